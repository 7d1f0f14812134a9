"""Where this package keeps what can be made again: compiled kernels, and measurements of them."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """This package's folder in the user's cache; it need not exist.

    XDG Base Directory Specification: a relative ``XDG_CACHE_HOME`` is ignored.

    Raises:
        RuntimeError: the user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "twostroke"

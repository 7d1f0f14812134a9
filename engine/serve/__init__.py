"""The OpenAI-compatible server around a serving loop. Needs the extra ``serve``.

Names are imported when they are first used, so that reading the command line needs none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .config import InvalidServeConfig, ServeConfig
    from .server import ApiServer

_HOME = {"ApiServer": ".server", "InvalidServeConfig": ".config", "ServeConfig": ".config", "create_app": ".app"}

__all__ = ["ApiServer", "InvalidServeConfig", "ServeConfig", "create_app"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)

"""Where the lines of a recording go: a file, or whatever else takes them. Torch-free."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .recording_format import Fields

_MOST_LINES = 1024
_FLUSH_SECONDS = 0.2  # what a crash can cost, and how far behind a reader of the growing file is


class LineSink(Protocol):
    """Takes the lines of a recording."""

    def write(self, line: Fields) -> None:
        """One more line."""
        ...

    def flush(self) -> None:
        """There will be none for a while."""
        ...

    def close(self) -> None:
        """There are no more."""
        ...


def _plain(value: Any) -> Any:
    """What JSON does not know."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Collection) and not isinstance(value, Mapping):
        return list(value)
    return str(value)


encode_line = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"), default=_plain).encode
"""A line without its end."""


class LineFile:
    """A file of JSON lines. What is written is on its way to the disk after a fifth of a second.

    Lines are made into text many at a time: right after a step, with the caches full of other things, each would take
    three times as long.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("w", encoding="utf-8")
        self._lines: list[Fields] = []
        self._flushed = 0.0
        self._lock = threading.Lock()

    def write(self, line: Fields) -> None:
        """Append; after ``close``, nothing. The line is not to be changed any more."""
        with self._lock:
            self._lines.append(line)
            if time.monotonic() - self._flushed > _FLUSH_SECONDS or len(self._lines) > _MOST_LINES:
                self._flush()

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write what is left. Idempotent."""
        with self._lock:
            self._flush()
            self._file.close()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if not self._file.closed:
            self._file.write("".join([encode_line(line) + "\n" for line in lines]))
            self._file.flush()
            self._flushed = time.monotonic()

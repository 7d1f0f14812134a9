"""Where the lines of a recording go: a file, or whatever else takes them. Torch-free."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Protocol

from .recording_lines import Line, text_of

_LINES_A_TIME = 256
_FLUSH_SECONDS = 0.2  # what a crash can cost, and how far behind a reader of the growing file is


class LineSink(Protocol):
    """Takes the lines of a recording."""

    def write(self, line: Line) -> None:
        """One more line."""
        ...

    def flush(self) -> None:
        """There will be none for a while."""
        ...

    def close(self) -> None:
        """There are no more."""
        ...


class LineFile:
    """A file of JSON lines. Every fifth of a second, what was written goes to the operating system with the next line.

    A process that crashes loses at most the lines since then, and the step that was running; a machine that crashes,
    what the operating system had not yet put on the disk: nothing here waits for that. Lines are made into text many
    at a time: right after a step, with the caches full of other things, each would take three times as long.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("w", encoding="utf-8", buffering=1 << 20)
        self._lines: list[Line] = []
        self._flush_at = 0.0
        self._lock = threading.Lock()

    def write(self, line: Line) -> None:
        """Append; after ``close``, nothing. The line is not to be changed any more."""
        with self._lock:
            self._lines.append(line)
            if time.monotonic() > self._flush_at:
                self._flush()
            elif len(self._lines) >= _LINES_A_TIME:
                self._make_text()

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
        self._make_text()
        if not self._file.closed:
            self._file.flush()
            self._flush_at = time.monotonic() + _FLUSH_SECONDS

    def _make_text(self) -> None:
        lines, self._lines = self._lines, []
        if not self._file.closed:
            self._file.write("".join([text_of(line) + "\n" for line in lines]))

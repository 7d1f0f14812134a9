"""What ``twostroke generate`` shows: live on a terminal (with rich), in plain lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, Self

from .cli_report import Report
from .outputs import RequestOutput

_BAR_WIDTH = 24
_TITLE_WIDTH = 60


class View(Protocol):
    """Hears of deltas while they come, of each result, and of the report."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def delta(self, index: int, delta: RequestOutput) -> None:
        """More of prompt ``index``."""
        ...

    def results(self, results: Sequence[RequestOutput | None]) -> None:
        """All of every prompt; None for one that failed. After the view was left."""
        ...

    def report(self, report: Report) -> None:
        """The figures. After the view was left."""
        ...


class PlainView:
    """Every text in one piece when it is complete, then the tables; only lines, for logs and pipes."""

    def __init__(self, titles: Sequence[str]) -> None:
        self._titles = titles
        self._texts = [""] * len(titles)
        self._num_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def delta(self, index: int, delta: RequestOutput) -> None:
        """Print the prompt and its text once that is complete."""
        self._texts[index] += delta.text
        if delta.finished:
            self._num_done += 1
            print(f"[{self._num_done}/{len(self._titles)}] {one_line(self._titles[index])}")
            print(f"    {one_line(self._texts[index], None)}", flush=True)

    def results(self, results: Sequence[RequestOutput | None]) -> None:
        """Nothing more: they were printed as they came."""

    def report(self, report: Report) -> None:
        """Both tables."""
        print()
        for label, value in report.summary():
            print(f"{label:<20} {value}")
        print()
        print(f"{'stage':<20} {'ms a step':>9} {'share':>7}")
        for stage in report.stages():
            print(f"{stage.name:<20} {stage.ms:9.2f} {stage.share:7.1%}")


def one_line(text: str, width: int | None = _TITLE_WIDTH) -> str:
    """Without line breaks, and cut to a width."""
    line = " ".join(text.split())
    return line if width is None or len(line) <= width else line[: width - 1] + "…"


def bar(share: float) -> str:
    """A share as a row of blocks."""
    return "█" * round(share * _BAR_WIDTH) or ("▏" if share > 0 else "")


def choose_view(titles: Sequence[str], total_tokens: int, *, plain: bool) -> View:
    """The live view where there is a terminal, and rich is installed."""
    if plain or not sys.stdout.isatty():
        return PlainView(titles)
    try:
        from .cli_live import LiveView
    except ImportError:
        return PlainView(titles)
    return LiveView(titles, total_tokens)

"""The live view of ``twostroke generate``; needs rich (the extra ``demo``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .cli_report import OUTSIDE, Report
from .cli_view import bar, one_line
from .outputs import RequestOutput

_REFRESHES_PER_SECOND = 8  # more would take time from the model


class LiveView:
    """All prompts at once with the end of their text, above a progress bar; afterwards the texts and the tables."""

    def __init__(self, titles: Sequence[str], total_tokens: int, console: Console | None = None) -> None:
        self._titles = titles
        self._texts = [""] * len(titles)
        self._finished = [False] * len(titles)
        self._console = console or Console()
        self._progress = Progress(
            TextColumn("[bold]tokens"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[speed]}"),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task("tokens", total=total_tokens, speed="")
        self._live = Live(
            get_renderable=self._picture,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def delta(self, index: int, delta: RequestOutput) -> None:
        """Take in what is new; the picture is drawn on its own time."""
        self._texts[index] += delta.text
        self._finished[index] = delta.finished
        self._progress.advance(self._task, sum(len(output.token_ids) for output in delta.outputs))
        speed = self._progress.tasks[0].speed
        self._progress.update(self._task, speed=f"{speed:.0f} tokens/s" if speed else "")

    def results(self, results: Sequence[RequestOutput | None]) -> None:
        """Every prompt with its whole text."""
        for title, result in zip(self._titles, results, strict=True):
            if result is not None:
                panel = Panel(
                    Text(result.text.strip()), title=Text(one_line(title), style="bold cyan"), title_align="left"
                )
                self._console.print(panel)

    def report(self, report: Report) -> None:
        """Both tables."""
        summary = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for label, value in report.summary():
            summary.add_row(Text(label, style="bold"), value)
        stages = Table(title="Where a step's time goes", title_justify="left", box=None, padding=(0, 2, 0, 0))
        stages.add_column("stage")
        stages.add_column("ms a step", justify="right")
        stages.add_column("share", justify="right")
        stages.add_column("")
        for stage in report.stages():
            style = "dim" if stage.name == OUTSIDE else ""
            stages.add_row(stage.name, f"{stage.ms:.2f}", f"{stage.share:.1%}", Text(bar(stage.share)), style=style)
        self._console.print(summary, "", stages)

    def _picture(self) -> RenderableType:
        width = max(self._console.width - 40, 20)
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=1)
        table.add_column(width=34, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True)
        for title, text, finished in zip(self._titles, self._texts, self._finished, strict=True):
            mark = Text("✓", style="green") if finished else Text("›", style="yellow")
            line = one_line(text, None)
            table.add_row(mark, Text(one_line(title, 34), style="cyan"), Text(line[-width:]))
        return Group(table, "", self._progress)

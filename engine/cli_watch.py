"""``twostroke watch``, and the view of ``twostroke generate --watch``. Both need rich (the extra ``demo``)."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .cli_live import LiveView
from .cli_report import Report
from .cli_view import bar, one_line
from .outputs import RequestOutput
from .recording_reader import RecordingError
from .watch import Snapshot, Watcher

_STATE_STYLES = {"IDLE": "dim", "FORWARDED": "bold yellow", "SAMPLED": "bold green"}
_METER_WIDTH = 30
_REFRESHES_PER_SECOND = 8
_POLL_SECONDS = 0.1


def watch_command(args: argparse.Namespace) -> int:
    """Follow a recording that is being written; returns the exit code."""
    watcher, console = Watcher(), Console()
    with FollowedFile(args.recording) as lines:
        lines.feed(watcher)
        if args.once:
            console.print(picture(watcher.snapshot(), console.size.height))
            return 0
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                live.update(picture(watcher.snapshot(), console.size.height), refresh=True)
                time.sleep(_POLL_SECONDS)
                lines.feed(watcher)


class FollowedFile:
    """The lines of a recording as they come; one that is not complete yet waits for its end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._path = path
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def feed(self, watcher: Watcher) -> None:
        """Hand on what is new. Raises as :meth:`new_lines`."""
        for line in self.new_lines():
            watcher.write(line)

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Those that were added since the last call.

        Raises:
            RecordingError: one is no line of a recording.
        """
        *complete, self._rest = (self._rest + self._file.read()).split(b"\n")
        for text in complete:
            try:
                line = json.loads(text)
                if "kind" not in line:
                    raise ValueError("it has no kind")
            except (ValueError, TypeError) as error:
                raise RecordingError(f"{self._path} holds a line that is none of a recording: {error}") from error
            yield line


def picture(now: Snapshot, height: int = 40) -> RenderableType:
    """State, batch, KV use, stages and speed; as many requests as fit."""
    figures = Table.grid(padding=(0, 3))
    state = Text(now.state, style=_STATE_STYLES.get(now.state, ""))
    figures.add_row(
        state,
        f"step {now.num_steps:,}",
        f"{now.num_tokens:,} tokens",
        Text(f"{now.tokens_per_second:,.1f} tokens/s", style="cyan"),
        f"{now.num_live} live",
    )
    plan = f"{now.mode or 'no plan yet'}{f' ({now.reason})' if now.reason else ''}"
    use = now.num_blocks / now.max_blocks if now.max_blocks else 0.0
    meters = Table.grid(padding=(0, 2))
    meters.add_row("KV blocks", _meter(use), f"{now.num_blocks:,} of {now.max_blocks:,}")
    wasted = 1 - now.num_scheduled / now.num_padded if now.num_padded else 0.0
    meters.add_row("padding", _meter(max(wasted, 0.0)), f"{now.num_scheduled} wanted, {now.num_padded} run")
    meters.add_row("graph mode", plan)
    parts: list[RenderableType] = [figures, meters, _stages(now)]
    parts.append(_batch(now, max(height - len(now.stage_seconds) - 9, 3)))
    if now.num_failures:
        parts.append(Text(f"{now.num_failures} failures, the last: {one_line(now.last_failure)}", style="red"))
    return Panel(Group(*parts), title="twostroke watch", title_align="left")


def _meter(share: float) -> Text:
    full = round(min(share, 1.0) * _METER_WIDTH)
    text = Text("█" * full, style="red" if share > 0.95 else "cyan")
    return text.append("─" * (_METER_WIDTH - full), style="dim")


def _stages(now: Snapshot) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("stage")
    table.add_column("ms a step", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    total = sum(now.stage_seconds.values()) or 1.0
    for name, seconds in now.stage_seconds.items():
        share = seconds / total
        table.add_row(
            name, f"{seconds / max(now.num_steps, 1) * 1e3:.2f}", f"{share:.1%}", Text(bar(share), style="blue")
        )
    return table


def _batch(now: Snapshot, most: int) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("request")
    table.add_column("doing")
    for name in ("computed", "of", "now"):
        table.add_column(name, justify="right")
    for part in now.batch[:most]:
        doing = Text("decode", style="green") if part.is_decode else Text("prompt", style="yellow")
        numbers = (str(part.num_computed), str(part.num_tokens), f"+{part.num_scheduled}")
        table.add_row(one_line(part.req_id, 32), doing, *numbers)
    if len(now.batch) > most:
        table.add_row(Text(f"and {len(now.batch) - most} more", style="dim"))
    return table


class WatchView:
    """A view of ``twostroke generate`` that shows the engine instead of the texts; those come at the end."""

    def __init__(
        self, titles: Sequence[str], total_tokens: int, watcher: Watcher, console: Console | None = None
    ) -> None:
        self._console = console or Console()
        self._after = LiveView(titles, total_tokens, self._console)
        self._live = Live(
            get_renderable=lambda: picture(watcher.snapshot(), self._console.size.height),
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
        """Nothing: the engine is what is looked at."""

    def results(self, results: Sequence[RequestOutput | None]) -> None:
        """Every prompt with its whole text."""
        self._after.results(results)

    def report(self, report: Report) -> None:
        """Both tables."""
        self._after.report(report)

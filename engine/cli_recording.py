"""What the command line knows about recording: the options of ``twostroke generate``, and ``twostroke watch``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..fsm.errors import InputRefused

if TYPE_CHECKING:
    from .model_runner import ModelRunner
    from .watch import Watcher

_NEEDS_RICH = "watching needs rich: pip install 'twostroke[demo]'"


def add_recording(parser: argparse.ArgumentParser) -> None:
    """The group of options."""
    group = parser.add_argument_group("recording")
    group.add_argument("--record", type=Path, metavar="FILE", help="write every step to FILE, for replay and timeline")
    group.add_argument(
        "--record-failures", type=Path, metavar="DIR", help="when a step fails, write the last steps to a file in DIR"
    )
    group.add_argument("--redact", action="store_true", help="leave token ids out of what is recorded")
    group.add_argument("--watch", action="store_true", help="show the engine while it runs, instead of the texts")


def add_watch(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``twostroke watch``."""
    parser.set_defaults(run=_watch)
    parser.description = "Follow a recording while it is written: state, batch, KV use, stages, speed."
    parser.add_argument("recording", type=Path, help="the file that --record writes")
    parser.add_argument("--once", action="store_true", help="show how things stand, and end")


@contextmanager
def recorded(runner: ModelRunner, args: argparse.Namespace, watcher: Watcher | None) -> Iterator[None]:
    """Record as the options say, until the block ends."""
    from .recording import Recorder, RecordingOptions

    with ExitStack() as stack:
        if args.record is not None:
            stack.enter_context(runner.record(args.record, redact=args.redact))
        if args.record_failures is not None:
            stack.enter_context(runner.record_failures(args.record_failures, redact=args.redact))
        if watcher is not None:
            stack.enter_context(Recorder(runner, watcher, RecordingOptions()).start())
        yield


def require_rich() -> None:
    """Refuse to watch where there is nothing to draw with.

    Raises:
        InputRefused: rich is not installed.
    """
    from importlib.util import find_spec

    if find_spec("rich") is None:
        raise InputRefused(_NEEDS_RICH)


def _watch(args: argparse.Namespace) -> int:
    require_rich()
    from .cli_watch import watch_command

    return watch_command(args)

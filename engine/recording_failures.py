"""A failed step leaves a recording behind: the last steps, with the requests as they were before them."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define

from .recording import Recorder, RecordingOptions
from .recording_book import RequestBook
from .recording_file import LineFile
from .recording_format import Fields, redact, scheduler_output, show
from .recording_lines import Line, OutputLine, StepLine, fields_of
from .recording_reader import RecordedOutput, RecordedStep

if TYPE_CHECKING:
    from .model_runner import ModelRunner

_LOG = logging.getLogger(__name__)


@define(eq=False)
class _RecentStep:
    """A step's lines. It may fall out of the ring once its outcome is there, or it needs none."""

    number: int
    lines: list[Line]
    is_over: bool = False

    def add(self, line: Line) -> None:
        self.lines.append(line)
        if not isinstance(line, dict):
            self.is_over = True  # an output
        elif line["kind"] in ("output", "rollback"):
            self.is_over = True
        elif line["kind"] == "failed":
            self.is_over = line["stroke"] != "sample"  # which can be tried again

    def book(self, book: RequestBook) -> None:
        """Take over what the step did to its requests."""
        match self.lines:
            case [StepLine() as step, OutputLine() as output]:
                book.continued(step, output)
            case _:
                self._book_fields(book)

    def _book_fields(self, book: RequestBook) -> None:
        found = {line["kind"]: line for line in map(fields_of, self.lines)}
        step = RecordedStep(
            number=self.number,
            scheduled=scheduler_output(found["step"]),
            output=RecordedOutput.of(found["output"]) if "output" in found else None,
            failure=found.get("failed"),
            is_rolled_back="rollback" in found,
        )
        if not step.was_undone:
            book.schedule(step.scheduled)
            if step.output is not None:
                book.sampled(step.ends, step.output.tokens)


class FailureRing:
    """A sink that keeps the last steps in memory, and writes them to a file of its own when one fails.

    One file for each kind of failure (stage and error), at most ``max_files`` in all: a step that fails is tried again
    in parts, which fail alike.
    """

    def __init__(self, folder: Path, *, num_steps: int, max_files: int, is_redacted: bool) -> None:
        self.files: list[Path] = []
        self._folder = folder
        self._num_steps = num_steps
        self._max_files = max_files
        self._tokens = redact if is_redacted else show
        self._header: Fields = {}
        self._book = RequestBook()
        self._recent: deque[_RecentStep] = deque()
        self._seen: set[tuple[str, str, str]] = set()

    def write(self, line: Line) -> None:
        """Take in a line; on a failure, write a file."""
        if isinstance(line, StepLine):
            self._begin(_RecentStep(line.step, [line]))
        elif isinstance(line, OutputLine):
            self._add(line.step, line)
        else:
            self._take_in(line)

    def _take_in(self, line: Fields) -> None:
        match line["kind"]:
            case "recording":
                self._header = line
            case "state":
                self._book = RequestBook(line["requests"])
            case "step":
                self._begin(_RecentStep(line["step"], [line], is_over=not line["num_scheduled_tokens"]))
            case "settle":
                pass  # it changes no request
            case kind:
                self._add(line["step"], line)
                if kind == "failed":
                    self._dump(line)

    def _begin(self, step: _RecentStep) -> None:
        if len(self._recent) >= 2 * self._num_steps:  # many at a time, which is faster than one by one
            self._forget_all_but(self._num_steps)
        self._recent.append(step)

    def _add(self, number: int, line: Line) -> None:
        for step in reversed(self._recent):  # it is the last, or a few before
            if step.number == number:
                step.add(line)
                return

    def flush(self) -> None:
        """Nothing to do: a failure is written at once."""

    def close(self) -> None:
        """Nothing to do: what is in memory is of no use any more."""

    def _forget_all_but(self, num_steps: int) -> None:
        """Book the oldest steps and forget them; those whose output is on its way stay."""
        while len(self._recent) > num_steps and self._recent[0].is_over:
            self._recent.popleft().book(self._book)

    def _dump(self, failure: Fields) -> None:
        kind = (failure["stage"], failure["type"], failure["error"])
        if kind in self._seen or len(self.files) >= self._max_files:
            return
        self._seen.add(kind)
        self._forget_all_but(self._num_steps)
        where = re.sub(r"\W+", "-", failure["stage"] or failure["stroke"])
        stem = f"failure-{time.strftime('%Y%m%dT%H%M%S')}-step{failure['step']}-{where}-{len(self.files)}"
        self._folder.mkdir(parents=True, exist_ok=True)
        file = LineFile(self._folder / f"{stem}.jsonl")
        file.write(self._header)
        state = [request.to_fields(req_id, self._tokens) for req_id, request in self._book.requests.items()]
        file.write({"kind": "state", "requests": state})
        for step in self._recent:
            for line in step.lines:
                file.write(line)
        file.close()
        self.files.append(file.path)
        _LOG.warning("a step failed; replay it with: twostroke replay %s", file.path)


class FailureRecorder(Recorder):
    """Records into a :class:`FailureRing`; ``files`` are what it left behind."""

    def __init__(
        self, runner: ModelRunner, folder: str | Path, *, num_steps: int = 32, max_files: int = 16, redact: bool = False
    ) -> None:
        self._ring = FailureRing(Path(folder), num_steps=num_steps, max_files=max_files, is_redacted=redact)
        super().__init__(runner, self._ring, RecordingOptions(redact=redact, times=False))

    @property
    def files(self) -> tuple[Path, ...]:
        """The recordings written so far."""
        return tuple(self._ring.files)

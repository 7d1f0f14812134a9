"""What a run is doing right now, from the lines of its recording: live in the process, or from a file that grows."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from attrs import frozen

from .recording_book import RequestBook
from .recording_format import Fields, scheduler_output
from .recording_lines import Line, fields_of
from .recording_reader import RecordedOutput, RecordedStep

_WINDOW_SECONDS = 5.0


@frozen(kw_only=True)
class WatchedRequest:
    """A request of the latest step. ``num_tokens`` are known, ``num_computed`` of them have keys and values."""

    req_id: str
    num_prompt: int
    num_tokens: int
    num_computed: int
    num_scheduled: int
    is_decode: bool


@frozen(kw_only=True)
class Snapshot:
    """One look. Times are host times in seconds, ``tokens_per_second`` over the last five seconds."""

    state: str
    num_steps: int
    num_tokens: int
    tokens_per_second: float
    mode: str
    reason: str
    num_scheduled: int
    num_padded: int
    num_blocks: int
    max_blocks: int
    num_live: int
    batch: tuple[WatchedRequest, ...]
    stage_seconds: dict[str, float]
    num_failures: int
    last_failure: str


class Watcher:
    """A sink of recording lines that remembers what a viewer wants to know. One thread writes, any may look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._book = RequestBook()
        self._steps: dict[int, RecordedStep] = {}
        self._arrivals: deque[tuple[float, int]] = deque()
        self._stages: Counter[str] = Counter()
        self._state = "IDLE"
        self._batch: tuple[WatchedRequest, ...] = ()
        self._plan: Fields = {}
        self._max_blocks = self._num_steps = self._num_tokens = self._num_failures = 0
        self._last_failure = ""

    def write(self, line: Line) -> None:
        """Take in one line of a recording."""
        line = fields_of(line)
        match line["kind"]:
            case "recording":
                self._max_blocks = max(int(line["config"].get("num_kv_blocks") or 1) - 1, 0)
            case "state":
                self._book = RequestBook(line["requests"])
            case "step":
                self._begin(RecordedStep(number=line["step"], scheduled=scheduler_output(line)))
            case "output":
                self._end(line)
            case "times":
                self._add_times(line)
            case "failed":
                self._num_failures += 1
                self._last_failure = f"step {line['step']}: {line['stage'] or line['stroke']}: {line['error']}"
            case "rollback" | "settle":
                self._state = "IDLE"
            case _:
                pass  # nothing that is shown

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """What was seen stays."""

    def snapshot(self) -> Snapshot:
        """How things stand."""
        requests = self._book.requests
        return Snapshot(
            state=self._state,
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            tokens_per_second=self._speed(),
            mode=self._plan.get("mode", ""),
            reason=self._plan.get("reason", ""),
            num_scheduled=sum(part.num_scheduled for part in self._batch),
            num_padded=self._plan.get("num_tokens", 0),
            num_blocks=self._book.num_blocks,
            max_blocks=self._max_blocks,
            num_live=len(requests),
            batch=self._batch,
            stage_seconds=dict(self._stages),
            num_failures=self._num_failures,
            last_failure=self._last_failure,
        )

    def _begin(self, step: RecordedStep) -> None:
        self._num_steps += 1
        self._book.schedule(step.scheduled)
        if not step.scheduled.num_scheduled_tokens:
            return
        self._state = "FORWARDED"
        self._steps[step.number] = step
        self._batch = tuple(self._parts(step))

    def _parts(self, step: RecordedStep) -> list[WatchedRequest]:
        parts: list[WatchedRequest] = []
        for req_id, end in step.ends.items():
            request, count = self._book.requests.get(req_id), step.scheduled.num_scheduled_tokens[req_id]
            num_prompt = len(request.prompt_token_ids) if request is not None else 0
            parts.append(
                WatchedRequest(
                    req_id=req_id,
                    num_prompt=num_prompt,
                    num_tokens=max(len(request.token_ids) if request is not None else 0, end),
                    num_computed=end - count,
                    num_scheduled=count,
                    is_decode=end - count >= num_prompt,
                )
            )
        return parts

    def _end(self, line: Fields) -> None:
        self._state = "SAMPLED"
        self._plan = line.get("plan", {})
        output, step = RecordedOutput.of(line), self._steps.pop(line["step"], None)
        if step is not None:
            self._book.sampled(step.ends, output.tokens)
        sampled = sum(map(len, output.tokens.values()))
        self._num_tokens += sampled
        self._add_times(line)
        self._arrivals.append((self._recorded_seconds(line), sampled))

    def _add_times(self, line: Fields) -> None:
        for name, _, nanoseconds in line.get("stages", ()):
            self._stages[name] += nanoseconds / 1e9

    def _recorded_seconds(self, line: Fields) -> float:
        """When the step ended, by the recording's clock where it has one."""
        stages = line.get("stages")
        return sum(stages[-1][1:]) / 1e9 if stages else self._clock()

    def _speed(self) -> float:
        """Of the last five seconds in which there were steps. The first step of them only says where they begin."""
        if len(self._arrivals) < 2:
            return 0.0
        latest = self._arrivals[-1][0]
        while latest - self._arrivals[0][0] > _WINDOW_SECONDS and len(self._arrivals) > 2:
            self._arrivals.popleft()
        began, at_first = self._arrivals[0]
        return (sum(tokens for _, tokens in self._arrivals) - at_first) / max(latest - began, 1e-6)

"""A recording laid out in time: what each step did to which request, and what the machine did meanwhile. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from ..fsm.machine import STEP_TRIGGERS, StepState
from .recording_book import RequestBook
from .recording_reader import RecordedStep, Recording

_UNTIMED_STEP_US = 1000.0
_SECOND_STROKE = ("sample", "commit")

Transition = tuple[str, str, str]
"""Source, target and trigger, by name."""


@frozen(kw_only=True)
class Part:
    """What a step did to one request. ``sampled`` are the token ids it got, -1 each where they are redacted."""

    req_id: str
    num_scheduled: int
    num_computed: int
    is_decode: bool
    sampled: Sequence[int] = ()
    error: str = ""


@frozen(kw_only=True)
class Span:
    """Something with a name, a start and an end, in microseconds since the first step."""

    name: str
    start_us: float
    end_us: float


@frozen(kw_only=True)
class TimelineStep:
    """One step. ``num_padded`` are the tokens that ran, ``num_scheduled`` those that were wanted.

    ``first_stroke`` and ``second_stroke`` are None where the step had no such stages.
    """

    number: int
    start_us: float
    end_us: float
    stages: tuple[Span, ...]
    first_stroke: Span | None
    second_stroke: Span | None
    parts: tuple[Part, ...]
    num_scheduled: int
    num_padded: int
    mode: str
    reason: str
    num_blocks: int
    finished: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    failure: str = ""
    was_executed: bool = True
    was_sampled: bool = True
    is_rolled_back: bool = False


@define(eq=False)
class TimelineRequest:
    """One request over the whole recording. Steps are counted from 0."""

    req_id: str
    num_prompt: int
    first_step: int
    last_step: int
    num_sampled: int = 0
    num_preemptions: int = 0
    first_token_us: float | None = None
    arrived_us: float = 0.0


@frozen(kw_only=True, eq=False)
class Timeline:
    """What the page and the trace are drawn from. ``is_timed`` is False where times are made up: one unit a step."""

    header: Mapping[str, Any]
    steps: tuple[TimelineStep, ...]
    requests: tuple[TimelineRequest, ...]
    states: tuple[Span, ...]
    transitions: Mapping[Transition, int]
    num_failures: int
    num_kv_blocks: int
    is_timed: bool
    began_unix_us: float | None = None

    @property
    def duration_us(self) -> float:
        """From the first step's start to the last one's end."""
        return self.steps[-1].end_us if self.steps else 0.0

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled."""
        return sum(request.num_sampled for request in self.requests)

    @property
    def stage_us(self) -> dict[str, float]:
        """Time in each stage, in the order in which they first ran."""
        total: dict[str, float] = {}
        for step in self.steps:
            for span in step.stages:
                total[span.name] = total.get(span.name, 0.0) + span.end_us - span.start_us
        return total

    @property
    def padding(self) -> float:
        """The share of the tokens that ran which nobody wanted, 0 to 1."""
        ran = sum(step.num_padded for step in self.steps)
        return 1.0 - sum(step.num_scheduled for step in self.steps) / ran if ran else 0.0

    @property
    def modes(self) -> tuple[ModeUse, ...]:
        """How the steps ran, most frequent first."""
        uses: dict[tuple[str, str], list[TimelineStep]] = {}
        for step in self.steps:
            if step.num_scheduled:
                uses.setdefault((step.mode, step.reason), []).append(step)
        rows = (
            ModeUse(
                mode=mode,
                reason=reason,
                num_steps=len(steps),
                num_scheduled=sum(step.num_scheduled for step in steps),
                num_padded=sum(step.num_padded for step in steps),
            )
            for (mode, reason), steps in uses.items()
        )
        return tuple(sorted(rows, key=lambda use: -use.num_steps))


@frozen(kw_only=True)
class ModeUse:
    """Steps that ran in one graph mode for one reason; tokens as in :class:`TimelineStep`."""

    mode: str
    reason: str
    num_steps: int
    num_scheduled: int
    num_padded: int


def timeline_of(recording: Recording) -> Timeline:
    """Lay out a recording."""
    return _Layout(recording).timeline()


class _Layout:
    """Goes through the steps once, with a book of the requests."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._book = RequestBook(recording.state)
        self._requests: dict[str, TimelineRequest] = {}
        self._is_timed = any(step.stages for step in recording.steps)
        first = (stage.start_us for step in recording.steps for stage in step.stages[:1])
        self._zero = next(first, 0.0)
        self._second = frozenset(recording.header.get("second_stroke", _SECOND_STROKE))

    def timeline(self) -> Timeline:
        steps = tuple(self._steps())
        began = self._recording.header.get("began_unix_us")
        walk = _Walk()
        for step in steps:
            walk.step(step, is_settled=step.number in self._recording.settles)
        return Timeline(
            header=self._recording.header,
            steps=steps,
            requests=tuple(self._requests.values()),
            states=tuple(walk.spans),
            transitions=dict(walk.counts),
            num_failures=sum(bool(step.failure) for step in steps),
            num_kv_blocks=max(int(self._recording.config.get("num_kv_blocks") or 1) - 1, 0),
            is_timed=self._is_timed,
            began_unix_us=began + self._zero if began is not None else None,
        )

    def _steps(self) -> Iterator[TimelineStep]:
        end = 0.0
        for index, step in enumerate(self._recording.steps):
            laid = self._step(index, step, end)
            end = laid.end_us
            yield laid

    def _step(self, index: int, step: RecordedStep, after_us: float) -> TimelineStep:
        if not step.was_undone:
            self._book.schedule(step.scheduled)
        stages = tuple(
            Span(name=own.name, start_us=own.start_us - self._zero, end_us=own.start_us - self._zero + own.duration_us)
            for own in step.stages
        )
        start = stages[0].start_us if stages else after_us
        end = stages[-1].end_us if stages else after_us + (0.0 if self._is_timed else _UNTIMED_STEP_US)
        parts = tuple(self._parts(step))
        self._follow(index, step, parts, (start, end))
        plan = step.output.plan if step.output is not None else {}
        num_scheduled = sum(part.num_scheduled for part in parts)
        if step.output is not None and not step.was_undone:
            self._book.sampled(step.ends, step.output.tokens)
        failure = step.failure
        first = _hull("execute_model", [span for span in stages if span.name not in self._second])
        second = _hull("sample_tokens", [span for span in stages if span.name in self._second])
        if not self._is_timed and parts and step.failure is None:
            half = (start + end) / 2
            first = Span(name="execute_model", start_us=start, end_us=half)
            second = Span(name="sample_tokens", start_us=half, end_us=end)
        return TimelineStep(
            number=step.number,
            start_us=start,
            end_us=end,
            stages=stages,
            first_stroke=first,
            second_stroke=second,
            parts=parts,
            num_scheduled=num_scheduled,
            num_padded=plan.get("num_tokens", num_scheduled),
            mode=plan.get("mode", ""),
            reason=plan.get("reason", ""),
            num_blocks=self._book.num_blocks,
            finished=tuple(sorted(step.scheduled.finished_req_ids)),
            preempted=tuple(sorted(step.scheduled.preempted_req_ids or ())),
            failure="" if failure is None else f"{failure['stage'] or failure['stroke']}: {failure['error']}",
            was_executed=failure is None or failure["stroke"] != "execute",
            was_sampled=step.output is not None or failure is None or failure["stroke"] == "output",
            is_rolled_back=step.is_rolled_back,
        )

    def _parts(self, step: RecordedStep) -> Iterator[Part]:
        output = step.output
        for req_id, end in step.ends.items():
            count, prompt = step.scheduled.num_scheduled_tokens[req_id], self._num_prompt(req_id, step)
            yield Part(
                req_id=req_id,
                num_scheduled=count,
                num_computed=end - count,
                is_decode=end - count >= prompt,
                sampled=tuple(output.tokens.get(req_id, ())) if output is not None else (),
                error=output.errors.get(req_id, "") if output is not None else "",
            )

    def _num_prompt(self, req_id: str, step: RecordedStep) -> int:
        """Tokens of a request's prompt; of a step that was undone, the book knows nothing."""
        for data in step.scheduled.scheduled_new_reqs:
            if data.req_id == req_id:
                return len(data.prompt_token_ids)
        request = self._book.requests.get(req_id)
        return len(request.prompt_token_ids) if request is not None else 0

    def _follow(self, index: int, step: RecordedStep, parts: Sequence[Part], times: tuple[float, float]) -> None:
        start, end = times
        for req_id in step.scheduled.preempted_req_ids or ():
            if req_id in self._requests:
                self._requests[req_id].num_preemptions += 1
        for part in parts:
            request = self._requests.get(part.req_id)
            if request is None:
                prompt = self._num_prompt(part.req_id, step)
                request = TimelineRequest(part.req_id, prompt, index, index, arrived_us=start)
                self._requests[part.req_id] = request
            request.last_step = index
            request.num_sampled += len(part.sampled)
            if part.sampled and request.first_token_us is None:
                request.first_token_us = end


def _hull(name: str, spans: Sequence[Span]) -> Span | None:
    return Span(name=name, start_us=spans[0].start_us, end_us=spans[-1].end_us) if spans else None


@define(eq=False)
class _Walk:
    """The machine's way through the steps: how long it was in each state, and how often it took each transition."""

    counts: Counter[Transition] = field(factory=Counter)
    spans: list[Span] = field(factory=list)
    state: StepState = StepState.IDLE
    since_us: float = 0.0

    def step(self, step: TimelineStep, *, is_settled: bool) -> None:
        """What one step made of it."""
        if not step.parts:
            self._fire("skip", step.end_us)
        elif step.was_executed:
            self._fire("execute", step.first_stroke.end_us if step.first_stroke is not None else step.start_us)
            if step.is_rolled_back:
                self._fire("rollback", step.end_us)
            elif step.was_sampled:
                self._fire("sample", step.end_us)
        if is_settled:
            self._fire("settle", step.end_us)

    def _fire(self, name: str, at_us: float) -> None:
        row = next(row for row in STEP_TRIGGERS if row.name == name)
        target = self.state if row.target is None else row.target
        self.counts[self.state.name, target.name, name] += 1
        if target is not self.state:
            self.spans.append(Span(name=self.state.name, start_us=self.since_us, end_us=at_us))
            self.state, self.since_us = target, at_us

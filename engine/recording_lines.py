"""Lines of the steps that a run mostly consists of, kept as what they are made of until somebody reads them.

Such a step only continues requests, and gives tokens and nothing else. What it is made of is copied, as schedulers go
on using their lists; what it has in common with the step before it (who takes part) is kept once for both. Text is made
later, many lines at a time: right after a step, with the caches full of other things, it would take three times as
long. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

from ..stages.io import ModelRunnerOutput, SchedulerOutput
from .recording_format import Fields, block_fields

if TYPE_CHECKING:
    from ..stages.records import BatchExecutionDescriptor

Stages = list[tuple[tuple[str, ...], int, Sequence[int]]]
"""Of each stroke: its stages' names, its start, and when each stage ended that returned, by ``perf_counter_ns``."""


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
"""Fields of a line as text, without its end."""


@define(eq=False)
class Lineup:
    """Who takes part in a step, with how many tokens each: shared by the lines of equal steps in a row."""

    req_ids: list[str]
    scheduled: list[str]
    counts: list[int]
    _texts: tuple[str, str] | None = None
    _counts_in_order: list[int] | None = None

    @property
    def counts_in_order(self) -> list[int]:
        """The counts in the order of ``req_ids``."""
        if self._counts_in_order is None:
            by_id = dict(zip(self.scheduled, self.counts, strict=True))
            self._counts_in_order = [by_id[req_id] for req_id in self.req_ids]
        return self._counts_in_order

    @property
    def texts(self) -> tuple[str, str]:
        """``req_ids`` and ``num_scheduled_tokens`` as text."""
        if self._texts is None:
            by_id = dict(zip(self.scheduled, self.counts, strict=True))
            self._texts = (encode_line(self.req_ids), encode_line(by_id))
        return self._texts


class StepLine:
    """A ``step`` line of a step that continues requests, and does nothing else."""

    __slots__ = ("block_ids", "computed", "lineup", "outputs", "prefix_blocks", "step")

    def __init__(self, step: int, lineup: Lineup, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        self.step = step
        self.lineup = lineup
        self.computed = [*cached.num_computed_tokens]
        self.outputs = [*cached.num_output_tokens]
        self.block_ids = block_fields(cached.new_block_ids) if any(cached.new_block_ids) else None
        self.prefix_blocks = [*output.num_common_prefix_blocks] if any(output.num_common_prefix_blocks) else None

    def fields(self) -> Fields:
        """The line."""
        lineup = self.lineup
        cached: Fields = {"req_ids": lineup.req_ids}
        if self.block_ids is not None:
            cached["new_block_ids"] = self.block_ids
        cached["num_computed_tokens"] = self.computed
        if self.outputs:
            cached["num_output_tokens"] = self.outputs
        line: Fields = {"kind": "step", "step": self.step, "scheduled_cached_reqs": cached}
        line["num_scheduled_tokens"] = dict(zip(lineup.scheduled, lineup.counts, strict=True))
        if self.prefix_blocks is not None:
            line["num_common_prefix_blocks"] = self.prefix_blocks
        return line

    def text(self) -> str:
        """The line, as :func:`encode_line` would have it, in a third of the time."""
        req_ids, counts = self.lineup.texts
        blocks = "" if self.block_ids is None else f'"new_block_ids":{encode_line(self.block_ids)},'
        outputs = f',"num_output_tokens":{_integers(self.outputs)}' if self.outputs else ""
        prefix = "" if self.prefix_blocks is None else f',"num_common_prefix_blocks":{_integers(self.prefix_blocks)}'
        return (
            f'{{"kind":"step","step":{self.step},"scheduled_cached_reqs":{{"req_ids":{req_ids},{blocks}'
            f'"num_computed_tokens":{_integers(self.computed)}{outputs}}},"num_scheduled_tokens":{counts}{prefix}}}'
        )


class OutputLine:
    """An ``output`` line of a step that gave tokens, and nothing else. ``stages`` is None where no times are kept."""

    __slots__ = ("plan", "req_ids", "stages", "step", "tokens", "writer")

    def __init__(
        self,
        step: int,
        plan: BatchExecutionDescriptor | None,
        output: ModelRunnerOutput,
        stages: Stages | None,
        writer: OutputWriter,
    ) -> None:
        self.step = step
        self.plan = plan
        self.req_ids = output.req_ids
        self.tokens = [[*ids] for ids in output.sampled_token_ids]
        self.stages = stages
        self.writer = writer

    def fields(self) -> Fields:
        """The line."""
        line: Fields = {"kind": "output", "step": self.step, "plan": plan_fields(self.plan)}
        line |= {"req_ids": list(self.req_ids), "sampled_token_ids": self.tokens}
        if self.stages is not None:
            line["stages"] = stage_fields(self.writer.zero, self.stages)
        return line

    def text(self) -> str:
        """The line, as :func:`encode_line` would have it."""
        writer = self.writer
        stages = "" if self.stages is None else f',"stages":{writer.stages(self.stages)}'
        return (
            f'{{"kind":"output","step":{self.step},"plan":{writer.plan(self.plan)},"req_ids":{writer.ids(self.req_ids)}'
            f',"sampled_token_ids":{_integers(self.tokens)}{stages}}}'
        )


Line = Fields | StepLine | OutputLine


def fields_of(line: Line) -> Fields:
    """A line of any form, as the fields that a reader will find in the file."""
    return line if isinstance(line, dict) else line.fields()


def text_of(line: Line) -> str:
    """A line of any form as text, without its end."""
    return encode_line(line) if isinstance(line, dict) else line.text()


@define(eq=False)
class StepReader:
    """Tells the steps that :class:`StepLine` is for from others."""

    _last: Lineup = field(factory=lambda: Lineup([], [], []))

    def line(self, step: int, output: SchedulerOutput) -> StepLine | None:
        """The line of a step, or None where it does more than continue requests."""
        cached = output.scheduled_cached_reqs
        if (
            output.scheduled_new_reqs
            or output.finished_req_ids
            or output.preempted_req_ids
            or output.scheduled_spec_decode_tokens
            or output.scheduled_encoder_inputs
            or output.free_encoder_mm_hashes
            or output.kv_connector_metadata is not None
            or cached.resumed_req_ids
            or cached.all_token_ids
            or any(map(len, cached.new_token_ids))
        ):
            return None
        req_ids, counts = [*cached.req_ids], output.num_scheduled_tokens
        scheduled, numbers = [*counts], [*counts.values()]
        last = self._last
        if not req_ids or len(scheduled) != len(req_ids):
            return None  # nothing is scheduled, or what the runner is going to refuse
        if last.req_ids != req_ids or last.scheduled != scheduled or last.counts != numbers:
            self._last = last = Lineup(req_ids, scheduled, numbers)
        return StepLine(step, last, output)


@define(eq=False)
class OutputWriter:
    """Makes text of outputs; what it made last is at hand for the next, which most often says the same.

    ``zero`` is when the recording began, by ``perf_counter_ns``.
    """

    zero: int
    _plan: tuple[object, str] = (None, "{}")
    _ids: tuple[Sequence[str], str] = ((), "[]")
    _templates: dict[tuple[str, ...], str] = field(factory=dict)

    def plan(self, plan: BatchExecutionDescriptor | None) -> str:
        """How a batch ran."""
        if plan != self._plan[0]:
            self._plan = plan, encode_line(plan_fields(plan))
        return self._plan[1]

    def ids(self, req_ids: Sequence[str]) -> str:
        """Requests in the order of their rows."""
        if req_ids != self._ids[0]:
            self._ids = req_ids, encode_line(list(req_ids))
        return self._ids[1]

    def stages(self, stages: Stages) -> str:
        """Stages with start and duration in nanoseconds."""
        strokes = [
            self._template(names if len(names) == len(ends) else names[: len(ends)])
            % tuple(_times(self.zero, started, ends))
            for names, started, ends in stages
            if ends
        ]
        return f"[{','.join(strokes)}]"

    def _template(self, names: tuple[str, ...]) -> str:
        template = self._templates.get(names)
        if template is None:
            # A name may hold a per cent sign.
            rows = [f"[{encode_line(name)},".replace("%", "%%") + "%s,%s]" for name in names]
            template = self._templates[names] = ",".join(rows)
        return template


def tells_tokens_only(output: ModelRunnerOutput) -> bool:
    """Whether an :class:`OutputLine` can hold it."""
    return output.logprobs is None and not output.prompt_logprobs_dict and not output.request_errors


def plan_fields(plan: BatchExecutionDescriptor | None) -> Fields:
    """How a batch ran; nothing for a step that had no plan."""
    if plan is None:
        return {}
    line: Fields = {"mode": plan.mode.name, "num_tokens": plan.num_tokens, "num_reqs": plan.num_reqs}
    if plan.should_ubatch:
        line["ubatched"] = True
    return line | {"reason": plan.reason}


def stage_fields(zero: int, stages: Stages) -> list[tuple[str, int, int]]:
    """Name, start since ``zero`` and duration of stages, in whole nanoseconds."""
    rows: list[tuple[str, int, int]] = []
    for names, started, ends in stages:
        times = _times(zero, started, ends)
        rows += zip(names, times[::2], times[1::2], strict=False)  # a stage that failed has a name, and no end
    return rows


def _times(zero: int, start: int, ends: Sequence[int]) -> list[int]:
    """Start and duration of each stage of a stroke, one after the other."""
    times: list[int] = []
    for end in ends:
        times += (start - zero, end - start)
        start = end
    return times


def _integers(values: Sequence[Any]) -> str:
    """Integers, or lists of them, as text."""
    text = str(values).replace(" ", "")
    return text if "(" not in text else encode_line(values)  # NumPy's show their type

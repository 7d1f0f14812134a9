"""Recording a run: each step's inputs, plan and outputs as JSON lines, and what a failed step left behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
from attrs import define, frozen

from ..fsm import InputRefused, StageFailed
from ..fsm.observers import RunObserver
from ..stages.io import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from ..stages.records import BatchExecutionDescriptor, ExecuteModelState
from .recording_book import BookedRequest
from .recording_events import StepListener
from .recording_file import LineSink
from .recording_format import VERSION, Fields, grammar_fields, output_fields, redact, show, step_fields
from .recording_lines import (
    OutputLine,
    OutputWriter,
    Stages,
    StepReader,
    plan_fields,
    stage_fields,
    tells_tokens_only,
)
from .recording_reader import tensors_path

if TYPE_CHECKING:
    from .model_runner import ModelRunner

TENSORS = ("logits", "hidden_states")


@frozen(kw_only=True)
class RecordingOptions:
    """What a recording holds.

    ``redact`` leaves out token ids and the sampling parameters that tell of text: such a recording replays with as many
    tokens of other ids, so that schedule, shapes, plans and most failures are the same, but no token or log probability
    can be compared. ``times`` adds the stages' times; without them, equal runs give equal files. ``tensors`` names
    fields of :class:`ExecuteModelState` to keep, in one safetensors file a step; that waits for the device.

    Raises:
        InputRefused: an unknown tensor, or tensors of a redacted recording.
    """

    redact: bool = False
    times: bool = True
    tensors: tuple[str, ...] = attrs.field(default=(), converter=tuple)

    def __attrs_post_init__(self) -> None:
        if unknown := set(self.tensors) - set(TENSORS):
            raise InputRefused(f"tensors {sorted(unknown)} are not among those that can be recorded: {TENSORS}")
        if self.redact and self.tensors:
            raise InputRefused("tensors tell of the text: record them, or redact, not both")


class StageClock(RunObserver):
    """Keeps when stages ended, since it was asked last."""

    def __init__(self) -> None:
        self._stages: Stages = []

    def after_run(self, names: tuple[str, ...], started: int, ends: Sequence[int]) -> None:
        self._stages.append((names, started, ends))

    def take(self) -> Stages:
        """What there is, and start over."""
        taken, self._stages = self._stages, []
        return taken


@define(eq=False)
class _Pending:
    """A sampled step whose output is not known on the host."""

    step: int
    plan: BatchExecutionDescriptor | None
    stages: Stages | None
    output: ModelRunnerOutput | AsyncModelRunnerOutput


class Recorder(StepListener):
    """Writes what it hears of a runner to a sink, in the lines of :mod:`~twostroke.engine.recording_format`.

    Outputs are written in the order of their steps, when they have reached the host: reading one early is no use to a
    recorder, so it never waits for one but at the end. Get one from :meth:`ModelRunner.record`; use it as a context
    manager or ``close`` it.
    """

    def __init__(
        self, runner: ModelRunner, sink: LineSink, options: RecordingOptions, path: Path | None = None
    ) -> None:
        """``path`` is that of the recording, beside which tensors are put."""
        self._runner = runner
        self._sink = sink
        self._write = sink.write
        self._options = options
        self._path = path
        self._tokens = redact if options.redact else show
        self._steps = StepReader()
        self._writer = OutputWriter(time.perf_counter_ns())
        self._step = 0
        self._stroke = "execute"
        self._is_skip = False
        self._plan: BatchExecutionDescriptor | None = None
        self._clock = StageClock()
        self._has_times, self._has_tensors = options.times, bool(options.tensors)
        self._pending: deque[_Pending] = deque()
        self._write(header_of(runner, options))
        if state := live_requests(runner):
            self._write(
                {"kind": "state", "requests": [own.to_fields(req_id, self._tokens) for req_id, own in state.items()]}
            )

    @property
    def path(self) -> Path | None:
        """Where the recording goes."""
        return self._path

    def start(self) -> Self:
        """Listen to the runner."""
        self._runner.listeners.add(self)
        if self._options.times:
            self._runner.observers.add(self._clock)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, then wait for outputs on their way and write them. Idempotent."""
        self._runner.listeners.remove(self)
        self._runner.observers.remove(self._clock)
        self._collect(wait=True)
        self._sink.close()

    # ---- what is heard

    def executing(self, scheduler_output: SchedulerOutput) -> None:
        if self._pending:
            self._collect()
        self._step += 1
        self._stroke, self._plan = "execute", None
        if self._has_times:
            self._clock.take()
        self._is_skip = not scheduler_output.num_scheduled_tokens
        line = self._steps.line(self._step, scheduler_output)
        self._write(line or {"kind": "step", "step": self._step, **step_fields(scheduler_output, self._tokens)})

    def executed(self, records: Mapping[type, Any]) -> None:
        self._plan = records.get(BatchExecutionDescriptor)
        if self._has_tensors and ExecuteModelState in records:
            self._write_tensors(records[ExecuteModelState])
        if self._is_skip:
            self._write_times()
            self._sink.flush()  # most often the last step for a while

    def sampling(self, grammar_output: GrammarOutput | None) -> None:
        self._stroke = "sample"
        if grammar_output is not None and not self._options.redact:
            self._write({"kind": "grammar", "step": self._step, **grammar_fields(grammar_output)})

    def sampled(self, output: ModelRunnerOutput | AsyncModelRunnerOutput) -> None:
        stages = self._clock.take() if self._has_times else None
        if self._pending or not output.ready():
            self._pending.append(_Pending(self._step, self._plan, stages, output))
            self._collect()
        else:
            self._write_arrived(self._step, self._plan, stages, output)

    def failed(self, error: BaseException) -> None:
        cause = error.__cause__ if isinstance(error, StageFailed) and error.__cause__ is not None else error
        line: Fields = {"kind": "failed", "step": self._step, "stroke": self._stroke}
        line |= {"stage": error.stage if isinstance(error, StageFailed) else "", "type": type(cause).__name__}
        line["error"] = str(cause)
        self._collect()
        self._write_times()
        self._write(line)

    def rolled_back(self) -> None:
        self._write({"kind": "rollback", "step": self._step})

    def settled(self) -> None:
        self._collect()
        self._write({"kind": "settle", "step": self._step})

    # ---- what is written

    def _collect(self, *, wait: bool = False) -> None:
        """Write the outputs that have arrived."""
        pending = self._pending
        while pending and (wait or pending[0].output.ready()):
            entry = pending.popleft()
            self._write_arrived(entry.step, entry.plan, entry.stages, entry.output)

    def _write_arrived(
        self,
        step: int,
        plan: BatchExecutionDescriptor | None,
        stages: Stages | None,
        late: ModelRunnerOutput | AsyncModelRunnerOutput,
    ) -> None:
        try:
            output = late.get_output()
        except Exception as error:
            line = {"kind": "failed", "step": step, "stroke": "output", "stage": ""}
            self._write(line | {"type": type(error).__name__, "error": str(error)})
            return
        if tells_tokens_only(output) and self._tokens is show:
            self._write(OutputLine(step, plan, output, stages, self._writer))
            return
        line = {"kind": "output", "step": step, "plan": plan_fields(plan), **output_fields(output, self._tokens)}
        if stages is not None:
            line["stages"] = stage_fields(self._writer.zero, stages)
        self._write(line)

    def _write_times(self) -> None:
        if self._has_times:
            stages = stage_fields(self._writer.zero, self._clock.take())
            self._write({"kind": "times", "step": self._step, "stages": stages})

    def _write_tensors(self, state: ExecuteModelState) -> None:
        from safetensors.torch import save_file

        assert self._path is not None, "tensors are recorded beside a file only"
        file = tensors_path(self._path, self._step)
        file.parent.mkdir(exist_ok=True)
        kept = {name: tensor for name in self._options.tensors if (tensor := getattr(state, name)) is not None}
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}, file)


def header_of(runner: ModelRunner, options: RecordingOptions) -> Fields:
    """The first line: what the recording is of."""
    spec, stages = runner.spec, runner.stages
    line: Fields = {
        "kind": "recording",
        "version": VERSION,
        "twostroke": _version(),
        "model": {
            "source": "object" if runner.loaded is None else runner.config.model,
            "architecture": spec.architecture,
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "num_layers": len(spec.attention_layers),
        },
        "config": attrs.asdict(runner.config),
        "stages": {name: _name_of(stages[name]) for name in stages.names},
        "second_stroke": list(stages.sample.names),
        "redacted": options.redact,
        "tensors": list(options.tensors),
    }
    return line | {"began_unix_us": time.time_ns() // 1000} if options.times else line


def live_requests(runner: ModelRunner) -> dict[str, BookedRequest]:
    """The requests that a runner knows between two steps."""
    table = runner.parts.table
    table.wait_for_tokens()
    live: dict[str, BookedRequest] = {}
    for req_id, record in table.records.items():
        row = record.row
        if row is None:
            assert record.saved_tokens is not None, f"preempted request {req_id!r} lost its tokens"
            tokens, blocks = record.saved_tokens, []
        else:
            tokens = table.token_ids_host[row, : table.num_tokens[row]]
            blocks = [own.blocks[row, : own.counts[row]].tolist() for own in table.block_tables]
        live[req_id] = BookedRequest(record.prompt_token_ids.tolist(), tokens.tolist(), record.sampling_params, blocks)
    return live


def _version() -> str:
    try:
        return version("twostroke")
    except PackageNotFoundError:
        return "unknown"


def _name_of(stage: object) -> str:
    fn = getattr(stage, "__func__", stage)
    return f"{fn.__module__}.{getattr(fn, '__qualname__', None) or type(fn).__qualname__}"

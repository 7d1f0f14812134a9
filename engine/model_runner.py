"""The public face: one step of a batch in two calls, guarded by the state machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from ..fsm import Savepoint, StepState, Transaction, TransactionFailed
from ..stages.device import Device
from ..stages.errors import InvalidSchedulerOutput
from ..stages.forward_context import Model
from ..stages.io import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from ..stages.records import BatchExecutionDescriptor, IntermediateTensors
from .config import EngineConfig
from .dummy_runs import DummyRuns
from .recording import Recorder, RecordingOptions
from .recording_events import Listeners
from .recording_failures import FailureRecorder
from .recording_file import LineFile
from .runner_life import RunnerLife


@frozen(eq=False)
class _OpenStep:
    """A step between its two calls; ``mark`` is where the first stroke ended."""

    transaction: Transaction
    records: dict[type, Any]
    mark: Savepoint

    @classmethod
    def none(cls) -> _OpenStep:
        """Stands for a step where none is open; the machine refuses to do anything with it."""
        return cls(Transaction(0), {}, Savepoint(0, 0))


class ModelRunner(RunnerLife):
    """Runs a model step by step for a scheduler of the caller's choice.

    ``execute_model`` launches the forward pass, ``sample_tokens`` draws the tokens; any other order of calls is a
    :class:`StepStateError` that changes nothing. Life: ``load_model``, ``initialize_kv_cache``, optionally
    ``capture_model``; then steps; ``sleep`` / ``wake_up`` between steps; ``shutdown`` at the end. One thread at a time
    drives a runner; ``state`` and ``life`` may be read from any.

    ``model`` may be an object with the :class:`Model` protocol instead of something for ``load_model`` to read.
    """

    def __init__(self, config: EngineConfig, *, model: Model | None = None, device: Device | None = None) -> None:
        super().__init__(config, model=model, device=device)
        self.listeners = Listeners()
        self._no_step = self._open = _OpenStep.none()
        self._num_steps = 0
        self._last_output: ModelRunnerOutput | AsyncModelRunnerOutput | None = None
        self._inference_mode = torch.inference_mode()  # kept, as to make one takes as long as to enter it

    @property
    def num_steps(self) -> int:
        """Steps that were sampled."""
        return self._num_steps

    @property
    def last_output(self) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """What ``sample_tokens`` returned for step ``num_steps``; None before the first, and after ``shutdown``.

        For a caller whom an interrupt kept from getting it: what Python has to return can be lost to a signal on its
        way, and the state says SAMPLED then.
        """
        return self._last_output

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> ModelRunnerOutput | None:
        """First stroke: update the request table, prepare inputs, run the forward pass.

        Returns None when tokens were scheduled (``sample_tokens`` comes next), and the empty output when none were.

        Raises:
            StepStateError: an earlier step still waits for ``sample_tokens``, or the runner is not ready.
            InvalidSchedulerOutput: the scheduler output was refused; nothing was changed.
            StageFailed: a stage raised; the step was undone and can be sent again.
        """
        parts = self._ready("execute_model")
        is_empty = _is_empty(scheduler_output)
        transaction = Transaction(self._num_steps + 1)
        records: dict[type, Any] = {SchedulerOutput: scheduler_output, Transaction: transaction}
        if intermediate_tensors is not None:
            records[IntermediateTensors] = intermediate_tensors
        undo = partial(self._undo, transaction)

        def forward() -> None:
            with self._inference_mode:
                parts.stages.execute.run(records, self.observers)
            self._open = _OpenStep(transaction, records, transaction.savepoint())

        def skip() -> ModelRunnerOutput:
            parts.stages.skip.run(records, self.observers)
            if (plan := records.get(BatchExecutionDescriptor)) is not None:
                DummyRuns(parts).run_plan(plan)
            return EMPTY_MODEL_RUNNER_OUTPUT

        work = skip if is_empty else forward
        if self.listeners:
            work = self.listeners.around_execute(scheduler_output, records, work)
        if not is_empty:
            return self._machine.fire("execute", work, undo=undo)
        return self._machine.fire("skip", work, undo=undo, commit=partial(self._or_fault, transaction.commit))

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Second stroke: sample from the logits of the last ``execute_model`` and commit the step.

        The tokens stay on the device, and the next ``execute_model`` finds them there: it may come before this step's
        output has reached the host. ``get_output()`` of what is returned waits for it; without ``async_scheduling``
        that was done already.

        Raises:
            StepStateError: there is nothing to sample.
            InvalidGrammarOutput, StageFailed: the step stays open: call again, or ``rollback``.
        """
        parts = self._ready("sample_tokens")
        step = self._open
        drawn: list[ModelRunnerOutput | AsyncModelRunnerOutput] = []

        def sample() -> ModelRunnerOutput | AsyncModelRunnerOutput:
            records = dict(step.records)
            if grammar_output is not None:
                records[GrammarOutput] = grammar_output
            with self._inference_mode:
                parts.stages.sample.run(records, self.observers)
            output = records.get(AsyncModelRunnerOutput) or records[ModelRunnerOutput]
            drawn.append(output if self.config.async_scheduling else output.get_output())
            return drawn[-1]

        def undo() -> None:
            self._or_fault(partial(step.transaction.rollback_to, step.mark))

        def commit() -> None:
            self._or_fault(step.transaction.commit)
            self._open, self._last_output = self._no_step, drawn[-1]
            self._num_steps = step.transaction.step  # not "one more": an interrupted commit runs again

        work = self.listeners.around_sample(grammar_output, sample) if self.listeners else sample
        return self._machine.fire("sample", work, undo=undo, commit=commit)

    def rollback(self) -> None:
        """Undo the open step as if its ``execute_model`` had never been called; waits for outputs in flight first.

        Raises:
            StepStateError: no step is open.
        """
        step = self._open

        def undo() -> None:
            self._wait_for_outputs()
            self._undo(step.transaction)
            self.listeners.rolled_back()

        self._machine.fire("rollback", undo)

    def settle(self) -> None:
        """Wait for outputs that are still on their way to the host; state SAMPLED becomes IDLE.

        Raises:
            StepStateError: a step is open.
        """

        def settle() -> None:
            self._wait_for_outputs()
            self.listeners.settled()

        self._machine.fire("settle", settle)

    def record(
        self, path: str | Path, *, redact: bool = False, times: bool = True, tensors: Sequence[str] = ()
    ) -> Recorder:
        """Record every step from now on as JSON lines; use the recorder as a context manager, or close it.

        Recording may begin in the middle of a run: the requests that are live then are written down. ``redact``,
        ``times`` and ``tensors`` are those of :class:`RecordingOptions`.

        Raises:
            StepStateError: a step is open.
            InputRefused: options that don't go together.
            OSError: the file can't be written.
        """
        options = RecordingOptions(redact=redact, times=times, tensors=tuple(tensors))

        def begin() -> Recorder:
            return Recorder(self, LineFile(path), options, Path(path)).start()

        return self._machine.fire("settle", begin, call="record")

    def record_failures(self, folder: str | Path, *, num_steps: int = 32, redact: bool = False) -> FailureRecorder:
        """Keep the last ``num_steps`` steps in memory, and write them to a file in ``folder`` when a step fails.

        Raises:
            StepStateError: a step is open.
        """

        def begin() -> FailureRecorder:
            return FailureRecorder(self, folder, num_steps=num_steps, redact=redact).start()

        return self._machine.fire("settle", begin, call="record_failures")

    def shutdown(self) -> None:
        """Drop graphs, tables, cache and model. Legal with a step open, which is abandoned; idempotent.

        Raises:
            StepStateError: another thread is inside a call.
        """

        def abandon() -> None:
            self._open = self._no_step

        if self.state is StepState.FORWARDED:
            self._machine.fire("rollback", abandon, call="shutdown")
        self._machine.fire("settle", lambda: self._life.close(self._close), call="shutdown")
        self._last_output = None

    def _undo(self, transaction: Transaction) -> None:
        self._or_fault(transaction.rollback)
        self._open = self._no_step

    def _or_fault(self, end: Callable[[], None]) -> None:
        """End a transaction, or part of one; if that fails, nothing can be known of the tables any more."""
        try:
            end()
        except TransactionFailed as error:
            self._life.fault(f"a step was neither undone nor finished: {error}", error)
            raise


def _is_empty(scheduler_output: SchedulerOutput) -> bool:
    """Whether a step schedules nothing. Any object with the fields will do: a scheduler may have its own class."""
    try:
        return not (scheduler_output.num_scheduled_tokens or scheduler_output.total_num_scheduled_tokens)
    except AttributeError as error:
        kind = type(scheduler_output).__name__
        raise InvalidSchedulerOutput(f"execute_model wants a SchedulerOutput, not a {kind}: {error}") from error


def build_runner(config: EngineConfig, *, model: Model | None = None, device: Device | None = None) -> ModelRunner:
    """A runner that is ready for its first step: loaded, with its cache, and with graphs where the mode has them."""
    runner = ModelRunner(config, model=model, device=device)
    runner.load_model()
    runner.initialize_kv_cache()
    runner.capture_model()
    return runner

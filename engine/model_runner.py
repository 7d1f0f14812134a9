"""The public face: one step of a batch in two calls, guarded by the state machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from attrs import frozen

from ..fsm import (
    SLEEP_PARTS,
    InputRefused,
    LifeMachine,
    LifeState,
    Observers,
    Savepoint,
    StepMachine,
    StepState,
    Transaction,
    TransactionFailed,
)
from ..stages.forward_context import Model
from ..stages.io import EMPTY_MODEL_RUNNER_OUTPUT, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from ..stages.records import BatchExecutionDescriptor, IntermediateTensors
from ..stages.specs import KVCacheGroupSpec, ModelSpec
from .assembly import Assembly, assemble
from .config import EngineConfig
from .dummy_runs import DummyRuns, ProfileResult
from .loading import LoadedModel, load_model
from .stage_set import StageSet


@frozen(eq=False)
class _OpenStep:
    """A step between its two calls; ``mark`` is where the first stroke ended."""

    transaction: Transaction
    records: dict[type, Any]
    mark: Savepoint


_NO_STEP = _OpenStep(Transaction(0), {}, Savepoint(0, 0))
"""Stands for a step where none is open; the machine refuses to do anything with it."""


class ModelRunner:
    """Runs a model step by step for a scheduler of the caller's choice.

    ``execute_model`` launches the forward pass, ``sample_tokens`` draws the tokens; any other order of calls is a
    :class:`StepStateError` that changes nothing. Life: ``load_model``, ``initialize_kv_cache``, optionally
    ``capture_model``; then steps; ``sleep`` / ``wake_up`` between steps; ``shutdown`` at the end. One thread at a time
    drives a runner; ``state`` and ``life`` may be read from any.

    ``model`` may be an object with the :class:`Model` protocol instead of something for ``load_model`` to read.
    """

    def __init__(self, config: EngineConfig, *, model: Model | None = None) -> None:
        self.config = config
        self.observers = Observers()
        self.loaded: LoadedModel | None = None
        self._model = model
        self._parts: Assembly | None = None
        self._open: _OpenStep | None = None
        self._num_steps = 0
        self._machine = StepMachine()
        self._life = LifeMachine()

    # ---- one step

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
        transaction = Transaction(self._num_steps + 1)
        records: dict[type, Any] = {SchedulerOutput: scheduler_output, Transaction: transaction}
        if intermediate_tensors is not None:
            records[IntermediateTensors] = intermediate_tensors
        undo = partial(self._undo, transaction)

        def forward() -> None:
            with torch.inference_mode():
                parts.stages.execute.run(records, self.observers)
            self._open = _OpenStep(transaction, records, transaction.savepoint())

        def skip() -> ModelRunnerOutput:
            parts.stages.skip.run(records, self.observers)
            if (plan := records.get(BatchExecutionDescriptor)) is not None:
                DummyRuns(parts).run_plan(plan)
            return EMPTY_MODEL_RUNNER_OUTPUT

        if scheduler_output.num_scheduled_tokens or scheduler_output.total_num_scheduled_tokens:
            return self._machine.fire("execute", forward, undo=undo)
        return self._machine.fire("skip", skip, undo=undo, commit=transaction.commit)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Second stroke: sample from the logits of the last ``execute_model`` and commit the step.

        Raises:
            StepStateError: there is nothing to sample.
            InvalidGrammarOutput, StageFailed: the step stays open: call again, or ``rollback``.
        """
        parts = self._ready("sample_tokens")
        step = self._open or _NO_STEP

        def sample() -> ModelRunnerOutput:
            records = dict(step.records)
            if grammar_output is not None:
                records[GrammarOutput] = grammar_output
            with torch.inference_mode():
                parts.stages.sample.run(records, self.observers)
            return records[ModelRunnerOutput]

        def undo() -> None:
            self._guard_undo(partial(step.transaction.rollback_to, step.mark))

        def commit() -> None:
            step.transaction.commit()
            self._open = None
            self._num_steps += 1

        return self._machine.fire("sample", sample, undo=undo, commit=commit)

    def rollback(self) -> None:
        """Undo the open step as if its ``execute_model`` had never been called.

        Raises:
            StepStateError: no step is open.
        """
        step = self._open or _NO_STEP
        self._machine.fire("rollback", lambda: self._undo(step.transaction))

    def settle(self) -> None:
        """Wait for outputs that are still on their way to the host; state SAMPLED becomes IDLE.

        Raises:
            StepStateError: a step is open.
        """
        self._machine.fire("settle", lambda: None)

    def _undo(self, transaction: Transaction) -> None:
        self._guard_undo(transaction.rollback)
        self._open = None

    def _guard_undo(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except TransactionFailed as error:
            self._life.fault(f"a step could not be undone: {error}", error)
            raise

    # ---- what can be looked at

    @property
    def state(self) -> StepState:
        """Where the runner stands between two calls. May be read from any thread."""
        return self._machine.state

    @property
    def life(self) -> LifeState:
        """How far the runner has come. May be read from any thread."""
        return self._life.state

    @property
    def fault_reason(self) -> str:
        """Why the runner is FAULTED; empty if it is not."""
        return self._life.fault_reason

    @property
    def num_steps(self) -> int:
        """Steps that were sampled."""
        return self._num_steps

    @property
    def spec(self) -> ModelSpec:
        """The shape of the loaded model."""
        return self._loaded_model("spec").spec

    @property
    def kv_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """KV-cache groups: a request has one list of block ids for each."""
        return self.parts.groups

    @property
    def stages(self) -> StageSet:
        """The stages, editable between steps."""
        return self.parts.stages

    @property
    def parts(self) -> Assembly:
        """Tables, buffers and caches, for stages of one's own and for tests.

        Raises:
            StepStateError: before ``initialize_kv_cache``.
        """
        if self._parts is None:
            self._life.require_ready("initialize_kv_cache")
        assert self._parts is not None, "a ready runner has its parts"
        return self._parts

    def _ready(self, call: str) -> Assembly:
        self._life.require_ready(call)
        return self.parts

    def _loaded_model(self, call: str) -> Model:
        if self._model is None:
            self._life.require_ready(call)
        assert self._model is not None, "a loaded runner has its model"
        return self._model

    # ---- life

    def load_model(self) -> None:
        """Read the model that ``config.model`` names (unless one was given) and resolve the configuration.

        Raises:
            ModelLoadError: the model can't be read; the message names the file, key or tensor.
            InvalidConfig: a value that cannot work with this model or machine.
        """

        def load() -> None:
            model = self._model
            if model is None:
                self.loaded = load_model(self.config.model, device=self.config.device, dtype=self.config.dtype)
                model = self.loaded.model
            self.config = self.config.resolve(model.spec)
            self._model = model

        self._life.load(load)

    def initialize_kv_cache(self) -> None:
        """Allocate the KV cache, tables and buffers, and build the stages.

        Raises:
            StepStateError: the model is not loaded, or this was done before.
        """

        def initialize() -> None:
            self._parts = assemble(self._loaded_model("initialize_kv_cache"), self.config, self._machine)

        self._life.initialize(initialize)

    def capture_model(self) -> int:
        """Capture every graph of the dispatch table, large shapes first; graphs of before are dropped.

        Returns how many were captured: none where ``cudagraph_mode`` is NONE.
        """
        runs = DummyRuns(self._ready("capture_model"))
        return self._machine.fire("dummy", runs.capture, call="capture_model")

    def dummy_run(self, num_tokens: int = 1) -> None:
        """A forward pass of padding: it touches no request and no block. For warm-up and idle ranks."""
        runs = DummyRuns(self._ready("dummy_run"))
        self._machine.fire("dummy", lambda: runs.run(num_tokens), call="dummy_run")

    def profile_run(self) -> ProfileResult:
        """The largest forward pass, measured, with tables of its own: legal as soon as the model is loaded."""
        if self.life is not LifeState.LOADED:
            self._life.require_ready("profile_run")
        model = self._loaded_model("profile_run")

        def profile() -> ProfileResult:
            config = self.config.replace(num_kv_blocks=2, cudagraph_mode="NONE", cudagraph_capture_sizes=())
            return DummyRuns(assemble(model, config, StepMachine())).profile()

        return self._machine.fire("dummy", profile, call="profile_run")

    def sleep(self, level: int = 1) -> None:
        """Give memory back between steps: level 1 the KV cache, level 2 the weights too. Idempotent.

        Live requests are preempted: their tokens are kept, their blocks are gone, and the scheduler resumes them as
        it resumes any preempted request.

        Raises:
            StepStateError: a step is open, or the runner is not ready.
            InputRefused: another level, or level 2 of a model that was given as an object (nothing to reload it from).
        """
        if level not in (1, 2):
            raise InputRefused(f"sleep level {level!r}: use 1 (KV cache) or 2 (KV cache and weights)")
        if level == 2 and self.loaded is None:
            raise InputRefused("sleep level 2 needs a model that load_model() can read again; use level 1")
        parts = ("kv_cache",) if level == 1 else ("kv_cache", "weights")
        self._machine.fire("settle", lambda: self._life.sleep(self._fall_asleep, parts), call="sleep")

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory again: all of it, or the parts in ``tags`` ("weights", "kv_cache"). Idempotent.

        The cache comes back zeroed; captured graphs do not come back: call ``capture_model`` again.

        Raises:
            InputRefused: an unknown tag.
            ModelLoadError: the weights can't be read again; they stay asleep.
        """
        chosen = SLEEP_PARTS if tags is None else tuple(tags)
        self._machine.fire("settle", lambda: self._life.wake(self._rise, chosen), call="wake_up")

    def _fall_asleep(self, parts: frozenset[str]) -> None:
        self.parts.graphs.drop("the runner slept")
        if "kv_cache" in parts:
            table, transaction = self.parts.table, Transaction(self._num_steps)
            for record in list(table.records.values()):
                table.preempt(record, transaction)
            transaction.commit()
            self.parts.kv_cache.release()
        if "weights" in parts and self.loaded is not None:
            self.loaded.release_weights()

    def _rise(self, parts: frozenset[str]) -> None:
        if "weights" in parts and self.loaded is not None:
            self.loaded.reload_weights()
        if "kv_cache" in parts:
            self.parts.kv_cache.restore()

    def shutdown(self) -> None:
        """Drop graphs, tables, cache and model. Legal with a step open, which is abandoned; idempotent.

        Raises:
            StepStateError: another thread is inside a call.
        """

        def close() -> None:
            if self._parts is not None:
                self._parts.graphs.drop("the runner was shut down")
                self._parts.kv_cache.release()
            self._parts = self._model = self.loaded = self._open = None

        if self.state is StepState.FORWARDED:
            self._machine.fire("rollback", lambda: None, call="shutdown")
        self._machine.fire("settle", lambda: self._life.close(close), call="shutdown")


def build_runner(config: EngineConfig, *, model: Model | None = None) -> ModelRunner:
    """A runner that is ready for its first step: loaded, with its cache, and with graphs where the mode has them."""
    runner = ModelRunner(config, model=model)
    runner.load_model()
    runner.initialize_kv_cache()
    runner.capture_model()
    return runner

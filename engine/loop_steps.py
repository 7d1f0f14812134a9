"""The loop itself: launch the next step, then collect the last one while that computes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..fsm import LifeState, TwoStrokeError
from ..stages.io import GrammarOutput, SchedulerOutput
from .loop_grammar import GrammarFailed, GrammarProvider
from .loop_recovery import UNDONE, StepOutput, run_in_parts
from .loop_requests import LiveRequests
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .model_runner import ModelRunner

_LOG = logging.getLogger(__name__)


class SchedulerStalled(TwoStrokeError, RuntimeError):
    """The scheduler says that there is work, and gives a step without any."""


@frozen(eq=False)
class StepInFlight:
    """A step that was launched, and its output, which may be on its way."""

    scheduled: SchedulerOutput
    output: StepOutput


class StepLoop:
    """Steps a runner for a scheduler, with up to ``depth`` steps in flight; with 1, each is waited for at once.

    One thread steps. ``lock`` guards the scheduler and the live requests, which other threads change too; it is held
    whenever they are touched, and never while the runner computes or is waited for.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        live: LiveRequests,
        grammar: GrammarProvider,
        *,
        depth: int,
        lock: AbstractContextManager[Any],
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.depth = depth
        self.num_steps = 0
        self._live = live
        self._grammar = grammar
        self._lock = lock
        self._in_flight: deque[StepInFlight] = deque()
        self._cache_generation = runner.kv_cache_generation

    @property
    def num_in_flight(self) -> int:
        """Steps whose output was not collected."""
        return len(self._in_flight)

    def turn(self, *, admit_new: bool = True) -> bool:
        """Launch the next step; then, if ``depth`` are in flight or there is none to launch, collect the oldest.

        Without ``admit_new``, requests that have not begun stay where they are. False when there is nothing to do.

        Raises:
            SchedulerStalled: the scheduler does not get on.
            Exception: what makes it impossible to go on: of the runner, or of the scheduler.
        """
        if self.runner.kv_cache_generation != self._cache_generation:
            self.recompute()
        with self._lock:
            scheduled = self.scheduler.schedule() if admit_new else self.scheduler.schedule(admit_new=False)
            is_blank = not (scheduled.num_scheduled_tokens or scheduled.finished_req_ids or scheduled.preempted_req_ids)
            if is_blank and not self._in_flight:
                if admit_new and self.scheduler.has_work():
                    raise SchedulerStalled("the scheduler has work, but scheduled nothing and finished nothing")
                return False
            self._live.begin(scheduled.scheduled_new_reqs)
        if not is_blank:
            self._launch(scheduled)
        if self._in_flight and (is_blank or len(self._in_flight) >= self.depth):
            self._collect()
        return True

    def settle(self) -> None:
        """Collect every step in flight."""
        while self._in_flight:
            self._collect()

    def recompute(self) -> None:
        """Have keys and values computed anew: running requests go on from their tokens, no cached prefix is kept."""
        self.settle()
        with self._lock:
            self.scheduler.reset_prefix_cache(preempt_running=True)
        self._cache_generation = self.runner.kv_cache_generation

    def _launch(self, scheduled: SchedulerOutput) -> None:
        self.num_steps += 1
        error: Exception | None = None
        try:
            output = self._run(scheduled)
        except UNDONE as failure:
            if self.runner.life is LifeState.FAULTED:
                raise
            _LOG.warning("a step failed; it is tried again in parts", exc_info=failure)
            error, output = failure, run_in_parts(scheduled, failure, self._run)
        if scheduled.num_scheduled_tokens:
            self._in_flight.append(StepInFlight(scheduled, output))
        if error is not None:  # whoever was to blame must be gone before the next step is scheduled
            self.settle()

    def _run(self, scheduled: SchedulerOutput) -> StepOutput:
        """Both strokes. When it raises one of ``UNDONE``, the runner has undone the step."""
        output = self.runner.execute_model(scheduled)
        if output is not None:
            return output
        try:
            try:
                return self.runner.sample_tokens(self._masks(scheduled))
            except UNDONE:  # the step is still open: once more as it is
                return self.runner.sample_tokens(self._masks(scheduled))
        except UNDONE:
            self.runner.rollback()
            raise

    def _masks(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
        """Masks of the step that was just launched; sampling waits until its constrained requests have their tokens."""
        while (constrained := self._constrained(scheduled)) and self._is_any_in_flight(constrained):
            self._collect()
        if not constrained:
            return None
        try:
            with self._lock:
                return self._grammar.grammar_output(scheduled)
        except Exception as error:
            raise GrammarFailed(f"no masks for {', '.join(constrained)}: {type(error).__name__}: {error}") from error

    def _constrained(self, scheduled: SchedulerOutput) -> Collection[str]:
        with self._lock:
            return self._grammar.constrained(scheduled)

    def _is_any_in_flight(self, req_ids: Collection[str]) -> bool:
        return any(not step.scheduled.num_scheduled_tokens.keys().isdisjoint(req_ids) for step in self._in_flight)

    def _collect(self) -> None:
        """Wait for the oldest step in flight and hand out what it brought."""
        step = self._in_flight.popleft()
        output = step.output.get_output()
        with self._lock:
            for update in self.scheduler.update_from_output(step.scheduled, output):
                if dropped := self._live.deliver(update):
                    self.scheduler.finish_requests(dropped)

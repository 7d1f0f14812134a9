"""Listening to a runner: what it was called with, what came back, what failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ..fsm import Observers
from ..fsm.observers import StageObserver
from ..stages.io import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SchedulerOutput

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class StepListener(StageObserver):
    """An observer of stages that also hears of the calls around them. Override what you want to hear.

    All methods run on the runner's thread, inside the call; what they raise never fails a step.
    """

    def executing(self, scheduler_output: SchedulerOutput) -> None:
        """``execute_model`` was called and is legal; nothing has run yet."""

    def executed(self) -> None:
        """The first stroke is done, or the whole step where nothing was scheduled."""

    def sampling(self, grammar_output: GrammarOutput | None) -> None:
        """``sample_tokens`` was called and is legal; nothing has run yet."""

    def sampled(self, output: ModelRunnerOutput | AsyncModelRunnerOutput) -> None:
        """The second stroke is done; its tokens may still be on their way."""

    def failed(self, error: BaseException) -> None:
        """The stroke that was told of last raised, and was undone."""

    def rolled_back(self) -> None:
        """The open step was undone by ``rollback``."""

    def settled(self) -> None:
        """``settle`` waited for every output."""


class Listeners:
    """A runner's listeners. Keeps what they raise away from the step; the first exception of each is logged."""

    def __init__(self, observers: Observers) -> None:
        """``observers`` are those of the same runner: a listener is added to and removed from both."""
        self._observers = observers
        self._listeners: tuple[StepListener, ...] = ()
        self._complained: tuple[StepListener, ...] = ()

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: StepListener) -> None:
        """Tell ``listener`` of every call and every stage from now on."""
        self._listeners = (*self._listeners, listener)
        self._observers.add(listener)

    def remove(self, listener: StepListener) -> None:
        """Tell it no more; one that is not there is fine."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        self._complained = tuple(other for other in self._complained if other is not listener)
        self._observers.remove(listener)

    def around_execute(self, scheduler_output: SchedulerOutput, work: Callable[[], T]) -> Callable[[], T]:
        """The work of a first stroke, told of."""

        def execute() -> T:
            self._tell(lambda listener: listener.executing(scheduler_output))
            result = self._watched(work)
            self._tell(lambda listener: listener.executed())
            return result

        return execute

    def around_sample(
        self,
        grammar_output: GrammarOutput | None,
        work: Callable[[], ModelRunnerOutput | AsyncModelRunnerOutput],
    ) -> Callable[[], ModelRunnerOutput | AsyncModelRunnerOutput]:
        """The work of a second stroke, told of."""

        def sample() -> ModelRunnerOutput | AsyncModelRunnerOutput:
            self._tell(lambda listener: listener.sampling(grammar_output))
            output = self._watched(work)
            self._tell(lambda listener: listener.sampled(output))
            return output

        return sample

    def rolled_back(self) -> None:
        """Tell every listener."""
        self._tell(lambda listener: listener.rolled_back())

    def settled(self) -> None:
        """Tell every listener."""
        self._tell(lambda listener: listener.settled())

    def _watched(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException as error:
            failure = error
            self._tell(lambda listener: listener.failed(failure))
            raise

    def _tell(self, event: Callable[[StepListener], None]) -> None:
        for listener in self._listeners:
            try:
                event(listener)
            except Exception:
                if listener not in self._complained:
                    self._complained = (*self._complained, listener)
                    _LOG.exception("%r raised; it goes on being told, and is not logged again", listener)

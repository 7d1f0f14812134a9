"""Listening to a runner: what it was called with, what came back, what failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..stages.io import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SchedulerOutput

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class StepListener:
    """What a listener can be told of a runner's calls. Subclass it and override what you want to hear.

    All methods run on the runner's thread, inside the call; what they raise never fails a step.
    """

    def executing(self, scheduler_output: SchedulerOutput) -> None:
        """``execute_model`` was called and is legal; nothing has run yet."""

    def executed(self, records: Mapping[type, Any]) -> None:
        """The first stroke is done, or the whole step where nothing was scheduled; ``records`` are what it left."""

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


_EVENTS = ("executing", "executed", "sampling", "sampled", "failed", "rolled_back", "settled")


class Listeners:
    """A runner's listeners. Keeps what they raise away from the step; the first exception of each is logged."""

    def __init__(self) -> None:
        self._complained: tuple[StepListener, ...] = ()
        self._set(())

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: StepListener) -> None:
        """Tell ``listener`` of every call from now on."""
        self._set((*self._listeners, listener))

    def remove(self, listener: StepListener) -> None:
        """Tell it no more; one that is not there is fine."""
        self._set(tuple(other for other in self._listeners if other is not listener))
        self._complained = tuple(other for other in self._complained if other is not listener)

    def _set(self, listeners: tuple[StepListener, ...]) -> None:
        self._listeners = listeners
        # Bound once, and those left out that do nothing: in a step, each look-up and each empty call costs.
        self._told = {
            event: tuple((own, getattr(own, event)) for own in listeners if _overrides(own, event)) for event in _EVENTS
        }

    def around_execute(
        self, scheduler_output: SchedulerOutput, records: Mapping[type, Any], work: Callable[[], T]
    ) -> Callable[[], T]:
        """The work of a first stroke, told of; ``records`` are those that its stages will file theirs in."""

        def execute() -> T:
            self._tell("executing", scheduler_output)
            try:
                result = work()
            except BaseException as error:
                self._tell("failed", error)
                raise
            self._tell("executed", records)
            return result

        return execute

    def around_sample(self, grammar_output: GrammarOutput | None, work: Callable[[], T]) -> Callable[[], T]:
        """The work of a second stroke, which gives the step's output, told of."""

        def sample() -> T:
            self._tell("sampling", grammar_output)
            try:
                output = work()
            except BaseException as error:
                self._tell("failed", error)
                raise
            self._tell("sampled", output)
            return output

        return sample

    def rolled_back(self) -> None:
        """Tell every listener."""
        self._tell("rolled_back")

    def settled(self) -> None:
        """Tell every listener."""
        self._tell("settled")

    def _tell(self, event: str, *args: Any) -> None:
        for listener, tell in self._told[event]:
            try:
                tell(*args)
            except Exception:
                if listener not in self._complained:
                    self._complained = (*self._complained, listener)
                    _LOG.exception("%r raised; it goes on being told, and is not logged again", listener)


def _overrides(listener: StepListener, event: str) -> bool:
    """Whether a listener has a method of its own for an event."""
    return getattr(type(listener), event) is not getattr(StepListener, event)

"""Observers of stages: called around each stage, with its name and its time on the host."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from attrs import define

_LOG = logging.getLogger(__name__)


class StageObserver(Protocol):
    """What an observer can be told. Subclass it and override what you want to hear; each method may do nothing.

    Times are of the host: on a GPU a stage only launches its work. An exception of an observer never fails a step.
    """

    def before_stage(self, name: str) -> None:
        """The stage is about to run."""

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        """The stage returned ``record`` (None if it gives nothing); its tensors are valid until the next step."""

    def stage_failed(self, name: str, error: BaseException) -> None:
        """The stage raised ``error``, or what it returned was refused."""


class RunObserver(StageObserver):
    """Hears of all stages of a run at once, when it is over, which costs a step far less than to be told of each."""

    def after_run(self, names: tuple[str, ...], started: int, ends: Sequence[int]) -> None:
        """The run is over. Of the stages that returned, ``ends`` says when, in order, by ``perf_counter_ns``.

        The first began at ``started``, each other one when the one before it ended; observers' time counts with theirs.
        """


class StageTimes(StageObserver):
    """Adds up host time by stage: ``seconds`` and ``calls`` of those that returned, ``failures`` of the others."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.calls[name] += 1

    def stage_failed(self, name: str, error: BaseException) -> None:
        self.failures[name] += 1


@define(eq=False)
class _Seat:
    """An observer and how often it raised."""

    observer: StageObserver
    failures: int = 0

    @property
    def hears_before(self) -> bool:
        return getattr(type(self.observer), "before_stage", None) is not StageObserver.before_stage

    def failed(self, during: str) -> None:
        self.failures += 1
        if self.failures == 1:
            _LOG.exception("%s of %r raised; it goes on being called, and is not logged again", during, self.observer)


class Observers:
    """A runner's observers. Keeps what they raise away from the step: the first exception of each is logged, all count.

    May be changed from any thread; a step that is under way may not notice. ``hear_stages`` says whether any of them
    wants to be told of each stage.
    """

    def __init__(self, observers: Iterable[StageObserver] = ()) -> None:
        self._set(_Seat(observer) for observer in observers)

    @classmethod
    def of(cls, observers: Observers | Iterable[StageObserver]) -> Observers:
        """``observers`` as it is, or gathered in an object of its own."""
        return observers if isinstance(observers, Observers) else cls(observers)

    def __iter__(self) -> Iterator[StageObserver]:
        return (seat.observer for seat in self._seats)

    def __len__(self) -> int:
        return len(self._seats)

    def add(self, observer: StageObserver) -> None:
        """Call ``observer`` around every stage from now on, after the others."""
        self._set((*self._seats, _Seat(observer)))

    def remove(self, observer: StageObserver) -> None:
        """Stop calling ``observer``; one that is not there is fine."""
        self._set(seat for seat in self._seats if seat.observer is not observer)

    def _set(self, seats: Iterable[_Seat]) -> None:
        self._seats = tuple(seats)
        self._run_seats = tuple(
            (seat, seat.observer.after_run) for seat in self._seats if isinstance(seat.observer, RunObserver)
        )
        self._stage_seats = tuple(seat for seat in self._seats if not isinstance(seat.observer, RunObserver))
        self.hear_stages = bool(self._stage_seats)
        # Most want to hear of the end only: a call of an empty method for each stage is left out.
        self._early_seats = tuple(seat for seat in self._stage_seats if seat.hears_before)

    @property
    def failures(self) -> int:
        """How often the present observers raised."""
        return sum(seat.failures for seat in self._seats)

    def before_stage(self, name: str) -> None:
        """Tell every observer that has a method of its own for this."""
        for seat in self._early_seats:
            try:
                seat.observer.before_stage(name)
            except Exception:
                seat.failed("before_stage")

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        """Tell every observer."""
        for seat in self._stage_seats:
            try:
                seat.observer.after_stage(name, seconds, record)
            except Exception:
                seat.failed("after_stage")

    def stage_failed(self, name: str, error: BaseException) -> None:
        """Tell every observer."""
        for seat in self._stage_seats:
            try:
                seat.observer.stage_failed(name, error)
            except Exception:
                seat.failed("stage_failed")

    def after_run(self, names: tuple[str, ...], started: int, ends: Sequence[int]) -> None:
        """Tell every :class:`RunObserver`."""
        for seat, after_run in self._run_seats:
            try:
                after_run(names, started, ends)
            except Exception:
                seat.failed("after_run")


class ProfilerProbe:
    """Says whether a torch profiler is recording.

    Torch is looked up, never imported: a program that has not loaded it has no profiler running either.
    """

    def __init__(self) -> None:
        self._is_enabled: Callable[[], bool] | None = None

    def range(self) -> Callable[[str], AbstractContextManager[Any]] | None:
        """``torch.profiler.record_function`` while a torch profiler is recording, else None."""
        is_enabled = self._is_enabled or self._look_up()
        return sys.modules["torch"].autograd.profiler.record_function if is_enabled() else None

    def _look_up(self) -> Callable[[], bool]:
        autograd: Any = getattr(sys.modules.get("torch"), "autograd", None)
        is_enabled = getattr(autograd, "_profiler_enabled", None)
        if is_enabled is None:
            return _never
        self._is_enabled = is_enabled
        return is_enabled


def _never() -> bool:
    return False

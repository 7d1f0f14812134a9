"""The machine of a runner's life: loaded, ready, asleep in part or whole, faulted, closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TypeVar

from .errors import InputRefused, RunnerFaulted, StepStateError
from .guard import GuardedMachine, Trigger

T = TypeVar("T")

SLEEP_PARTS = frozenset({"weights", "kv_cache"})
"""What can sleep on its own."""


class LifeState(StrEnum):
    """How far a runner has come."""

    CREATED = "CREATED"
    LOADED = "LOADED"
    READY = "READY"
    ASLEEP = "ASLEEP"
    FAULTED = "FAULTED"
    CLOSED = "CLOSED"


_READY = LifeState.READY.name
_AWAKE_OR_ASLEEP = (LifeState.READY, LifeState.ASLEEP)

LIFE_TRIGGERS: tuple[Trigger[LifeState], ...] = (
    Trigger("load", (LifeState.CREATED,), LifeState.LOADED, call="load_model"),
    Trigger("initialize", (LifeState.LOADED,), LifeState.READY, call="initialize_kv_cache"),
    Trigger("sleep", _AWAKE_OR_ASLEEP, LifeState.ASLEEP, call="sleep"),
    Trigger("wake_part", (LifeState.ASLEEP,), None, call="wake_up"),
    Trigger("wake", _AWAKE_OR_ASLEEP, LifeState.READY, call="wake_up"),
    Trigger("fault", (LifeState.READY, LifeState.FAULTED), LifeState.FAULTED, call="fault", offered=False),
    Trigger("close", tuple(LifeState), LifeState.CLOSED, call="shutdown"),
)
"""Every change in a runner's life. The triggers that repeat themselves (sleep, wake, fault, close) are idempotent."""


class LifeMachine(GuardedMachine[LifeState]):
    """Guards a runner's life. Each method runs ``work`` and moves the state if and only if it returned.

    A runner calls the methods that touch its memory from inside the step machine's ``settle``, so that no step can be
    under way. Calls that are not legal raise :class:`StepStateError` with the way out, and change nothing.
    """

    def __init__(self) -> None:
        super().__init__(LIFE_TRIGGERS, LifeState.CREATED)
        self._asleep: frozenset[str] = frozenset()
        self._reason = ""
        self._cause: BaseException | None = None

    @property
    def asleep_parts(self) -> frozenset[str]:
        """Which of "weights" and "kv_cache" sleep; empty unless ASLEEP (or closed in its sleep)."""
        return self._asleep

    @property
    def fault_reason(self) -> str:
        """Why the runner faulted; empty if it did not."""
        return self._reason

    def load(self, work: Callable[[], T]) -> T:
        """CREATED → LOADED."""
        return self.fire("load", work)

    def initialize(self, work: Callable[[], T]) -> T:
        """LOADED → READY."""
        return self.fire("initialize", work)

    def sleep(self, work: Callable[[frozenset[str]], object], parts: Iterable[str] = SLEEP_PARTS) -> None:
        """READY → ASLEEP. ``work`` gets the parts that were awake; with none of them it does not run.

        Raises:
            InputRefused: ``parts`` is empty or names something that cannot sleep.
        """
        chosen = _checked_parts(parts)

        def put_to_sleep() -> None:
            falling = chosen - self._asleep
            if falling:
                work(falling)
            self._asleep |= falling

        self.fire("sleep", put_to_sleep)

    def wake(self, work: Callable[[frozenset[str]], object], parts: Iterable[str] = SLEEP_PARTS) -> None:
        """ASLEEP → READY, or still ASLEEP while other parts sleep. ``work`` gets the parts that slept; if any did.

        Raises:
            InputRefused: ``parts`` is empty or names something that cannot sleep.
        """
        chosen = _checked_parts(parts)

        def wake_up() -> None:
            rising = chosen & self._asleep
            if rising:
                work(rising)
            self._asleep -= rising

        self.fire("wake_part" if self._asleep - chosen else "wake", wake_up)

    def fault(self, reason: str, cause: BaseException | None = None) -> None:
        """READY → FAULTED: something happened that nothing undoes. The first reason is kept; only closing is left."""

        def note() -> None:
            if not self._reason:
                self._reason, self._cause = reason, cause

        self.fire("fault", note)

    def close(self, work: Callable[[], object]) -> None:
        """→ CLOSED from any state. ``work`` does not run the second time."""

        def shut() -> None:
            if self.state is not LifeState.CLOSED:
                work()

        self.fire("close", shut)

    def require_ready(self, call: str) -> None:
        """Let ``call`` pass if the runner is READY.

        Raises:
            RunnerFaulted: the runner faulted.
            StepStateError: any other state; the message says what to call first.
        """
        if self._position.state != _READY:
            raise self._refusal(call, self._hint(""))

    def _hint(self, trigger: str) -> str:
        return {
            LifeState.CREATED: "call load_model() first",
            LifeState.LOADED: "call initialize_kv_cache() first" if trigger != "load" else "the model is loaded",
            LifeState.READY: "the runner is ready",
            LifeState.ASLEEP: f"call wake_up() first ({' and '.join(sorted(self._asleep))} asleep)",
            LifeState.FAULTED: f"the runner faulted ({self._reason}); shut it down and build a new one",
            LifeState.CLOSED: "the runner was shut down; build a new one",
        }[self.state]

    def _refusal(self, call: str, hint: str) -> StepStateError:
        error = super()._refusal(call, hint)
        if self.state is not LifeState.FAULTED:
            return error
        faulted = RunnerFaulted(str(error), state=error.state, call=call, allowed=error.allowed)
        faulted.__cause__ = self._cause
        return faulted


def _checked_parts(parts: Iterable[str]) -> frozenset[str]:
    chosen = frozenset(parts)
    if not chosen or chosen - SLEEP_PARTS:
        raise InputRefused(f"parts {sorted(chosen)}: expected one or more of {sorted(SLEEP_PARTS)}")
    return chosen

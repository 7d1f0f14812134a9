"""A state machine whose triggers do work: one call at a time, and the state moves only if the work returned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from attrs import frozen
from transitions import Event, Machine

from .errors import StepStateError

S = TypeVar("S", bound=Enum)
T = TypeVar("T")


@frozen
class Trigger(Generic[S]):
    """One row of a table: from any of ``sources`` to ``target`` (None: the state stays what it is).

    ``call`` is the public method that messages name; ``offered`` False keeps it out of the lists of allowed calls.
    """

    name: str
    sources: tuple[S, ...]
    target: S | None
    call: str
    offered: bool = True


class _Position:
    """The model that the library moves: one attribute, and no method whose name a trigger could meet.

    The library gets the states' names, as strings: with enum members a trigger takes half as long again.
    """

    __slots__ = ("state",)

    def __init__(self, state: str) -> None:
        self.state = state


class _Firing:
    """One call on its way through the machine."""

    __slots__ = ("call", "result", "returned", "thread", "work")

    def __init__(self, work: Callable[[], Any], call: str) -> None:
        self.work = work
        self.call = call
        self.thread = threading.get_ident()
        self.returned = False
        self.result: Any = None


class _Slot:
    """Holds the one call that is under way; a lock that knows who has it.

    A ``threading.Lock`` can be lost to an interrupt between ``acquire()`` and the ``try`` after it. Here one C call
    both takes the slot and records the taker, so a ``finally`` can tell from the slot alone whether to give it back.
    """

    holder: _Firing | None = None

    def taker(self) -> Callable[[_Firing], _Firing]:
        """What puts a firing in if the slot is free, and gives whoever holds it then. Atomic, never waits."""
        return partial(vars(self).setdefault, "holder")


def _nothing() -> None:
    """The hook of a call that needs none."""


class _WorkEvent(Event):
    """Runs the work, then moves the model along the one transition that leaves its state, and nothing else.

    The library also goes by its queue, logs each step, and looks for conditions and for callbacks of events,
    transitions and states, none of which a table of ours has: that is four fifths of the time of a trigger.
    """

    def trigger(self, model: _Position, firing: _Firing) -> bool:
        """The guard has checked that there is such a transition. Returns True: without conditions it always happens."""
        (transition,) = self.transitions[model.state]
        firing.result = firing.work()
        firing.returned = True
        if transition.dest is not None:
            model.state = transition.dest
        return True


class _WorkMachine(Machine):
    event_cls = _WorkEvent


class _Move(NamedTuple, Generic[S]):
    """A row of the table as it is looked up: its event, and its states by name (``target`` None: it stays)."""

    row: Trigger[S]
    sources: frozenset[str]
    target: str | None
    event: Event


class GuardedMachine(Generic[S]):
    """A :class:`transitions.Machine` behind a guard. ``triggers`` is its table, in the order it was given.

    The library's events move the state. Work happens before the move, so that an exception leaves the old state, and
    none of the library's queues, conditions or exception hooks is used: they hide failures.
    """

    def __init__(self, triggers: Sequence[Trigger[S]], initial: S) -> None:
        # At INFO the library formats a message for every callback, which makes a trigger five times as slow.
        logging.getLogger("transitions").setLevel(logging.WARNING)
        self.triggers = {trigger.name: trigger for trigger in triggers}
        self.initial = initial
        self._states = {state.name: state for state in type(initial)}
        self._position = _Position(initial.name)
        self._slot = _Slot()
        self._take_slot = self._slot.taker()
        targets = {row.name: None if row.target is None else row.target.name for row in triggers}
        events = _WorkMachine(
            model=None,
            states=list(self._states),
            initial=initial.name,
            auto_transitions=False,
            transitions=[
                {"trigger": row.name, "source": [source.name for source in row.sources], "dest": targets[row.name]}
                for row in triggers
            ],
        ).events
        self._moves = {
            row.name: _Move(row, frozenset(source.name for source in row.sources), targets[row.name], events[row.name])
            for row in triggers
        }

    @property
    def state(self) -> S:
        """Where the machine is. May be read from any thread, never waits."""
        return self._states[self._position.state]

    def fire(
        self,
        trigger: str,
        work: Callable[[], T],
        *,
        call: str | None = None,
        undo: Callable[[], object] = _nothing,
        commit: Callable[[], object] = _nothing,
    ) -> T:
        """Run ``work`` and then move the state; the state moves if and only if ``work`` returned.

        ``commit`` runs once the state has moved, ``undo`` if it has not: also where an interrupt fell between the work
        and the move. Both run while this call still is the only one, and a second time if an interrupt cut them short:
        they must be able to go on, as a :class:`~twostroke.fsm.transaction.Transaction` is. ``call`` names the public
        method in messages.

        Raises:
            StepStateError: not legal in this state, or another call is under way (in another thread, or this is a
                stage calling its own runner). ``work``, ``undo`` and ``commit`` did not run.
            Exception: whatever ``work``, ``undo`` or ``commit`` raised.
        """
        row, sources, target, event = self._moves.get(trigger) or self._unknown(trigger)
        firing = _Firing(work, call or row.call)
        # CPython delivers signals where a call begins or returns. The two `finally` blocks decide what to do without
        # any call, so no interrupt can fall between.
        try:
            holder = self._take_slot(firing)
            if holder is not firing:
                raise self._busy(holder, firing.call)
            if self._position.state not in sources:
                raise self._refusal(firing.call, self._hint(trigger))
            try:
                event.trigger(self._position, firing)
            finally:
                hook = commit if firing.returned and (target is None or self._position.state == target) else undo
                try:
                    hook()
                except KeyboardInterrupt:
                    hook()
                    raise
        finally:
            if self._slot.holder is firing:
                del self._slot.holder
        return firing.result

    def check(self, trigger: str, *, call: str | None = None) -> None:
        """Raise the :class:`StepStateError` that :meth:`fire` would raise now; change nothing."""
        row, sources, _, _ = self._moves.get(trigger) or self._unknown(trigger)
        holder = self._slot.holder
        if holder is not None:
            raise self._busy(holder, call or row.call)
        if self._position.state not in sources:
            raise self._refusal(call or row.call, self._hint(trigger))

    def allowed(self) -> tuple[str, ...]:
        """The public calls that are legal in this state, each once, in the order of the table."""
        rows = self.triggers.values()
        return tuple(dict.fromkeys(row.call for row in rows if row.offered and self.state in row.sources))

    def _unknown(self, trigger: str) -> NoReturn:
        known = ", ".join(self.triggers)
        raise StepStateError(
            f"there is no trigger {trigger!r}; there are: {known}", state=self.state.name, call=trigger
        )

    def _hint(self, trigger: str) -> str:
        """Why ``trigger`` is not legal in the present state, where there is more to say than that it is not."""
        return ""

    def _refusal(self, call: str, hint: str) -> StepStateError:
        allowed = self.allowed()
        reason = f": {hint}" if hint else ""
        offer = ", ".join(f"{name}()" for name in allowed) or "nothing"
        return StepStateError(
            f"{call}() is not allowed in state {self.state.name}{reason}; allowed now: {offer}",
            state=self.state.name,
            call=call,
            allowed=allowed,
        )

    def _busy(self, holder: _Firing, call: str) -> StepStateError:
        if holder.thread == threading.get_ident():
            reason = f"from inside {holder.call}(): a stage cannot call its own runner, return from it first"
        else:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            other = names.get(holder.thread, str(holder.thread))
            reason = (
                f"by thread {threading.current_thread().name!r} while thread {other!r} is inside {holder.call}(): "
                "one thread at a time drives a runner, and calls are not queued"
            )
        return StepStateError(
            f"{call}() was called {reason}; state {self.state.name}, nothing is allowed until {holder.call}() returns",
            state=self.state.name,
            call=call,
        )

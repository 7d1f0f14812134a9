"""An interrupt at every place where CPython may deliver one: nothing is left locked, half done or half undone."""

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import transitions.core
import twostroke.fsm.guard
import twostroke.fsm.transaction
from twostroke.fsm import StepMachine, StepState, Transaction

FILES = {module.__file__ for module in (twostroke.fsm.guard, twostroke.fsm.transaction, transitions.core)}
LOOP = dis.opmap["JUMP_BACKWARD"]
AFTER = {dis.opmap[name] for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX") if name in dis.opmap}
HANDLER = dis.opmap["PUSH_EXC_INFO"]  # follows a call that raised instead of returning


class InterruptAt:
    """Raises one KeyboardInterrupt at the ``place``-th point in ``FILES`` where the interpreter looks for signals.

    CPython looks when a function starts, when a loop goes round and when a call has returned.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.seen = 0
        self.raised = False
        self._last_opcode: dict[FrameType, int] = {}

    def run(self, work: Callable[[], object]) -> None:
        previous = sys.gettrace()
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(previous)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self._arrive()
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            opcode = frame.f_code.co_code[frame.f_lasti]
            last = self._last_opcode.get(frame, -1)
            self._last_opcode[frame] = opcode
            if opcode == LOOP or (last in AFTER and opcode != HANDLER):
                self._arrive()
        return self._step

    def _arrive(self) -> None:
        self.seen += 1
        if self.seen == self.place:
            self.raised = True
            raise KeyboardInterrupt


class Bench:
    """A machine, a transaction with two undos and two commit actions, and what happened to them."""

    def __init__(self) -> None:
        self.machine = StepMachine()
        self.value = "old"
        self.undone: list[str] = []
        self.committed: list[str] = []
        self.transaction = Transaction(1)

    def work(self) -> None:
        for name in ("a", "b"):
            self.transaction.on_undo(self.undone.append, name)
            self.transaction.on_commit(self.committed.append, name)
        self.value = "new"

    def fail(self) -> None:
        self.work()
        raise ValueError("work")

    def fire(self, work: Callable[[], object]) -> None:
        transaction = self.transaction
        self.machine.fire("execute", work, undo=transaction.rollback, commit=transaction.commit)


def places(run: Callable[[InterruptAt], None]) -> int:
    """Run with the interrupt at place 1, 2, … until there is no such place; how many there were."""
    place = 0
    while True:
        place += 1
        interrupt = InterruptAt(place)
        run(interrupt)
        if not interrupt.raised:
            return place - 1


def test_interrupt_while_firing() -> None:
    def run(interrupt: InterruptAt) -> None:
        bench = Bench()
        try:
            interrupt.run(lambda: bench.fire(bench.work))
        except KeyboardInterrupt:
            assert interrupt.raised
        where = f"interrupt at place {interrupt.place}"
        if bench.machine.state is StepState.FORWARDED:
            assert bench.committed == ["a", "b"], where
            assert bench.undone == [], where
        else:
            assert bench.committed == [], where
            assert list(dict.fromkeys(bench.undone)) in (["b", "a"], ["a"], []), where
            assert bench.value == "old" or bench.undone[-1:] == ["a"], where
        legal = "sample" if bench.machine.state is StepState.FORWARDED else "execute"
        bench.machine.fire(legal, lambda: None)

    assert places(run) > 30


def test_interrupt_while_undoing() -> None:
    def run(interrupt: InterruptAt) -> None:
        bench = Bench()
        with pytest.raises((ValueError, KeyboardInterrupt)):
            interrupt.run(lambda: bench.fire(bench.fail))
        where = f"interrupt at place {interrupt.place}"
        assert bench.machine.state is StepState.IDLE, where
        assert bench.committed == [], where
        assert bench.value == "old" or bench.undone[-1:] == ["a"], where
        bench.machine.fire("execute", lambda: None)

    assert places(run) > 30


def test_interrupt_in_a_commit_action_lets_the_others_run() -> None:
    machine, transaction, ran = StepMachine(), Transaction(1), []

    def interrupted() -> None:
        ran.append("interrupted")
        raise KeyboardInterrupt

    def work() -> None:
        transaction.on_commit(ran.append, "before")
        transaction.on_commit(interrupted)
        transaction.on_commit(ran.append, "after")

    with pytest.raises(KeyboardInterrupt):
        machine.fire("execute", work, undo=transaction.rollback, commit=transaction.commit)
    assert machine.state is StepState.FORWARDED
    assert ran == ["before", "interrupted", "after"]

"""Chapter T: what the state-machine library does to those who use it, and why it cannot happen here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from transitions import Machine
from twostroke.engine.model_runner import ModelRunner
from twostroke.fsm import LIFE_TRIGGERS, STEP_TRIGGERS, LifeMachine, StepMachine, StepState, StepStateError
from twostroke.fsm.guard import GuardedMachine

MACHINES = [pytest.param(StepMachine, STEP_TRIGGERS, id="step"), pytest.param(LifeMachine, LIFE_TRIGGERS, id="life")]


def nothing() -> None:
    """Work that is done at once."""


def fail(error: BaseException) -> None:
    """Work that raises."""
    raise error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), GeneratorExit(), SystemExit()])
def test_T2_recovery_follows_a_failure_of_any_kind(error: BaseException) -> None:
    """No queue holds the recovery, so no exception can empty it or leave it deaf."""
    machine = StepMachine()
    machine.fire("execute", nothing)
    for _ in range(2):
        with pytest.raises(type(error)):
            machine.fire("sample", lambda: fail(error))
        assert machine.state is StepState.FORWARDED
    machine.fire("rollback", nothing)
    assert machine.state is StepState.IDLE
    machine.fire("execute", nothing)
    assert machine.state is StepState.FORWARDED


def test_T3_T5_a_machine_fired_inside_another_ones_work() -> None:
    """Two runners are two machines: one may be stepped in a stage of the other, and neither waits or mixes."""
    outer, inner = StepMachine(), StepMachine()

    def work() -> StepState:
        inner.fire("execute", nothing)
        with pytest.raises(StepStateError, match="inside"):
            outer.fire("dummy", nothing)
        return outer.state

    assert outer.fire("execute", work) is StepState.IDLE
    assert (outer.state, inner.state) == (StepState.FORWARDED, StepState.FORWARDED)
    with pytest.raises(ValueError, match="of the inner"):
        outer.fire("sample", lambda: inner.fire("sample", lambda: fail(ValueError("of the inner"))))
    assert (outer.state, inner.state) == (StepState.FORWARDED, StepState.FORWARDED)


def test_T4_fire_returns_what_the_work_returned_or_raises() -> None:
    machine = StepMachine()
    for value in (False, None, 0, [], True):
        assert machine.fire("dummy", lambda value=value: value) is value
    for trigger in ("sample", "rollback"):
        with pytest.raises(StepStateError):
            machine.fire(trigger, nothing)


def test_T6_the_state_can_be_read_while_work_runs() -> None:
    machine, entered, leave = StepMachine(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert leave.wait(10)

    thread = threading.Thread(target=machine.fire, args=("execute", work))
    thread.start()
    assert entered.wait(10)
    seen = [machine.state for _ in range(1000)]
    with pytest.raises(StepStateError):
        machine.check("execute")
    leave.set()
    thread.join()
    assert set(seen) == {StepState.IDLE}
    assert machine.state is StepState.FORWARDED


def test_T7_overlapping_calls_never_interleave() -> None:
    """Many threads fire at once: one wins, the others are refused, and no work runs inside other work."""
    machine, inside, refused, most = StepMachine(), [0], [0], [0]
    barrier = threading.Barrier(8)

    def work() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0)
        inside[0] -= 1

    def hammer() -> None:
        barrier.wait()
        for _ in range(200):
            try:
                machine.fire("dummy", work)
            except StepStateError:
                refused[0] += 1

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert inside == [0]
    machine.fire("dummy", work)


@pytest.mark.parametrize(("make", "triggers"), MACHINES)
def test_T8_asking_changes_nothing(make: Callable[[], GuardedMachine], triggers: tuple) -> None:
    machine = make()
    for row in triggers:
        before = machine.state
        try:
            machine.check(row.name)
            legal = True
        except StepStateError:
            legal = False
        assert legal is (machine.initial in row.sources)
        assert machine.state is before
    assert set(machine.allowed()) == {row.call for row in triggers if row.offered and machine.initial in row.sources}


@pytest.mark.parametrize(("make", "triggers"), MACHINES)
def test_T10_T12_T13_the_table_is_flat_and_the_model_bare(make: Callable[[], GuardedMachine], triggers: tuple) -> None:
    """States are plain names, no trigger was added by the library, and the model has no method to meet one."""
    machine = make()
    owner: Machine = next(iter(machine._moves.values())).event.machine
    assert set(owner.events) == {row.name for row in triggers}
    assert set(owner.states) == {row.name for row in machine.initial.__class__.__members__.values()}
    assert all(not hasattr(state, "states") for state in owner.states.values()), "nested states"
    assert not owner.models
    assert not owner.has_queue
    assert [name for name in dir(machine._position) if not name.startswith("__")] == ["state"]


def test_T10_a_runner_has_one_machine_for_its_steps(runner: ModelRunner) -> None:
    machine = runner._machine
    moves = machine._moves
    runner.dummy_run()
    runner.sleep()
    runner.wake_up()
    assert runner._machine is machine
    assert machine._moves is moves


def test_T11_a_call_returns_after_its_effect() -> None:
    machine = StepMachine()
    order: list[str] = []
    machine.fire(
        "execute",
        lambda: order.append(f"work in {machine.state}"),
        commit=lambda: order.append(f"commit in {machine.state}"),
    )
    order.append(f"returned in {machine.state}")
    assert order == ["work in IDLE", "commit in FORWARDED", "returned in FORWARDED"]


def test_T13_a_trigger_that_no_table_has_is_an_error_not_a_method() -> None:
    machine = StepMachine()
    for name in ("state", "fire", "to_IDLE", "may_execute", "is_IDLE", "prepare", ""):
        with pytest.raises(StepStateError, match="there is no trigger"):
            machine.fire(name, nothing)
    assert machine.state is StepState.IDLE

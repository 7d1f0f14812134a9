"""The step machine: every state with every trigger, who may call, and what is left when work raises."""

import functools
import logging
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twostroke.fsm import STEP_TRIGGERS, StepMachine, StepState, StepStateError

IDLE, FORWARDED, SAMPLED = StepState
PATHS = {IDLE: (), FORWARDED: ("execute",), SAMPLED: ("execute", "sample")}

# The protocol, written down a second time: (state, trigger) -> next state. What is not here is illegal.
PROTOCOL = {
    (IDLE, "execute"): FORWARDED,
    (IDLE, "skip"): IDLE,
    (IDLE, "settle"): IDLE,
    (IDLE, "dummy"): IDLE,
    (FORWARDED, "sample"): SAMPLED,
    (FORWARDED, "rollback"): IDLE,
    (SAMPLED, "execute"): FORWARDED,
    (SAMPLED, "skip"): SAMPLED,
    (SAMPLED, "settle"): IDLE,
    (SAMPLED, "dummy"): SAMPLED,
}
TRIGGERS = tuple(trigger.name for trigger in STEP_TRIGGERS)
PUBLIC = {trigger.name: trigger.call for trigger in STEP_TRIGGERS}
PAIRING = "sample_tokens() must be called after execute_model() returns None"


def nothing() -> None:
    pass


def machine_in(state: StepState) -> StepMachine:
    machine = StepMachine()
    for trigger in PATHS[state]:
        machine.fire(trigger, nothing)
    assert machine.state is state
    return machine


def test_protocol_covers_the_table() -> None:
    assert {trigger for _, trigger in PROTOCOL} == set(TRIGGERS)


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("state", list(StepState))
def test_every_state_with_every_trigger(state: StepState, trigger: str) -> None:
    machine = machine_in(state)
    ran: list[str] = []

    def hooks() -> dict:
        return {"undo": lambda: ran.append("undo"), "commit": lambda: ran.append("commit")}

    if (state, trigger) in PROTOCOL:
        machine.check(trigger)
        assert machine.fire(trigger, lambda: ran.append("work") or "result", **hooks()) == "result"
        assert machine.state is PROTOCOL[state, trigger]
        assert ran == ["work", "commit"]
        return

    for attempt in (
        lambda: machine.check(trigger),
        lambda: machine.fire(trigger, lambda: ran.append("work"), **hooks()),
    ):
        with pytest.raises(StepStateError) as caught:
            attempt()
        error = caught.value
        allowed = tuple(dict.fromkeys(PUBLIC[name] for at, name in PROTOCOL if at is state))
        assert isinstance(error, RuntimeError)
        assert (error.state, error.call) == (state.name, PUBLIC[trigger])
        assert sorted(error.allowed) == sorted(allowed)
        assert all(f"{name}()" in str(error) for name in (*allowed, PUBLIC[trigger]))
        assert state.name in str(error)
    assert ran == []
    assert machine.state is state


@pytest.mark.parametrize("trigger", ["execute", "skip"])
def test_pairing_error_has_the_known_text(trigger: str) -> None:
    machine = machine_in(FORWARDED)
    with pytest.raises(StepStateError, match=r"sample_tokens\(\) must be called after execute_model\(\) returns None"):
        machine.fire(trigger, nothing)
    with pytest.raises(StepStateError) as caught:
        machine.fire(trigger, nothing, call="run_step")
    assert PAIRING in str(caught.value)
    assert caught.value.call == "run_step"


def test_F2_pairing_error_is_not_used_for_other_orders() -> None:
    with pytest.raises(StepStateError) as caught:
        machine_in(IDLE).fire("sample", nothing)
    assert PAIRING not in str(caught.value)


def test_call_names_the_public_method() -> None:
    with pytest.raises(StepStateError, match=r"^stages\.replace\(\) is not allowed in state FORWARDED"):
        machine_in(FORWARDED).check("dummy", call="stages.replace")


def test_unknown_trigger_names_the_known_ones() -> None:
    with pytest.raises(StepStateError, match=r"no trigger 'prepare'.*execute, skip, sample"):
        StepMachine().fire("prepare", nothing)


@pytest.mark.parametrize(
    "error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(1)], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize(("state", "trigger"), list(PROTOCOL), ids=lambda value: str(value))
def test_T1_work_that_raises_leaves_the_old_state(state: StepState, trigger: str, error: BaseException) -> None:
    machine = machine_in(state)
    undone: list[StepState] = []
    committed: list[str] = []

    def fail() -> None:
        raise error

    def undo() -> None:
        undone.append(machine.state)
        with pytest.raises(StepStateError, match="from inside"):
            machine.fire("settle", nothing)

    with pytest.raises(type(error)) as caught:
        machine.fire(trigger, fail, undo=undo, commit=lambda: committed.append("commit"))
    assert caught.value is error
    assert machine.state is state
    assert undone == [state]
    assert committed == []
    machine.fire(trigger, nothing)
    assert machine.state is PROTOCOL[state, trigger]


def test_commit_that_raises_leaves_the_new_state_and_a_usable_machine() -> None:
    machine = StepMachine()

    def fail() -> None:
        raise ValueError("commit")

    with pytest.raises(ValueError, match="commit"):
        machine.fire("execute", nothing, commit=fail)
    assert machine.state is FORWARDED
    machine.fire("sample", nothing)


@pytest.mark.parametrize("outer", ["execute", "skip", "dummy"])
@pytest.mark.parametrize("inner", TRIGGERS)
def test_T3_calls_from_inside_a_stage_are_refused(outer: str, inner: str) -> None:
    machine = StepMachine()
    inner_ran: list[str] = []

    def stage() -> str:
        with pytest.raises(StepStateError) as caught:
            machine.fire(inner, lambda: inner_ran.append(inner))
        assert f"{PUBLIC[inner]}() was called from inside {PUBLIC[outer]}()" in str(caught.value)
        assert (caught.value.call, caught.value.state, caught.value.allowed) == (PUBLIC[inner], "IDLE", ())
        with pytest.raises(StepStateError, match="from inside"):
            machine.check(inner)
        return "done"

    assert machine.fire(outer, stage) == "done"
    assert inner_ran == []
    assert machine.state is PROTOCOL[IDLE, outer]


def test_T6_second_thread_is_refused_and_may_read_the_state() -> None:
    machine = StepMachine()
    inside, leave = threading.Event(), threading.Event()
    results: list[str] = []

    def work() -> str:
        inside.set()
        assert leave.wait(10)
        return "first"

    first = threading.Thread(target=lambda: results.append(machine.fire("execute", work)), name="driver")
    first.start()
    try:
        assert inside.wait(10)
        assert machine.state is IDLE
        with pytest.raises(StepStateError) as caught:
            machine.fire("execute", lambda: results.append("second"))
        for word in ("execute_model()", "'driver'", threading.current_thread().name, "IDLE", "not queued"):
            assert word in str(caught.value)
        with pytest.raises(StepStateError, match="driver"):
            machine.check("settle")
    finally:
        leave.set()
        first.join(10)
    assert results == ["first"]
    assert machine.state is FORWARDED
    machine.fire("sample", nothing)


def test_of_many_threads_one_gets_in() -> None:
    machine = StepMachine()
    threads_count = 8
    start = threading.Barrier(threads_count)
    leave = threading.Event()
    ran: list[int] = []
    refused: list[StepStateError] = []

    def work() -> None:
        ran.append(threading.get_ident())
        assert leave.wait(10)

    def call() -> None:
        start.wait(10)
        try:
            machine.fire("execute", work)
        except StepStateError as error:
            refused.append(error)
            if len(refused) == threads_count - 1:
                leave.set()

    threads = [threading.Thread(target=call) for _ in range(threads_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(ran) == 1
    assert len(refused) == threads_count - 1
    assert machine.state is FORWARDED


def test_two_machines_do_not_share_anything() -> None:
    first, second = StepMachine(), StepMachine()
    first.fire("execute", lambda: second.fire("execute", lambda: second.state))
    assert (first.state, second.state) == (FORWARDED, FORWARDED)
    second.fire("rollback", nothing)
    assert (first.state, second.state) == (FORWARDED, IDLE)


def test_transitions_logger_stays_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        machine_in(SAMPLED)
    assert [record for record in caplog.records if record.name.startswith("transitions")] == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TRIGGERS), st.booleans()), max_size=30))
def test_random_calls_follow_the_protocol(calls: list[tuple[str, bool]]) -> None:
    machine = StepMachine()
    state = IDLE
    log: list[str] = []

    def work(fails: bool) -> str:
        log.append("work")
        if fails:
            raise ValueError("work")
        return "result"

    def undo() -> None:
        log.append("undo")

    def commit() -> None:
        log.append("commit")

    for trigger, fails in calls:
        log.clear()
        legal = (state, trigger) in PROTOCOL
        try:
            result = machine.fire(trigger, functools.partial(work, fails), undo=undo, commit=commit)
        except StepStateError:
            assert not legal
            assert log == []
        except ValueError:
            assert legal
            assert log == ["work", "undo"]
        else:
            assert legal
            assert result == "result"
            assert log == ["work", "commit"]
            state = PROTOCOL[state, trigger]
        assert machine.state is state

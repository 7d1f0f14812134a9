"""The machine of a runner's life."""

import pytest
from twostroke.fsm import (
    LIFE_TRIGGERS,
    InputRefused,
    LifeMachine,
    LifeState,
    RunnerFaulted,
    StepStateError,
)

CREATED, LOADED, READY, ASLEEP, FAULTED, CLOSED = LifeState

# (state, method) -> next state; what is not here is illegal.
LIFE = {
    (CREATED, "load"): LOADED,
    (LOADED, "initialize"): READY,
    (READY, "sleep"): ASLEEP,
    (ASLEEP, "sleep"): ASLEEP,
    (ASLEEP, "wake"): READY,
    (READY, "wake"): READY,
    (READY, "fault"): FAULTED,
    (FAULTED, "fault"): FAULTED,
    **{(state, "close"): CLOSED for state in LifeState},
}
METHODS = ("load", "initialize", "sleep", "wake", "fault", "close")
PATHS = {
    CREATED: (),
    LOADED: ("load",),
    READY: ("load", "initialize"),
    ASLEEP: ("load", "initialize", "sleep"),
    FAULTED: ("load", "initialize", "fault"),
    CLOSED: ("close",),
}


def call(life: LifeMachine, method: str, ran: list | None = None) -> None:
    def work(*parts: object) -> None:
        if ran is not None:
            ran.append((method, *parts))

    if method == "fault":
        life.fault("a collective was cut short")
    else:
        getattr(life, method)(work)


def life_in(state: LifeState) -> LifeMachine:
    life = LifeMachine()
    for method in PATHS[state]:
        call(life, method)
    assert life.state is state
    return life


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("state", list(LifeState))
def test_every_state_with_every_method(state: LifeState, method: str) -> None:
    life = life_in(state)
    asleep = life.asleep_parts
    if (state, method) in LIFE:
        call(life, method)
        assert life.state is LIFE[state, method]
        assert bool(life.asleep_parts) == (life.state is ASLEEP or (method == "close" and bool(asleep)))
        return
    ran: list = []
    with pytest.raises(StepStateError) as caught:
        call(life, method, ran)
    assert caught.value.state == state.name
    assert "shutdown" in caught.value.allowed
    assert "fault" not in caught.value.allowed
    assert (life.state, life.asleep_parts, ran) == (state, asleep, [])


@pytest.mark.parametrize(
    ("state", "way_out"),
    [
        (CREATED, r"call load_model\(\) first"),
        (LOADED, r"call initialize_kv_cache\(\) first"),
        (ASLEEP, r"call wake_up\(\) first \(kv_cache and weights asleep\)"),
        (FAULTED, "a collective was cut short.*build a new one"),
        (CLOSED, "was shut down; build a new one"),
    ],
)
def test_require_ready_names_the_way_out(state: LifeState, way_out: str) -> None:
    with pytest.raises(
        StepStateError, match=rf"execute_model\(\) is not allowed in state {state.name}.*{way_out}"
    ) as caught:
        life_in(state).require_ready("execute_model")
    assert (caught.value.call, caught.value.state) == ("execute_model", state.name)


def test_require_ready_passes_when_ready() -> None:
    life = life_in(READY)
    life.require_ready("execute_model")
    assert life.state is READY


def test_F3_every_part_must_be_awake() -> None:
    life = life_in(READY)
    moved: list[frozenset[str]] = []
    life.sleep(moved.append)
    life.wake(moved.append, {"weights"})
    assert life.state is ASLEEP
    assert life.asleep_parts == {"kv_cache"}
    with pytest.raises(StepStateError, match=r"wake_up\(\) first \(kv_cache asleep\)"):
        life.require_ready("execute_model")
    life.wake(moved.append, {"kv_cache"})
    assert life.state is READY
    assert moved == [{"weights", "kv_cache"}, {"weights"}, {"kv_cache"}]


def test_F3_sleep_and_wake_twice_work_once() -> None:
    life = life_in(READY)
    moved: list[frozenset[str]] = []
    life.sleep(moved.append, {"kv_cache"})
    life.sleep(moved.append)
    life.sleep(moved.append)
    assert moved == [{"kv_cache"}, {"weights"}]
    life.wake(moved.append)
    life.wake(moved.append)
    assert moved[2:] == [{"kv_cache", "weights"}]
    assert life.state is READY


@pytest.mark.parametrize("parts", [(), ("kv",), ("weights", "graphs")])
def test_parts_that_cannot_sleep_are_refused(parts: tuple[str, ...]) -> None:
    life = life_in(READY)
    for method in (life.sleep, life.wake):
        with pytest.raises(InputRefused, match=r"kv_cache.*weights"):
            method(lambda _: pytest.fail("work ran"), parts)
    assert life.state is READY


@pytest.mark.parametrize("state", [state for state in LifeState if state is not CLOSED])
def test_work_that_raises_changes_nothing(state: LifeState) -> None:
    life = life_in(state)
    asleep = life.asleep_parts

    def fail(*_: object) -> None:
        raise OSError("no such file")

    methods = [method for method in METHODS if (state, method) in LIFE and method != "fault"]
    for method in methods:
        if (state, method) in ((ASLEEP, "sleep"), (READY, "wake")):
            continue  # nothing to do: no work runs
        with pytest.raises(OSError, match="no such file"):
            getattr(life, method)(fail)
        assert (life.state, life.asleep_parts) == (state, asleep)


def test_fault_keeps_the_first_reason_and_its_cause() -> None:
    life = life_in(READY)
    cause = ValueError("device lost")
    life.fault("the device was lost", cause)
    life.fault("another reason")
    assert life.fault_reason == "the device was lost"
    with pytest.raises(RunnerFaulted, match="the device was lost") as caught:
        life.require_ready("execute_model")
    assert caught.value.__cause__ is cause
    assert caught.value.allowed == ("shutdown",)
    with pytest.raises(RunnerFaulted):
        life.wake(lambda _: None)


def test_close_works_once() -> None:
    life = life_in(READY)
    ran: list[str] = []
    life.close(lambda: ran.append("closed"))
    life.close(lambda: ran.append("closed"))
    assert ran == ["closed"]


def test_calls_from_inside_are_refused() -> None:
    life = life_in(READY)

    def work(_: frozenset[str]) -> None:
        with pytest.raises(StepStateError, match=r"shutdown\(\) was called from inside sleep\(\)"):
            life.close(lambda: None)

    life.sleep(work)
    assert life.state is ASLEEP


def test_methods_return_what_work_returned() -> None:
    life = LifeMachine()
    assert life.load(lambda: "model") == "model"
    assert life.initialize(lambda: 7) == 7


def test_every_trigger_has_a_method() -> None:
    assert {trigger.name for trigger in LIFE_TRIGGERS} == {*METHODS, "wake_part"}

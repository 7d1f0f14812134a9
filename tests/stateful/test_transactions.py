"""A step is a transaction: an error or an interrupt at any place of it changes nothing, or everything."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from books import Plan
from faults import Fault, When
from ground import Setting
from planning import Habits
from reference import References
from snapshot import assert_same
from twostroke.fsm import LifeState, StepState
from world import REPLACEABLE, Boom, World

NOWHERE = 10**9
NUM_PLACES = 8
BUSY = Habits(pick=0.9, preempt=0.25, rewind=0.2)
DEVICES = pytest.mark.parametrize("is_lazy", [False, True], ids=["host", "lazy"])


@pytest.fixture
def make_world(references: References) -> Callable[..., World]:
    """A world with steps in flight, in a mode with graphs."""

    def make(is_lazy: bool, seed: int = 1) -> World:
        setting = Setting(mode="full_and_piecewise", is_lazy=is_lazy, is_async=True, depth=3)
        world = World(references, setting, random.Random(seed), Counter())
        for _ in range(4):
            world.run(next_plan(world))
        return world

    return make


def next_plan(world: World) -> Plan:
    """A plan that schedules something; requests that are done make room for new ones."""
    while True:
        world.finish()
        world.add()
        plan = world.plan(BUSY)
        if plan.entries:
            return plan
        world.books.cancel(plan)


def spread(count: int, at_most: int) -> Iterator[int]:
    """Places from 1 to ``count``, evenly spread, with both ends."""
    picks = min(count, at_most)
    yield from sorted({1 + index * (count - 1) // max(picks - 1, 1) for index in range(picks)})


@DEVICES
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("name", REPLACEABLE)
def test_a_fault_at_any_place_of_a_stage(
    make_world: Callable[..., World], name: str, error: type[BaseException], is_lazy: bool
) -> None:
    world = make_world(is_lazy)
    survey = Fault(error(), world.stage(name), place=NOWHERE)
    world.fail(next_plan(world), name, survey)
    faults = [Fault(error(), world.stage(name), when) for when in (When.BEFORE, When.AFTER)]
    faults += [Fault(error(), world.stage(name), place=place) for place in spread(survey.num_places, NUM_PLACES)]
    for fault in faults:
        world.fail(next_plan(world), name, fault)
        world.check()
    assert sum(fault.raised for fault in faults) >= min(3, len(faults))
    world.close()


def interrupted(call: Callable[[], object], place: int) -> Fault:
    """Call with an interrupt at a place anywhere in the engine's code."""
    fault = Fault(KeyboardInterrupt(), place=place)
    try:
        with fault.armed():
            call()
    except KeyboardInterrupt:
        if not fault.raised:  # somebody at the keyboard
            raise
    return fault


@DEVICES
def test_an_interrupt_anywhere_in_execute_model(make_world: Callable[..., World], is_lazy: bool) -> None:
    world = make_world(is_lazy)
    survey = interrupted(lambda: world.run(next_plan(world)), NOWHERE)
    for place in spread(survey.num_places, 40):
        plan = next_plan(world)
        before = world.state()
        interrupted(lambda plan=plan: world.runner.execute_model(plan.output), place)
        if world.runner.state is StepState.FORWARDED:
            world.runner.rollback()
            before["state"] = StepState.IDLE
        assert_same(world.state(), before)
        world.run(plan)
        world.check()
    world.close()


@DEVICES
def test_an_interrupt_anywhere_in_sample_tokens(make_world: Callable[..., World], is_lazy: bool) -> None:
    world = make_world(is_lazy)
    for place in spread(sample_interrupted(world, NOWHERE).num_places, 50):
        sample_interrupted(world, place)
        world.run(next_plan(world))
        world.check()
    world.close()


def sample_interrupted(world: World, place: int) -> Fault:
    """A step with an interrupt in its second stroke."""
    plan = next_plan(world)
    world.execute(plan.output)
    between = world.state()
    fault = interrupted(world.runner.sample_tokens, place)
    if world.runner.state is StepState.FORWARDED:
        assert_same(world.state(), between)
        world.sample(plan)
    else:
        # The step happened, and only the answer was lost on its way out: the table has it.
        late = world.runner.parts.table.latest_output
        assert late is not None
        world.books.book(plan, late)
        world.num_sampled += 1
        world.runner.parts.table.recover_rows()  # as the next step does: one may have been kept from being freed
        world.check()
    return fault


@DEVICES
def test_an_interrupt_anywhere_in_rollback(make_world: Callable[..., World], is_lazy: bool) -> None:
    world = make_world(is_lazy)
    plan = next_plan(world)
    world.execute(plan.output)
    survey = interrupted(world.runner.rollback, NOWHERE)
    world.run(plan)
    for place in spread(survey.num_places, 40):
        plan = next_plan(world)
        before = world.state()
        world.execute(plan.output)
        interrupted(world.runner.rollback, place)
        if world.runner.state is StepState.FORWARDED:
            world.runner.rollback()
        assert_same(world.state(), {**before, "state": StepState.IDLE})
        world.run(plan)
        world.check()
    world.close()


@DEVICES
def test_an_interrupt_anywhere_in_a_step_without_tokens(make_world: Callable[..., World], is_lazy: bool) -> None:
    world = make_world(is_lazy)
    for place in range(1, 400, 7):
        for _ in range(3):
            world.run(next_plan(world))
        plan = world.plan(Habits(pick=-1.0, preempt=0.5))
        fault = interrupted(lambda plan=plan: world.runner.execute_model(plan.output), place)
        world.run(plan)  # once more, whether it happened or not: telling it twice changes nothing
        world.check()
        if not fault.raised:
            break
    else:
        pytest.fail("the step has more places than were tried")
    world.close()


@DEVICES
def test_an_interrupt_anywhere_in_sleep(make_world: Callable[..., World], is_lazy: bool) -> None:
    world = make_world(is_lazy)
    for place in range(1, 600, 9):
        for _ in range(3):
            world.run(next_plan(world))
        before = world.state()
        fault = interrupted(world.runner.sleep, place)
        if world.runner.life is LifeState.READY and world.runner.parts.table.rows:
            assert_same(world.state(), {**before, "state": world.runner.state})
        world.sleep_and_wake()
        world.check()
        if not fault.raised:
            break
    else:
        pytest.fail("sleep() has more places than were tried")
    world.close()

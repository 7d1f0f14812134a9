"""Random histories of a runner: whatever happens in whatever order, every request gets what it would get alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from faults import When
from ground import Setting
from hypothesis import HealthCheck, event, note, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mistakes import MISTAKES
from modes import MODES
from reference import References
from world import REPLACEABLE, RULES, World

SETTINGS = st.builds(
    lambda mode, is_lazy, is_async, depth: Setting(
        mode=mode, is_lazy=is_lazy, is_async=is_async, depth=depth if is_async else 1
    ),
    mode=st.sampled_from(list(MODES)),
    is_lazy=st.booleans(),
    is_async=st.sampled_from([True, True, False]),
    depth=st.sampled_from([2, 3, 1]),
)
SEEDS = st.sampled_from(range(5_000))
"""For all choices inside a happening: a history is shrunk by leaving happenings out, not by choices inside of them."""
RARE = ("sleep_and_wake", "settle", "update_weights", "dummy_run", "capture", "empty_step", "abort", "reuse")
DEEP = (
    *RULES,
    *(f"refused: {mistake.__name__}" for mistake in MISTAKES),
    *(f"resume {how}" for how in ("as new", "with all_token_ids", "without tokens", "in flight")),
    *(f"{what} in flight" for what in ("rewind", "abort", "finish", "sleep", "rollback", "fault")),
    *(f"{what} between the strokes" for what in ("abort", "collect", "illegal")),
    *("sent again", "in parts", "dropped", "sampled again", "replayed", "captured", "probed", "spoilt"),
    "scheduled after its logits were spoilt",
    *("prefix hit, live", "prefix hit, finished", "id used again at once", "chunk", "several at once"),
    *("intruders from a stage", "intruders from a thread", "resume in the step of its preemption"),
)
"""What a long walk must have met."""


class _RunnerMachine(RuleBasedStateMachine):
    """What :func:`machine_of` makes a machine of, by adding one rule for each happening that is not rare."""

    references: References
    happened: Counter[str]
    world: World | None = None

    @initialize(setting=SETTINGS, seed=SEEDS)
    def start(self, setting: Setting, seed: int) -> None:
        self.world = World(self.references, setting, random.Random(seed), self.happened, note)

    @rule(seed=SEEDS)
    def something_rare(self, seed: int) -> None:
        assert self.world is not None
        self.world.chooser = chooser = random.Random(f"{seed} {self.world.seen.total()}")
        self.world.happen(chooser.choice([name for name in RARE if self.world.is_possible(name)]))

    def teardown(self) -> None:
        if self.world is not None:
            self.world.chooser = random.Random(0)
            self.world.close()


def machine_of(references: References, happened: Counter[str]) -> type[RuleBasedStateMachine]:
    """A state machine over these references that counts what happens."""

    def rule_of(name: str) -> Callable[..., None]:
        def happen(self: Any, seed: int) -> None:
            # Seeds repeat, and happenings should not.
            self.world.chooser = random.Random(f"{seed} {self.world.seen[name]}")
            self.world.happen(name)
            event(name)

        happen.__name__ = name
        possible = precondition(lambda self: self.world is not None and self.world.is_possible(name))
        return rule(seed=SEEDS)(possible(happen))

    rules = {name: rule_of(name) for name in RULES if name not in RARE}
    return type("RunnerMachine", (_RunnerMachine,), {**rules, "references": references, "happened": happened})


def test_every_history_gives_every_request_what_it_gets_alone(references: References) -> None:
    happened = Counter[str]()
    run_state_machine_as_test(
        machine_of(references, happened),
        settings=settings(
            max_examples=2 * settings().max_examples,
            stateful_step_count=max(60, settings().stateful_step_count),
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    print(dict(happened))
    assert happened["tokens checked"] > 0


def test_a_long_walk_meets_everything(references: References) -> None:
    chooser, happened = random.Random(1), Counter[str]()
    for number, mode in enumerate([*MODES] * 3):
        depth = (3, 2, 1)[(number + number // len(MODES)) % 3]
        world = World(
            references, Setting(mode=mode, is_lazy=number % 2 == 0, is_async=depth > 1, depth=depth), chooser, happened
        )
        for _ in range(60):
            names = [name for name in RULES if world.is_possible(name) and (name not in RARE or chooser.random() < 0.3)]
            world.happen(chooser.choice(names))
        world.close()
    assert happened["tokens checked"] > 500
    assert {name for name in DEEP if not happened[name]} == set()
    for error in ("Boom", "KeyboardInterrupt"):
        assert {when for when in When if any(happened[f"{error} {when} {stage}"] for stage in REPLACEABLE)} == set(When)
    for stage in REPLACEABLE:
        assert any(happened[f"{error} {when} {stage}"] for error in ("Boom", "KeyboardInterrupt") for when in When)

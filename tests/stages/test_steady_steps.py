"""Steps that go on with the batch before them: read at a glance, and only if nothing else is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from twostroke.fsm import Transaction
from twostroke.stages.errors import InvalidSchedulerOutput
from twostroke.stages.io import CachedRequestData, SchedulerOutput
from twostroke.stages.steady_steps import SteadySteps

IDS = ["a", "b", "c"]


def decode(build: Any, length: int, blocks: Any = (), outputs: Any = (), ids: list[str] = IDS) -> SchedulerOutput:
    """Everybody's token at position ``length``."""
    cached = build.cached(ids, [length] * len(ids), blocks, num_output_tokens=list(outputs))
    return build.output(dict.fromkeys(ids, 1), cached=cached)


def begin(kit: Any, build: Any, groups: int = 1) -> None:
    """Three requests of two prompt tokens and a block each; one token was sampled for each."""
    news = [
        evolve(build.new(req_id, [1, 2]), block_ids=tuple([4 * group + at] for group in range(groups)))
        for at, req_id in enumerate(IDS, 1)
    ]
    kit.step(build.output(dict.fromkeys(IDS, 2), news), dict.fromkeys(IDS, 9))


def reader(kit: Any) -> SteadySteps:
    return kit.update_states._steady


def test_a_decode_of_the_same_requests_is_read_at_a_glance(kit: Any, build: Any) -> None:
    begin(kit, build)
    output = decode(build, 2, outputs=[1, 1, 1])
    assert reader(kit).read(output) is not None
    first = kit.step(output, dict.fromkeys(IDS, 8))
    second = kit.step(decode(build, 3), dict.fromkeys(IDS, 7))
    assert first.rows is second.rows
    assert second.num_computed_tokens.tolist() == [3, 3, 3]
    assert second.num_scheduled_tokens.tolist() == [1, 1, 1]
    assert second.num_tokens == 3
    assert kit.tokens("b") == [1, 2, 9, 8, 7]
    assert kit.table.num_computed_tokens[second.rows].tolist() == [3, 3, 3]


def test_blocks_are_appended_and_taken_back_with_the_step(make_kit: Callable[..., Any], build: Any) -> None:
    kit = make_kit(groups=2)
    begin(kit, build, groups=2)
    for length in (2, 3):
        kit.step(decode(build, length), dict.fromkeys(IDS, 9))
    more = decode(build, 4)
    cached = evolve(more.scheduled_cached_reqs, new_block_ids=[([20], [21]), ([22], [23]), ([24], [25])])
    more = evolve(more, scheduled_cached_reqs=cached)
    before, transaction = kit.snapshot(), Transaction(5)
    assert reader(kit).read(more) is not None
    kit.update_states(more, transaction)
    assert [kit.blocks(req_id, 1)[-1] for req_id in IDS] == [21, 23, 25]
    transaction.rollback()
    assert kit.snapshot() == before
    kit.step(more)
    assert [kit.blocks(req_id) for req_id in IDS] == [[1, 20], [2, 22], [3, 24]]


def changed(build: Any, **changes: Any) -> SchedulerOutput:
    return evolve(decode(build, 2), **changes)


def with_cached(build: Any, **changes: Any) -> SchedulerOutput:
    output = decode(build, 2)
    return evolve(output, scheduled_cached_reqs=evolve(output.scheduled_cached_reqs, **changes))


OTHER: dict[str, Callable[[Any], SchedulerOutput]] = {
    "another order of counts": lambda build: changed(build, num_scheduled_tokens=dict.fromkeys("cba", 1)),
    "another order": lambda build: decode(build, 2, ids=["b", "a", "c"]),
    "one less": lambda build: decode(build, 2, ids=["a", "b"]),
    "a finished request": lambda build: changed(build, finished_req_ids={"ghost"}),
    "a preempted request": lambda build: changed(build, preempted_req_ids={"ghost"}),
    "empty drafts": lambda build: changed(build, scheduled_spec_decode_tokens={"a": []}),
    "told tokens": lambda build: with_cached(build, new_token_ids=[[9], [9], [9]]),
    "two blocks for one": lambda build: with_cached(build, new_block_ids=[([20, 21],), None, None]),
    "a rewind": lambda build: decode(build, 1, outputs=[0, 1, 1]),
}


@pytest.mark.parametrize("name", OTHER)
def test_any_other_step_is_looked_at_closely(kit: Any, build: Any, name: str) -> None:
    begin(kit, build)
    output = OTHER[name](build)
    assert reader(kit).read(output) is None


WRONG: dict[str, Callable[[Any], SchedulerOutput]] = {
    "integers": lambda build: changed(build, num_scheduled_tokens={"a": 1, "b": 1.0, "c": 1}),
    "total_num_scheduled_tokens": lambda build: changed(build, total_num_scheduled_tokens=4),
    "schedules 0 tokens": lambda build: changed(build, num_scheduled_tokens={"a": 0, "b": 2, "c": 1}),
    "beyond what is known": lambda build: decode(build, 3),
    "num_computed_tokens is -1": lambda build: decode(build, -1),
    "num_computed_tokens must be": lambda build: with_cached(build, num_computed_tokens=[2, 2.5, 2]),
    "num_computed_tokens has 2": lambda build: with_cached(build, num_computed_tokens=[2, 2]),
    "the scheduler counts 4": lambda build: decode(build, 2, outputs=[1, 2, 1]),
    "num_output_tokens has 2": lambda build: decode(build, 2, outputs=[1, 1]),
    "not in the pool": lambda build: decode(build, 2, blocks=[[20], [99], [21]]),
    "block ids must be integers": lambda build: decode(build, 2, blocks=[None, ["x"], None]),
    "new_block_ids has 2": lambda build: decode(build, 2, blocks=[[20], [21]]),
    "given block 20 to write to": lambda build: decode(build, 2, blocks=[[20], None, [20]]),
    "KV-cache groups": lambda build: with_cached(build, new_block_ids=[([20], [21]), None, None]),
    "connector": lambda build: changed(build, kv_connector_metadata=object()),
    "listed twice": lambda build: decode(build, 2, ids=["a", "b", "b"]),
    "is scheduled but unknown": lambda build: decode(build, 2, ids=["a", "b", "ghost"]),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_refused_by_the_full_check(kit: Any, build: Any, message: str) -> None:
    begin(kit, build)
    before = kit.snapshot()
    with pytest.raises(InvalidSchedulerOutput, match=message):
        kit.step(WRONG[message](build))
    assert kit.snapshot() == before


def test_too_few_and_too_many_blocks_are_refused(make_kit: Callable[..., Any], build: Any) -> None:
    kit = make_kit(max_model_len=8)
    begin(kit, build)
    for length in (2, 3):
        kit.step(decode(build, length), dict.fromkeys(IDS, 9))
    with pytest.raises(InvalidSchedulerOutput, match="too few"):
        kit.step(decode(build, 4, blocks=[[20], None, [21]]))
    kit.step(decode(build, 4, blocks=[[20], [21], [22]]), dict.fromkeys(IDS, 9))
    with pytest.raises(InvalidSchedulerOutput, match="more than the 2"):
        kit.step(decode(build, 5, blocks=[[23], None, None]))
    for length in (5, 6, 7):
        kit.step(decode(build, length), dict.fromkeys(IDS, 9))
    with pytest.raises(InvalidSchedulerOutput, match="beyond max_model_len 8"):
        kit.step(decode(build, 8))


def test_a_list_that_the_scheduler_goes_on_to_write_is_not_what_is_remembered(kit: Any, build: Any) -> None:
    begin(kit, build)
    output = decode(build, 2)
    ids = output.scheduled_cached_reqs.req_ids
    kit.step(output, dict.fromkeys(IDS, 9))
    assert isinstance(ids, list)
    ids.reverse()
    cached = CachedRequestData(req_ids=ids, num_computed_tokens=[3, 3, 3])
    batch = kit.step(build.output(dict.fromkeys(ids, 1), cached=cached))
    assert [kit.table.rows[req_id] for req_id in batch.req_ids] == batch.rows.tolist()


def test_nothing_is_remembered_beyond_a_step_that_was_undone(kit: Any, build: Any) -> None:
    begin(kit, build)
    kit.step(decode(build, 2), dict.fromkeys(IDS, 9))
    transaction = Transaction(9)
    late = build.output({"a": 1, "d": 2}, [build.new("d", [1, 2], [9])], build.cached(["a"], [3]))
    kit.update_states(evolve(late, finished_req_ids={"b"}), transaction)
    transaction.rollback()
    batch = kit.step(decode(build, 3), dict.fromkeys(IDS, 9))
    assert batch.rows.tolist() == [kit.table.rows[req_id] for req_id in IDS]
    assert kit.table.num_tokens[batch.rows].tolist() == [5, 5, 5]
    assert not np.isin(batch.rows, kit.table._free_rows).any()


@pytest.mark.parametrize("numbers", [[3.0, 3.0, 3.0], [3, 3, 2**70], [3, 3], [3, 3, 4], None])
def test_a_run_ends_where_other_numbers_are_sent(kit: Any, build: Any, numbers: Any) -> None:
    begin(kit, build)
    first = kit.step(decode(build, 2), dict.fromkeys(IDS, 9))
    assert first.run is not None
    output = decode(build, 3)
    wrong = evolve(output, scheduled_cached_reqs=evolve(output.scheduled_cached_reqs, num_computed_tokens=numbers))
    with pytest.raises((InvalidSchedulerOutput, TypeError)):
        kit.step(wrong)
    second = kit.step(output, dict.fromkeys(IDS, 9))
    assert second.latest_of_run() is not None
    assert second.run is not first.run
    third = kit.step(decode(build, 4, blocks=[[20], [21], [22]], outputs=[3, 3, 3]))
    assert third.run is second.run
    assert second.latest_of_run() is None

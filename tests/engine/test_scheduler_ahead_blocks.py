"""Blocks when steps are in flight: who waits, who gives way, and what undoing a step brings back."""

from __future__ import annotations

import pytest
from attrs import evolve
from doubting_runner import LateLoop, solo
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.stages.io import SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32, num_kv_blocks=5, block_sizes=(4,))


def late_loop(**changes: object) -> LateLoop:
    return LateLoop(evolve(CONFIG, **changes))  # pyright: ignore[reportArgumentType]


def counts(output: SchedulerOutput) -> dict[str, int]:
    return dict(output.num_scheduled_tokens)


def two_that_do_not_fit(**changes: object) -> LateLoop:
    """``a`` and ``b`` hold both 2 of the 4 blocks, full, and both want another one."""
    loop = late_loop(**changes)
    loop.add("a", range(8), max_tokens=4)
    loop.add("b", range(1, 9), max_tokens=4)
    loop.launch()
    return loop


def test_a_request_in_flight_is_not_preempted_but_gives_way_once_it_has_landed():
    loop = two_that_do_not_fit()
    for _ in range(2):  # asking again does not help, and does no harm
        assert not loop.launch().num_scheduled_tokens
    assert loop.scheduler.stats().num_preemptions == 0
    loop.land()
    output = loop.launch()
    assert (counts(output), output.preempted_req_ids) == ({"a": 1}, {"b"})
    loop.run(2)
    for req_id, prompt in (("a", range(8)), ("b", range(1, 9))):
        assert loop.outputs[req_id] == solo(prompt, SamplingParams(max_tokens=4), 32)[0]


def test_only_those_without_a_block_and_the_latest_wait():
    loop = late_loop(num_kv_blocks=7)
    loop.add("full", range(8))
    loop.add("room", range(5))
    loop.add("latest", range(6))
    loop.launch()
    assert counts(loop.launch()) == {"room": 1}
    loop.land()
    output = loop.launch()
    assert (counts(output), output.preempted_req_ids) == ({"full": 1, "room": 1}, {"latest"})


def test_blocks_of_a_request_that_leaves_are_waited_for():
    loop = late_loop(num_kv_blocks=7)
    (stop,), _ = solo([7, 8], SamplingParams(max_tokens=1), 32)
    loop.add("full", range(8))
    loop.add("leaves", [7, 8], stop_token_ids=(stop,))
    loop.add("room", range(9))
    loop.launch()
    loop.launch()
    loop.land()
    assert counts(loop.launch()) == {"room": 1}
    loop.land()
    assert counts(loop.launch()) == {"full": 1, "room": 1}
    assert loop.scheduler.stats().num_preemptions == 0


def test_nobody_behind_a_request_that_waits_gets_blocks():
    loop = late_loop(num_kv_blocks=7, long_prefill_token_threshold=8)
    loop.add("needs_two", range(16))
    loop.add("needs_one", range(8))
    loop.add("latest", range(3))
    loop.launch()
    loop.add("new", [1], max_tokens=1)
    assert loop.num_held_blocks == 5
    assert not loop.launch().num_scheduled_tokens
    assert loop.num_held_blocks == 5
    loop.land()
    output = loop.launch()
    assert (counts(output), output.preempted_req_ids) == ({"needs_two": 8}, {"latest", "needs_one"})


@pytest.mark.parametrize("landed", [False, True])
def test_rollback_is_exact_while_earlier_steps_are_in_flight(landed: bool):
    loop = late_loop(num_kv_blocks=17, long_prefill_token_threshold=6)
    loop.add("a", range(7))
    loop.add("b", range(11))
    loop.launch()
    loop.launch()
    before = loop.scheduler.stats()
    loop.add("c", [5, 6])
    third = loop.scheduler.schedule()
    fourth = loop.scheduler.schedule()
    if landed:
        loop.land()
    loop.scheduler.rollback(fourth)
    loop.scheduler.rollback(third)
    assert evolve(loop.scheduler.stats(), num_waiting=0) == before
    assert loop.launch() == third
    assert loop.launch() == fourth
    loop.run(3)
    for req_id, prompt in (("a", range(7)), ("b", range(11)), ("c", [5, 6])):
        assert loop.outputs[req_id] == solo(prompt, SamplingParams(max_tokens=8), 32)[0]


def test_rollback_of_a_step_with_a_request_that_ended_meanwhile_frees_its_blocks():
    loop = late_loop(num_kv_blocks=17)
    (stop,), _ = solo([7, 8, 9, 1], SamplingParams(max_tokens=1), 32)
    loop.add("a", [7, 8, 9, 1], stop_token_ids=(stop,))
    loop.launch()
    output = loop.scheduler.schedule()
    loop.land()
    assert loop.num_held_blocks == 2
    loop.scheduler.rollback(output)
    assert loop.num_held_blocks == 0
    assert loop.launch().finished_req_ids == {"a"}


def executed_and_undone(loop: LateLoop) -> SchedulerOutput:
    """A step whose forward pass ran before it failed; the runner takes back all but what it wrote to the cache."""
    before = loop.runner.snapshot()
    output = loop.scheduler.schedule()
    loop.runner.execute(output)
    loop.runner.rows, loop.runner.preempted = before
    loop.scheduler.rollback(output, executed=True)
    return output


def test_a_prefix_that_a_failed_step_wrote_over_is_not_found_any_more():
    loop = late_loop()
    loop.add("cached", range(12), max_tokens=1)
    loop.run(1)
    loop.add("writes", range(5, 13), max_tokens=1)
    executed_and_undone(loop)
    loop.scheduler.finish_requests(["writes"])
    loop.add("again", range(13), max_tokens=2)
    assert loop.launch().scheduled_new_reqs[0].num_computed_tokens == 8  # the third block was written over
    loop.run(1)
    assert loop.outputs["again"] == solo(range(13), SamplingParams(max_tokens=2), 32)[0]


@pytest.mark.parametrize("aborted", [False, True])
def test_who_gave_its_blocks_to_a_failed_step_stays_preempted(aborted: bool):
    loop = two_that_do_not_fit()
    loop.land()
    assert executed_and_undone(loop).preempted_req_ids == {"b"}
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 1)
    if aborted:
        loop.scheduler.finish_requests(["b"])
    undone = loop.scheduler.schedule()
    loop.scheduler.rollback(undone)
    output = loop.launch()
    assert output.preempted_req_ids == (set() if aborted else {"b"})
    assert output.finished_req_ids == ({"b"} if aborted else set())
    assert not loop.launch().preempted_req_ids
    loop.run(2)
    assert loop.outputs["a"] == solo(range(8), SamplingParams(max_tokens=4), 32)[0]
    if not aborted:
        assert loop.outputs["b"] == solo(range(1, 9), SamplingParams(max_tokens=4), 32)[0]

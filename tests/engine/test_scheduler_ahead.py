"""Scheduling ahead: the next step is made while the tokens of earlier ones are not known yet."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import evolve
from doubting_runner import LateLoop, solo
from twostroke.engine.scheduler import FinishReason, RunnerOutputMismatch, SchedulerConfig
from twostroke.fsm.errors import StepStateError
from twostroke.stages.errors import RequestFailed
from twostroke.stages.io import ModelRunnerOutput, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32, num_kv_blocks=33, block_sizes=(4,)
)


def late_loop(**changes: object) -> LateLoop:
    return LateLoop(evolve(CONFIG, **changes))  # pyright: ignore[reportArgumentType]


def stopping_at(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """A stop token that ends this prompt's output after ``count`` tokens."""
    outputs, _ = solo(prompt, SamplingParams(max_tokens=count), CONFIG.max_model_len)
    assert outputs[-1] not in outputs[:-1]
    return (outputs[-1],)


def counts(output: SchedulerOutput) -> dict[str, int]:
    return dict(output.num_scheduled_tokens)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("num_kv_blocks", [33, 9])
def test_every_depth_gives_the_same_tokens(depth: int, num_kv_blocks: int):
    loop = late_loop(max_num_batched_tokens=10, num_kv_blocks=num_kv_blocks)
    prompts = {f"r{index}": [(index * 7 + position * 3) % 11 for position in range(5 + index)] for index in range(7)}
    for req_id, prompt in prompts.items():
        loop.add(req_id, prompt, max_tokens=12, stop_token_ids=(0, 5))
    loop.run(depth)
    params = SamplingParams(max_tokens=12, stop_token_ids=(0, 5))
    assert loop.outputs == {req_id: solo(prompt, params, 32)[0] for req_id, prompt in prompts.items()}
    assert (loop.scheduler.stats().num_preemptions > 0) == (num_kv_blocks == 9)


def test_a_token_in_flight_counts_as_known():
    loop = late_loop()
    loop.add("a", range(6))
    loop.launch()
    for ahead in (1, 2, 3):
        output = loop.launch()
        cached = output.scheduled_cached_reqs
        assert counts(output) == {"a": 1}
        assert (cached.num_computed_tokens, cached.num_output_tokens) == ([5 + ahead], [ahead])
        assert (cached.new_token_ids, dict(cached.all_token_ids)) == ((), {})
    assert loop.scheduler.num_in_flight == 4


def test_the_next_chunk_of_a_prompt_follows_at_once():
    loop = late_loop(long_prefill_token_threshold=4)
    loop.add("a", range(10), max_tokens=2)
    steps = [loop.launch() for _ in range(5)]
    assert [counts(step).get("a", 0) for step in steps] == [4, 4, 2, 1, 0]
    assert [step.scheduled_cached_reqs.num_output_tokens for step in steps[1:4]] == [[0], [0], [1]]
    assert [list(loop.land()) for _ in range(4)] == [[], [], ["a"], ["a"]]


def test_A2_after_a_drain_no_token_is_dropped():
    loop = late_loop()
    prompt = [1, 2, 3, 4, 5]
    loop.add("a", prompt, max_tokens=6)
    for _ in range(2):
        loop.launch()
        loop.launch()
        loop.land()
        loop.land()
        assert loop.scheduler.num_in_flight == 0
    loop.launch()
    assert len(loop.land()["a"].new_token_ids) == 1
    loop.run(2)
    assert loop.outputs["a"] == solo(prompt, SamplingParams(max_tokens=6), 32)[0]


@pytest.mark.parametrize("limits", [{"max_tokens": 3}, {"max_model_len": 9, "max_tokens": 20}])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_A7_no_step_too_many(limits: dict[str, int], depth: int):
    loop = late_loop(max_model_len=limits.get("max_model_len", 32))
    loop.add("a", range(6), max_tokens=limits["max_tokens"])
    launched = loop.run(depth)
    assert [counts(output)["a"] for output in launched if output.num_scheduled_tokens] == [6, 1, 1]
    assert len(loop.outputs["a"]) == 3


def test_A8_late_outputs_are_matched_by_request_in_whatever_order_they_come():
    loop = late_loop()
    loop.add("a", [1, 2, 3])
    loop.add("b", [4, 5])
    output, later = loop.launch(), loop.launch()
    for step in (output, later):
        result = ModelRunnerOutput(req_ids=["b", "a"], req_id_to_index={"b": 0, "a": 1}, sampled_token_ids=[[7], [8]])
        updates = loop.scheduler.update_from_output(step, result)
        assert {update.req_id: list(update.new_token_ids) for update in updates} == {"a": [8], "b": [7]}


def test_a_stop_drops_what_later_steps_bring_and_frees_the_blocks_with_the_last_of_them():
    loop = late_loop()
    loop.add("a", range(6), stop_token_ids=stopping_at(range(6), 1))
    loop.add("b", [9, 9, 9], max_tokens=20)
    loop.launch()
    loop.launch()
    loop.launch()
    update = loop.land()["a"]
    assert (len(update.new_token_ids), update.finish_reason) == (1, FinishReason.STOP)
    output = loop.launch()
    assert (output.finished_req_ids, counts(output)) == ({"a"}, {"b": 1})
    assert loop.num_held_blocks == 2 + 2
    assert list(loop.land()) == ["b"]
    assert loop.num_held_blocks == 2 + 2
    assert list(loop.land()) == ["b"]
    assert loop.num_held_blocks == 2
    assert loop.launch().finished_req_ids == set()


def test_U8_requests_that_were_aborted_in_flight_are_passed_over_and_freed_once():
    loop = late_loop()
    loop.add("a", range(5))
    loop.add("b", range(5, 10))
    loop.launch()
    loop.launch()
    assert loop.scheduler.finish_requests(["a", "nobody", "a", "nobody"]) == ["a"]
    assert list(loop.land()) == ["b"]
    assert loop.num_held_blocks == 4
    assert list(loop.land()) == ["b"]
    assert loop.num_held_blocks == 2
    assert loop.scheduler.finish_requests(["a"]) == []
    assert loop.launch().finished_req_ids == {"a"}


def test_L1_an_id_is_used_again_while_steps_of_its_first_request_are_in_flight():
    loop = late_loop()
    loop.add("x", [1, 2, 3])
    loop.launch()
    loop.launch()
    loop.scheduler.finish_requests(["x"])
    loop.add("x", [4, 5, 6, 7], max_tokens=3)
    output = loop.launch()
    assert output.finished_req_ids == {"x"}
    assert [(new.req_id, new.prompt_token_ids) for new in output.scheduled_new_reqs] == [("x", (4, 5, 6, 7))]
    assert loop.land() == loop.land() == {}
    loop.run(2)
    assert loop.outputs["x"] == solo([4, 5, 6, 7], SamplingParams(max_tokens=3), 32)[0]


def test_an_error_is_reported_once_and_nothing_of_it_is_shared():
    loop = late_loop()
    loop.add("a", range(8))
    loop.add("b", [1, 2])
    loop.launch()
    loop.launch()
    error = RequestFailed("a", "its logits are not numbers")
    assert loop.land(a=error)["a"].error is error
    assert list(loop.land(a=error)) == ["b"]
    assert loop.num_held_blocks == 1
    loop.add("c", range(8))
    output = loop.launch()
    assert (output.finished_req_ids, output.scheduled_new_reqs[0].num_computed_tokens) == ({"a"}, 0)


def test_a_request_that_was_dropped_from_its_step_needs_an_error_but_no_entry():
    loop = late_loop()
    loop.add("a", [1, 2])
    loop.add("b", [3])
    output = loop.launch()
    only_b = ModelRunnerOutput(req_ids=["b"], req_id_to_index={"b": 0}, sampled_token_ids=[[7]])
    with pytest.raises(RunnerOutputMismatch, match="scheduled request 'a'"):
        loop.scheduler.update_from_output(output, only_b)
    error = RequestFailed("a", "a stage raised")
    updates = loop.scheduler.update_from_output(output, evolve(only_b, request_errors={"a": error}))
    assert {update.req_id: update.error for update in updates} == {"a": error, "b": None}


def test_several_tokens_where_the_next_step_counts_on_one_fail_the_request():
    loop = late_loop()
    loop.add("a", [1, 2])
    output = loop.launch()
    loop.launch()
    several = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[3, 4]])
    (update,) = loop.scheduler.update_from_output(output, several)
    assert update.finish_reason is FinishReason.ERROR
    assert "2 tokens were sampled" in str(update.error)


def test_a_prefix_is_shared_only_after_the_step_that_filled_it_was_updated():
    loop = late_loop()
    loop.add("a", range(9))
    loop.launch()
    loop.add("b", range(9))
    assert loop.launch().scheduled_new_reqs[0].num_computed_tokens == 0
    loop.land()
    loop.add("c", range(9))
    assert loop.launch().scheduled_new_reqs[0].num_computed_tokens == 8


def test_K2_the_common_prefix_is_not_counted_from_requests_that_are_leaving():
    loop = late_loop()
    loop.add("a", range(9), stop_token_ids=stopping_at(range(9), 2))
    loop.launch()
    loop.land()
    loop.add("b", range(9))
    loop.add("c", [5, 5, 5])
    loop.launch()
    loop.launch()
    assert loop.land()["a"].finish_reason is FinishReason.STOP
    assert loop.scheduler.num_running == 2
    assert loop.launch().num_common_prefix_blocks == [0]  # two hold the first block, but not b and c


def test_steps_are_updated_in_order_and_rolled_back_in_reverse():
    loop = late_loop()
    loop.add("a", [1, 2])
    first, second = loop.launch(), loop.launch()
    with pytest.raises(StepStateError, match="its turn has not come"):
        loop.scheduler.update_from_output(second, loop.flights[1][1])
    with pytest.raises(StepStateError, match="its turn has not come"):
        loop.scheduler.rollback(first)
    with pytest.raises(StepStateError, match="with 2 steps in flight"):
        loop.scheduler.reset_prefix_cache()
    loop.scheduler.rollback(second)
    with pytest.raises(StepStateError, match="not the output of a step in flight"):
        loop.scheduler.rollback(second)
    loop.scheduler.rollback(first)
    assert (loop.scheduler.num_in_flight, loop.scheduler.num_waiting) == (0, 1)


def test_a_step_without_tokens_says_that_everyone_waits_for_a_step_in_flight():
    loop = late_loop()
    loop.add("a", [1, 2], max_tokens=1)
    loop.launch()
    output = loop.scheduler.schedule()
    assert (output.num_scheduled_tokens, output.finished_req_ids, output.preempted_req_ids) == ({}, set(), set())
    assert (loop.scheduler.num_in_flight, loop.scheduler.has_unfinished_requests()) == (1, True)
    loop.scheduler.rollback(output)  # neither is needed, neither does anything
    assert loop.scheduler.update_from_output(output, ModelRunnerOutput()) == []
    assert loop.land()["a"].finish_reason is FinishReason.LENGTH


def test_there_is_work_until_the_last_step_is_settled_and_the_runner_knows_who_ended():
    loop = late_loop()
    loop.add("a", range(6), stop_token_ids=stopping_at(range(6), 1))
    loop.launch()
    loop.launch()
    loop.land()
    assert not loop.scheduler.has_unfinished_requests()
    output = loop.launch()
    assert (output.finished_req_ids, output.total_num_scheduled_tokens) == ({"a"}, 0)
    assert loop.scheduler.has_work()
    assert loop.land() == {}
    assert not loop.scheduler.has_work()

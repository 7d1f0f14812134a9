"""Blocks as the scheduler deals with them: shared prefixes, preemption, failed allocation, undone steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import evolve
from twostroke.engine.block_pool import BlockPool
from twostroke.engine.scheduler import RequestUpdate, Scheduler, SchedulerConfig
from twostroke.fsm.errors import StepStateError
from twostroke.stages.io import ModelRunnerOutput, NewRequestData, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32, num_kv_blocks=17, block_sizes=(4,)
)
TOKEN = 90


def scheduler(**changes: object) -> Scheduler:
    return Scheduler(evolve(CONFIG, **changes))  # pyright: ignore[reportArgumentType]


def settle(subject: Scheduler, output: SchedulerOutput) -> list[RequestUpdate]:
    """Every scheduled request samples the same token."""
    ids = list(output.num_scheduled_tokens)
    index = {req_id: position for position, req_id in enumerate(ids)}
    result = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=[[TOKEN] for _ in ids])
    return subject.update_from_output(output, result)


def step(subject: Scheduler) -> SchedulerOutput:
    output = subject.schedule()
    settle(subject, output)
    return output


def run_alone(subject: Scheduler, prompt: Sequence[int], max_tokens: int = 1, **more: str) -> NewRequestData:
    """Serve one request to its end; how it was first scheduled."""
    subject.add_request("alone", prompt, SamplingParams(max_tokens=max_tokens), **more)
    first = subject.schedule()
    settle(subject, first)
    while subject.has_work():
        step(subject)
    return first.scheduled_new_reqs[0]


@pytest.mark.parametrize(
    ("prompt_len", "cached"), [(8, 4), (9, 8), (7, 4), (4, 0)], ids=["P3_full", "full_and_one", "partial", "one_block"]
)
def test_P3_a_cached_prompt_recomputes_at_least_its_last_token(prompt_len: int, cached: int):
    subject = scheduler()
    first = run_alone(subject, range(prompt_len))
    subject.add_request("again", range(prompt_len), SamplingParams())
    output = subject.schedule()
    (again,) = output.scheduled_new_reqs
    assert again.num_computed_tokens == cached
    assert again.block_ids[0][: cached // 4] == first.block_ids[0][: cached // 4]
    assert output.num_scheduled_tokens["again"] == prompt_len - cached >= 1
    (update,) = settle(subject, output)
    assert update.num_cached_tokens == cached
    stats = subject.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (2 * prompt_len, cached)


def test_generated_tokens_can_be_a_prefix_too():
    subject = scheduler()
    run_alone(subject, range(6), max_tokens=4)  # the last of the four is never computed
    assert run_alone(subject, [*range(6), TOKEN, TOKEN, TOKEN, TOKEN]).num_computed_tokens == 8


def test_nothing_is_shared_before_its_step_has_succeeded():
    subject = scheduler()
    subject.add_request("a", range(9), SamplingParams())
    subject.add_request("b", range(9), SamplingParams())
    output = subject.schedule()
    a, b = output.scheduled_new_reqs
    assert b.num_computed_tokens == 0
    assert not set(a.block_ids[0]) & set(b.block_ids[0])
    settle(subject, output)
    subject.add_request("c", range(9), SamplingParams())
    (c,) = subject.schedule().scheduled_new_reqs
    assert c.block_ids[0][:2] == a.block_ids[0][:2]


def test_prefixes_are_shared_only_within_a_salt_and_only_where_enabled():
    subject = scheduler()
    run_alone(subject, range(9), cache_salt="adapter")
    assert run_alone(subject, range(9)).num_computed_tokens == 0
    assert run_alone(subject, range(9), cache_salt="adapter").num_computed_tokens == 8
    plain = scheduler(enable_prefix_caching=False)
    run_alone(plain, range(9))
    assert run_alone(plain, range(9)).num_computed_tokens == 0
    assert plain.stats().prefix_cache_queries == 0


def test_S8_a_request_for_prompt_logprobs_computes_every_position():
    subject = scheduler()
    run_alone(subject, range(9))
    subject.add_request("a", range(9), SamplingParams(prompt_logprobs=1))
    assert subject.schedule().scheduled_new_reqs[0].num_computed_tokens == 0


def test_the_least_recently_used_prefix_is_evicted_and_its_tail_goes_first():
    subject = scheduler(num_kv_blocks=7)
    run_alone(subject, range(9))  # two blocks stay cached
    run_alone(subject, range(100, 109))  # two more
    run_alone(subject, range(9))  # used again
    run_alone(subject, range(200, 212))  # three blocks: the two free ones and the tail of the older prefix
    assert run_alone(subject, range(9)).num_computed_tokens == 8
    subject = scheduler(num_kv_blocks=7)
    run_alone(subject, range(100, 109))
    run_alone(subject, range(9))
    run_alone(subject, range(200, 212))
    assert run_alone(subject, range(100, 109)).num_computed_tokens == 4


def test_several_groups_share_where_all_of_them_have_a_block_border():
    subject = scheduler(block_sizes=(2, 4), num_kv_blocks=30)
    first = run_alone(subject, range(11))
    assert [len(ids) for ids in first.block_ids] == [6, 3]
    assert len({block for ids in first.block_ids for block in ids}) == 9
    again = run_alone(subject, range(11))
    assert again.num_computed_tokens == 8
    assert [list(ids[:count]) for ids, count in zip(again.block_ids, (4, 2), strict=True)] == [
        list(ids[:count]) for ids, count in zip(first.block_ids, (4, 2), strict=True)
    ]


def test_a_hit_in_one_group_alone_is_no_hit():
    subject = scheduler(block_sizes=(3, 2), num_kv_blocks=30)
    run_alone(subject, range(5))  # fills one block of three tokens and two of two
    assert run_alone(subject, range(8)).num_computed_tokens == 0
    assert run_alone(subject, range(8)).num_computed_tokens == 6


def test_K2_common_prefix_counts_computed_blocks_that_every_running_request_shares():
    subject = scheduler()
    subject.add_request("a", range(9), SamplingParams())
    assert step(subject).num_common_prefix_blocks == [0]
    subject.add_request("b", range(9), SamplingParams())
    assert step(subject).num_common_prefix_blocks == [2]
    subject.add_request("c", [*range(5), 50, 51, 52, 53], SamplingParams())
    assert step(subject).num_common_prefix_blocks == [1]
    subject.add_request("d", [60, 61], SamplingParams())
    assert step(subject).num_common_prefix_blocks == [0]


def two_that_do_not_fit(**changes: object) -> Scheduler:
    """``a`` and ``b`` hold both 2 of the 4 blocks, full, and both want another one."""
    subject = scheduler(num_kv_blocks=5, **changes)
    subject.add_request("a", range(8), SamplingParams(max_tokens=4))
    subject.add_request("b", range(10, 18), SamplingParams(max_tokens=4))
    step(subject)
    return subject


def test_the_latest_request_gives_way_and_comes_back_with_all_its_tokens():
    subject = two_that_do_not_fit(enable_prefix_caching=False)
    subject.add_request("late", [1], SamplingParams(max_tokens=1))
    output = step(subject)
    assert dict(output.num_scheduled_tokens) == {"a": 1}
    assert output.preempted_req_ids == {"b"}
    assert subject.stats().num_preemptions == 1
    while "a" not in (output := step(subject)).finished_req_ids:
        assert not output.scheduled_new_reqs  # whoever was preempted is first in the queue
    cached = output.scheduled_cached_reqs
    assert cached.req_ids == ["b"]
    assert cached.resumed_req_ids == {"b"}
    assert cached.all_token_ids == {"b": [*range(10, 18), TOKEN]}
    assert (cached.num_computed_tokens, cached.num_output_tokens) == ([0], [1])
    assert [len(ids) for ids in cached.new_block_ids[0] or ()] == [3]
    assert output.num_scheduled_tokens["b"] == 9
    assert [new.req_id for new in output.scheduled_new_reqs] == ["late"]


def test_a_resumed_request_finds_what_is_left_of_its_own_blocks():
    subject = two_that_do_not_fit()
    while not (output := step(subject)).scheduled_cached_reqs.resumed_req_ids:
        pass
    assert output.scheduled_cached_reqs.num_computed_tokens == [4]  # its tail was evicted for the other request
    assert output.num_scheduled_tokens == {"b": 5}


def test_a_preempted_request_can_be_aborted():
    subject = two_that_do_not_fit()
    step(subject)
    assert subject.finish_requests(["b"]) == ["b"]
    output = step(subject)
    assert (output.finished_req_ids, subject.num_waiting) == ({"b"}, 0)


def test_a_prompt_is_admitted_only_where_all_of_it_finds_room():
    subject = scheduler(num_kv_blocks=6, max_num_batched_tokens=12)
    subject.add_request("a", range(8), SamplingParams(max_tokens=4))
    subject.add_request("b", range(20, 36), SamplingParams(max_tokens=1))
    assert list(step(subject).num_scheduled_tokens) == ["a"]  # b's first chunk would fit, the rest not
    while subject.has_work():
        step(subject)
    assert subject.stats().num_preemptions == 0


@pytest.mark.parametrize("running", [False, True])
def test_L8_an_allocation_that_fails_once_parks_the_request(monkeypatch: pytest.MonkeyPatch, running: bool):
    subject = scheduler()
    subject.add_request("a", range(8), SamplingParams(max_tokens=3))
    if running:
        step(subject)
    monkeypatch.setattr(BlockPool, "allocate", lambda *_: None)
    output = step(subject)
    assert output.total_num_scheduled_tokens == 0
    assert (subject.num_running, subject.num_waiting) == (0, 1)
    monkeypatch.undo()
    assert step(subject).num_scheduled_tokens == {"a": 1 if running else 8}  # its full blocks were published


def test_an_interrupt_while_scheduling_leaves_no_half_step(monkeypatch: pytest.MonkeyPatch):
    subject = scheduler()
    subject.add_request("a", range(8), SamplingParams())
    subject.add_request("gone", [1], SamplingParams())
    subject.finish_requests(["gone"])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockPool, "allocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        subject.schedule()
    monkeypatch.undo()
    output = subject.schedule()
    assert (output.num_scheduled_tokens, output.finished_req_ids) == ({"a": 8}, {"gone"})


def test_rollback_restores_a_preemption_exactly():
    subject = two_that_do_not_fit()
    before = subject.stats()
    output = subject.schedule()
    assert output.preempted_req_ids == {"b"}
    subject.rollback(output)
    assert subject.stats() == before
    assert subject.schedule() == output


def test_rollback_brings_back_prefixes_that_the_step_evicted():
    subject = scheduler(num_kv_blocks=5)
    run_alone(subject, range(12))
    subject.add_request("big", range(100, 116), SamplingParams(max_tokens=1))
    output = subject.schedule()
    subject.rollback(output)
    subject.finish_requests(["big"])
    assert run_alone(subject, range(13)).num_computed_tokens == 12


def test_rollback_keeps_what_was_added_and_aborted_meanwhile():
    subject = two_that_do_not_fit()
    output = subject.schedule()  # preempts b
    subject.add_request("c", [1], SamplingParams())
    subject.finish_requests(["a", "b"])
    subject.add_request("b", [2], SamplingParams())
    subject.rollback(output)
    assert subject.stats().kv_cache_usage == 0.0
    output = subject.schedule()
    assert output.finished_req_ids == {"a", "b"}
    assert [new.req_id for new in output.scheduled_new_reqs] == ["c", "b"]


def test_finished_ids_of_an_undone_step_are_sent_again():
    subject = scheduler()
    run_alone(subject, [1])
    subject.add_request("a", [1], SamplingParams())
    subject.finish_requests(["a"])
    output = subject.schedule()
    subject.rollback(output)
    assert subject.has_work()
    assert subject.schedule().finished_req_ids == {"a"}


def test_F3_a_reset_cache_gives_no_hits_and_is_refused_while_requests_run():
    subject = scheduler()
    run_alone(subject, range(9))
    subject.reset_prefix_cache()
    subject.add_request("a", range(9), SamplingParams())
    output = subject.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0
    settle(subject, output)
    with pytest.raises(StepStateError, match="1 requests running"):
        subject.reset_prefix_cache()

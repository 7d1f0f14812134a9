"""What a pausing loop asks of the scheduler: to admit nobody new, and to start everyone over from their tokens."""

from __future__ import annotations

from typing import Any

import pytest
from twostroke.engine.scheduler import Scheduler, SchedulerConfig
from twostroke.fsm import StepStateError
from twostroke.stages.io import ModelRunnerOutput, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams


def make(**limits: Any) -> Scheduler:
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 32,
        "num_kv_blocks": 20,
        "block_sizes": (4,),
    }
    return Scheduler(SchedulerConfig(**defaults | limits))


def settle(scheduler: Scheduler, scheduled: SchedulerOutput) -> None:
    """Every request of the step samples token 7."""
    req_ids = list(scheduled.num_scheduled_tokens)
    scheduler.update_from_output(
        scheduled,
        ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[[7]] * len(req_ids),
        ),
    )


def test_without_admit_new_only_those_go_on_that_have_begun() -> None:
    scheduler = make()
    scheduler.add_request("old", [1, 2, 3], SamplingParams(max_tokens=4))
    settle(scheduler, scheduler.schedule())
    scheduler.add_request("new", [1, 2, 3], SamplingParams(max_tokens=4))
    for _ in range(3):
        scheduled = scheduler.schedule(admit_new=False)
        assert scheduled.num_scheduled_tokens == {"old": 1}
        settle(scheduler, scheduled)
    assert scheduler.schedule(admit_new=False).finished_req_ids == {"old"}
    blank = scheduler.schedule(admit_new=False)
    assert not blank.num_scheduled_tokens
    assert not blank.finished_req_ids
    assert scheduler.schedule().num_scheduled_tokens == {"new": 3}


def test_everyone_starts_over_from_their_tokens_and_nothing_cached() -> None:
    scheduler = make()
    for req_id in ("a", "b"):
        scheduler.add_request(req_id, [1, 2, 3, 4, 5], SamplingParams(max_tokens=4))
    settle(scheduler, scheduler.schedule())
    scheduler.reset_prefix_cache(preempt_running=True)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    assert scheduler.stats().kv_cache_usage == 0
    scheduled = scheduler.schedule(admit_new=False)
    assert scheduled.preempted_req_ids == {"a", "b"}
    cached = scheduled.scheduled_cached_reqs
    assert list(cached.req_ids) == ["a", "b"]
    assert cached.resumed_req_ids == {"a", "b"}
    assert cached.all_token_ids == {"a": [1, 2, 3, 4, 5, 7], "b": [1, 2, 3, 4, 5, 7]}
    assert list(cached.num_computed_tokens) == [0, 0]
    assert scheduled.num_scheduled_tokens == {"a": 6, "b": 6}


def test_nobody_starts_over_with_a_step_in_flight() -> None:
    scheduler = make()
    scheduler.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    scheduled = scheduler.schedule()
    with pytest.raises(StepStateError, match="in flight"):
        scheduler.reset_prefix_cache(preempt_running=True)
    settle(scheduler, scheduled)
    scheduler.reset_prefix_cache(preempt_running=True)
    scheduler.finish_requests(["a"])
    scheduled = scheduler.schedule()
    assert scheduled.finished_req_ids == {"a"}
    assert not scheduled.preempted_req_ids

"""The scheduler's contract: what it refuses, what its outputs say, how requests end, and the order of calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from attrs import evolve
from twostroke.engine.scheduler import (
    FinishReason,
    InvalidSchedulerConfig,
    RequestRefused,
    RequestUpdate,
    RunnerOutputMismatch,
    Scheduler,
    SchedulerConfig,
)
from twostroke.fsm.errors import InputRefused, StepStateError
from twostroke.stages.errors import RequestFailed
from twostroke.stages.io import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=16, num_kv_blocks=33, block_sizes=(4,)
)


def scheduler(**changes: object) -> Scheduler:
    return Scheduler(evolve(CONFIG, **changes))  # pyright: ignore[reportArgumentType]


def ran(output: SchedulerOutput, sampled: Mapping[str, Sequence[int]], **more: object) -> ModelRunnerOutput:
    """A runner's output: what each scheduled request sampled, nothing where it is left out."""
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
        sampled_token_ids=[sampled.get(req_id, []) for req_id in ids],
        **more,  # pyright: ignore[reportArgumentType]
    )


def step(subject: Scheduler, **sampled: Sequence[int]) -> list[RequestUpdate]:
    output = subject.schedule()
    return subject.update_from_output(output, ran(output, sampled))


def outputs_until_the_end(subject: Scheduler, tokens: Sequence[int]) -> tuple[list[int], RequestUpdate]:
    """Feed tokens to the request ``a``, one a step; what it kept, and its last update."""
    kept: list[int] = []
    for token in tokens:
        (update,) = step(subject, a=[token])
        kept.extend(update.new_token_ids)
        if update.finish_reason is not None:
            return kept, update
    raise AssertionError("the request did not end")


def test_importing_the_scheduler_needs_no_torch():
    code = "import sys, twostroke.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"block_sizes": ()}, "block_sizes"),
        ({"block_sizes": (4, 0)}, "block_sizes"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 8.0}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"num_kv_blocks": 1}, "num_kv_blocks"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"long_prefill_token_threshold": 33}, "long_prefill_token_threshold"),
    ],
)
def test_P8_limits_that_cannot_work_are_refused_at_the_start(changes: dict[str, object], setting: str):
    with pytest.raises(InvalidSchedulerConfig, match=f"^{setting}: ") as caught:
        scheduler(**changes)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ([], SamplingParams(), "empty prompt"),
        ([1], SamplingParams(n=2), "asks for n=2 outputs; add one request for each"),
        (range(16), SamplingParams(), "no room for an output within max_model_len 16; shorten it to at most 15"),
        (range(17), SamplingParams(), "no room for an output"),
        (range(9), SamplingParams(max_tokens=5), "need 4 KV blocks, and the pool has 3; .*lower max_tokens"),
        (range(3), SamplingParams(max_tokens=None), "up to 13 outputs need 4 KV blocks"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_when_added(
    prompt: Sequence[int], params: SamplingParams, reason: str
):
    subject = scheduler(num_kv_blocks=4)
    with pytest.raises(RequestRefused, match=f"request 'a': .*{reason}") as caught:
        subject.add_request("a", prompt, params)
    assert caught.value.req_id == "a"
    assert not subject.has_work()


def test_the_largest_request_that_fits_is_served():
    subject = scheduler(num_kv_blocks=4)
    subject.add_request("a", range(9), SamplingParams(max_tokens=4))
    kept, last = outputs_until_the_end(subject, [50, 51, 52, 53])
    assert (kept, last.finish_reason) == ([50, 51, 52, 53], FinishReason.LENGTH)


def test_L1_a_second_live_request_of_one_id_is_refused_and_the_first_goes_on():
    subject = scheduler()
    subject.add_request("x", [1, 2], SamplingParams())
    with pytest.raises(RequestRefused, match="request 'x': is live already; abort it"):
        subject.add_request("x", [3], SamplingParams())
    assert list(subject.schedule().num_scheduled_tokens.items()) == [("x", 2)]


@pytest.mark.parametrize("in_flight", [False, True])
def test_L1_an_aborted_id_is_reused_in_the_same_step(in_flight: bool):
    subject = scheduler()
    subject.add_request("x", [1, 2], SamplingParams())
    step(subject, x=[9])
    flying = subject.schedule() if in_flight else None
    assert subject.finish_requests(["x"]) == ["x"]
    subject.add_request("x", [3, 4, 5], SamplingParams(max_tokens=1))
    if flying is not None:
        assert subject.update_from_output(flying, ran(flying, {"x": [7]})) == []
    output = subject.schedule()
    assert output.finished_req_ids == {"x"}
    assert [(new.req_id, new.prompt_token_ids) for new in output.scheduled_new_reqs] == [("x", (3, 4, 5))]
    assert not output.scheduled_cached_reqs.req_ids
    (update,) = subject.update_from_output(output, ran(output, {"x": [8]}))
    assert (update.new_token_ids, update.finish_reason) == ([8], FinishReason.LENGTH)


def test_L6_a_step_without_tokens_carries_the_last_finished_ids():
    subject = scheduler()
    subject.add_request("a", [1], SamplingParams(max_tokens=1))
    step(subject, a=[5])
    assert not subject.has_unfinished_requests()
    assert subject.has_work()
    output = subject.schedule()
    assert (output.total_num_scheduled_tokens, output.finished_req_ids) == (0, {"a"})
    assert not subject.has_work()
    assert subject.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT) == []


def test_a_step_without_tokens_need_not_be_settled():
    subject = scheduler()
    assert subject.schedule().total_num_scheduled_tokens == 0
    subject.add_request("a", [1], SamplingParams())
    assert subject.schedule().total_num_scheduled_tokens == 1


def test_L9_cancelling_what_is_not_there_leaves_nothing_behind():
    subject = scheduler()
    subject.add_request("a", [1], SamplingParams(max_tokens=1))
    step(subject, a=[5])
    subject.schedule()
    assert subject.finish_requests(f"gone-{index}" for index in range(1000)) == []
    assert subject.finish_requests(["a", "a"]) == []
    assert not subject.has_work()
    subject.add_request("b", [1], SamplingParams())
    assert subject.finish_requests(["b", "b"]) == ["b"]
    assert subject.schedule().finished_req_ids == {"b"}


def test_U8_a_request_that_is_aborted_between_schedule_and_update_is_passed_over():
    subject = scheduler()
    subject.add_request("a", range(5), SamplingParams())
    subject.add_request("b", range(5, 10), SamplingParams())
    output = subject.schedule()
    subject.finish_requests(["a"])
    held = subject.stats().kv_cache_usage
    updates = subject.update_from_output(output, ran(output, {"a": [1], "b": [2]}))
    assert [update.req_id for update in updates] == ["b"]
    assert subject.stats().kv_cache_usage == held / 2
    assert subject.schedule().finished_req_ids == {"a"}


def test_a_runner_may_leave_out_aborted_requests_but_no_live_one():
    subject = scheduler()
    subject.add_request("a", [1], SamplingParams())
    subject.add_request("b", [2], SamplingParams())
    output = subject.schedule()
    subject.finish_requests(["a"])
    with pytest.raises(RunnerOutputMismatch, match="scheduled request 'b'") as caught:
        subject.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
    assert caught.value.req_ids == ("b",)
    only_b = ModelRunnerOutput(req_ids=["b"], req_id_to_index={"b": 0}, sampled_token_ids=[[7]])
    assert [update.new_token_ids for update in subject.update_from_output(output, only_b)] == [[7]]


@pytest.mark.parametrize("wrong", [None, [], EMPTY_MODEL_RUNNER_OUTPUT])
def test_what_is_no_output_is_refused_by_its_kind_and_changes_nothing(wrong: object):
    subject = scheduler()
    subject.add_request("a", [1, 2], SamplingParams())
    output = subject.schedule()
    right = ran(output, {"a": [7]})
    for settle in (lambda: subject.update_from_output(wrong, right), lambda: subject.rollback(wrong)):  # pyright: ignore[reportArgumentType]
        with pytest.raises(InputRefused, match=f"the SchedulerOutput that schedule\\(\\) .*{type(wrong).__name__}"):
            settle()
    if wrong is not EMPTY_MODEL_RUNNER_OUTPUT:
        with pytest.raises(InputRefused, match=f"with a ModelRunnerOutput, not a {type(wrong).__name__}"):
            subject.update_from_output(output, wrong)  # pyright: ignore[reportArgumentType]
    assert [update.new_token_ids for update in subject.update_from_output(output, right)] == [[7]]


def test_calls_out_of_order_are_refused_and_change_nothing():
    subject = scheduler()
    subject.add_request("a", [1, 2], SamplingParams())
    with pytest.raises(StepStateError, match="no step is in flight") as caught:
        subject.rollback(SchedulerOutput(finished_req_ids={"b"}))
    assert (caught.value.call, caught.value.allowed) == ("rollback", ("schedule",))
    output = subject.schedule()
    with pytest.raises(StepStateError, match="not the output of a step in flight"):
        subject.update_from_output(evolve(output), ran(output, {"a": [3]}))
    assert len(subject.update_from_output(output, ran(output, {"a": [3]}))) == 1
    with pytest.raises(StepStateError, match="settled once"):
        subject.update_from_output(output, ran(output, {"a": [3]}))
    assert subject.schedule().scheduled_cached_reqs.num_output_tokens == [1]


def test_outputs_say_what_is_new_and_what_goes_on():
    subject = scheduler(max_num_batched_tokens=6)
    first, second = SamplingParams(seed=1), SamplingParams(seed=2)
    subject.add_request("a", range(4), first)
    subject.add_request("b", range(10, 15), second)
    output = subject.schedule()
    assert dict(output.num_scheduled_tokens) == {"a": 4, "b": 2}
    assert [(new.req_id, len(new.block_ids[0]), new.sampling_params) for new in output.scheduled_new_reqs] == [
        ("a", 1, first),
        ("b", 1, second),
    ]
    updates = subject.update_from_output(output, ran(output, {"a": [20], "b": [99]}))
    assert [(update.req_id, update.new_token_ids) for update in updates] == [("a", [20])]  # b's chunk samples nothing
    output = subject.schedule()
    cached = output.scheduled_cached_reqs
    assert (cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens) == (["a", "b"], [4, 2], [1, 0])
    assert [[len(ids) for ids in new] if new else None for new in cached.new_block_ids] == [[1], [1]]
    subject.update_from_output(output, ran(output, {"a": [21], "b": [22]}))
    assert subject.schedule().scheduled_cached_reqs.new_block_ids == [None, None]


def test_running_requests_go_before_waiting_ones_and_limits_hold():
    subject = scheduler(max_num_seqs=2, max_num_batched_tokens=5, long_prefill_token_threshold=3)
    for name in "abc":
        subject.add_request(name, range(8), SamplingParams())
    assert dict(subject.schedule().num_scheduled_tokens) == {"a": 3, "b": 2}
    assert (subject.num_running, subject.num_waiting) == (2, 1)


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        (SamplingParams(eos_token_ids=(7,)), [1, 7], FinishReason.STOP, None),
        (SamplingParams(stop_token_ids=(8,)), [1, 8], FinishReason.STOP, 8),
        (SamplingParams(eos_token_ids=(7,), stop_token_ids=(7,)), [7], FinishReason.STOP, None),
        (SamplingParams(eos_token_ids=(7,), stop_token_ids=(7,), ignore_eos=True), [7], FinishReason.STOP, 7),
        (SamplingParams(eos_token_ids=(7,), ignore_eos=True, max_tokens=3), [7, 7, 7], FinishReason.LENGTH, None),
        (SamplingParams(eos_token_ids=(7,), min_tokens=2), [7, 7], FinishReason.STOP, None),
        (SamplingParams(eos_token_ids=(7,), max_tokens=2), [1, 7], FinishReason.STOP, None),
        (SamplingParams(max_tokens=1), [1], FinishReason.LENGTH, None),
    ],
)
def test_how_a_request_ends(params: SamplingParams, tokens: list[int], reason: FinishReason, stop_reason: int | None):
    subject = scheduler()
    subject.add_request("a", [1, 2, 3], params)
    kept, last = outputs_until_the_end(subject, [*tokens, 99])
    assert (kept, last.finish_reason, last.stop_reason) == (tokens, reason, stop_reason)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(15, 1), (15, 9), (10, None), (10, 6)])
def test_P4_the_last_legal_token_is_kept(prompt_len: int, max_tokens: int | None):
    subject = scheduler()
    subject.add_request("a", range(prompt_len), SamplingParams(max_tokens=max_tokens))
    kept, last = outputs_until_the_end(subject, range(100, 200))
    assert (len(kept), last.finish_reason) == (16 - prompt_len, FinishReason.LENGTH)


def test_A7_no_step_too_many():
    subject = scheduler()
    subject.add_request("a", range(6), SamplingParams(max_tokens=3))
    steps = []
    while subject.has_unfinished_requests():
        output = subject.schedule()
        steps.append(output.total_num_scheduled_tokens)
        subject.update_from_output(output, ran(output, {"a": [5]}))
    assert steps == [6, 1, 1]


def test_tokens_after_a_stop_are_dropped_with_their_logprobs():
    subject = scheduler()
    subject.add_request("a", [1, 2], SamplingParams(stop_token_ids=(7,), logprobs=0))
    subject.add_request("b", [1, 3], SamplingParams())
    output = subject.schedule()
    logprobs = LogprobsLists(
        np.array([[5], [7], [6], [1]]), np.zeros((4, 1), np.float32), np.ones(4, np.int64), [0, 3, 4]
    )
    first, second = subject.update_from_output(output, ran(output, {"a": [5, 7, 6], "b": [1]}, logprobs=logprobs))
    assert (first.new_token_ids, first.finish_reason) == ([5, 7], FinishReason.STOP)
    assert first.logprobs is not None
    assert first.logprobs.logprob_token_ids.tolist() == [[5], [7]]
    assert (second.new_token_ids, second.logprobs) == ([1], None)


def test_several_tokens_at_once_are_computed_in_the_next_step():
    subject = scheduler()
    subject.add_request("a", [1, 2], SamplingParams())
    step(subject, a=[3, 4, 5])
    output = subject.schedule()
    assert dict(output.num_scheduled_tokens) == {"a": 3}
    assert output.scheduled_cached_reqs.num_output_tokens == [3]


def test_prompt_logprobs_are_handed_on_by_the_step_that_delivers_them():
    subject = scheduler()
    subject.add_request("a", range(3), SamplingParams(prompt_logprobs=0))
    output = subject.schedule()
    table = LogprobsLists(np.zeros((2, 1), np.int64), np.zeros((2, 1), np.float32), np.ones(2, np.int64))
    (update,) = subject.update_from_output(output, ran(output, {"a": [1]}, prompt_logprobs_dict={"a": table}))
    assert update.prompt_logprobs is table
    assert step(subject, a=[1])[0].prompt_logprobs is None


def test_an_error_ends_only_its_own_request():
    subject = scheduler()
    subject.add_request("a", range(8), SamplingParams())
    subject.add_request("b", range(20, 28), SamplingParams())
    error = RequestFailed("a", "its logits are not numbers")
    output = subject.schedule()
    first, second = subject.update_from_output(output, ran(output, {"b": [1]}, request_errors={"a": error}))
    assert (first.req_id, first.finish_reason, first.error) == ("a", FinishReason.ERROR, error)
    assert (second.req_id, second.finish_reason) == ("b", None)
    assert subject.num_running == 1
    subject.add_request("c", range(8), SamplingParams())
    assert subject.schedule().scheduled_new_reqs[0].num_computed_tokens == 0  # what spoilt it is not shared


def test_a_runner_that_samples_nothing_for_a_last_token_fails_the_request_instead_of_hanging_it():
    subject = scheduler()
    subject.add_request("a", [1, 2], SamplingParams())
    (update,) = step(subject)
    assert update.finish_reason is FinishReason.ERROR
    assert isinstance(update.error, RequestFailed)
    assert "nothing was sampled" in str(update.error)

"""Running a failed step in parts: who is blamed, how many parts it takes, and how their outputs become one."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from twostroke.engine.loop_recovery import merged, run_in_parts
from twostroke.fsm import StageFailed
from twostroke.stages.errors import InvalidSchedulerOutput, RequestFailed
from twostroke.stages.io import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    CachedRequestData,
    LogprobsLists,
    ModelRunnerOutput,
    SchedulerOutput,
)


def step(count: int) -> SchedulerOutput:
    """A step of decoding requests that also tells of one that has finished."""
    req_ids = [str(index) for index in range(count)]
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(req_ids=req_ids, num_computed_tokens=range(count)),
        num_scheduled_tokens=dict.fromkeys(req_ids, 1),
        total_num_scheduled_tokens=count,
        finished_req_ids={"gone"},
    )


def failure(req_ids: object) -> StageFailed:
    return StageFailed("forward", 1, tuple(req_ids), ValueError("no"))  # pyright: ignore[reportArgumentType]


@define
class Runner:
    """Refuses every part with a request of ``guilty`` in it, naming it where it is in ``named``."""

    guilty: set[str]
    named: set[str] = field(factory=set)
    num_parts: int = 0
    told: list[str] = field(factory=list)

    def run(self, part: SchedulerOutput) -> ModelRunnerOutput:
        req_ids = list(part.num_scheduled_tokens)
        self.num_parts += bool(req_ids)
        bad = [req_id for req_id in req_ids if req_id in self.guilty]
        if bad:
            raise InvalidSchedulerOutput("no", req_id=bad[0]) if bad[0] in self.named else failure(req_ids)
        self.told += part.finished_req_ids
        if not req_ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[[int(req_id)] for req_id in req_ids],
        )


def check(count: int, runner: Runner) -> ModelRunnerOutput:
    """Run a step in parts; everybody has a token or an error, and the runner heard once who has finished."""
    scheduled = step(count)
    output = run_in_parts(scheduled, failure(scheduled.num_scheduled_tokens), runner.run)
    assert runner.num_parts <= 2 * (count - 1).bit_length() + 2
    assert runner.told == ["gone"]
    assert sorted([*output.req_ids, *output.request_errors]) == sorted(scheduled.num_scheduled_tokens)
    assert [output.req_id_to_index[req_id] for req_id in output.req_ids] == list(range(len(output.req_ids)))
    assert output.sampled_token_ids == [[int(req_id)] for req_id in output.req_ids]
    assert runner.guilty <= output.request_errors.keys()
    for req_id, error in output.request_errors.items():
        assert isinstance(error, RequestFailed)
        assert error.req_id == req_id
        assert isinstance(error.__cause__, (StageFailed, InvalidSchedulerOutput))
    return output


@pytest.mark.parametrize("is_named", [False, True])
def test_one_guilty_request_is_always_found(is_named: bool) -> None:
    for count in (1, 2, 3, 4, 7, 8, 33):
        for index in range(count):
            guilty = {str(index)}
            output = check(count, Runner(guilty, guilty if is_named else set()))
            assert output.request_errors.keys() == guilty


def test_a_fault_that_has_passed_blames_nobody() -> None:
    for count in (1, 2, 9):
        assert not check(count, Runner(set())).request_errors


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.sets(st.integers(0, 39)))
def test_many_guilty_requests_are_bounded_work(count: int, guilty: set[int], named: set[int]) -> None:
    bad = {str(index) for index in guilty if index < count}
    check(count, Runner(bad, {str(index) for index in named}))


def test_everybody_guilty() -> None:
    for count in (1, 2, 64):
        output = check(count, Runner({str(index) for index in range(count)}))
        assert len(output.request_errors) == count


def test_a_step_without_tokens_is_tried_once_more() -> None:
    tried: list[SchedulerOutput] = []

    def run(part: SchedulerOutput) -> ModelRunnerOutput:
        tried.append(part)
        raise failure(())

    with pytest.raises(StageFailed):
        run_in_parts(step(0), failure(()), run)
    assert [part.finished_req_ids for part in tried] == [{"gone"}]


def test_what_the_runner_cannot_undo_is_passed_on() -> None:
    def run(part: SchedulerOutput) -> ModelRunnerOutput:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="gone"):
        run_in_parts(step(4), failure("0123"), run)


def logprobs(tokens: list[list[int]], counts: list[int]) -> LogprobsLists:
    ids = np.array(tokens, np.int64)
    offsets = [0, *np.cumsum(counts).tolist()]
    return LogprobsLists(ids, -ids.astype(np.float32), np.arange(len(ids)), offsets)


def test_logprobs_of_different_widths_become_one_table() -> None:
    parts = [
        ModelRunnerOutput(req_ids=["a", "b"], sampled_token_ids=[[1], []], logprobs=logprobs([[1, 1, 2]], [1, 0])),
        ModelRunnerOutput(req_ids=["c"], sampled_token_ids=[[3]], prompt_logprobs_dict={"c": None}),
        ModelRunnerOutput(req_ids=["d"], sampled_token_ids=[[4]], logprobs=logprobs([[4]], [1])),
    ]
    whole = merged(parts, {"e": ValueError("e")})
    assert whole.logprobs is not None
    assert whole.logprobs.cu_num_generated_tokens == [0, 1, 1, 1, 2]
    assert whole.logprobs.logprob_token_ids.tolist() == [[1, 1, 2], [4, -1, -1]]
    assert whole.logprobs.for_request(3).logprobs.tolist() == [[-4.0]]
    assert whole.logprobs.for_request(0).logprobs.tolist() == [[-1.0, -1.0, -2.0]]
    assert whole.logprobs.logprobs.dtype == np.float32
    assert set(whole.request_errors) == {"e"}
    assert set(whole.prompt_logprobs_dict) == {"c"}
    assert merged(parts[1:2], {}).logprobs is None

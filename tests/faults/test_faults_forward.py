"""Chapter W: what goes into the model, and what is made of what comes out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Driver, Served, Wish
from modes import MODES
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.scheduler import FinishReason, Scheduler, SchedulerConfig
from twostroke.stages.records import Batch, ExecuteModelState, ModelInputs, PreparedInputs
from twostroke.stages.sampling_params import SamplingParams

MakeRunner = Callable[..., ModelRunner]
ServeEach = Callable[..., dict[str, Served]]
FinishAll = Callable[[Driver], dict[str, Served]]


@pytest.mark.parametrize("mode", MODES)
def test_W1_everything_that_the_model_gets_is_padded_alike(make_runner: MakeRunner, mode: str) -> None:
    runner = make_runner(**MODES[mode])

    def compare(inputs: PreparedInputs, model_inputs: ModelInputs) -> None:
        assert model_inputs.input_ids is not None
        assert len(model_inputs.input_ids) == len(model_inputs.positions) >= len(inputs.input_ids)
        assert not model_inputs.input_ids[len(inputs.input_ids) :].any()
        assert not model_inputs.positions[len(inputs.input_ids) :].any()

    runner.stages.insert(compare, after="preprocess", name="compare")
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4), Wish("b", tuple(range(11)), 4))
    for step in ({"a": 3, "b": 11}, {"a": 1, "b": 1}, {"b": 1}, {"a": 1}):
        driver.step(step)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("everywhere", [True, False])
def test_W6_logits_that_are_no_numbers_touch_nobody_else(
    runner: ModelRunner, serve_each: ServeEach, finish_all: FinishAll, value: float, everywhere: bool
) -> None:
    """NaN, or nothing but -inf, ends its request with an error; +inf is a certain choice, not an error."""

    def spoil(batch: Batch, inputs: PreparedInputs, state: ExecuteModelState) -> ExecuteModelState:
        logits = state.logits.clone()
        for row, index in zip(inputs.sampling_logits.tolist(), inputs.sampling_reqs.tolist(), strict=True):
            if batch.req_ids[index] == "sick":
                logits[row, slice(None) if everywhere else 5] = value
        return ExecuteModelState(logits, state.hidden_states)

    runner.stages.insert(spoil, after="forward", name="spoil")
    well = [Wish("left", (1, 2), 4), Wish("right", (3, 4, 5), 4)]
    driver = Driver(runner)
    params = SamplingParams(temperature=0.8, seed=1, logprobs=2)
    driver.add(well[0], Wish("sick", (6, 7), 4, params), well[1])
    result = driver.step({"left": 2, "sick": 2, "right": 3})
    assert result is not None
    is_error = value != value or (value < 0 and everywhere)
    assert set(result.request_errors) == ({"sick"} if is_error else set())
    if value > 0 and not everywhere:
        assert driver.requests["sick"].outputs == [5]
    driver.finish("sick")
    alone = serve_each(well)
    for req_id, served in finish_all(driver).items():
        served.assert_equals(alone[req_id])


def test_W6_nothing_of_a_request_that_went_wrong_is_found_in_the_prefix_cache(runner: ModelRunner) -> None:
    """Its keys may be what spoilt it: a later request with the same prompt computes its own."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=24, num_kv_blocks=40, block_sizes=(4,))
    )
    sick = [True]

    def spoil(state: ExecuteModelState) -> ExecuteModelState:
        if not sick:
            return state
        return ExecuteModelState(torch.full_like(state.logits, torch.nan), state.hidden_states)

    def serve(req_id: str) -> tuple[list[int], FinishReason | None, int]:
        tokens: list[int] = []
        scheduler.add_request(req_id, range(20), SamplingParams(max_tokens=3, temperature=0.0))
        while scheduler.has_work():
            scheduled = scheduler.schedule()
            if runner.execute_model(scheduled) is not None:
                continue
            for update in scheduler.update_from_output(scheduled, runner.sample_tokens().get_output()):
                tokens += update.new_token_ids
                if update.finish_reason is not None:
                    return tokens, update.finish_reason, update.num_cached_tokens
        raise AssertionError(f"{req_id} never ended")

    runner.stages.insert(spoil, after="forward", name="spoil")
    assert serve("first") == ([], FinishReason.ERROR, 0)
    sick.clear()
    tokens, reason, cached = serve("second")
    assert (len(tokens), reason, cached) == (3, FinishReason.LENGTH, 0)
    assert serve("third") == (tokens, FinishReason.LENGTH, 16)

"""The loop over a real runner and a tiny random model: neighbours, pressure and failing stages change nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from twostroke.engine.config import EngineConfig
from twostroke.engine.loop_handle import RequestHandle
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.serving_loop import ServingLoop
from twostroke.fsm import StageFailed, stage
from twostroke.stages.errors import RequestFailed
from twostroke.stages.records import Batch, ExecuteModelState
from twostroke.stages.sampling_params import SamplingParams

PROMPTS = [[1 + index, 5, 9, 20 + index, 3][: 2 + index % 4] for index in range(6)]
PARAMS = [SamplingParams(max_tokens=10, temperature=0.0 if index % 2 else 1.2, seed=index) for index in range(6)]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(tiny_config())


@pytest.fixture(scope="module")
def make_runner(model: Any) -> Iterator[Callable[..., ModelRunner]]:
    """Runners with little room; nothing may be left in their tables."""
    made: list[ModelRunner] = []

    def make(**changes: Any) -> ModelRunner:
        limits: dict[str, Any] = {
            "device": "cpu",
            "block_size": 4,
            "num_kv_blocks": 60,
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 16,
        }
        made.append(build_runner(EngineConfig(**limits | changes), model=model))
        return made[-1]

    yield make
    for runner in made:
        assert not runner.parts.table.records
        runner.shutdown()


@pytest.fixture(scope="module")
def alone(make_runner: Callable[..., ModelRunner]) -> list[tuple[int, ...]]:
    """What each prompt gets when it is the only one."""
    with ServingLoop(make_runner()) as loop:
        return [tokens_of(loop.add(prompt, params)) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def tokens_of(handle: RequestHandle) -> tuple[int, ...]:
    return handle.result(timeout=60).outputs[0].token_ids


def add_all(loop: ServingLoop) -> list[RequestHandle]:
    return [loop.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="room"),
        pytest.param({"num_kv_blocks": 17}, id="preemption"),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 3}, id="chunks"),
    ],
)
def test_neighbours_do_not_matter(
    make_runner: Callable[..., ModelRunner], alone: list[tuple[int, ...]], changes: dict[str, int]
) -> None:
    with ServingLoop(make_runner(**changes)) as loop:
        assert [tokens_of(handle) for handle in add_all(loop)] == alone


STAGES = ["update_states", "prepare_inputs", "dispatch", "build_attn", "forward", "sample", "commit"]


def breaking(runner: ModelRunner, name: str, is_time: Callable[[Batch], bool]) -> ArithmeticError:
    """Have a stage raise, after its work, whenever ``is_time`` says so of the batch; gives what it raises."""
    original, batches = ArithmeticError("a stage broke"), list[Batch]()
    runner.stages.insert(stage(batches.append, takes=[Batch]), after="update_states", name="note")

    def broken(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = work(*args)
            if is_time(result if name == "update_states" else batches[-1]):
                raise original
            return result

        return run

    runner.stages.wrap(name, broken)
    return original


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_L3_a_stage_that_raises_once_costs_nobody_a_token(
    make_runner: Callable[..., ModelRunner], alone: list[tuple[int, ...]], depth: int, name: str
) -> None:
    runner = make_runner()
    left = [3]

    def is_time(batch: Batch) -> bool:
        left[0] -= 1
        return left[0] == 0

    breaking(runner, name, is_time)
    with ServingLoop(runner, depth=depth) as loop:
        assert [tokens_of(handle) for handle in add_all(loop)] == alone
    assert left[0] < 0


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_L3_a_stage_that_cannot_bear_one_request_fails_that_one(
    make_runner: Callable[..., ModelRunner], alone: list[tuple[int, ...]], depth: int, name: str
) -> None:
    runner = make_runner()
    guilty = PROMPTS.index([2, 5, 9])
    number_of_tokens = len(PROMPTS[guilty]) + 4

    def is_time(batch: Batch) -> bool:
        row = runner.parts.table.rows.get("r1", -1)
        return any(
            own == row and computed >= number_of_tokens
            for own, computed in zip(batch.rows.tolist(), batch.num_computed_tokens.tolist(), strict=True)
        )

    original = breaking(runner, name, is_time)
    with ServingLoop(runner, depth=depth) as loop:
        handles = [loop.add(*pair, f"r{index}") for index, pair in enumerate(zip(PROMPTS, PARAMS, strict=True))]
        streamed: list[int] = []
        with pytest.raises(RequestFailed, match="a stage broke") as caught:
            streamed.extend(token for delta in handles[guilty] for token in delta.outputs[0].token_ids)
        failed = caught.value.__cause__
        assert isinstance(failed, StageFailed)
        assert failed.stage == name
        assert failed.__cause__ is original
        assert tuple(streamed) == alone[guilty][:5], "tokens of the steps before were lost"
        others = [tokens_of(handle) for handle in handles if handle is not handles[guilty]]
        assert others == alone[:guilty] + alone[guilty + 1 :]


def test_logits_that_are_no_numbers_fail_one_request(
    make_runner: Callable[..., ModelRunner], alone: list[tuple[int, ...]]
) -> None:
    poison = [True]

    def poisoned(stage: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> ExecuteModelState:
            state = stage(*args)
            if poison and len(state.logits) > 1:
                poison.clear()
                state.logits[0] = torch.nan
            return state

        return forward

    runner = make_runner()
    runner.stages.wrap("forward", poisoned)
    failed: list[tuple[RequestHandle, RequestFailed]] = []
    with ServingLoop(runner) as loop:
        for handle, expected in zip(add_all(loop), alone, strict=True):
            try:
                assert tokens_of(handle) == expected
            except RequestFailed as error:
                failed.append((handle, error))
    assert [error.req_id for _, error in failed] == [handle.request_id for handle, _ in failed]
    assert len(failed) == 1


def test_prompt_and_output_logprobs(make_runner: Callable[..., ModelRunner]) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=2, prompt_logprobs=1, n=2)
    with ServingLoop(make_runner()) as loop:
        whole = loop.add([1, 2, 3, 4], params).result(timeout=60)
    assert whole.prompt_logprobs is not None
    assert whole.prompt_logprobs[0] is None
    for token, position in zip([2, 3, 4], whole.prompt_logprobs[1:], strict=True):
        assert position is not None
        assert token in position
    for output in whole.outputs:
        assert output.logprobs is not None
        for token, position in zip(output.token_ids, output.logprobs, strict=True):
            assert position[token].rank == 1
            assert position[token].logprob == max(candidate.logprob for candidate in position.values())
    assert whole.outputs[0].logprobs == whole.outputs[1].logprobs

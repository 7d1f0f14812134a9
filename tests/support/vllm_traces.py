"""What vLLM's own scheduler sent its model runner, fed to ours: every token and log probability that came back.

The model is SmolLM2-135M-Instruct in float32 on both sides. Where our two best tokens lie within ``NEAR_TIE`` of each
other the token may differ; the recording's token is then written over ours, so that the rest stays comparable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.stages.forward_context import Model
from twostroke.stages.io import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs
from twostroke.stages.sampling_params import SamplingParams

SCENARIOS = ("plain", "chunked", "prefix", "preempt", "logprobs", "penalties")
NEAR_TIE = 0.01
TOLERANCE = 1e-3
EOS = 2


def read_trace(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[int]] | None]:
    """Set-up, steps, and every request's outputs by the number that its id starts with (two recordings lack those)."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    return lines[0], steps, lines[-1].get("outputs")


def scheduler_output(step: dict[str, Any], sampling: dict[str, Any]) -> SchedulerOutput:
    """A recorded line as the scheduler output that it was."""
    cached = step["scheduled_cached_reqs"]
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                req_id=data["req_id"],
                prompt_token_ids=data["prompt_token_ids"],
                block_ids=data["block_ids"],
                num_computed_tokens=data["num_computed_tokens"],
                sampling_params=SamplingParams(
                    max_tokens=data["max_tokens"], ignore_eos=True, eos_token_ids=[EOS], **sampling
                ),
            )
            for data in step["scheduled_new_reqs"]
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=cached["req_ids"],
            resumed_req_ids=set(cached["resumed_req_ids"]),
            new_token_ids=cached["new_token_ids"],
            all_token_ids=cached["all_token_ids"],
            new_block_ids=cached["new_block_ids"],
            num_computed_tokens=cached["num_computed_tokens"],
            num_output_tokens=cached["num_output_tokens"],
        ),
        num_scheduled_tokens=step["num_scheduled_tokens"],
        total_num_scheduled_tokens=step["total_num_scheduled_tokens"],
        finished_req_ids=set(step["finished_req_ids"]),
        preempted_req_ids=set(step["preempted_req_ids"]),
        num_common_prefix_blocks=step["num_common_prefix_blocks"],
    )


class Gaps:
    """How far apart the two best raw logits of every request were that sampled in the last step."""

    def __init__(self) -> None:
        self.by_request: dict[str, float] = {}

    def __call__(self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState) -> None:
        best = state.logits[inputs.sampling_logits].topk(2, dim=1).values.tolist()
        ids = [str(batch.req_ids[int(index)]) for index in inputs.sampling_reqs]
        self.by_request = {req_id: first - second for req_id, (first, second) in zip(ids, best, strict=True)}


def replayer(model: Model, setup: dict[str, Any], num_blocks: int, **options: Any) -> tuple[ModelRunner, Gaps]:
    """A runner with a recording's limits, with a probe for near ties."""
    config = EngineConfig(
        max_num_seqs=setup["max_num_seqs"],
        max_num_batched_tokens=setup["max_num_batched_tokens"],
        max_model_len=setup["max_model_len"],
        block_size=setup["block_size"],
        num_kv_blocks=num_blocks,
        **options,
    )
    runner, gaps = build_runner(config, model=model), Gaps()
    runner.stages.insert(gaps, after="forward", name="gaps")
    return runner, gaps


def check_replay(model: Model, path: Path, **options: Any) -> None:
    """Replay a recording with a runner over ``model``; everything that comes back must be what came back then."""
    setup, steps, outputs = read_trace(path)
    # The pool as vLLM had it, as far as it was used: max_model_len must fit.
    used = max(block for step in steps for block in _blocks(step)) + 1
    num_blocks = max(used, setup["max_model_len"] // setup["block_size"] + 1)
    runner, gaps = replayer(model, setup, num_blocks, **options)
    near_ties: list[str] = []
    got: dict[str, list[int]] = {}
    for number, step in enumerate(steps, 1):
        result = runner.execute_model(scheduler_output(step, setup["sampling"]))
        if result is None:
            result = runner.sample_tokens().get_output()
        recorded = step["output"]
        assert set(result.req_ids) == set(recorded["req_ids"])
        expected = dict(zip(recorded["req_ids"], recorded["sampled_token_ids"], strict=True))
        for index, req_id in enumerate(result.req_ids):
            tokens = list(result.sampled_token_ids[index])
            if tokens != expected[req_id]:
                gap = gaps.by_request.get(req_id, np.inf)
                assert gap < NEAR_TIE, f"step {number}, {req_id}: {tokens} instead of {expected[req_id]} (gap {gap})"
                near_ties.append(f"{path.stem} step {number} {req_id}: gap {gap:.4f}")
                _overwrite_last(runner, req_id, expected[req_id][0])
            got.setdefault(req_id.split("-")[0], []).extend(expected[req_id])
        check_logprobs(result, recorded)
        check_prompt_logprobs(result, recorded)
    assert outputs is None or got == outputs
    if near_ties:
        print("near ties:", *near_ties, sep="\n  ")


def _overwrite_last(runner: ModelRunner, req_id: str, token: int) -> None:
    """Make another token the last one of a request, on the host and on the device."""
    table = runner.parts.table
    table.apply_late_tokens()
    row = table.rows[req_id]
    place = row, int(table.num_tokens[row]) - 1
    table.token_ids_host[place] = token
    table.token_ids[place] = token


def _blocks(step: dict[str, Any]) -> Iterator[int]:
    for data in step["scheduled_new_reqs"]:
        yield from (block for group in data["block_ids"] for block in group)
    for groups in step["scheduled_cached_reqs"]["new_block_ids"]:
        yield from (block for group in groups or () for block in group)


def check_logprobs(result: ModelRunnerOutput, recorded: dict[str, Any]) -> None:
    """Rows of requests that sampled; the recording also lists rows of prompt chunks, which sample nothing."""
    if recorded["logprobs"] is None:
        assert result.logprobs is None
        return
    assert result.logprobs is not None
    token_ids, logprobs, ranks = recorded["logprobs"]
    for position, req_id in enumerate(recorded["req_ids"]):
        ours = result.logprobs.for_request(result.req_id_to_index[req_id])
        if not recorded["sampled_token_ids"][position]:
            assert len(ours.logprobs) == 0
            continue
        assert_same_rows(ours.logprob_token_ids, ours.logprobs, [token_ids[position]], [logprobs[position]])
        assert ours.sampled_token_ranks.tolist() == [ranks[position]]


def check_prompt_logprobs(result: ModelRunnerOutput, recorded: dict[str, Any]) -> None:
    """Whole tables, delivered by the same step."""
    assert result.prompt_logprobs_dict.keys() == recorded["prompt_logprobs"].keys()
    for req_id, (token_ids, logprobs, ranks) in recorded["prompt_logprobs"].items():
        ours = result.prompt_logprobs_dict[req_id]
        assert ours is not None
        assert_same_rows(ours.logprob_token_ids, ours.logprobs, token_ids, logprobs)
        # Ranks beyond the first hundreds count tokens whose logits lie within rounding of each other.
        assert np.allclose(ours.sampled_token_ranks, ranks, rtol=0.01, atol=1)


def assert_same_rows(ids: np.ndarray, values: np.ndarray, expected_ids: Any, expected_values: Any) -> None:
    """Same log probabilities in order, and the same tokens wherever neighbours are not equal within the tolerance."""
    expected_ids, expected_values = np.array(expected_ids), np.array(expected_values)
    np.testing.assert_allclose(values, expected_values, atol=TOLERANCE)
    for row, column in np.argwhere(ids != expected_ids):
        others = np.delete(expected_values[row], column)
        assert np.abs(others - expected_values[row, column]).min() < 2 * TOLERANCE, (
            f"row {row}: token {ids[row, column]} instead of {expected_ids[row, column]}"
        )

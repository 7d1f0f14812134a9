"""Sampling on a GPU: what the kernels give is what the torch stage gives on a CPU, and nothing waits for the device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, Wish
from modes import LIMITS, PARAMS
from sampling_world import SamplingWorld, assert_scored_alike, some_grammar, some_logits, some_params
from twostroke.engine.config import EngineConfig
from twostroke.engine.cuda.sample import CudaSample
from twostroke.engine.kernels.logits_rows import LogitsRows
from twostroke.engine.kernels.logprobs import score_tokens
from twostroke.engine.kernels.truncation import SearchSizes, Truncation, find_floors
from twostroke.engine.model_runner import build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.stages.io import GrammarOutput
from twostroke.stages.records import CUDAGraphMode, LogprobsTensors
from twostroke.stages.sampling.choose import scale_logits
from twostroke.stages.sampling.logprobs import gather_logprobs
from twostroke.stages.sampling.truncation import min_p_floor, top_k_floor
from twostroke.stages.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

VOCAB = 151_936
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 60,
    "top_p": 0.9,
    "min_p": 0.001,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
    "logit_bias": {1: 4.0, 5: -3.0},
    "bad_words_token_ids": [[3], [1, 2], [4, 0, 5]],
    "min_tokens": 3,
    "stop_token_ids": [0, 2],
    "logprobs": 5,
}


def everything(**changes: Any) -> SamplingParams:
    return SamplingParams(**(EVERYTHING | changes))


def logits_like(kind: str, num_rows: int, vocab: int = VOCAB) -> torch.Tensor:
    """On the CPU: Gaussian, with a long tail as of a language model, equal in groups, or all equal."""
    generator = torch.Generator().manual_seed(num_rows)
    noise = torch.randn(num_rows, vocab, generator=generator)
    if kind == "zipf":
        ranks = torch.rand(num_rows, vocab, generator=generator).argsort(dim=1) + 1
        return noise * 0.5 - 1.6 * ranks.float().log()
    if kind == "half":
        return (noise * 3).to(torch.bfloat16).float()
    return torch.zeros(num_rows, vocab) if kind == "equal" else noise


@pytest.mark.parametrize("sizes", [None, SearchSizes(64, 20_000)], ids=["default", "small"])
@pytest.mark.parametrize("kind", ["flat", "zipf", "half", "equal"])
def test_the_same_tokens_are_kept_of_a_large_vocabulary(kind: str, sizes: SearchSizes | None) -> None:
    limits = [
        (1, 1.0, 0.0),
        (50, 1.0, 0.0),
        (3000, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.5, 0.0),
        (0, 0.9999, 0.0),
        (50, 0.9, 0.0),
        (4000, 0.7, 0.01),
        (0, 1.0, 0.05),
    ]
    logits = logits_like(kind, len(limits))
    top_k, top_p, min_p = (torch.tensor(values) for values in zip(*limits, strict=True))
    temperatures = torch.full((len(limits),), 0.8)
    used = torch.ones(len(limits), dtype=torch.int32)
    truncation = Truncation(*(part.cuda() for part in (top_k.int(), top_p, min_p.log(), used)))
    floors = find_floors(LogitsRows(logits.cuda()), temperatures.cuda(), truncation, sizes).floors.cpu()
    scaled = scale_logits(logits, logits.amax(1), temperatures)
    least = min_p_floor(scaled, min_p).maximum(top_k_floor(scaled, top_k, int(top_k.max())))
    is_exact = top_p == 1
    assert torch.equal((scaled >= floors[:, None])[is_exact], (scaled >= least[:, None])[is_exact])
    # Exponentials differ in their last bits: what is kept holds top_p of the probability, without its least not.
    weights = (scaled.double().exp() * (scaled >= least[:, None]))[~is_exact]
    kept, floor, wanted = scaled[~is_exact], floors[~is_exact, None], weights.sum(1) * top_p[~is_exact]
    assert (floor[:, 0] >= least[~is_exact]).all()
    assert ((weights * (kept >= floor)).sum(1) >= wanted * (1 - 1e-6)).all()
    assert ((weights * (kept > floor)).sum(1) < wanted * (1 + 1e-6)).all()
    assert (kept == floor).any(1).all()


@pytest.mark.parametrize("kind", ["flat", "zipf", "half", "equal"])
def test_log_probabilities_of_a_large_vocabulary(kind: str) -> None:
    logits = logits_like(kind, 6)
    rows, tokens = torch.tensor([5, 0, 3, 1]), torch.tensor([7, VOCAB - 1, 100_000, int(logits[1].argmax())])
    for num_top in (0, 5, 20):
        got = score_tokens(LogitsRows(logits.cuda(), rows.cuda()), tokens.cuda(), num_top)
        on_host = LogprobsTensors(*(part.cpu() for part in got))
        wanted = gather_logprobs(logits[rows], tokens, num_top)
        exact = logits[rows].double().log_softmax(1).gather(1, on_host.token_ids).float()
        torch.testing.assert_close(on_host.logprobs, exact, atol=4e-6, rtol=1e-6)
        if kind != "half":  # groups of equal logits, of which two may round to one log probability
            assert_scored_alike(on_host, wanted, torch.ones(4, dtype=torch.bool), rank_slack=3, atol=2e-4)


@pytest.mark.parametrize("seed", range(60))
def test_any_parameters(seed: int) -> None:
    chooser = random.Random(seed)
    vocab, num_reqs = chooser.choice([2, 31, 64, 300, 5000, 40_000]), chooser.randint(1, 6)
    world = SamplingWorld([some_params(chooser, vocab) for _ in range(num_reqs)], vocab, "cuda", seed=seed)
    for sampling in (None, chooser.sample(range(num_reqs), chooser.randint(1, num_reqs)), None):
        logits = some_logits(chooser, num_reqs, vocab)
        got = world.compare(logits, some_grammar(chooser, vocab, world.batch.req_ids), sampling)
        assert len(got.sampled_token_ids) == len(world.rows if sampling is None else sampling)
        if sampling is None:
            world.append(got.sampled_token_ids.tolist())


def test_everything_at_once_of_a_large_vocabulary() -> None:
    kinds = [
        everything(),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.8),
        everything(allowed_token_ids=range(0, VOCAB, 7)),
        SamplingParams(temperature=1.1, top_p=0.95),
        everything(),
    ]
    world = SamplingWorld(kinds, VOCAB, "cuda", longest=3000)
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (2, VOCAB // 32), dtype=np.int32)
    grammar = GrammarOutput(structured_output_request_ids=["r5", "r1"], grammar_bitmask=masks)
    for step, kind in enumerate(("zipf", "flat", "zipf")):
        got = world.compare(logits_like(kind, len(kinds)), grammar if step == 1 else None)
        assert got.health is not None
        assert not got.health.any()
        world.append(got.sampled_token_ids.tolist())


@pytest.mark.parametrize("kinds", ["drawn", "edited", "all"])
def test_nothing_waits_for_the_device_in_steady_decode(kinds: str) -> None:
    edited = everything(max_tokens=60, ignore_eos=True)
    drawn = {
        name: SamplingParams(temperature=0.7, max_tokens=60, **limits)
        for name, limits in {"top_k": {"top_k": 5}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1}}.items()
    }
    chosen = {"drawn": drawn, "edited": {"edited": edited}, "all": drawn | {"edited": edited} | PARAMS}[kinds]
    larger = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 100, "num_kv_blocks": 400}
    options: dict[str, Any] = LIMITS | larger | {"async_scheduling": True}
    model = random_model(tiny_config("qwen3", head_dim=16, num_key_value_heads=2), device="cuda")
    runner = build_runner(EngineConfig(**options), model=model)
    driver = Driver(runner, depth=2)
    driver.add(*[Wish(name, (3, 1, 4, 1, 5), 60, params) for name, params in chosen.items()])
    for req_id, request in driver.requests.items():
        driver.step({req_id: len(request.wish.prompt)})
    counts = dict.fromkeys(driver.requests, 1)
    mask = np.full((1, 2), -1, dtype=np.int32)
    grammar = GrammarOutput(structured_output_request_ids=[next(iter(chosen))], grammar_bitmask=mask)
    for index in range(20):
        if index == 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            output = driver.output(counts)
            assert runner.execute_model(output) is None
            late = runner.sample_tokens(grammar if kinds == "all" and index % 2 else None)
        finally:
            if index == 19:
                torch.cuda.set_sync_debug_mode("default")
        driver.launched(output, late)
    driver.collect_all()
    assert all(len(request.outputs) >= 20 for request in driver.requests.values())
    modes = {mode for mode, _ in runner.parts.dispatch.counts}
    assert CUDAGraphMode.FULL in modes


def test_truncated_draws_are_a_graph_behind_the_forward() -> None:
    model = random_model(tiny_config("qwen3", head_dim=16, num_key_value_heads=2), device="cuda")
    modes: list[dict[str, Any]] = [{"cudagraph_mode": mode} for mode in ("FULL_AND_PIECEWISE", "NONE")]
    runner, eager = (build_runner(EngineConfig(**LIMITS | mode), model=model) for mode in modes)
    params = SamplingParams(temperature=1.0, top_k=7, top_p=0.9, seed=3)
    wishes = [Wish(f"r{index}", (index, 5, 9), 8, params) for index in range(3)]
    served = [Driver(one, 1).run_random(wishes) for one in (runner, eager)]
    tokens = [{req_id: got.tokens for req_id, got in one.items()} for one in served]
    assert tokens[0] == tokens[1]
    stage = runner.stages["sample"]
    assert isinstance(stage, CudaSample)
    assert stage.captured
    assert all(stage.captured)

"""The whole runner on a GPU: what a request gets there is what it gets on a CPU, alone, eagerly and unchunked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driver import GREEDY, Driver, Served, Wish, serve_alone
from modes import LIMITS, MODES, PARAMS
from twostroke.engine import ServingLoop
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.stages.records import CUDAGraphMode
from twostroke.stages.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

ARCHITECTURES = {
    "llama": {},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen2": {},
    "mistral": {"sliding_window": 6},
}
PROMPTS = ((3, 41, 7, 7, 0, 25, 13, 60, 2, 19, 33, 8, 54), (1,), (63, 5, 40, 11), (22, 9, 9, 9, 17, 3, 50, 48, 2))


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


def make_runner(architecture: str, device: str, **options: Any) -> ModelRunner:
    model = random_model(tiny_config(architecture, **ARCHITECTURES[architecture]), device=device)
    return build_runner(EngineConfig(**LIMITS | options), model=model)


def wishes(params: SamplingParams = GREEDY) -> list[Wish]:
    return [Wish(f"r{index}", prompt, 8, params) for index, prompt in enumerate(PROMPTS)]


def on_cpu(architecture: str, params: SamplingParams) -> dict[str, Served]:
    runner = make_runner(architecture, "cpu")
    return {wish.req_id: serve_alone(runner, wish) for wish in wishes(params)}


def assert_served(got: dict[str, Served], wanted: dict[str, Served]) -> None:
    assert got.keys() == wanted.keys()
    for req_id, served in got.items():
        served.assert_equals(wanted[req_id], 2e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gpu_serves_what_a_cpu_serves(architecture: str) -> None:
    runner = make_runner(architecture, "cuda")
    assert runner.config.device.startswith("cuda")
    assert runner.config.cudagraph_mode == "FULL_AND_PIECEWISE"
    got = Driver(runner).run_random(wishes())
    assert_served(got, on_cpu(architecture, GREEDY))
    modes = {mode for mode, _ in runner.parts.dispatch.counts}
    assert CUDAGraphMode.FULL in modes
    assert CUDAGraphMode.PIECEWISE in modes


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_kind_of_sampling(name: str, depth: int) -> None:
    runner = make_runner("qwen3", "cuda", async_scheduling=depth > 1)
    assert_served(Driver(runner, depth, depth).run_random(wishes(PARAMS[name])), on_cpu("qwen3", PARAMS[name]))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_graphs_and_micro_batches(mode: str) -> None:
    runner = make_runner("qwen3", "cuda", **{"cudagraph_mode": "NONE"} | MODES[mode])
    assert_served(Driver(runner, 5).run_random(wishes()), on_cpu("qwen3", GREEDY))


def test_observed_steps_fall_back_to_the_plain_decoder() -> None:
    runner = make_runner("qwen3", "cuda")
    seen: list[torch.Size] = []
    with runner.observe("layers.1.mlp", lambda activation: seen.append(activation.tensor.shape)):
        got = Driver(runner, 2).run_random(wishes())
    assert_served(got, on_cpu("qwen3", GREEDY))
    assert seen


def test_half_precision_is_close_and_graphs_equal_eager_steps() -> None:
    tokens: dict[str, list[list[int]]] = {}
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        config = tiny_config("qwen3", head_dim=64, hidden_size=256, intermediate_size=512, vocab_size=4096)
        model = random_model(config, device="cuda", dtype=torch.bfloat16)
        options: dict[str, Any] = LIMITS | {"cudagraph_mode": mode}
        runner = build_runner(EngineConfig(**options), model=model)
        with ServingLoop(runner) as loop:
            params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
            handles = [loop.add(list(prompt), params) for prompt in PROMPTS]
            tokens[mode] = [list(handle.result(60).outputs[0].token_ids) for handle in handles]
        logits = model.compute_logits(torch.ones(3, 256, device="cuda", dtype=torch.bfloat16))
        exact = torch.ones(3, 256, dtype=torch.float64) @ model.weights.lm_head.double().cpu().t()
        error = (logits.double().cpu() - exact).norm() / exact.norm()
        assert error < 2e-2
    assert tokens["NONE"] == tokens["FULL_AND_PIECEWISE"]


def test_nothing_waits_for_the_device_in_steady_decode() -> None:
    runner = make_runner("qwen3", "cuda", async_scheduling=True, max_model_len=100, num_kv_blocks=120)
    driver = Driver(runner, depth=2)
    driver.add(*[Wish(f"r{index}", prompt, 60) for index, prompt in enumerate(PROMPTS)])
    for req_id, request in driver.requests.items():
        driver.step({req_id: len(request.wish.prompt)})
    counts = dict.fromkeys(driver.requests, 1)
    outputs = []
    for index in range(20):
        if index == 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            output = driver.output(counts)
            assert runner.execute_model(output) is None
            late = runner.sample_tokens()
        finally:
            if index == 19:
                torch.cuda.set_sync_debug_mode("default")
        outputs.append(driver.launched(output, late))
    driver.collect_all()
    assert all(len(request.outputs) >= 20 for request in driver.requests.values())


def test_shutdown_gives_the_memory_back() -> None:
    def held() -> int:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    before = held()
    runner = make_runner("qwen3", "cuda", num_kv_blocks=4000)
    assert runner.parts.graphs.describe().keys
    assert held() > before
    runner.shutdown()
    del runner
    assert held() <= before

"""A whole runner whose attention is planned for FlashInfer: every mode of graphs and micro-batches, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from driver import Driver, Served, Wish, serve_alone
from fake_flashinfer import Fake
from modes import LIMITS, MODES
from twostroke.engine.attention.chosen import ChosenBackend
from twostroke.engine.attention.flashinfer_buffers import AttentionLimits
from twostroke.engine.attention.flashinfer_library import AttentionKernel, FixedChoice, FlashInfer
from twostroke.engine.attention.flashinfer_paged import FlashInferBackend
from twostroke.engine.attention.paged_cpu import PagedCPUBackend
from twostroke.engine.backends import Kernels, kernels_for
from twostroke.engine.config import EngineConfig
from twostroke.engine.kv_cache import kv_cache_groups
from twostroke.engine.model_runner import build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.stages.attention import AttentionBackend

CUDA_CORES, FA2, TRITON = AttentionKernel.CUDA_CORES, AttentionKernel.FA2, AttentionKernel.TRITON
PROMPTS = ((3, 41, 7, 7, 0, 25, 13, 60, 2, 19, 33, 8, 54), (1,), (63, 5, 40, 11), (22, 9, 9, 9, 17, 3))
MODEL = tiny_config(head_dim=64, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the same on the GPU; the interpreter is for machines without one")
    monkeypatch.setattr("twostroke.engine.attention.flashinfer_library.DTYPES", (torch.float32,))


class ByParity:
    """Decode steps of odd sizes by one kernel, of even ones by the other."""

    def decode(self, num_reqs: int) -> AttentionKernel:
        return CUDA_CORES if num_reqs % 2 else TRITON

    def mixed(self) -> AttentionKernel:
        return FA2


def serve(fake: Fake, monkeypatch: pytest.MonkeyPatch, *, is_mixed: bool = False, **options: Any) -> dict[str, Served]:
    def kernels(model: Any, config: EngineConfig, device: Any) -> Kernels:
        assert not isinstance(config.max_model_len, str)
        limits = AttentionLimits(
            max_num_seqs=config.max_num_seqs,
            max_blocks=-(-config.max_model_len // config.block_size),
            dtype=torch.float32,
        )
        choice = ByParity() if is_mixed else FixedChoice(CUDA_CORES, FA2)
        attention: AttentionBackend = FlashInferBackend(
            FlashInfer(fake), model.spec, limits, device, lambda group: choice
        )
        if is_mixed:
            choices = dict.fromkeys(kv_cache_groups(model.spec, config.block_size), choice)
            attention = ChosenBackend(PagedCPUBackend(), attention, choices)
        return evolve(kernels_for(model, config, device), attention=attention)

    monkeypatch.setattr("twostroke.engine.assembly.kernels_for", kernels)
    runner = build_runner(EngineConfig(**LIMITS | options), model=random_model(MODEL))
    return Driver(runner, 3).run_random(wishes())


def wishes() -> list[Wish]:
    return [Wish(f"r{index}", prompt, 6) for index, prompt in enumerate(PROMPTS)]


def assert_served(got: dict[str, Served]) -> None:
    runner = build_runner(EngineConfig(**LIMITS), model=random_model(MODEL))
    wanted = {wish.req_id: serve_alone(runner, wish) for wish in wishes()}
    assert got.keys() == wanted.keys()
    for req_id, served in got.items():
        served.assert_equals(wanted[req_id], 1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_serves_what_a_request_gets_alone(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    fake = Fake()
    got = serve(fake, monkeypatch, **MODES[mode])
    monkeypatch.undo()
    assert_served(got)
    in_graphs = {wrapper.is_fixed for wrapper, _ in fake.plans}
    assert (True in in_graphs) == ("FULL" in MODES[mode].get("cudagraph_mode", "NONE"))


def test_backends_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    got = serve(fake, monkeypatch, is_mixed=True, **MODES["full_and_piecewise"])
    monkeypatch.undo()
    assert_served(got)
    assert not any(wrapper.is_fixed for wrapper, _ in fake.plans), "what graphs hold is the other backend's"
    assert any(plan["kind"] == "fa2" for _, plan in fake.plans)

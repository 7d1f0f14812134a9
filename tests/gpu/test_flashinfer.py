"""FlashInfer's kernels on a GPU, against a dense loop and Triton's: in graphs, behind a busy device, in a runner."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import TRITON as TRITON_KIT
from attention_cases import Case, Kit, World
from attrs import evolve
from modes import LIMITS
from twostroke.engine import ServingLoop
from twostroke.engine.attention.chosen import ChosenBackend
from twostroke.engine.attention.flashinfer_buffers import RING_DEPTH, AttentionLimits
from twostroke.engine.attention.flashinfer_library import AttentionKernel, FixedChoice, FlashInfer
from twostroke.engine.attention.flashinfer_paged import FlashInferBackend
from twostroke.engine.attention.triton_paged import TritonPagedBackend
from twostroke.engine.config import EngineConfig
from twostroke.engine.cuda.device import CudaDevice
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.stages.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

CHOICES = {
    "cuda_cores_fa2": FixedChoice(AttentionKernel.CUDA_CORES, AttentionKernel.FA2),
    "tensor_cores_fa3": FixedChoice(AttentionKernel.TENSOR_CORES, AttentionKernel.FA3),
}
PROMPTS = ((3, 41, 7, 7, 0, 25, 13, 60, 2, 19, 33, 8, 54), (1,), (63, 5, 40, 11), (22, 9, 9, 9, 17, 3, 50, 48, 2))
TOLERANCE = 2e-2


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    pytest.importorskip("flashinfer")
    yield
    gc.collect()


def case(requests: list[tuple[int, int]], **options: Any) -> Case:
    shape: dict[str, Any] = {
        "head_size": 128,
        "group_size": 2,
        "num_kv_heads": 8,
        "block_size": 16,
        "dtype": torch.bfloat16,
    }
    return Case(requests=requests, **shape | options)


def kit(choice: FixedChoice) -> Kit:
    library = FlashInfer.load()
    layer = case([(0, 1)]).layer
    for kernel in (choice.decode_kernel, choice.mixed_kernel):
        if not library.is_built(kernel, layer, torch.bfloat16):
            pytest.skip(f"{kernel} is not built, and compiling it takes minutes")

    def make(case: Case) -> FlashInferBackend:
        limits = AttentionLimits(max_num_seqs=128, max_blocks=256, dtype=torch.bfloat16)
        return FlashInferBackend(library, case.spec, limits, CudaDevice(), lambda _: choice)

    return Kit(torch.device("cuda"), make)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), wanted.float(), atol=TOLERANCE, rtol=TOLERANCE)


def assert_right(output: torch.Tensor, world: World) -> None:
    """As the dense loop says, and as Triton's kernels compute; padding is zeros, and no NaN of the pool is in it."""
    real = sum(count for _, count in world.case.requests)
    close(output[:real], world.expected())
    assert not output[real:].any()
    close(output, TRITON_KIT.outcome(World(world.case)))


BATCHES = {
    "one": [(700, 1)],
    "first_tokens": [(0, 1)] * 5,
    "decodes": [(13 * index, 1) for index in range(37)],
    "many": [(1 + 7 * index % 300, 1) for index in range(120)],
    "long_and_short": [(3000, 1), (2, 1), (15, 1), (16, 1)],
    "prompts": [(0, 300), (0, 1), (0, 16), (0, 129)],
    "chunks": [(512, 100), (16, 33), (0, 7)],
    "mixed": [*((40 * index, 1) for index in range(9)), (100, 64), (0, 200)],
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("in_graph", [False, True])
def test_any_batch(choice: str, batch: str, padding: int, in_graph: bool) -> None:
    made = kit(CHOICES[choice])
    for group_size in (1, 2, 4):
        world = World(case(BATCHES[batch], padded_reqs=padding, padded_tokens=padding, group_size=group_size))
        planned = made.planned(world, evolve(world.batch(), in_graph=in_graph))
        assert_right(made.run(planned, world), world)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_other_pages(choice: str, block_size: int) -> None:
    made = kit(CHOICES[choice])
    for requests in ([(31, 1), (100, 1)], [(31, 20), (0, 100)]):
        world = World(case(requests, block_size=block_size))
        assert_right(made.outcome(world), world)


REPLAYS: dict[str, list[list[tuple[int, int]]]] = {
    "decode": [[(9, 1), (700, 1), (2, 1)], [(17, 1)], [(3, 1), (40, 1), (500, 1), (90, 1)], [(2500, 1)] * 4],
    "mixed": [[(9, 12), (300, 1)], [(1, 1), (20, 1), (3, 6), (0, 40)], [(0, 48)]],
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", REPLAYS)
def test_a_graph_replayed_with_other_lengths(choice: str, kind: str) -> None:
    made = kit(CHOICES[choice])
    tokens = 4 if kind == "decode" else 48
    first = World(case([(0, 1)] * 4 if kind == "decode" else [(0, 12)] * 4))
    backend = made.make_backend(first.case)
    plan = backend.make_plan(first.case.group)
    other_plan = backend.make_plan(first.case.group)
    pool = torch.zeros(2, 800, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    query = torch.zeros(tokens, 16, 128, dtype=torch.bfloat16, device="cuda")
    made.planned(first, evolve(first.batch(), in_graph=True), plan)
    plan.run(query, None, None, pool, first.case.layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = plan.run(query, None, None, pool, first.case.layer)
    for requests in REPLAYS[kind] * 2:
        missing = tokens - sum(count for _, count in requests)
        world = World(case(requests, padded_reqs=4 - len(requests), padded_tokens=missing))
        wanted = TRITON_KIT.outcome(world)  # puts the keys in the world's pool
        other = World(case([(33, 1)] * 7))
        made.planned(other, evolve(other.batch(), in_graph=True), other_plan)  # of another graph, in the same memory
        made.planned(world, evolve(world.batch(), in_graph=True), plan)
        pool.fill_(torch.nan)
        pool[:, : world.kv_cache.shape[1]] = world.kv_cache.cuda()
        query.copy_(world.inputs()[0])
        output.fill_(torch.nan)
        graph.replay()
        close(output.cpu(), wanted)
        assert_right(output.cpu(), world)


@pytest.mark.parametrize("choice", CHOICES)
def test_plans_made_while_the_device_is_behind(choice: str) -> None:
    """Many steps are launched before the first has run: none may see the schedule of another."""
    made = kit(CHOICES[choice])
    worlds = [
        World(case([(50 * index + 7, 1)] * (index % 3 + 2) if index % 2 else [(11 * index, 9 + index), (0, 30)]))
        for index in range(4 * RING_DEPTH)
    ]
    backend = made.make_backend(worlds[0].case)
    plan = backend.make_plan(worlds[0].case.group)
    for world in worlds:
        made.planned(world, plan=plan)  # wrappers are made, kernels are loaded
    pools = [world.kv_cache.cuda() for world in worlds]
    inputs = [[tensor.cuda() for tensor in world.inputs()] for world in worlds]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    outputs: list[torch.Tensor] = []
    for world, pool, (query, key, value) in zip(worlds, pools, inputs, strict=True):
        made.planned(world, plan=plan)
        outputs.append(plan.run(query, key, value, pool, world.case.layer))
    for world, output in zip(worlds, outputs, strict=True):
        assert_right(output.cpu(), world)


@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_waits_for_the_device(choice: str) -> None:
    made = kit(CHOICES[choice])
    for requests, in_graph in (([(40, 1), (9, 1)], True), ([(40, 1), (9, 1)], False), ([(40, 5), (9, 1)], False)):
        world = World(case(requests))
        batch = world.batch()
        moved = evolve(
            batch,
            query_start_loc=batch.query_start_loc.cuda(),
            seq_lens=batch.seq_lens.cuda(),
            block_table=batch.block_table.cuda(),
            slot_mapping=batch.slot_mapping.cuda(),
            in_graph=in_graph,
        )
        query, key, value = (tensor.cuda() for tensor in world.inputs())
        pool, plan = world.kv_cache.cuda(), made.plan(world.case)
        outputs: list[torch.Tensor] = []
        for index in range(2 * RING_DEPTH):
            if index:
                torch.cuda.set_sync_debug_mode("error")
            try:
                plan.plan(moved)
                outputs.append(plan.run(query, key, value, pool, world.case.layer))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for output in outputs:
            assert_right(output.cpu(), world)


def make_runner(backend: str, **options: Any) -> ModelRunner:
    config = tiny_config("qwen3", head_dim=128, hidden_size=256, intermediate_size=512, vocab_size=4096)
    model = random_model(config, device="cuda", dtype=torch.bfloat16)
    limits: dict[str, Any] = {"max_model_len": 64, "num_kv_blocks": 60, "block_size": 16}
    return build_runner(EngineConfig(**LIMITS | limits | options, attention_backend=backend), model=model)


def greedy_tokens(runner: ModelRunner) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with ServingLoop(runner) as loop:
        handles = [loop.add(list(prompt), params) for prompt in PROMPTS]
        return [list(handle.result(60).outputs[0].token_ids) for handle in handles]


def attention_of(runner: ModelRunner) -> Any:
    """The backend that the runner's plans come from."""
    build_attn: Any = runner.stages["build_attn"]
    return build_attn._plans._backend


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_runner_serves_what_it_serves_with_triton(mode: str, async_scheduling: bool) -> None:
    options = {"cudagraph_mode": mode, "async_scheduling": async_scheduling}
    runner = make_runner("flashinfer", **options)
    assert isinstance(attention_of(runner), FlashInferBackend)
    tokens = greedy_tokens(runner)
    wanted = greedy_tokens(make_runner("triton", **options))
    assert tokens == wanted
    assert [len(part) for part in tokens] == [12] * len(PROMPTS)


def test_the_choice_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokens = greedy_tokens(make_runner("auto"))
    (path,) = (tmp_path / "twostroke").iterdir()
    content = path.read_text()
    (times,) = json.loads(content).values()
    built = [kernel for kernel in AttentionKernel if kernel in times["mixed"] or kernel in times["decode"]["1"]]
    assert AttentionKernel.TRITON in built
    runner = make_runner("auto")
    assert isinstance(attention_of(runner), ChosenBackend | TritonPagedBackend)
    assert path.read_text() == content
    assert greedy_tokens(runner) == tokens == greedy_tokens(make_runner("triton"))

"""The FlashInfer backend over a stand-in for the library: what is planned, from where, and what comes out."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import GPU_OR_CPU, Case, Kit, World, check
from attrs import evolve
from fake_flashinfer import Fake, modules
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_device import BufferRewritten, LazyDevice
from twostroke.engine.attention.flashinfer_buffers import (
    RING_DEPTH,
    AttentionLimits,
    HostLengths,
    StagingRing,
    workspace_bytes,
)
from twostroke.engine.attention.flashinfer_library import (
    AttentionKernel,
    FixedChoice,
    FlashInfer,
    FlashInferMissing,
    FlashInferUnsupported,
    default_choice,
)
from twostroke.engine.attention.flashinfer_paged import FlashInferBackend, FlashInferPlan
from twostroke.engine.backends import device_for
from twostroke.engine.config import EngineConfig, InvalidConfig
from twostroke.engine.kernels.pages import list_pages
from twostroke.stages.specs import AttentionLayerSpec, KVCacheGroupSpec

CUDA_CORES, TENSOR_CORES = AttentionKernel.CUDA_CORES, AttentionKernel.TENSOR_CORES
FA2, FA3 = AttentionKernel.FA2, AttentionKernel.FA3
CHOICES = [FixedChoice(CUDA_CORES, FA3), FixedChoice(TENSOR_CORES, FA2)]
GROUP = KVCacheGroupSpec(layers=(0,), block_size=4)
HALF = {"head_size": 64, "dtype": torch.float16}
without_gpu = pytest.mark.skipif(GPU_OR_CPU.type == "cuda", reason="the lazy device is a CPU")


def kit(fake: Fake, choice: FixedChoice) -> Kit:
    """A backend that has room for its case and a little more."""

    def make(case: Case) -> FlashInferBackend:
        limits = AttentionLimits(max_num_seqs=12, max_blocks=60, dtype=case.dtype)
        return FlashInferBackend(
            FlashInfer(fake), case.spec, limits, device_for(str(GPU_OR_CPU)), lambda _: evolve(choice)
        )

    return Kit(GPU_OR_CPU, make)


def in_graph(world: World) -> Any:
    return evolve(world.batch(), in_graph=True)


@settings(max_examples=12)
@given(
    requests=st.lists(st.tuples(st.integers(0, 30), st.one_of(st.just(1), st.integers(1, 9))), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.one_of(st.none(), st.integers(1, 20)),
    soft_cap=st.one_of(st.none(), st.just(3.0)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 4)),
    choice=st.sampled_from(CHOICES),
)
def test_any_batch_equals_the_dense_loop(requests: Any, padding: Any, choice: FixedChoice, **options: Any) -> None:
    case = Case(requests=requests, padded_reqs=padding[0], padded_tokens=padding[1], **options, **HALF)
    check(kit(Fake(), choice), case)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_plan_made_again_for_other_lengths(choice: FixedChoice) -> None:
    cases = [Case(requests=requests, **HALF) for requests in ([(5, 1), (30, 1)], [(0, 9), (6, 1)], [(6, 1), (9, 1)])]
    backend = kit(Fake(), choice)
    plan = backend.plan(cases[0])
    for case in (*cases, *cases):
        assert torch.equal(check(backend, case, plan), check(kit(Fake(), choice), case))


def test_keys_that_the_model_has_stored() -> None:
    for requests in ([(9, 1), (4, 1)], [(5, 6), (7, 1)]):
        world, backend = World(Case(requests=requests, **HALF)), kit(Fake(), CHOICES[0])
        wanted = backend.outcome(world)
        query, _, _ = world.inputs()
        assert torch.equal(backend.run(backend.planned(world), world, (query, None, None)), wanted)


def test_a_plan_first_made_in_inference_mode_serves_outside_of_it() -> None:
    world, backend = World(Case(requests=[(5, 2), (3, 1)], **HALF)), kit(Fake(), CHOICES[0])
    with torch.inference_mode():
        plan = backend.planned(world, in_graph(world))
    torch.testing.assert_close(
        backend.run(backend.planned(world, in_graph(world), plan), world).float(),
        world.expected(),
        atol=5e-3,
        rtol=5e-3,
    )


def test_what_a_padded_decode_is_planned_with() -> None:
    fake = Fake()
    case = Case(requests=[(6, 1), (0, 1), (7, 1)], padded_reqs=2, padded_tokens=2, window=5, **HALF)
    world, backend = World(case), kit(fake, CHOICES[0])
    backend.planned(world)
    plan = fake.plans[-1][1]
    assert plan["offsets"].tolist() == [0, 2, 3, 5, 5, 5]
    assert plan["last"].tolist() == [3, 1, 4, 0, 0]
    assert (plan["heads"], plan["page_size"], plan["window_left"]) == ((6, 2, 64), 4, 4)
    assert (plan["kind"], plan["q_data_type"], plan["sm_scale"]) == ("decode", torch.float16, case.layer.scale)
    wrapper = fake.plans[-1][0]
    assert wrapper.offsets.tolist() == [0, 2, 3, 5, 5, 5]
    assert wrapper.pages[:5].tolist() == [block for blocks in world.tables for block in blocks]


def test_what_a_padded_mixed_step_is_planned_with() -> None:
    fake = Fake()
    world = World(Case(requests=[(6, 3), (9, 1)], padded_reqs=1, padded_tokens=4, soft_cap=2.0, **HALF))
    kit(fake, CHOICES[0]).planned(world)
    plan = fake.plans[-1][1]
    assert plan["starts"].tolist() == [0, 3, 4, 4]
    assert plan["offsets"].tolist() == [0, 3, 6, 6]
    assert (plan["last"].tolist(), plan["seq_lens"].tolist()) == ([1, 2, 0], [9, 10, 0])
    assert (plan["kind"], plan["window_left"], plan["logits_soft_cap"], plan["most_queries"]) == ("fa3", -1, 2.0, 3)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
@pytest.mark.parametrize("page", [1, 4])
def test_pages_listed_on_the_device_are_those_the_host_counts(length: int, page: int) -> None:
    lens = torch.tensor([length, 9, 0, length], dtype=torch.int32)
    table = torch.arange(4 * 12, dtype=torch.int32).view(4, 12)
    offsets, pages, last = (torch.full((size,), -7, dtype=torch.int32, device=GPU_OR_CPU) for size in (6, 60, 5))
    list_pages(table.to(GPU_OR_CPU), lens.to(GPU_OR_CPU), page, offsets, pages, last)
    host = HostLengths.of(lens, page)
    assert offsets.tolist() == [*host.offsets.tolist(), -7]
    assert last.tolist() == [*host.last_page_len.tolist(), -7]
    counts = [-(-size // page) for size in lens.tolist()]
    wanted = [table[row, place].item() for row, count in enumerate(counts) for place in range(count)]
    assert pages.tolist() == wanted + [-7] * (60 - len(wanted))


def test_more_requests_than_the_kernel_counts_at_once() -> None:
    lens = torch.arange(600, dtype=torch.int32) % 7
    offsets, pages, last = (torch.zeros(size, dtype=torch.int32, device=GPU_OR_CPU) for size in (601, 3000, 600))
    table = torch.arange(600, dtype=torch.int32)[:, None].expand(600, 3).contiguous()
    list_pages(table.to(GPU_OR_CPU), lens.to(GPU_OR_CPU), 2, offsets, pages, last)
    host = HostLengths.of(lens, 2)
    assert np.array_equal(offsets.cpu().numpy(), host.offsets)
    owners = np.repeat(np.arange(600), np.diff(host.offsets))
    assert np.array_equal(pages[: len(owners)].cpu().numpy(), owners)


@pytest.mark.parametrize(("choice", "uses_tensor_cores"), [(CHOICES[0], False), (CHOICES[1], True)])
def test_a_decode_graph_replayed_with_other_lengths(choice: FixedChoice, uses_tensor_cores: bool) -> None:
    fake = Fake()
    backend = kit(fake, choice)
    captured = World(Case(requests=[(0, 1)] * 4, **HALF))
    plan = backend.plan(captured.case)
    backend.run(backend.planned(captured, in_graph(captured), plan), captured)
    wrapper, (_, _, out) = fake.runs[-1]
    assert (wrapper.is_fixed, wrapper.use_tensor_cores) == (True, uses_tensor_cores)
    for requests, padding in (([(9, 1), (30, 1), (2, 1)], 1), ([(17, 1)], 3), ([(3, 1), (4, 1), (5, 1), (90, 1)], 0)):
        world = World(Case(requests=requests, padded_reqs=padding, padded_tokens=padding, **HALF))
        wanted = kit(Fake(), choice).outcome(world)  # stores the keys, too
        other = World(Case(requests=[(3, 1)] * 2, **HALF))
        backend.planned(other, in_graph(other))  # a graph of another size shares the memory
        backend.planned(world, in_graph(world), plan)
        out.fill_(torch.nan)
        query, _, _ = (tensor.to(GPU_OR_CPU) for tensor in world.inputs())
        pool = world.kv_cache.to(GPU_OR_CPU)
        wrapper.run(query, (pool[0], pool[1]), out=out)
        torch.testing.assert_close(out.cpu(), wanted, atol=2e-3, rtol=2e-3)


def test_a_mixed_graph_replayed_with_other_lengths() -> None:
    fake = Fake()
    backend = kit(fake, CHOICES[0])
    captured = World(Case(requests=[(0, 3), (0, 3), (0, 2)], **HALF))
    plan = backend.plan(captured.case)
    backend.run(backend.planned(captured, in_graph(captured), plan), captured)
    wrapper, _ = fake.runs[-1]
    assert (wrapper.is_fixed, wrapper.backend, wrapper.most_rows) == (True, "fa2", 8)
    for requests, padding in (([(9, 5), (30, 1)], (1, 2)), ([(1, 1), (20, 1), (3, 6)], (0, 0))):
        world = World(Case(requests=requests, padded_reqs=padding[0], padded_tokens=padding[1], **HALF))
        wanted = kit(Fake(), CHOICES[0]).outcome(world)
        assert torch.equal(backend.run(backend.planned(world, in_graph(world), plan), world), wanted)
    assert fake.runs[-1][0] is wrapper


def test_graphs_share_memory_and_other_plans_have_their_own() -> None:
    fake = Fake()
    backend = kit(fake, CHOICES[0]).make_backend(case := Case(requests=[(4, 1)] * 2, **HALF))
    worlds = [World(case), World(evolve(case, requests=[(4, 1)] * 3))]
    addresses: dict[bool, list[int]] = {True: [], False: []}
    for graph in addresses:
        for world in worlds:
            moved = kit(fake, CHOICES[0])
            moved.planned(world, evolve(world.batch(), in_graph=graph), backend.make_plan(GROUP))
            wrapper = fake.plans[-1][0]
            addresses[graph] += [wrapper._int_workspace_buffer.data_ptr(), wrapper.pages.data_ptr()]
    assert addresses[True][:2] == addresses[True][2:]
    assert len(set(addresses[False])) == 4


def test_a_decode_step_without_a_graph_takes_the_mixed_kernel_instead_of_tensor_cores() -> None:
    fake = Fake()
    check(kit(fake, CHOICES[1]), Case(requests=[(4, 1), (9, 1)], **HALF))
    assert {plan["kind"] for _, plan in fake.plans} == {"fa2"}


def plan_on(device: LazyDevice) -> FlashInferPlan:
    case = Case(requests=[(0, 1)], **HALF)
    limits = AttentionLimits(max_num_seqs=4, max_blocks=20, dtype=torch.float16)
    choice = CHOICES[0]
    backend = FlashInferBackend(FlashInfer(Fake(device)), case.spec, limits, device, lambda _: choice)
    return backend.make_plan(GROUP)


def make_plans(device: LazyDevice) -> None:
    plan = plan_on(device)
    for step in range(3 * RING_DEPTH):
        for requests in ([(step, 1)] * 4, [(0, step + 2)]):
            world = World(Case(requests=requests, **HALF))
            plan.plan(evolve(world.batch(), in_graph=True))
    device.fence().wait()


@without_gpu
def test_pinned_memory_is_not_rewritten_while_a_copy_may_read_it() -> None:
    device = LazyDevice()
    make_plans(device)
    assert device.num_waits > RING_DEPTH
    assert not device.uploads


@without_gpu
def test_the_double_notices_a_missing_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagingRing, "launched", lambda self: None)
    with pytest.raises(BufferRewritten):
        make_plans(LazyDevice())


@without_gpu
def test_a_ring_waits_only_for_the_slot_it_gives() -> None:
    device = LazyDevice()
    ring = StagingRing(4, device)
    slots = []
    for _ in range(RING_DEPTH):
        slots.append(ring.wait_for_slot())
        ring.launched()
    assert (device.num_waits, len(set(map(id, slots)))) == (0, RING_DEPTH)
    assert ring.wait_for_slot() is slots[0]
    assert device.num_waits == 1


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(FlashInferMissing, match=r"pip install 'twostroke\[cuda\]'") as caught:
        FlashInfer.load()
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "float16 and bfloat16, not for torch.float32"),
        ({"head_size": 80}, "heads of 64, 128, 256"),
    ],
)
def test_layers_that_it_does_not_serve(options: dict[str, Any], message: str) -> None:
    case = Case(requests=[(0, 1)], **HALF | options)
    with pytest.raises(FlashInferUnsupported, match=f"{message}; use attention_backend='triton'"):
        kit(Fake(), CHOICES[0]).plan(case)


def test_a_kernel_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*args: Any, **options: Any) -> None:
        raise RuntimeError("ninja is not there")

    monkeypatch.setattr("fake_flashinfer.Prefill.plan", plan)
    world = World(Case(requests=[(0, 5)], **HALF))
    with pytest.raises(FlashInferUnsupported, match=r"flashinfer-fa3 cannot be made ready \(ninja is not there\)"):
        kit(Fake(), CHOICES[0]).planned(world)


@pytest.mark.parametrize(
    ("heads", "built", "capability", "decode", "mixed"),
    [
        (2, {"fa2", "fa3", "decode"}, (9, 0), CUDA_CORES, FA3),
        (4, {"fa2", "fa3", "decode"}, (9, 0), TENSOR_CORES, FA3),
        (1, {"fa2", "decode"}, (9, 0), CUDA_CORES, FA2),
        (5, {"fa2", "fa3"}, (8, 0), TENSOR_CORES, FA2),
    ],
)
def test_kernels_without_a_measurement(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    built: set[str],
    capability: tuple[int, int],
    decode: AttentionKernel,
    mixed: AttentionKernel,
) -> None:
    for name, module in modules(built).items():
        monkeypatch.setitem(sys.modules, name, module)
    layer = AttentionLayerSpec(num_heads=heads, num_kv_heads=1, head_size=128, scale=1.0)
    library = FlashInfer.load()
    assert default_choice(library, [layer], torch.bfloat16, capability) == FixedChoice(decode, mixed)
    assert not FlashInfer(Fake()).is_built(FA2, layer, torch.bfloat16)


def test_the_workspace_holds_what_a_decode_graph_splits() -> None:
    layer = AttentionLayerSpec(num_heads=32, num_kv_heads=8, head_size=128, scale=1.0)
    limits = AttentionLimits(max_num_seqs=256, max_blocks=1, dtype=torch.bfloat16)
    tiles = 256 * 4 // 16 + 255
    assert workspace_bytes(layer, limits, 132) >= 32 * tiles * 16 * 129 * 4
    assert workspace_bytes(layer, limits, 132) < 2**27


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_cpu_has_a_backend_of_its_own(name: str) -> None:
    spec = Case(requests=[(0, 1)]).spec
    assert EngineConfig(num_kv_blocks=9).resolve(spec).attention_backend == "auto"
    with pytest.raises(
        InvalidConfig, match=f"attention_backend '{name}' has kernels for a GPU only; use 'auto' on cpu"
    ):
        EngineConfig(attention_backend=name, num_kv_blocks=9).resolve(spec)
    on_gpu = EngineConfig(attention_backend=name, num_kv_blocks=9).resolve(spec, device=torch.device("cuda:0"))
    assert on_gpu.attention_backend == name
    with pytest.raises(InvalidConfig, match="attention_backend 'fa4' is not one of auto, triton, flashinfer"):
        EngineConfig(attention_backend="fa4").resolve(spec)

"""Cases for attention backends: requests over a pool full of NaN, what a dense loop makes of them, and the backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import evolve, frozen
from twostroke.engine.attention.paged_cpu import PagedCPUBackend
from twostroke.engine.attention.triton_paged import TritonPagedBackend
from twostroke.engine.backends import PDL_CAPABILITY
from twostroke.engine.native.attention import NativeCPUBackend
from twostroke.engine.native.library import load_native
from twostroke.stages.attention import AttentionBackend, AttentionBatch, AttentionPlan
from twostroke.stages.specs import NULL_BLOCK, PAD_SLOT, AttentionLayerSpec, KVCacheGroupSpec, ModelSpec

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@frozen(kw_only=True, eq=False)
class Case:
    """Requests as (computed tokens, scheduled tokens), and the padding after them."""

    requests: Sequence[tuple[int, int]]
    block_size: int = 4
    num_kv_heads: int = 2
    group_size: int = 3
    head_size: int = 8
    window: int | None = None
    soft_cap: float | None = None
    padded_reqs: int = 0
    padded_tokens: int = 0
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    seed: int = 0
    spare_blocks: int = 3

    @property
    def layer(self) -> AttentionLayerSpec:
        return AttentionLayerSpec(
            num_heads=self.num_kv_heads * self.group_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=1.3 / math.sqrt(self.head_size),
            sliding_window=self.window,
            soft_cap=self.soft_cap,
        )

    @property
    def spec(self) -> ModelSpec:
        """A model of this one layer."""
        return ModelSpec(
            architecture="", vocab_size=1, hidden_size=1, max_position=2**20, attention_layers=(self.layer,)
        )

    @property
    def group(self) -> KVCacheGroupSpec:
        """The group of the one layer."""
        return KVCacheGroupSpec(layers=(0,), block_size=self.block_size)


class World:
    """Tensors of a case: a pool that is NaN but for the history of the requests, shuffled block tables, new tokens.

    They lie on the CPU; a :class:`Kit` moves them to where its backend computes, and the pool back.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        size, lens = case.block_size, [computed + scheduled for computed, scheduled in case.requests]
        needed = [-(-length // size) for length in lens]
        num_blocks = 1 + sum(needed) + case.spare_blocks
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        self.tables = [blocks.tolist() for blocks in order[: sum(needed)].split(needed)]
        heads, head_size = case.num_kv_heads, case.head_size
        self.keys = [randn(length, heads, head_size) for length in lens]
        self.values = [randn(length, heads, head_size) for length in lens]
        self.queries = [randn(scheduled, heads * case.group_size, head_size) for _, scheduled in case.requests]
        cache_dtype = case.cache_dtype or case.dtype
        self.kv_cache = torch.full((2, num_blocks, size, heads, head_size), torch.nan, dtype=cache_dtype)
        for index, (computed, _) in enumerate(case.requests):
            slots = self.slots(index)[:computed]
            self.kv_cache[0].view(-1, heads, head_size)[slots] = self.keys[index][:computed].to(cache_dtype)
            self.kv_cache[1].view(-1, heads, head_size)[slots] = self.values[index][:computed].to(cache_dtype)

    def slots(self, index: int) -> torch.Tensor:
        """Slots of all tokens of a request."""
        positions = torch.arange(len(self.keys[index]))
        blocks = torch.tensor(self.tables[index])[positions // self.case.block_size]
        return blocks * self.case.block_size + positions % self.case.block_size

    def batch(self) -> AttentionBatch:
        """What a step over all requests is planned with."""
        case = self.case
        scheduled = [count for _, count in case.requests]
        num_tokens, num_reqs = sum(scheduled), len(scheduled) + case.padded_reqs
        offsets = torch.full((num_reqs + 1,), num_tokens, dtype=torch.int32)
        offsets[: len(scheduled) + 1] = torch.from_numpy(np.cumsum([0, *scheduled]))
        seq_lens = torch.zeros(num_reqs, dtype=torch.int32)
        seq_lens[: len(scheduled)] = torch.tensor([sum(request) for request in case.requests])
        width = max(len(blocks) for blocks in self.tables) + 2
        block_table = torch.full((num_reqs, width), NULL_BLOCK, dtype=torch.int32)
        for index, blocks in enumerate(self.tables):
            block_table[index, : len(blocks)] = torch.tensor(blocks)
        new = [self.slots(index)[computed:] for index, (computed, _) in enumerate(case.requests)]
        return AttentionBatch(
            num_reqs=num_reqs,
            num_tokens=num_tokens + case.padded_tokens,
            max_query_len=max(scheduled),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=offsets,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=torch.cat([*new, torch.full((case.padded_tokens,), PAD_SLOT)]),
            query_start_loc_host=offsets,
            seq_lens_host=seq_lens,
        )

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of all tokens; padded tokens come in as NaN."""
        computed = [computed for computed, _ in self.case.requests]
        return (
            self._padded(self.queries),
            self._padded([keys[count:] for keys, count in zip(self.keys, computed, strict=True)]),
            self._padded([values[count:] for values, count in zip(self.values, computed, strict=True)]),
        )

    def _padded(self, parts: list[torch.Tensor]) -> torch.Tensor:
        padding = torch.full((self.case.padded_tokens, *parts[0].shape[1:]), torch.nan, dtype=self.case.dtype)
        return torch.cat([*parts, padding])

    def expected(self) -> torch.Tensor:
        """Dense attention, one request at a time."""
        return torch.cat([self._dense(index) for index in range(len(self.case.requests))])

    def _dense(self, index: int) -> torch.Tensor:
        case, layer = self.case, self.case.layer
        computed, scheduled = case.requests[index]
        cache_dtype = case.cache_dtype or case.dtype
        key = self.keys[index].to(cache_dtype).float().repeat_interleave(case.group_size, 1)
        value = self.values[index].to(cache_dtype).float().repeat_interleave(case.group_size, 1)
        scores = torch.einsum("qhd,khd->hqk", self.queries[index].float(), key) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        query_positions = torch.arange(computed, computed + scheduled)[:, None]
        key_positions = torch.arange(computed + scheduled)
        hidden = key_positions > query_positions
        if layer.sliding_window is not None:
            hidden |= key_positions <= query_positions - layer.sliding_window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


@frozen(eq=False)
class Kit:
    """A backend under test and where it computes."""

    device: torch.device
    make_backend: Callable[[Case], AttentionBackend]

    def plan(self, case: Case) -> AttentionPlan:
        """An empty plan for cases with the layer and the block size of this one."""
        return self.make_backend(case).make_plan(KVCacheGroupSpec(layers=(0,), block_size=case.block_size))

    def planned(self, world: World, batch: AttentionBatch | None = None, plan: AttentionPlan | None = None):
        """``plan``, or a new one, that has taken in the batch of a world, or another one, with its tensors moved."""
        batch = batch or world.batch()
        plan = plan or self.plan(world.case)
        plan.plan(
            evolve(
                batch,
                query_start_loc=batch.query_start_loc_host.to(self.device),
                seq_lens=batch.seq_lens_host.to(self.device),
                block_table=batch.block_table.to(self.device),
                slot_mapping=batch.slot_mapping.to(self.device),
            )
        )
        return plan

    def run(self, plan: AttentionPlan, world: World, inputs: Sequence[torch.Tensor | None] | None = None):
        """The output, on the CPU, for the inputs of a world or for others; the world's pool is written."""
        query, key, value = (None if tensor is None else tensor.to(self.device) for tensor in inputs or world.inputs())
        assert query is not None
        pool = world.kv_cache.to(self.device)
        output = plan.run(query, key, value, pool, world.case.layer)
        if pool is not world.kv_cache:
            world.kv_cache.copy_(pool)
        return output.cpu()

    def outcome(self, world: World) -> torch.Tensor:
        """The output of a world under a plan of its own."""
        return self.run(self.planned(world), world)


def check(kit: Kit, case: Case, plan: AttentionPlan | None = None) -> torch.Tensor:
    """Plan and run a case; compare output and pool with what they must be."""
    world = World(case)
    batch = world.batch()
    before = world.kv_cache.clone()
    output = kit.run(kit.planned(world, batch, plan), world)
    real = sum(count for _, count in case.requests)
    tolerance = max(TOLERANCE[dtype] for dtype in (case.dtype, case.cache_dtype or case.dtype))
    torch.testing.assert_close(output[:real].float(), world.expected(), atol=tolerance, rtol=tolerance)
    assert not output[real:].any()
    written = torch.zeros(before[0].shape[:2], dtype=torch.bool)
    written.view(-1)[batch.slot_mapping[:real]] = True
    assert torch.equal(world.kv_cache[:, ~written].nan_to_num(7), before[:, ~written].nan_to_num(7))
    assert not world.kv_cache[:, written].isnan().any()
    return output


MAX_REQS = 16
"""Requests of a case, padding included, that every backend has room for."""

CPU = torch.device("cpu")
GPU_OR_CPU = torch.device("cuda") if torch.cuda.is_available() else CPU


def _triton(case: Case) -> AttentionBackend:
    is_cuda = GPU_OR_CPU.type == "cuda"
    pdl = is_cuda and torch.cuda.get_device_capability(GPU_OR_CPU) >= PDL_CAPABILITY
    return TritonPagedBackend(case.spec, MAX_REQS, GPU_OR_CPU, pdl=pdl)


def _native_or_torch() -> AttentionBackend:
    """On machines where the native kernels can't be had, what a runner takes instead."""
    library = load_native()
    return PagedCPUBackend() if library is None else NativeCPUBackend(library)


PAGED_CPU = Kit(CPU, lambda case: PagedCPUBackend())
NATIVE_CPU = Kit(CPU, lambda case: _native_or_torch())
TRITON = Kit(GPU_OR_CPU, _triton)
KITS = {"paged_cpu": PAGED_CPU, "native_cpu": NATIVE_CPU, "triton": TRITON}
"""On a machine with a GPU the Triton backend computes there, elsewhere under Triton's interpreter."""

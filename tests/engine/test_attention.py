"""Paged attention on the CPU against a dense loop: any lengths, layouts and padding, over a pool full of NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from twostroke.engine.attention.paged_cpu import MAX_SCORES, PagedCPUBackend, PagedCPUPlan
from twostroke.engine.attention.tiles import MAX_TILE_KEYS, Tiling, build_tiles
from twostroke.stages.attention import AttentionBatch
from twostroke.stages.specs import NULL_BLOCK, PAD_SLOT, AttentionLayerSpec, KVCacheGroupSpec

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


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

    def plan(self) -> PagedCPUPlan:
        return PagedCPUBackend().make_plan(KVCacheGroupSpec(layers=(0,), block_size=self.block_size))


class World:
    """Tensors of a case: a pool that is NaN but for the history of the requests, shuffled block tables, new tokens."""

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

    def run(self, plan: PagedCPUPlan) -> torch.Tensor:
        """The output of all tokens; padded tokens come in as NaN."""
        computed = [computed for computed, _ in self.case.requests]
        return plan.run(
            self._padded(self.queries),
            self._padded([keys[count:] for keys, count in zip(self.keys, computed, strict=True)]),
            self._padded([values[count:] for values, count in zip(self.values, computed, strict=True)]),
            self.kv_cache,
            self.case.layer,
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


def check(case: Case, plan: PagedCPUPlan | None = None) -> torch.Tensor:
    """Plan and run a case; compare output and pool with what they must be."""
    world, plan = World(case), plan or case.plan()
    batch = world.batch()
    before = world.kv_cache.clone()
    plan.plan(batch)
    output = world.run(plan)
    real = sum(count for _, count in case.requests)
    tolerance = TOLERANCE[torch.bfloat16 if torch.bfloat16 in (case.dtype, case.cache_dtype) else torch.float32]
    torch.testing.assert_close(output[:real].float(), world.expected(), atol=tolerance, rtol=tolerance)
    assert not output[real:].any()
    written = torch.zeros(before[0].shape[:2], dtype=torch.bool)
    written.view(-1)[batch.slot_mapping[:real]] = True
    assert torch.equal(world.kv_cache[:, ~written].nan_to_num(7), before[:, ~written].nan_to_num(7))
    assert not world.kv_cache[:, written].isnan().any()
    return output


CASES = st.builds(
    Case,
    requests=st.lists(
        st.tuples(st.one_of(st.just(0), st.integers(0, 40)), st.one_of(st.just(1), st.integers(1, 12))),
        min_size=1,
        max_size=8,
    ),
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 20)),
    soft_cap=st.one_of(st.none(), st.sampled_from([1.5, 30.0])),
    padded_reqs=st.integers(0, 3),
    padded_tokens=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)


@given(CASES)
def test_any_batch_equals_the_dense_loop(case: Case) -> None:
    check(case)


@given(CASES, st.sampled_from([torch.float32, torch.bfloat16]))
def test_bfloat16_caches(case: Case, dtype: torch.dtype) -> None:
    check(evolve(case, dtype=dtype, cache_dtype=torch.bfloat16))


@given(st.lists(CASES, min_size=2, max_size=3))
def test_a_plan_made_again_in_place_equals_a_fresh_one(cases: list[Case]) -> None:
    plan = evolve(cases[0], block_size=4).plan()
    for case in cases:
        case = evolve(case, block_size=4)
        assert torch.equal(check(case, plan), check(case))


@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_prefill_decode_and_mixed(window: int | None, soft_cap: float | None) -> None:
    decodes = [(20 + 7 * index, 1) for index in range(9)]
    for requests in ([(0, 33)], [(17, 16)], decodes, [*decodes, (0, 30), (12, 5), (0, 1)]):
        check(Case(requests=requests, window=window, soft_cap=soft_cap, padded_reqs=2, padded_tokens=3))


def test_solo_equals_batch() -> None:
    requests = [(31, 1), (0, 9), (5, 4), (77, 1), (12, 1)]
    together = World(Case(requests=requests, padded_tokens=2))
    plan = together.case.plan()
    plan.plan(together.batch())
    parts = together.run(plan)[:-2].split([count for _, count in requests])
    for index, (request, part) in enumerate(zip(requests, parts, strict=True)):
        alone = World(Case(requests=[request]))
        for name in ("keys", "values", "queries"):
            getattr(alone, name)[0] = getattr(together, name)[index]
        computed, slots = request[0], alone.slots(0)[: request[0]]
        alone.kv_cache[0].flatten(0, 1)[slots] = alone.keys[0][:computed]
        alone.kv_cache[1].flatten(0, 1)[slots] = alone.values[0][:computed]
        plan = alone.case.plan()
        plan.plan(alone.batch())
        torch.testing.assert_close(alone.run(plan), part, atol=1e-5, rtol=1e-5)


def test_K3_layers_of_one_group_keep_their_own_window() -> None:
    world = World(Case(requests=[(9, 1), (0, 10)]))
    plan = world.case.plan()
    plan.plan(world.batch())
    for window in (4, None, 4, 2):
        world.case = evolve(world.case, window=window)
        torch.testing.assert_close(world.run(plan), world.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_K6_a_recycled_block_full_of_nan_does_no_harm(soft_cap: float | None) -> None:
    """5 tokens in blocks of 4: three stale places follow the last key, and the null block is NaN too."""
    check(Case(requests=[(0, 5)], soft_cap=soft_cap))
    check(Case(requests=[(4, 1), (20, 1), (2, 3)], soft_cap=soft_cap, padded_reqs=1, padded_tokens=1))


def test_K8_the_plan_follows_a_request_over_a_block_edge() -> None:
    plan = Case(requests=[(7, 1)]).plan()
    for computed in (7, 8, 9):
        check(Case(requests=[(computed, 1)]), plan)


def test_G3_padding_leaves_the_last_slot_alone() -> None:
    world = World(Case(requests=[(4, 1), (5, 1)], padded_tokens=2, padded_reqs=2, spare_blocks=0))
    last = world.kv_cache[:, -1, -1]
    last.fill_(42.0)
    plan = world.case.plan()
    plan.plan(world.batch())
    world.run(plan)
    assert (last == 42.0).all()


def test_G4_a_request_of_length_zero_gives_zero_rows_even_where_it_has_tokens() -> None:
    world = World(Case(requests=[(3, 1), (6, 2)], padded_reqs=2, padded_tokens=2))
    batch = world.batch()
    batch.query_start_loc_host[:] = torch.tensor([0, 1, 3, 4, 5])
    plan = world.case.plan()
    plan.plan(batch)
    output = world.run(plan)
    torch.testing.assert_close(output[:3], world.expected(), atol=2e-5, rtol=2e-5)
    assert not output[3:].any()


def test_a_batch_of_padding_only_gives_zeros() -> None:
    world = World(Case(requests=[(3, 1)], padded_tokens=1))
    batch = world.batch()
    batch.seq_lens_host.zero_()
    batch.slot_mapping.fill_(PAD_SLOT)
    plan = world.case.plan()
    plan.plan(batch)
    before = world.kv_cache.clone()
    assert not world.run(plan).any()
    assert torch.equal(world.kv_cache.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("window", [None, 4])
def test_B3_a_request_cut_by_a_micro_batch_border(window: int | None) -> None:
    """13 tokens of two requests, cut at 6: the second is in both halves, each with offsets and a length of its own."""
    world = World(Case(requests=[(2, 3), (4, 10)], window=window))
    batch, expected = world.batch(), world.expected()
    key = torch.cat([world.keys[0][2:], world.keys[1][4:]])
    value = torch.cat([world.values[0][2:], world.values[1][4:]])
    query = torch.cat(world.queries)
    for tokens, offsets, seq_lens, requests in (
        (slice(0, 6), [0, 3, 6], [5, 7], slice(0, 2)),
        (slice(6, 13), [0, 7], [14], slice(1, 2)),
    ):
        host = [torch.tensor(values, dtype=torch.int32) for values in (offsets, seq_lens)]
        half = AttentionBatch(
            num_reqs=len(seq_lens),
            num_tokens=tokens.stop - tokens.start,
            max_query_len=7,
            max_seq_len=max(seq_lens),
            query_start_loc=host[0],
            seq_lens=host[1],
            block_table=batch.block_table[requests],
            slot_mapping=batch.slot_mapping[tokens],
            query_start_loc_host=host[0],
            seq_lens_host=host[1],
        )
        plan = world.case.plan()
        plan.plan(half)
        output = plan.run(query[tokens], key[tokens], value[tokens], world.kv_cache, world.case.layer)
        torch.testing.assert_close(output, expected[tokens], atol=2e-5, rtol=2e-5)


def test_capped_attention_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(requests=[(3, 17), (0, 17), (0, 20)], soft_cap=3.0)
    assert MAX_SCORES > 20 * 20 * 6
    whole = check(case)
    monkeypatch.setattr("twostroke.engine.attention.paged_cpu.MAX_SCORES", 6 * 20 * 3)
    torch.testing.assert_close(check(case), whole, atol=1e-6, rtol=1e-6)


def test_strided_inputs() -> None:
    """Queries, keys and values as slices of one projection, as models make them."""
    world = World(Case(requests=[(6, 1), (3, 4), (9, 1)]))
    expected, shape = world.expected(), (6, 6 + 2 + 2, 8)
    fused = torch.empty(shape)
    fused[:, :6] = torch.cat(world.queries)
    fused[:, 6:8] = torch.cat([world.keys[0][6:], world.keys[1][3:], world.keys[2][9:]])
    fused[:, 8:] = torch.cat([world.values[0][6:], world.values[1][3:], world.values[2][9:]])
    plan = world.case.plan()
    plan.plan(world.batch())
    output = plan.run(fused[:, :6], fused[:, 6:8], fused[:, 8:], world.kv_cache, world.case.layer)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def test_scratch_made_in_inference_mode_serves_outside_of_it() -> None:
    case = Case(requests=[(6, 1), (3, 4)])
    plan = case.plan()
    with torch.inference_mode():
        check(case, plan)
    check(case, plan)


# Tiles


def test_decodes_of_like_length_share_a_tile() -> None:
    batch = World(Case(requests=[(123 + index % 7, 1) for index in range(32)], num_kv_heads=1)).batch()
    (tile,) = build_tiles(batch, 4, None)
    assert (tile.num_reqs, tile.num_queries, tile.num_keys) == (32, 1, 130)
    assert tile.tokens == slice(0, 32)
    assert build_tiles(batch, 4, window=8)[0].mask is None


def test_tiles_of_uneven_decodes_hold_little_padding() -> None:
    lens = np.random.default_rng(0).integers(10, 1000, 64)
    world = World(Case(requests=[(int(length), 1) for length in lens], head_size=1, num_kv_heads=1, group_size=1))
    tiles = build_tiles(world.batch(), 4, None)
    assert len(tiles) < 32
    assert sum(tile.num_reqs * tile.num_keys for tile in tiles) < 1.3 * (lens + 1).sum()
    assert all(tile.num_reqs * tile.num_keys <= MAX_TILE_KEYS for tile in tiles)


def test_K7_tiles_do_not_depend_on_the_order_of_requests() -> None:
    requests = [(9, 4), (30, 1), (0, 7), (21, 1), (3, 4)]
    forward, backward = Case(requests=requests), Case(requests=requests[::-1])
    shapes = [
        sorted((tile.num_reqs, tile.num_queries, tile.num_keys) for tile in build_tiles(World(case).batch(), 4, None))
        for case in (forward, backward)
    ]
    assert shapes[0] == shapes[1]
    check(forward)
    check(backward)


def test_a_first_prompt_needs_no_mask() -> None:
    (tile,) = build_tiles(World(Case(requests=[(0, 9)])).batch(), 4, None)
    assert tile.is_causal
    assert tile.mask is None


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("request_sizes", [(30, 1), (30, 7), (0, 19)])
def test_keys_in_adjacent_slots_are_not_copied(request_sizes: tuple[int, int], window: int | None) -> None:
    case = Case(requests=[request_sizes], block_size=64, window=window)  # all in one block
    world = World(case)
    (tile,) = build_tiles(world.batch(), 64, window)
    assert isinstance(tile.slots, slice)
    assert tile.slots.stop - tile.slots.start == tile.num_keys
    check(case)


def test_keys_of_adjacent_blocks_are_adjacent() -> None:
    world = World(Case(requests=[(10, 1)]))
    world.tables[0] = [1, 2, 3]
    world.kv_cache.fill_(torch.nan)
    for pool, history in zip(world.kv_cache, (world.keys[0], world.values[0]), strict=True):
        pool.flatten(0, 1)[world.slots(0)[:10]] = history[:10]
    (tile,) = build_tiles(world.batch(), 4, None)
    assert tile.slots == slice(4, 15)
    plan = world.case.plan()
    plan.plan(world.batch())
    torch.testing.assert_close(world.run(plan), world.expected(), atol=2e-5, rtol=2e-5)


def test_decodes_of_scattered_lengths_go_back_to_their_places() -> None:
    requests = [(length, 1) for length in (600, 3, 900, 5, 610, 4)]
    batch = World(Case(requests=requests)).batch()
    tiling = Tiling.of(build_tiles(batch, 4, None))
    assert tiling.order is not None
    assert sorted(tiling.order.tolist()) == list(range(6))
    assert [part.stop - part.start for part in tiling.ranges] == [tile.num_reqs for tile in tiling.tiles]
    check(Case(requests=requests, padded_reqs=2, padded_tokens=3))
    check(Case(requests=[*requests, (0, 40), (7, 2)], padded_tokens=1))


def test_tiles_in_order_need_no_copy_of_the_queries() -> None:
    tiling = Tiling.of(build_tiles(World(Case(requests=[(3, 1), (4, 1), (0, 40)])).batch(), 4, None))
    assert tiling.order is None
    assert tiling.ranges == (slice(0, 2), slice(2, 42))

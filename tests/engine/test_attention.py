"""Paged attention against a dense loop: any lengths, layouts and padding, over a pool full of NaN, in every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import KITS, PAGED_CPU, TRITON, Case, Kit, World, check
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from twostroke.engine.attention.paged_cpu import MAX_SCORES
from twostroke.engine.attention.tiles import MAX_TILE_KEYS, Tiling, build_tiles
from twostroke.stages.attention import AttentionBatch
from twostroke.stages.specs import PAD_SLOT

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


BFLOAT16_QUERY = torch.float32 if TRITON.device.type == "cpu" else torch.bfloat16
"""Triton's interpreter takes the bits of bfloat16 for integers in a dot."""

every_backend = pytest.mark.parametrize("kit", KITS.values(), ids=KITS)
few = settings(max_examples=max(settings().max_examples // 8, 1))
"""For the Triton backend, whose interpreter is slow."""


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as fill a GPU are too many for the interpreter."""
    if TRITON.device.type == "cpu":
        monkeypatch.setattr("twostroke.engine.attention.triton_paged.MOST_SPLITS", 3)


@given(CASES)
def test_any_batch_equals_the_dense_loop(case: Case) -> None:
    check(PAGED_CPU, case)


@few
@given(CASES)
def test_any_batch_equals_the_dense_loop_by_triton(case: Case) -> None:
    check(TRITON, case)


@few
@given(CASES, st.booleans())
def test_any_decodes_equal_the_dense_loop_by_triton(case: Case, has_long: bool) -> None:
    """As many tokens as requests, padding included, which is what the kernel for decodes takes."""
    requests = [(computed, 1) for computed, _ in case.requests]
    requests[0] = (requests[0][0] + 150 * has_long, 1)  # keys of several tiles, so that programs share them
    check(TRITON, evolve(case, requests=requests, padded_tokens=case.padded_reqs))


@given(CASES, st.sampled_from([torch.float32, torch.bfloat16]))
def test_bfloat16_caches(case: Case, dtype: torch.dtype) -> None:
    check(PAGED_CPU, evolve(case, dtype=dtype, cache_dtype=torch.bfloat16))


@few
@given(CASES, st.sampled_from([(torch.float16, torch.float16), (BFLOAT16_QUERY, torch.bfloat16)]))
def test_half_precision_caches_by_triton(case: Case, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check(TRITON, evolve(case, dtype=dtypes[0], cache_dtype=dtypes[1]))


@given(st.lists(CASES, min_size=2, max_size=3))
def test_a_plan_made_again_in_place_equals_a_fresh_one(cases: list[Case]) -> None:
    plan = PAGED_CPU.plan(evolve(cases[0], block_size=4))
    for case in cases:
        case = evolve(case, block_size=4)
        assert torch.equal(check(PAGED_CPU, case, plan), check(PAGED_CPU, case))


@every_backend
def test_a_plan_made_again_for_other_lengths(kit: Kit) -> None:
    cases = [Case(requests=requests) for requests in ([(5, 1), (30, 1)], [(0, 9), (6, 1)], [(6, 1), (9, 1), (2, 1)])]
    plan = kit.plan(cases[0])
    for case in (*cases, *cases):
        assert torch.equal(check(kit, case, plan), check(kit, case))


@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
@every_backend
def test_prefill_decode_and_mixed(kit: Kit, window: int | None, soft_cap: float | None) -> None:
    decodes = [(20 + 7 * index, 1) for index in range(9 if kit is PAGED_CPU else 3)]
    for requests in ([(0, 33)], [(17, 16)], decodes, [*decodes, (0, 30), (12, 5), (0, 1)]):
        check(kit, Case(requests=requests, window=window, soft_cap=soft_cap, padded_reqs=2, padded_tokens=3))


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
@every_backend
def test_decodes_padded_to_as_many_tokens_as_requests(kit: Kit, window: int | None, soft_cap: float | None) -> None:
    requests = [(20, 1), (180, 1), (0, 1)]
    check(kit, Case(requests=requests, window=window, soft_cap=soft_cap))
    check(kit, Case(requests=requests, window=window, soft_cap=soft_cap, padded_reqs=2, padded_tokens=2))


@every_backend
def test_keys_that_the_model_has_stored(kit: Kit) -> None:
    for requests in ([(9, 1), (4, 1)], [(5, 6), (0, 3), (7, 1)]):
        world = World(Case(requests=requests))
        wanted = kit.outcome(world)
        query, _, _ = world.inputs()
        before = world.kv_cache.clone()
        assert torch.equal(kit.run(kit.planned(world), world, (query, None, None)), wanted)
        assert torch.equal(world.kv_cache.nan_to_num(7), before.nan_to_num(7))


@every_backend
def test_solo_equals_batch(kit: Kit) -> None:
    requests = [(31, 1), (0, 9), (5, 4), (77, 1), (12, 1)]
    together = World(Case(requests=requests, padded_tokens=2))
    parts = kit.outcome(together)[:-2].split([count for _, count in requests])
    for index, (request, part) in enumerate(zip(requests, parts, strict=True)):
        alone = World(Case(requests=[request]))
        for name in ("keys", "values", "queries"):
            getattr(alone, name)[0] = getattr(together, name)[index]
        computed, slots = request[0], alone.slots(0)[: request[0]]
        alone.kv_cache[0].flatten(0, 1)[slots] = alone.keys[0][:computed]
        alone.kv_cache[1].flatten(0, 1)[slots] = alone.values[0][:computed]
        torch.testing.assert_close(kit.outcome(alone), part, atol=1e-5, rtol=1e-5)


@every_backend
def test_K3_layers_of_one_group_keep_their_own_window(kit: Kit) -> None:
    world = World(Case(requests=[(9, 1), (0, 10)]))
    plan = kit.planned(world)
    for window in (4, None, 4, 2):
        world.case = evolve(world.case, window=window)
        torch.testing.assert_close(kit.run(plan, world), world.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("soft_cap", [None, 4.0])
@every_backend
def test_K6_a_recycled_block_full_of_nan_does_no_harm(kit: Kit, soft_cap: float | None) -> None:
    """5 tokens in blocks of 4: three stale places follow the last key, and the null block is NaN too."""
    check(kit, Case(requests=[(0, 5)], soft_cap=soft_cap))
    check(kit, Case(requests=[(4, 1), (20, 1), (2, 3)], soft_cap=soft_cap, padded_reqs=1, padded_tokens=1))
    check(kit, Case(requests=[(4, 1), (20, 1)], soft_cap=soft_cap, padded_reqs=1, padded_tokens=1))


@every_backend
def test_K8_the_plan_follows_a_request_over_a_block_edge(kit: Kit) -> None:
    plan = kit.plan(Case(requests=[(7, 1)]))
    for computed in (7, 8, 9):
        check(kit, Case(requests=[(computed, 1)]), plan)


@every_backend
def test_G3_padding_leaves_the_last_slot_alone(kit: Kit) -> None:
    world = World(Case(requests=[(4, 1), (5, 1)], padded_tokens=2, padded_reqs=2, spare_blocks=0))
    last = world.kv_cache[:, -1, -1]
    last.fill_(42.0)
    kit.outcome(world)
    assert (last == 42.0).all()


@every_backend
def test_G4_a_request_of_length_zero_gives_zero_rows_even_where_it_has_tokens(kit: Kit) -> None:
    world = World(Case(requests=[(3, 1), (6, 2)], padded_reqs=2, padded_tokens=2))
    batch = world.batch()
    batch.query_start_loc_host[:] = torch.tensor([0, 1, 3, 4, 5])
    output = kit.run(kit.planned(world, batch), world)
    torch.testing.assert_close(output[:3], world.expected(), atol=2e-5, rtol=2e-5)
    assert not output[3:].any()


@every_backend
def test_a_batch_of_padding_only_gives_zeros(kit: Kit) -> None:
    world = World(Case(requests=[(3, 1)], padded_tokens=1))
    batch = world.batch()
    batch.seq_lens_host.zero_()
    batch.slot_mapping.fill_(PAD_SLOT)
    before = world.kv_cache.clone()
    assert not kit.run(kit.planned(world, batch), world).any()
    assert torch.equal(world.kv_cache.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("window", [None, 4])
@every_backend
def test_B3_a_request_cut_by_a_micro_batch_border(kit: Kit, window: int | None) -> None:
    """13 tokens of two requests, cut at 6: the second is in both halves, each with offsets and a length of its own."""
    world = World(Case(requests=[(2, 3), (4, 10)], window=window))
    batch, expected = world.batch(), world.expected()
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
        output = kit.run(kit.planned(world, half), world, [tensor[tokens] for tensor in world.inputs()])
        torch.testing.assert_close(output, expected[tokens], atol=2e-5, rtol=2e-5)


@every_backend
def test_strided_inputs(kit: Kit) -> None:
    """Queries, keys and values as slices of one projection, as models make them."""
    world = World(Case(requests=[(6, 1), (3, 4), (9, 1)]))
    fused = torch.cat(world.inputs(), dim=1).to(kit.device)
    output = kit.run(kit.planned(world), world, (fused[:, :6], fused[:, 6:8], fused[:, 8:]))
    torch.testing.assert_close(output, world.expected(), atol=2e-5, rtol=2e-5)


# What the backend of the CPU does in its own way


def test_capped_attention_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(requests=[(3, 17), (0, 17), (0, 20)], soft_cap=3.0)
    assert MAX_SCORES > 20 * 20 * 6
    whole = check(PAGED_CPU, case)
    monkeypatch.setattr("twostroke.engine.attention.paged_cpu.MAX_SCORES", 6 * 20 * 3)
    torch.testing.assert_close(check(PAGED_CPU, case), whole, atol=1e-6, rtol=1e-6)


def test_scratch_made_in_inference_mode_serves_outside_of_it() -> None:
    case = Case(requests=[(6, 1), (3, 4)])
    plan = PAGED_CPU.plan(case)
    with torch.inference_mode():
        check(PAGED_CPU, case, plan)
    check(PAGED_CPU, case, plan)


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
    check(PAGED_CPU, forward)
    check(PAGED_CPU, backward)


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
    check(PAGED_CPU, case)


def test_keys_of_adjacent_blocks_are_adjacent() -> None:
    world = World(Case(requests=[(10, 1)]))
    world.tables[0] = [1, 2, 3]
    world.kv_cache.fill_(torch.nan)
    for pool, history in zip(world.kv_cache, (world.keys[0], world.values[0]), strict=True):
        pool.flatten(0, 1)[world.slots(0)[:10]] = history[:10]
    (tile,) = build_tiles(world.batch(), 4, None)
    assert tile.slots == slice(4, 15)
    torch.testing.assert_close(PAGED_CPU.outcome(world), world.expected(), atol=2e-5, rtol=2e-5)


def test_decodes_of_scattered_lengths_go_back_to_their_places() -> None:
    requests = [(length, 1) for length in (600, 3, 900, 5, 610, 4)]
    batch = World(Case(requests=requests)).batch()
    tiling = Tiling.of(build_tiles(batch, 4, None))
    assert tiling.order is not None
    assert sorted(tiling.order.tolist()) == list(range(6))
    assert [part.stop - part.start for part in tiling.ranges] == [tile.num_reqs for tile in tiling.tiles]
    check(PAGED_CPU, Case(requests=requests, padded_reqs=2, padded_tokens=3))
    check(PAGED_CPU, Case(requests=[*requests, (0, 40), (7, 2)], padded_tokens=1))


def test_tiles_in_order_need_no_copy_of_the_queries() -> None:
    tiling = Tiling.of(build_tiles(World(Case(requests=[(3, 1), (4, 1), (0, 40)])).batch(), 4, None))
    assert tiling.order is None
    assert tiling.ranges == (slice(0, 2), slice(2, 42))

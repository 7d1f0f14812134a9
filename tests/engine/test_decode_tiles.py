"""Tiles that grow with the steps of a decode give what tiles made anew give, and are made anew where they must be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from twostroke.engine.attention import paged_cpu
from twostroke.engine.attention.paged_cpu import PagedCPUBackend, PagedCPUPlan
from twostroke.engine.attention.tiles import MAX_TILE_KEYS
from twostroke.stages.attention import AttentionBatch
from twostroke.stages.specs import NULL_BLOCK, PAD_SLOT, AttentionLayerSpec, KVCacheGroupSpec

HEADS, KV_HEADS, HEAD_SIZE, MAX_BLOCKS = 4, 2, 8, 24


class Decode:
    """Requests that decode over a pool that is NaN but for their own keys and values."""

    def __init__(self, lens: list[int], block_size: int, *, padded: int = 0, is_adjacent: bool = False) -> None:
        self.random = np.random.default_rng(0)
        self.block_size, self.padded = block_size, padded
        num_blocks = (len(lens) + 4) * MAX_BLOCKS + 1
        self.free = [*range(1, num_blocks)]
        if not is_adjacent:
            self.random.shuffle(self.free)
        self.kv = torch.full((2, num_blocks, block_size, KV_HEADS, HEAD_SIZE), torch.nan)
        self.tables = np.full((len(lens) + padded, MAX_BLOCKS), NULL_BLOCK, dtype=np.int32)
        self.lens = [0] * len(lens)
        for index, length in enumerate(lens):
            self.start(index, length)

    def start(self, index: int, length: int) -> None:
        """A request of this length takes the place of another."""
        freed = self.tables[index, : -(-self.lens[index] // self.block_size)].tolist()
        self.kv[:, freed] = torch.nan
        self.free += freed
        self.lens[index] = 0
        self.tables[index] = 10**6
        for _ in range(length):
            slot = self.extend(index)
            self.kv.view(2, -1, KV_HEADS, HEAD_SIZE)[:, slot] = torch.randn(2, KV_HEADS, HEAD_SIZE)

    def extend(self, index: int) -> int:
        """One token more; returns its slot."""
        place, offset = divmod(self.lens[index], self.block_size)
        if not offset:
            self.tables[index, place] = self.free.pop(0)
        self.lens[index] += 1
        return int(self.tables[index, place]) * self.block_size + offset

    def batch(self) -> AttentionBatch:
        """The next step: one token more for everybody."""
        slots = [self.extend(index) for index in range(len(self.lens))] + [PAD_SLOT] * self.padded
        num_reqs = len(slots)
        lens = torch.tensor([*self.lens, *[0] * self.padded], dtype=torch.int32)
        offsets = torch.arange(num_reqs + 1, dtype=torch.int32).clamp(max=len(self.lens))
        return AttentionBatch(
            num_reqs=num_reqs,
            num_tokens=num_reqs,
            max_query_len=1,
            max_seq_len=max(self.lens),
            query_start_loc=offsets,
            seq_lens=lens,
            block_table=torch.from_numpy(self.tables.copy()),
            slot_mapping=torch.tensor(slots),
            query_start_loc_host=offsets,
            seq_lens_host=lens,
        )


def plan_of(decode: Decode) -> PagedCPUPlan:
    return PagedCPUBackend().make_plan(KVCacheGroupSpec(layers=(0,), block_size=decode.block_size))


def layer(window: int | None = None) -> AttentionLayerSpec:
    return AttentionLayerSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, scale=0.4, sliding_window=window, soft_cap=None
    )


def check_step(decode: Decode, kept: PagedCPUPlan, windows: tuple[int | None, ...] = (None,)) -> None:
    """One step through the plan that is kept and through a new one."""
    batch, fresh = decode.batch(), plan_of(decode)
    query = torch.randn(batch.num_tokens, HEADS, HEAD_SIZE)
    key, value = torch.randn(2, batch.num_tokens, KV_HEADS, HEAD_SIZE)
    kept.plan(batch)
    fresh.plan(batch)
    for window in windows:
        expected = fresh.run(query, key, value, decode.kv, layer(window))
        assert not expected.isnan().any()
        torch.testing.assert_close(kept.run(query, key, value, decode.kv, layer(window)), expected)


@pytest.fixture
def count_builds(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often tiles were made anew since the last question, by plans that are not ``check_step``'s own."""
    builds: list[AttentionBatch] = []
    build = paged_cpu.build_tiles

    def counted(batch: AttentionBatch, block_size: int, window: int | None) -> object:
        builds.append(batch)
        return build(batch, block_size, window)

    def taken() -> int:
        count = len(builds)
        builds.clear()
        return count

    monkeypatch.setattr(paged_cpu, "build_tiles", counted)
    return taken


@given(
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    block_size=st.sampled_from([1, 2, 4, 16]),
    padded=st.integers(0, 2),
    is_adjacent=st.booleans(),
    window=st.sampled_from([None, 3, 20, 50]),
    events=st.lists(st.sampled_from(["step"] * 6 + ["another", "same again"]), max_size=22),
)
def test_grown_tiles_give_what_new_ones_give(
    lens: list[int], block_size: int, padded: int, is_adjacent: bool, window: int | None, events: list[str]
) -> None:
    if block_size == 1:
        lens = [min(length, 2) for length in lens]
    decode = Decode(lens, block_size, padded=padded, is_adjacent=is_adjacent)
    kept = plan_of(decode)
    for event in ["step", *events]:
        if max(decode.lens) + 2 > MAX_BLOCKS * block_size:  # as many tokens as "same again" takes
            break
        if event == "another":
            decode.start(int(decode.random.integers(len(lens))), 1)
        if event == "same again":
            kept.plan(decode.batch())  # planned, and never run: what it would have stored is not there
            for index in range(len(lens)):
                decode.start(index, decode.lens[index])
        check_step(decode, kept, (None, window))


def test_a_decode_is_cut_into_tiles_once(count_builds: Callable[[], int]) -> None:
    decode = Decode([3, 9, 30, 31, 33, 70], 8)
    kept = plan_of(decode)
    check_step(decode, kept)
    assert count_builds() == 2
    for _ in range(40):
        kept.plan(decode.batch())
    assert count_builds() == 0


def test_tiles_are_made_anew_for_another_request_or_another_block(count_builds: Callable[[], int]) -> None:
    decode = Decode([9, 12, 17], 4)
    kept = plan_of(decode)
    check_step(decode, kept)
    kept.plan(decode.batch())
    count_builds()
    decode.tables[1, 0] = decode.free.pop()
    kept.plan(decode.batch())
    assert count_builds() == 1, "a block in the middle of a table is another one"
    decode.start(2, 5)
    kept.plan(decode.batch())
    assert count_builds() == 1, "another length"
    batch = decode.batch()
    kept.plan(evolve(batch, slot_mapping=torch.full((3,), PAD_SLOT)))
    assert count_builds() == 1, "keys that are stored nowhere"


def test_tiles_do_not_outgrow_their_bound() -> None:
    decode = Decode([16] * 400, 16)
    kept = plan_of(decode)
    check_step(decode, kept)
    for _ in range(60):
        kept.plan(decode.batch())
        tiles = kept._tilings[None].tiles
        assert all(tile.num_reqs * tile.num_keys <= 1.3 * MAX_TILE_KEYS for tile in tiles)
        assert sum(tile.num_reqs for tile in tiles) == 400


def test_tiles_of_one_width_grow_together_beyond_their_room(count_builds: Callable[[], int]) -> None:
    decode = Decode([60] * 300 + [9, 40, 41], 16)
    kept = plan_of(decode)
    check_step(decode, kept)
    count_builds()
    widths = [tile.num_keys for tile in kept._tilings[None].tiles]
    assert max(map(widths.count, widths)) > 1
    for _ in range(18):
        kept.plan(decode.batch())
    assert count_builds() == 0
    lens = np.array(decode.lens)
    for tile in kept._tilings[None].tiles:
        requests = np.arange(303)[tile.tokens] if isinstance(tile.tokens, slice) else tile.tokens.numpy()
        assert isinstance(tile.slots, torch.Tensor)
        slots = tile.slots.numpy().reshape(tile.num_reqs, tile.num_keys)
        for row, request in enumerate(requests.tolist()):
            positions = np.arange(lens[request])
            expected = decode.tables[request, positions // 16] * 16 + positions % 16
            assert slots[row, : lens[request]].tolist() == expected.tolist()

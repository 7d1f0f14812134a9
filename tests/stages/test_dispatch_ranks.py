"""Dispatch across data-parallel ranks: threads are ranks, a barrier is the collective."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from twostroke.stages.coordinator import DispatchAgreement, DispatchVote, SoloCoordinator, combine_votes
from twostroke.stages.dispatch import OTHER_RANKS, Dispatch, DispatchDisagreement, DispatchTable, UBatchPolicy
from twostroke.stages.graphs import CapturedKeys, GraphKey
from twostroke.stages.records import Batch, BatchDescriptor, BatchExecutionDescriptor, CUDAGraphMode, PreparedInputs

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
Plans = list[BatchExecutionDescriptor | None]


class Ranks:
    """Two or more dispatchers that agree through a barrier; ``calls`` counts the collectives of each rank."""

    def __init__(
        self,
        size: int = 2,
        *,
        mode: str = "FULL_AND_PIECEWISE",
        sizes: Sequence[int] = (2, 4, 8),
        num_ubatches: int = 1,
        uniform_query_len: int = 1,
    ) -> None:
        table = DispatchTable(
            cudagraph_mode=mode, capture_sizes=tuple(sizes), max_num_seqs=8, uniform_query_len=uniform_query_len
        )
        policy = UBatchPolicy(num_ubatches=num_ubatches, decode_threshold=4, prefill_threshold=4)
        self.calls = [0] * size
        self._votes: list[DispatchVote | None] = [None] * size
        self._barrier = threading.Barrier(size)
        self.captured = [CapturedKeys() for _ in range(size)]
        self.dispatches = [
            Dispatch(table, keys, RankCoordinator(self, rank), policy) for rank, keys in enumerate(self.captured)
        ]
        for dispatch, keys in zip(self.dispatches, self.captured, strict=True):
            for plan in dispatch.capture_plans():
                keys.add(GraphKey.of(plan))

    def agree(self, rank: int, vote: DispatchVote) -> DispatchAgreement:
        self.calls[rank] += 1
        self._votes[rank] = vote
        self._barrier.wait(timeout=5)
        votes = [vote for vote in self._votes if vote is not None]
        self._barrier.wait(timeout=5)
        return combine_votes(votes)

    def step(self, *counts: Sequence[int], eager: int | None = None) -> Plans:
        """One step of every rank with these token counts; an empty list is an idle rank."""

        def run(rank: int) -> BatchExecutionDescriptor | None:
            dispatch = self.dispatches[rank]
            if not counts[rank]:
                return dispatch.idle_step()
            return dispatch(*prepared(counts[rank], "forced" if rank == eager else None))

        with ThreadPoolExecutor(len(counts)) as pool:
            return list(pool.map(run, range(len(counts))))


class RankCoordinator:
    """One rank's end of the collective."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def agree(self, vote: DispatchVote) -> DispatchAgreement:
        return self._ranks.agree(self._rank, vote)


def prepared(counts: Sequence[int], eager_reason: str | None) -> tuple[Batch, PreparedInputs]:
    array = np.array(counts)
    offsets = np.concatenate(([0], np.cumsum(array))).astype(np.int32)
    batch = Batch(
        req_ids=[f"r{index}" for index in range(len(counts))],
        rows=np.arange(len(counts)),
        num_scheduled_tokens=array,
        num_computed_tokens=np.zeros(len(counts), np.int64),
        num_tokens=int(array.sum()),
        eager_reason=eager_reason,
    )
    inputs = PreparedInputs(
        input_ids=torch.zeros(batch.num_tokens, dtype=torch.int32),
        positions=torch.zeros(batch.num_tokens, dtype=torch.int64),
        query_start_loc=torch.from_numpy(offsets),
        seq_lens=torch.from_numpy(array.astype(np.int32)),
        logits_indices=torch.from_numpy(offsets[1:].astype(np.int64) - 1),
        query_start_loc_host=offsets,
        seq_lens_host=array.astype(np.int32),
        token_rows=np.zeros(0, dtype=np.int64),
        logits_indices_host=offsets[1:].astype(np.int64) - 1,
        sampling_reqs=np.arange(len(counts)),
        sampling_logits=np.arange(len(counts)),
        prompt_spans=(),
        max_query_len=int(array.max()),
        max_seq_len=int(array.max()),
        is_uniform_decode=bool((array == 1).all()),
    )
    return batch, inputs


def shapes(plans: Plans) -> list[tuple[CUDAGraphMode, int, bool]]:
    return [(plan.mode, plan.num_tokens, plan.should_ubatch) for plan in plans if plan is not None]


def test_X1_an_idle_rank_takes_part_and_runs_a_dummy() -> None:
    ranks = Ranks()
    busy, idle = ranks.step([1, 1, 1], [])
    assert busy is not None
    assert idle is not None
    assert (busy.mode, busy.descriptor) == (idle.mode, idle.descriptor) == (FULL, BatchDescriptor(4, 4, True))
    assert busy.num_tokens_across_dp == idle.num_tokens_across_dp == (4, 4)
    assert ranks.calls == [1, 1]


def test_X1_without_work_anywhere_no_dummy_is_needed() -> None:
    ranks = Ranks()
    assert ranks.step([], []) == [None, None]
    assert ranks.calls == [1, 1]
    assert not ranks.dispatches[0].counts


def test_X1_an_idle_rank_runs_one_token_beside_an_eager_one() -> None:
    busy, idle = Ranks().step([9], [])
    assert busy is not None
    assert idle is not None
    assert (busy.mode, busy.num_tokens, busy.num_reqs) == (NONE, 9, 1)
    assert (idle.mode, idle.num_tokens, idle.num_reqs) == (NONE, 1, 1)
    assert busy.num_tokens_across_dp == idle.num_tokens_across_dp == (9, 1)


def test_X1_an_idle_rank_without_graphs_keeps_all_eager() -> None:
    ranks = Ranks()
    ranks.captured[1].clear("asleep")
    assert shapes(ranks.step([1, 1], [])) == [(NONE, 2, False), (NONE, 1, False)]


def test_X1_an_idle_rank_follows_into_a_piecewise_graph() -> None:
    plans = Ranks().step([3], [])
    assert shapes(plans) == [(PIECEWISE, 4, False)] * 2
    assert plans[1] is not None
    assert plans[1].num_reqs == 4


def test_X2_the_size_and_mode_are_those_of_all_ranks() -> None:
    plans = Ranks().step([1], [1] * 7)
    assert shapes(plans) == [(FULL, 8, False)] * 2
    assert [plan.num_tokens_across_dp for plan in plans if plan] == [(8, 8)] * 2


def test_X2_a_rank_beyond_the_largest_graph_makes_all_eager() -> None:
    plans = Ranks().step([1], [9])
    assert shapes(plans) == [(NONE, 1, False), (NONE, 9, False)]
    assert plans[0] is not None
    assert (plans[0].reason, plans[0].num_tokens_across_dp) == (OTHER_RANKS, (1, 9))


def test_X2_a_decode_follows_a_mixed_batch_down_to_piecewise() -> None:
    plans = Ranks().step([1, 1], [3, 2])
    assert shapes(plans) == [(PIECEWISE, 8, False)] * 2
    assert plans[0] is not None
    assert plans[0].reason == OTHER_RANKS


def test_X2_one_padding_rule_when_uniform_and_mixed_sizes_differ() -> None:
    """Rank 0 would use the FULL graph of 9 tokens; PIECEWISE has no such size, so both pad to 16."""
    plans = Ranks(sizes=(4, 8, 16), uniform_query_len=3).step([3, 3, 3], [2, 1])
    assert shapes(plans) == [(PIECEWISE, 16, False)] * 2


def test_X3_a_forced_eager_rank_makes_all_eager() -> None:
    assert shapes(Ranks().step([1, 1], [1, 1], eager=1)) == [(NONE, 2, False)] * 2


def test_X7_all_ranks_split_or_none() -> None:
    ranks = Ranks(num_ubatches=2)
    assert shapes(ranks.step([1] * 8, [1] * 7)) == [(PIECEWISE, 8, True)] * 2
    assert [shape[2] for shape in shapes(ranks.step([1] * 8, [1]))] == [False, False]
    assert shapes(ranks.step([1] * 8, [])) == [(PIECEWISE, 8, True)] * 2


def test_X7_an_empty_micro_batch_on_one_rank_stops_all() -> None:
    """Both want to split; padded to 8, the second half of rank 1's four tokens would be padding only."""
    assert shapes(Ranks(num_ubatches=2).step([1] * 8, [1] * 4)) == [(PIECEWISE, 8, False)] * 2


def test_X7_eager_micro_batches_have_one_size() -> None:
    assert shapes(Ranks(mode="NONE", num_ubatches=2).step([1] * 8, [1] * 5)) == [(NONE, 8, True)] * 2


def test_ranks_that_captured_different_graphs_are_told() -> None:
    ranks = Ranks()
    ranks.captured[0].clear("not captured")
    ranks.captured[0].add(GraphKey(FULL, BatchDescriptor(2, 2, True)))
    with pytest.raises(DispatchDisagreement, match="capture the same graphs on every rank"):
        ranks.step([1, 1], [1] * 4)


@given(
    st.lists(st.lists(st.integers(1, 3), max_size=8), min_size=2, max_size=3),
    st.sampled_from(["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
    st.integers(1, 2),
    st.integers(1, 3),
)
def test_ranks_never_disagree(counts: list[list[int]], mode: str, num_ubatches: int, query_len: int) -> None:
    ranks = Ranks(
        len(counts), mode=mode, sizes=(1, 2, 4, 8, 16), num_ubatches=num_ubatches, uniform_query_len=query_len
    )
    plans = ranks.step(*counts)
    assert ranks.calls == [1] * len(counts)
    if not any(counts):
        assert plans == [None] * len(counts)
        return
    present = [plan for plan in plans if plan is not None]
    assert len(present) == len(counts)
    assert len({(plan.mode, plan.should_ubatch, plan.num_tokens_across_dp) for plan in present}) == 1
    across = present[0].num_tokens_across_dp
    assert across == tuple(plan.num_tokens for plan in present)
    for plan, own in zip(present, counts, strict=True):
        assert plan.num_tokens >= max(1, sum(own))
        assert plan.num_reqs >= len(own)
    if present[0].mode is not NONE or present[0].should_ubatch:
        assert len({plan.num_tokens for plan in present}) == 1


def test_a_solo_rank_agrees_with_itself() -> None:
    vote = DispatchVote(num_scheduled_tokens=3, num_tokens=4, should_ubatch=False, mode=FULL)
    assert SoloCoordinator().agree(vote) == combine_votes([vote])
    solo = Dispatch(DispatchTable(cudagraph_mode="NONE", capture_sizes=(), max_num_seqs=4), CapturedKeys())
    assert solo.idle_step() is None

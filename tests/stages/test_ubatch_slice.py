"""Micro-batch slices: vLLM's table, the stage, and that slices always cover the batch."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twostroke.stages.records import Batch, BatchExecutionDescriptor, CUDAGraphMode, UBatchSlice
from twostroke.stages.ubatch_slice import EmptyUBatch, SliceUBatches, make_ubatch_slices, splits_evenly


def as_lists(slices: tuple[UBatchSlice, ...]) -> list[list[list[int]]]:
    return [[[part.start, part.stop] for part in ubatch] for ubatch in slices]


def batch_of(counts: list[int]) -> Batch:
    return Batch(
        req_ids=[f"r{index}" for index in range(len(counts))],
        rows=np.arange(1, len(counts) + 1),
        num_scheduled_tokens=np.array(counts),
        num_computed_tokens=np.zeros(len(counts), np.int64),
        num_tokens=sum(counts),
    )


def test_slices_equal_vllm(data_path: Path) -> None:
    rows = json.loads((data_path / "vllm_ubatch_slices.json").read_text())["rows"]
    assert len(rows) == 120
    for row in rows:
        result = make_ubatch_slices(
            row["num_scheduled_tokens"], row["num_tokens_padded"], row["num_reqs_padded"], row["num_ubatches"]
        )
        assert as_lists(result.slices) == row["slices"], row
        assert as_lists(result.padded) == row["padded"], row


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(0, 6), st.integers(0, 4), st.integers(1, 4))
def test_slices_cover_the_batch(counts: list[int], more_tokens: int, more_reqs: int, num_ubatches: int) -> None:
    total, starts = sum(counts), np.cumsum([0, *counts])
    if not splits_evenly(total, total + more_tokens, num_ubatches):
        with pytest.raises(EmptyUBatch, match=f"{total} tokens"):
            make_ubatch_slices(counts, total + more_tokens, len(counts) + more_reqs, num_ubatches)
        return
    result = make_ubatch_slices(counts, total + more_tokens, len(counts) + more_reqs, num_ubatches)
    for slices, end in ((result.slices, total), (result.padded, total + more_tokens)):
        assert slices[0].token_slice.start == 0
        assert slices[-1].token_slice.stop == end
        assert all(left.token_slice.stop == right.token_slice.start for left, right in pairwise(slices))
    for ubatch in result.slices:
        requests, tokens = ubatch.request_slice, ubatch.token_slice
        overlap = [
            index
            for index in range(len(counts))
            if max(starts[index], tokens.start) < min(starts[index + 1], tokens.stop)
        ]
        assert overlap == list(range(requests.start, requests.stop))
        assert ubatch.num_tokens > 0
        assert ubatch.num_reqs == len(overlap)
    assert result.padded[-1].request_slice.stop == len(counts) + more_reqs


@pytest.mark.parametrize(("num_tokens", "padded"), [(1, 1), (1, 2), (3, 8), (4, 8)])
def test_B4_a_micro_batch_without_a_token_is_refused(num_tokens: int, padded: int) -> None:
    with pytest.raises(EmptyUBatch, match="run the batch whole"):
        make_ubatch_slices([1] * num_tokens, padded, padded, 2)


def test_the_stage_splits_when_the_plan_says_so() -> None:
    batch = batch_of([3, 10])
    plan = BatchExecutionDescriptor(mode=CUDAGraphMode.PIECEWISE, num_tokens=16, num_reqs=2, should_ubatch=True)
    result = SliceUBatches(2)(batch, plan)
    assert as_lists(result.slices) == [[[0, 2], [0, 8]], [[1, 2], [8, 13]]]
    assert as_lists(result.padded) == [[[0, 2], [0, 8]], [[1, 2], [8, 16]]]


def test_the_stage_leaves_other_batches_whole() -> None:
    batch = batch_of([3, 10])
    plan = BatchExecutionDescriptor(mode=CUDAGraphMode.FULL, num_tokens=16, num_reqs=4)
    result = SliceUBatches(2)(batch, plan)
    assert as_lists(result.slices) == [[[0, 2], [0, 13]]]
    assert as_lists(result.padded) == [[[0, 4], [0, 16]]]

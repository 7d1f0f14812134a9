"""The dispatch table and the stage of a single rank: vLLM's table, reachability, fallbacks, micro-batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from twostroke.stages.dispatch import (
    BEST,
    NO_LORA,
    NOT_UNIFORM,
    OFF,
    OTHER_LOGITS,
    TOO_LARGE,
    TOO_MANY_REQUESTS,
    UBATCHED,
    Dispatch,
    DispatchTable,
    FixedDispatch,
    UBatchPolicy,
)
from twostroke.stages.graphs import CapturedKeys, GraphError, GraphKey, full_graph_rows
from twostroke.stages.records import (
    Batch,
    BatchDescriptor,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    IntArray,
    PreparedInputs,
    PromptSpan,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def step(
    counts: Sequence[int],
    *,
    logits: Sequence[int] | None = None,
    has_lora: bool = False,
    eager_reason: str | None = None,
) -> tuple[Batch, PreparedInputs]:
    """A batch with these token counts; ``logits`` are token indices, the last token of each request when left out."""
    array = np.array(counts)
    offsets = np.concatenate(([0], np.cumsum(array))).astype(np.int32)
    wanted: IntArray = np.array(offsets[1:] - 1 if logits is None else logits, dtype=np.int64)
    batch = Batch(
        req_ids=[f"r{index}" for index in range(len(counts))],
        rows=np.arange(1, len(counts) + 1),
        num_scheduled_tokens=array,
        num_computed_tokens=np.full(len(counts), 5),
        num_tokens=int(array.sum()),
        has_lora=has_lora,
        eager_reason=eager_reason,
    )
    seq_lens = (array + 5).astype(np.int32)
    inputs = PreparedInputs(
        input_ids=torch.zeros(batch.num_tokens, dtype=torch.int32),
        positions=torch.zeros(batch.num_tokens, dtype=torch.int64),
        query_start_loc=torch.from_numpy(offsets),
        seq_lens=torch.from_numpy(seq_lens),
        logits_indices=torch.from_numpy(wanted),
        query_start_loc_host=offsets,
        seq_lens_host=seq_lens,
        token_rows=np.zeros(0, dtype=np.int64),
        logits_indices_host=wanted,
        sampling_reqs=np.arange(len(counts)),
        sampling_logits=np.arange(len(counts)),
        prompt_spans=() if logits is None else (PromptSpan(0, 0, len(wanted), 0),),
        max_query_len=int(array.max()),
        max_seq_len=int(seq_lens.max()),
        is_uniform_decode=bool((array == 1).all()),
    )
    return batch, inputs


def table(
    mode: str = "FULL_AND_PIECEWISE",
    sizes: Sequence[int] = (1, 2, 4, 8),
    max_num_seqs: int = 8,
    uniform_query_len: int = 1,
) -> DispatchTable:
    return DispatchTable(
        cudagraph_mode=mode,
        capture_sizes=tuple(sizes),
        max_num_seqs=max_num_seqs,
        uniform_query_len=uniform_query_len,
    )


def capture_all(dispatch: Dispatch, captured: CapturedKeys) -> None:
    for plan in dispatch.capture_plans():
        captured.add(GraphKey.of(plan))


def captured_dispatch(
    dispatch_table: DispatchTable, ubatching: UBatchPolicy | None = None
) -> tuple[Dispatch, CapturedKeys]:
    captured = CapturedKeys()
    dispatch = Dispatch(dispatch_table, captured, ubatching=ubatching)
    capture_all(dispatch, captured)
    return dispatch, captured


# The table


def test_lookup_and_capture_order_equal_vllm(data_path: Path) -> None:
    """The recorded ladders hold only multiples of the uniform query length: there is nothing to gain there.

    Where they do not, or where max_num_seqs lies between two sizes, see the two tests after this one.
    """
    better: list[object] = []
    for config in json.loads((data_path / "vllm_dispatch.json").read_text())["configs"]:
        ours = DispatchTable(
            cudagraph_mode=config["cudagraph_mode"],
            capture_sizes=config["capture_sizes"],
            max_num_seqs=config["max_num_seqs"],
            uniform_query_len=1 + config["num_speculative_tokens"],
        )
        order = [[mode.name, [list(key[:3]) for key in keys]] for mode, keys in ours.capture_order()]
        assert order == config["capture_order"]
        for case in config["cases"]:
            mode, key, _ = ours.lookup(
                case["num_tokens"], uniform=case["uniform_decode"], allow_full=not case["no_full"]
            )
            theirs = (CUDAGraphMode[case["mode"]].value, -case["padded_tokens"])
            mine = (mode.value, -(key.num_tokens if key else case["num_tokens"]))
            assert mine >= theirs, (config["capture_sizes"], case)
            if mine > theirs:
                better.append(case)
            elif key is not None:
                assert (key.num_reqs, key.uniform) == (case["num_reqs"], case["uniform"])
    assert better == []


def test_G2_uniform_sizes_are_whole_requests() -> None:
    """Better than a ladder that drops what is no multiple of 3: every uniform batch up to the largest size is FULL."""
    ladder = table(sizes=(1, 2, 4, 8, 16), uniform_query_len=3)
    found = [ladder.lookup(3 * requests, uniform=True)[:2] for requests in range(1, 6)]
    assert [mode for mode, _ in found] == [FULL] * 5
    assert [key and (key.num_tokens, key.num_reqs) for _, key in found] == [(3, 1), (6, 2), (9, 3), (15, 5), (15, 5)]
    assert ladder.lookup(18, uniform=True) == (NONE, None, TOO_LARGE)


def test_G2_the_largest_batch_of_decodes_has_a_full_graph() -> None:
    """Better than a ladder that ends below max_num_seqs: 5 and 6 requests would fall to PIECEWISE at 8 tokens."""
    ladder = table(max_num_seqs=6)
    assert ladder.lookup(5, uniform=True)[:2] == (FULL, BatchDescriptor(6, 6, True))
    assert ladder.lookup(6, uniform=True)[:2] == (FULL, BatchDescriptor(6, 6, True))


ANY_TABLE = st.builds(
    DispatchTable,
    cudagraph_mode=st.sampled_from(MODES),
    capture_sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7).map(tuple),
    max_num_seqs=st.integers(1, 20),
    uniform_query_len=st.integers(1, 4),
    lora=st.booleans(),
)


@given(ANY_TABLE)
def test_G1_every_captured_key_is_reached_by_a_legal_batch(ladder: DispatchTable) -> None:
    reached = set()
    for num_tokens in range(1, 41):
        for lora in (True, False):
            legal = num_tokens % ladder.uniform_query_len == 0
            uniform = legal and num_tokens // ladder.uniform_query_len <= ladder.max_num_seqs
            for case in {uniform, False}:
                mode, key, _ = ladder.lookup(num_tokens, uniform=case, has_lora=lora)
                reached.add((mode, key))
    keys = [(mode, key) for mode, group in ladder.capture_order() for key in group]
    assert len(keys) == len(set(keys))
    assert set(keys) <= reached


@given(ANY_TABLE, st.integers(1, 45), st.booleans(), st.booleans())
def test_G2_lookup_is_the_best_key_and_idempotent(
    ladder: DispatchTable, num_tokens: int, uniform: bool, allow_full: bool
) -> None:
    mode, key, reason = ladder.lookup(num_tokens, uniform=uniform, allow_full=allow_full)
    usable = [
        (-mode.value, key.num_tokens)
        for mode, group in ladder.capture_order()
        for key in group
        if key.num_tokens >= num_tokens
        and (uniform or not key.uniform)
        and (allow_full or mode is not FULL)
        and not key.has_lora
    ]
    assert (-mode.value, key.num_tokens if key else num_tokens) == min(usable, default=(0, num_tokens))
    assert reason
    if key is not None:
        assert ladder.lookup(key.num_tokens, uniform=uniform, allow_full=allow_full)[:2] == (mode, key)


def test_capture_order_is_largest_first_with_both_lora_variants() -> None:
    ladder = DispatchTable(cudagraph_mode="FULL_AND_PIECEWISE", capture_sizes=(2, 1), max_num_seqs=4, lora=True)
    (first, piecewise), (second, full) = ladder.capture_order()
    assert (first, second) == (PIECEWISE, FULL)
    assert [(key.num_tokens, key.has_lora) for key in piecewise] == [(2, True), (2, False), (1, True), (1, False)]
    assert [(key.num_tokens, key.num_reqs, key.uniform) for key in full[::2]] == [(2, 2, True), (1, 1, True)]


def test_lora_without_lora_graphs_runs_eagerly() -> None:
    assert table().lookup(2, uniform=True, has_lora=True) == (NONE, None, NO_LORA)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(GraphError, match=r"'FULL_ONLY' is not one of NONE, PIECEWISE"):
        table("FULL_ONLY")


# The stage


def test_plans_are_padded_and_counted() -> None:
    dispatch, _ = captured_dispatch(table())
    decode = dispatch(*step([1, 1, 1]))
    assert (decode.mode, decode.num_tokens, decode.num_reqs) == (FULL, 4, 4)
    assert decode.num_tokens_across_dp is None
    mixed = dispatch(*step([4, 1]))
    assert (mixed.mode, mixed.num_tokens, mixed.num_reqs, mixed.reason) == (PIECEWISE, 8, 2, NOT_UNIFORM)
    large = dispatch(*step([9]))
    assert (large.mode, large.num_tokens, large.num_reqs, large.descriptor) == (NONE, 9, 1, None)
    dispatch(*step([1]))
    assert dispatch.counts == {(FULL, BEST): 2, (PIECEWISE, NOT_UNIFORM): 1, (NONE, TOO_LARGE): 1}


def test_nothing_is_replayed_before_capture_or_after_a_drop() -> None:
    captured = CapturedKeys()
    dispatch = Dispatch(table(), captured)
    assert dispatch(*step([1])).reason == "not captured"
    capture_all(dispatch, captured)
    assert dispatch(*step([1])).mode is FULL
    captured.clear("stage 'forward' was replaced")
    plan = dispatch(*step([1, 1, 1]))
    assert (plan.mode, plan.num_tokens, plan.num_reqs) == (NONE, 3, 3)
    assert dispatch.counts[NONE, "stage 'forward' was replaced"] == 1
    capture_all(dispatch, captured)
    assert dispatch(*step([1])).mode is FULL


def test_with_graphs_off_the_reason_says_so() -> None:
    dispatch, captured = captured_dispatch(table("NONE"))
    assert dispatch(*step([1])).reason == OFF
    assert len(captured) == 0


def test_G8_a_forced_eager_step_is_eager_once() -> None:
    dispatch, _ = captured_dispatch(table())
    forced = dispatch(*step([1, 1, 1], eager_reason="first KV-scale step"))
    assert (forced.mode, forced.num_tokens, forced.reason) == (NONE, 3, "first KV-scale step")
    assert dispatch(*step([1, 1, 1])).mode is FULL


def test_G13_odd_query_lengths_leave_the_uniform_graphs() -> None:
    dispatch, _ = captured_dispatch(table(sizes=(3, 6, 12), uniform_query_len=3))
    assert dispatch(*step([3, 3])).mode is FULL
    assert dispatch(*step([3, 2])).mode is PIECEWISE
    assert dispatch(*step([2, 4])).mode is PIECEWISE
    assert dispatch(*step([1, 1, 1])).mode is PIECEWISE


def test_a_mixed_full_graph_has_one_logits_row_a_request() -> None:
    dispatch, _ = captured_dispatch(table("FULL"))
    assert dispatch(*step([4, 1])).mode is FULL
    assert dispatch(*step([4, 1], logits=[4])).mode is FULL
    refused = dispatch(*step([4, 1], logits=[0, 1, 2, 4]))
    assert (refused.mode, refused.reason, refused.num_tokens) == (NONE, OTHER_LOGITS, 5)


def test_a_uniform_full_graph_has_a_logits_row_for_every_token() -> None:
    dispatch, _ = captured_dispatch(table(sizes=(2, 4), uniform_query_len=2))
    assert dispatch(*step([2, 2], logits=[0, 1, 3])).mode is FULL


def test_rows_of_a_full_graph() -> None:
    _, inputs = step([3, 1, 2], logits=[2, 5])
    uniform, mixed = BatchDescriptor(8, 4, True), BatchDescriptor(8, 8)
    rows = full_graph_rows(inputs, mixed)
    assert rows is not None
    assert rows.tolist() == [0, 2]
    rows = full_graph_rows(inputs, uniform)
    assert rows is not None
    assert rows.tolist() == [2, 5]
    assert full_graph_rows(step([3, 1, 2], logits=[1, 5])[1], mixed) is None
    rows = full_graph_rows(step([3, 1, 2], logits=[])[1], mixed)
    assert rows is not None
    assert rows.tolist() == []


def test_more_requests_than_the_graph_holds_run_eagerly() -> None:
    dispatch, _ = captured_dispatch(table("FULL", max_num_seqs=2))
    assert dispatch(*step([1, 1, 1])).reason == TOO_MANY_REQUESTS


@given(ANY_TABLE, st.lists(st.integers(1, 4), min_size=1, max_size=20))
def test_a_full_plan_fits_every_request(ladder: DispatchTable, counts: list[int]) -> None:
    dispatch, _ = captured_dispatch(ladder)
    batch, inputs = step(counts)
    plan = dispatch(batch, inputs)
    assert plan.num_tokens >= batch.num_tokens
    assert plan.num_reqs >= batch.num_reqs
    if plan.mode is FULL:
        key = plan.descriptor
        assert key is not None
        assert (key.num_tokens, key.num_reqs) == (plan.num_tokens, plan.num_reqs)
        assert not key.uniform or set(counts) == {ladder.uniform_query_len}
        assert full_graph_rows(inputs, key) is not None
    else:
        assert plan.num_reqs == batch.num_reqs


# Micro-batches


@pytest.mark.parametrize(
    ("num_tokens", "uniform_decode", "expected"),
    [(7, True, False), (8, True, True), (8, False, False), (19, False, False), (20, False, True)],
)
def test_B5_each_kind_of_batch_has_its_threshold(num_tokens: int, uniform_decode: bool, expected: bool) -> None:
    policy = UBatchPolicy(num_ubatches=2, decode_threshold=8, prefill_threshold=20)
    assert policy.wants(num_tokens=num_tokens, uniform_decode=uniform_decode) is expected
    with pytest.raises(TypeError):
        policy.wants(num_tokens, uniform_decode)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(("counts", "split"), [([1], False), ([2], True), ([1, 1], True), ([1, 1, 1], True)])
def test_B4_no_split_leaves_a_micro_batch_empty(counts: list[int], split: bool) -> None:
    policy = UBatchPolicy(num_ubatches=2, decode_threshold=0, prefill_threshold=0)
    dispatch, _ = captured_dispatch(table("NONE"), policy)
    assert dispatch(*step(counts)).should_ubatch is split


def test_B4_a_split_of_padding_is_refused_and_the_graph_is_used_whole() -> None:
    policy = UBatchPolicy(num_ubatches=2, decode_threshold=2, prefill_threshold=2)
    dispatch, _ = captured_dispatch(table(sizes=(8,)), policy)
    plan = dispatch(*step([1, 1, 1]))
    assert (plan.mode, plan.num_tokens, plan.should_ubatch) == (FULL, 8, False)


def test_G11_a_micro_batched_step_takes_no_full_graph() -> None:
    policy = UBatchPolicy(num_ubatches=2, decode_threshold=4, prefill_threshold=100)
    dispatch, _ = captured_dispatch(table(), policy)
    plan = dispatch(*step([1] * 5))
    assert (plan.mode, plan.num_tokens, plan.should_ubatch, plan.reason) == (PIECEWISE, 8, True, UBATCHED)
    full, _ = captured_dispatch(table("FULL"), policy)
    plan = full(*step([1] * 5))
    assert (plan.mode, plan.num_tokens, plan.should_ubatch, plan.reason) == (NONE, 5, True, UBATCHED)


def test_G1_micro_batched_graphs_are_captured_where_they_can_be_used() -> None:
    policy = UBatchPolicy(num_ubatches=2, decode_threshold=3, prefill_threshold=6)
    dispatch, captured = captured_dispatch(table(), policy)
    split = {key for key in captured if key.should_ubatch}
    assert {key.descriptor.num_tokens for key in split} == {4, 8}
    reached = set()
    for count in range(1, 9):
        for counts in ([1] * count, [count]):
            plan = dispatch(*step(counts))
            if plan.should_ubatch:
                reached.add(GraphKey.of(plan))
    assert reached == split


# Fixed plans


def test_a_fixed_plan_ignores_what_was_captured() -> None:
    plan = BatchExecutionDescriptor(mode=FULL, num_tokens=4, num_reqs=4, descriptor=BatchDescriptor(4, 4, True))
    assert FixedDispatch(plan)(*step([1, 1, 1])) is plan


def test_a_batch_larger_than_its_fixed_plan_is_refused() -> None:
    dispatch = FixedDispatch(BatchExecutionDescriptor(mode=NONE, num_tokens=4, num_reqs=1))
    with pytest.raises(GraphError, match="5 tokens and 1 requests does not fit"):
        dispatch(*step([5]))
    with pytest.raises(GraphError, match="2 tokens and 2 requests does not fit"):
        dispatch(*step([1, 1]))


def test_a_plan_without_a_graph_names_no_key() -> None:
    with pytest.raises(GraphError, match="mode NONE names no graph"):
        GraphKey.of(BatchExecutionDescriptor(mode=NONE, num_tokens=4, num_reqs=1))

"""Slot mapping and attention plans, for every KV-cache group and micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .attention import AttentionBatch, AttentionPlan
from .block_table import BlockTable
from .graphs import PlanCache
from .input_buffers import POSITIONS, QUERY_START_LOC, SEQ_LENS, Heads, InputBuffers
from .records import (
    AttentionMetadata,
    Batch,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    IntArray,
    PreparedInputs,
    UBatchSlice,
    UBatchSlices,
)
from .request_table import RequestTable
from .specs import NULL_BLOCK, NULL_ROW, PAD_SLOT


class _Lengths(NamedTuple):
    """Offsets and lengths of one micro-batch, on the host and on the device."""

    query_start_loc_host: torch.Tensor
    seq_lens_host: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


class BuildAttn:
    """Fills block tables and slots in the fixed buffers and plans attention over them."""

    def __init__(self, table: RequestTable, buffers: InputBuffers, plans: PlanCache) -> None:
        self._table = table
        self._buffers = buffers
        self._plans = plans
        self._rows: IntArray | None = None
        self._has_null_row = False

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, execution: BatchExecutionDescriptor, ubatches: UBatchSlices
    ) -> AttentionMetadata:
        """One plan a micro-batch and group; what they read are views of the fixed buffers."""
        if batch.rows is not self._rows:
            self._has_null_row = bool((batch.rows == NULL_ROW).any())
            self._rows = batch.rows
        positions = self._buffers.tokens.array[POSITIONS, : batch.num_tokens]
        for group, block_table in enumerate(self._table.block_tables):
            self._fill_group(group, block_table, batch.rows, inputs.token_rows, positions)
        if len(ubatches.padded) == 1:
            plans = (self._plan_ubatch(0, ubatches.padded[0], execution, self._whole(ubatches.padded[0], inputs)),)
        else:
            plans = tuple(
                self._plan_ubatch(index, part, execution, self._cut(part)) for index, part in enumerate(ubatches.padded)
            )
        slots = tuple(heads.first(execution.num_tokens) for heads in self._buffers.heads.slot_mapping)
        return AttentionMetadata(plans, slots)

    def _fill_group(
        self, group: int, block_table: BlockTable, rows: IntArray, token_rows: IntArray, positions: IntArray
    ) -> None:
        size, num_tokens = block_table.block_size, len(positions)
        self._buffers.block_table[group].fill(block_table, rows)
        slots = self._buffers.slot_mapping[group]
        block_index, offsets = np.divmod(positions, size)
        blocks = block_table.blocks[token_rows, block_index]
        mapping = slots.pad(num_tokens)[:num_tokens]
        np.multiply(blocks, size, out=mapping, dtype=np.int64)
        mapping += offsets
        if self._has_null_row:  # tokens of dummy runs, which store nothing
            mapping[blocks == NULL_BLOCK] = PAD_SLOT
        slots.flush_first(num_tokens)

    def _plan_ubatch(
        self, index: int, part: UBatchSlice, execution: BatchExecutionDescriptor, lengths: _Lengths
    ) -> tuple[AttentionPlan, ...]:
        plans: list[AttentionPlan] = []
        for group, (tables, slots) in enumerate(
            zip(self._buffers.heads.block_table, self._buffers.heads.slot_mapping, strict=True)
        ):
            plan = self._plans.plans_for(execution, index, group)
            plan.plan(
                AttentionBatch(
                    num_reqs=part.num_reqs,
                    num_tokens=part.num_tokens,
                    max_query_len=part.num_tokens if _is_mixed_full(execution) else lengths.max_query_len,
                    max_seq_len=lengths.max_seq_len,
                    query_start_loc=lengths.query_start_loc,
                    seq_lens=lengths.seq_lens,
                    block_table=_part(tables, part.request_slice),
                    slot_mapping=_part(slots, part.token_slice),
                    query_start_loc_host=lengths.query_start_loc_host,
                    seq_lens_host=lengths.seq_lens_host,
                    in_graph=execution.mode is CUDAGraphMode.FULL,
                )
            )
            plans.append(plan)
        return tuple(plans)

    def _whole(self, part: UBatchSlice, inputs: PreparedInputs) -> _Lengths:
        """Offsets and lengths of a batch that is not cut: the fixed buffers themselves."""
        buffers, count = self._buffers, part.num_reqs
        offsets_host, lengths_host = buffers.host_heads
        return _Lengths(
            offsets_host.first(count + 1),
            lengths_host.first(count),
            buffers.heads.query_start_loc.first(count + 1),
            buffers.heads.seq_lens.first(count),
            inputs.max_query_len,
            inputs.max_seq_len,
        )

    def _cut(self, part: UBatchSlice) -> _Lengths:
        """Offsets and lengths of one micro-batch: a request that is cut is as long as its tokens up to the border."""
        first, last = part.request_slice.start, part.request_slice.stop
        start, stop = part.token_slice.start, part.token_slice.stop
        bounds = self._buffers.requests.array[QUERY_START_LOC, first : last + 1]
        inside = np.clip(bounds, start, stop)
        lengths = self._buffers.requests.array[SEQ_LENS, first:last] - (bounds[1:] - inside[1:])
        offsets_host, lengths_host = torch.from_numpy(inside - start), torch.from_numpy(lengths)
        device = self._buffers.seq_lens.device
        return _Lengths(
            offsets_host,
            lengths_host,
            offsets_host.to(device),
            lengths_host.to(device),
            int((inside[1:] - inside[:-1]).max()),
            int(lengths.max()),
        )


def _part(heads: Heads, entries: slice) -> torch.Tensor:
    """Entries of a fixed tensor, by a slice without a step."""
    head = heads.first(entries.stop)
    return head if entries.start == 0 else head[entries.start :]


def _is_mixed_full(execution: BatchExecutionDescriptor) -> bool:
    """Whether the plan is for a graph that serves batches of any query lengths, however short this step's are."""
    key = execution.descriptor
    return execution.mode is CUDAGraphMode.FULL and key is not None and not key.uniform

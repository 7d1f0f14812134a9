"""Slot mapping and attention plans, for every KV-cache group and micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .attention import AttentionBatch, AttentionPlan
from .block_table import BlockTable
from .graphs import PlanCache
from .input_buffers import POSITIONS, QUERY_START_LOC, SEQ_LENS, InputBuffers
from .records import (
    AttentionMetadata,
    Batch,
    BatchExecutionDescriptor,
    IntArray,
    PreparedInputs,
    UBatchSlice,
    UBatchSlices,
)
from .request_table import RequestTable
from .specs import NULL_BLOCK, PAD_SLOT


class _Lengths(NamedTuple):
    """Offsets and lengths of one micro-batch, on the host and on the device."""

    query_start_loc_host: torch.Tensor
    seq_lens_host: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


class BuildAttn:
    """Fills block tables and slots in the fixed buffers and plans attention over them."""

    def __init__(self, table: RequestTable, buffers: InputBuffers, plans: PlanCache) -> None:
        self._table = table
        self._buffers = buffers
        self._plans = plans

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, execution: BatchExecutionDescriptor, ubatches: UBatchSlices
    ) -> AttentionMetadata:
        """One plan a micro-batch and group; what they read are views of the fixed buffers."""
        positions = self._buffers.tokens.array[POSITIONS, : batch.num_tokens]
        for group, block_table in enumerate(self._table.block_tables):
            self._fill_group(group, block_table, batch.rows, inputs.token_rows, positions)
        is_cut = len(ubatches.padded) > 1
        plans = tuple(
            self._plan_ubatch(index, part, execution, self._cut(part) if is_cut else self._whole(part))
            for index, part in enumerate(ubatches.padded)
        )
        slots = tuple(buffer.device[: execution.num_tokens] for buffer in self._buffers.slot_mapping)
        return AttentionMetadata(plans, slots)

    def _fill_group(
        self, group: int, block_table: BlockTable, rows: IntArray, token_rows: IntArray, positions: IntArray
    ) -> None:
        size, num_tokens = block_table.block_size, len(positions)
        width = int(block_table.counts[rows].max(initial=0))
        table, slots = self._buffers.block_table[group], self._buffers.slot_mapping[group]
        table.array[: len(rows), :width] = block_table.blocks[rows, :width]
        table.array[len(rows) :] = NULL_BLOCK
        block_index, offsets = np.divmod(positions, size)
        blocks = block_table.blocks[token_rows, block_index]
        mapping = slots.array[:num_tokens]
        np.multiply(blocks, size, out=mapping, dtype=np.int64)
        mapping += offsets
        if blocks.min(initial=NULL_BLOCK + 1) == NULL_BLOCK:  # tokens of dummy runs, which store nothing
            mapping[blocks == NULL_BLOCK] = PAD_SLOT
        slots.array[num_tokens:] = PAD_SLOT
        table.flush()
        slots.flush()

    def _plan_ubatch(
        self, index: int, part: UBatchSlice, execution: BatchExecutionDescriptor, lengths: _Lengths
    ) -> tuple[AttentionPlan, ...]:
        plans: list[AttentionPlan] = []
        for group, (block_table, slots) in enumerate(
            zip(self._buffers.block_table, self._buffers.slot_mapping, strict=True)
        ):
            plan = self._plans.plans_for(execution, index, group)
            plan.plan(
                AttentionBatch(
                    num_reqs=part.num_reqs,
                    num_tokens=part.num_tokens,
                    max_query_len=int(lengths.query_start_loc_host.diff().max()),
                    max_seq_len=int(lengths.seq_lens_host.max()),
                    query_start_loc=lengths.query_start_loc,
                    seq_lens=lengths.seq_lens,
                    block_table=block_table.device[part.request_slice],
                    slot_mapping=slots.device[part.token_slice],
                    query_start_loc_host=lengths.query_start_loc_host,
                    seq_lens_host=lengths.seq_lens_host,
                )
            )
            plans.append(plan)
        return tuple(plans)

    def _whole(self, part: UBatchSlice) -> _Lengths:
        """Offsets and lengths of a batch that is not cut: the fixed buffers themselves."""
        host, buffers, count = self._buffers.requests.host, self._buffers, part.num_reqs
        return _Lengths(
            host[QUERY_START_LOC, : count + 1],
            host[SEQ_LENS, :count],
            buffers.query_start_loc[: count + 1],
            buffers.seq_lens[:count],
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
        return _Lengths(offsets_host, lengths_host, offsets_host.to(device), lengths_host.to(device))

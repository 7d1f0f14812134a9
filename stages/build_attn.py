"""Slot mapping and attention plans, for every KV-cache group and micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from attrs import define, frozen

from .attention import AttentionBatch, AttentionPlan
from .block_table import BlockTable
from .graphs import PlanCache
from .input_buffers import POSITIONS, QUERY_START_LOC, SEQ_LENS, Heads, InputBuffers
from .records import (
    AttentionMetadata,
    Batch,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    DecodeRun,
    IntArray,
    PreparedInputs,
    UBatchSlice,
    UBatchSlices,
)
from .request_table import RequestTable
from .specs import NULL_BLOCK, NULL_ROW, PAD_SLOT

_ONE = np.ones((), np.int64)  # numpy takes as long to make it of an integer as to add it


class _Lengths(NamedTuple):
    """Offsets and lengths of one micro-batch, on the host and on the device."""

    query_start_loc_host: torch.Tensor
    seq_lens_host: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int


@define(eq=False)
class _KeptSlots:
    """The slots of a step of ``run``, int64 ``[num_reqs]`` in a buffer: in later ones each is that many larger.

    True for ``num_steps_in_blocks`` steps, and as long as ``num_fills`` of the buffer and the block table's ``version``
    stay.
    """

    run: DecodeRun
    num_steps_before: int
    num_fills: int
    slots: IntArray
    version: int
    num_steps_in_blocks: int

    def grow(self, block_table: BlockTable) -> bool:
        """Make them those of the latest step of the run; False where some begin a block, or a table was changed."""
        num_steps = self.run.num_steps_before - self.num_steps_before
        if num_steps > self.num_steps_in_blocks or self.version != block_table.version:
            return False
        np.add(self.slots, _ONE if num_steps == 1 else num_steps, self.slots)
        self.num_steps_before += num_steps
        self.num_steps_in_blocks -= num_steps
        return True


@frozen(eq=False)
class _KeptBatches:
    """What attention was planned for, and the record that was given, by the records that they were made from."""

    inputs: PreparedInputs
    execution: BatchExecutionDescriptor
    ubatches: UBatchSlices
    batches: tuple[AttentionBatch, ...]
    metadata: AttentionMetadata


class BuildAttn:
    """Fills block tables and slots in the fixed buffers and plans attention over them."""

    def __init__(self, table: RequestTable, buffers: InputBuffers, plans: PlanCache) -> None:
        self._table = table
        self._buffers = buffers
        self._plans = plans
        self._num_groups = len(table.block_tables)
        self._rows: IntArray | None = None
        self._has_null_row = False
        slots, groups = range(buffers.depth), range(self._num_groups)
        self._kept_slots: list[list[_KeptSlots | None]] = [[None for _ in groups] for _ in slots]
        self._kept_batches: list[_KeptBatches | None] = [None for _ in slots]

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, execution: BatchExecutionDescriptor, ubatches: UBatchSlices
    ) -> AttentionMetadata:
        """One plan a micro-batch and group; what they read are views of the fixed buffers."""
        if batch.rows is not self._rows:
            self._has_null_row = bool((batch.rows == NULL_ROW).any())
            self._rows = batch.rows
        run = batch.latest_of_run()
        for group in range(self._num_groups):
            self._fill_group(group, batch, inputs, run)
        if len(ubatches.padded) > 1:
            plans = tuple(
                self._plan_ubatch(index, part, execution, self._cut(part)) for index, part in enumerate(ubatches.padded)
            )
            return AttentionMetadata(plans, self._slots(execution))
        return self._plan_whole(inputs, execution, ubatches)

    def _fill_group(self, group: int, batch: Batch, inputs: PreparedInputs, run: DecodeRun | None) -> None:
        block_table, slots, kept_slots = (
            self._table.block_tables[group],
            self._buffers.slot_mapping[group],
            self._kept_slots[self._buffers.slot],
        )
        self._buffers.block_table[group].fill(block_table, batch.rows)
        kept, kept_slots[group] = kept_slots[group], None  # an interrupt on the way leaves nothing that is half grown
        is_kept = kept is not None and kept.run is run and kept.num_fills == slots.num_fills
        if kept is None or not is_kept or not kept.grow(block_table):
            kept = self._map_tokens(group, batch, inputs, run)
        slots.flush_first(batch.num_tokens)
        kept_slots[group] = kept

    def _map_tokens(self, group: int, batch: Batch, inputs: PreparedInputs, run: DecodeRun | None) -> _KeptSlots | None:
        """Write the slots of every token, and say what steps to come need to know of them."""
        block_table, num_tokens = self._table.block_tables[group], batch.num_tokens
        size = block_table.block_size
        block_index, offsets = np.divmod(self._buffers.tokens.array[POSITIONS, :num_tokens], size)
        blocks = block_table.blocks[inputs.token_rows, block_index]
        slots = self._buffers.slot_mapping[group]
        mapping = slots.pad(num_tokens)[:num_tokens]
        np.multiply(blocks, size, out=mapping, dtype=np.int64)
        mapping += offsets
        if self._has_null_row:  # tokens of dummy runs, which store nothing
            mapping[blocks == NULL_BLOCK] = PAD_SLOT
        if run is None:
            return None
        num_steps = size - 1 - int(np.maximum.reduce(offsets))
        return _KeptSlots(run, run.num_steps_before, slots.num_fills, mapping, block_table.version, num_steps)

    def _plan_whole(
        self, inputs: PreparedInputs, execution: BatchExecutionDescriptor, ubatches: UBatchSlices
    ) -> AttentionMetadata:
        """Plan for a batch that is not cut; steps that share their records share what is made of them too."""
        slot, part = self._buffers.slot, ubatches.padded[0]
        kept = self._kept_batches[slot]
        if (
            kept is None
            or kept.inputs is not inputs
            or kept.execution is not execution
            or kept.ubatches is not ubatches
        ):
            lengths = self._whole(part, inputs)
            batches = tuple(self._attention_batch(group, part, execution, lengths) for group in range(self._num_groups))
            metadata = AttentionMetadata((self._plans_for(execution),), self._slots(execution))
            kept = self._kept_batches[slot] = _KeptBatches(inputs, execution, ubatches, batches, metadata)
        for plan, batch in zip(kept.metadata.plans[0], kept.batches, strict=True):
            plan.plan(batch)
        return kept.metadata

    def _slots(self, execution: BatchExecutionDescriptor) -> tuple[torch.Tensor, ...]:
        return tuple(heads.first(execution.num_tokens) for heads in self._buffers.heads.slot_mapping)

    def _plan_ubatch(
        self, index: int, part: UBatchSlice, execution: BatchExecutionDescriptor, lengths: _Lengths
    ) -> tuple[AttentionPlan, ...]:
        plans = self._plans_for(execution, index)
        for group, plan in enumerate(plans):
            plan.plan(self._attention_batch(group, part, execution, lengths))
        return plans

    def _plans_for(self, execution: BatchExecutionDescriptor, ubatch: int = 0) -> tuple[AttentionPlan, ...]:
        return tuple(self._plans.plans_for(execution, ubatch, group) for group in range(self._num_groups))

    def _attention_batch(
        self, group: int, part: UBatchSlice, execution: BatchExecutionDescriptor, lengths: _Lengths
    ) -> AttentionBatch:
        heads = self._buffers.heads
        return AttentionBatch(
            num_reqs=part.num_reqs,
            num_tokens=part.num_tokens,
            max_query_len=part.num_tokens if _is_mixed_full(execution) else lengths.max_query_len,
            query_start_loc=lengths.query_start_loc,
            seq_lens=lengths.seq_lens,
            block_table=_part(heads.block_table[group], part.request_slice),
            slot_mapping=_part(heads.slot_mapping[group], part.token_slice),
            query_start_loc_host=lengths.query_start_loc_host,
            seq_lens_host=lengths.seq_lens_host,
            in_graph=execution.mode is CUDAGraphMode.FULL,
        )

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
        )


def _part(heads: Heads, entries: slice) -> torch.Tensor:
    """Entries of a fixed tensor, by a slice without a step."""
    head = heads.first(entries.stop)
    return head if entries.start == 0 else head[entries.start :]


def _is_mixed_full(execution: BatchExecutionDescriptor) -> bool:
    """Whether the plan is for a graph that serves batches of any query lengths, however short this step's are."""
    key = execution.descriptor
    return execution.mode is CUDAGraphMode.FULL and key is not None and not key.uniform

"""Buffers at fixed addresses: everything a captured graph may read. Made and owned by the engine, filled by stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, frozen

from .block_table import BlockTable
from .device import Device, Fence, HostArray
from .specs import NULL_BLOCK, PAD_SLOT

POSITIONS, TOKEN_INDEX, LOGITS_INDICES, SAMPLED_INDEX = 0, 1, 2, 3
QUERY_START_LOC, SEQ_LENS = 0, 1

_PLACES = 16


class Heads:
    """Views of a tensor at a fixed address. Each size has a place, shared with others, where it is kept.

    To make a view takes 1 to 2 us.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._views = [(-1, tensor, tensor)] * _PLACES

    def first(self, count: int) -> torch.Tensor:
        """``tensor[:count]``."""
        views = self._views[count % _PLACES]
        return views[1] if views[0] == count else self._cut(count)[1]

    def rest(self, count: int) -> torch.Tensor:
        """``tensor[count:]``."""
        views = self._views[count % _PLACES]
        return views[2] if views[0] == count else self._cut(count)[2]

    def _cut(self, count: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        views = self._views[count % _PLACES] = count, self._tensor[:count], self._tensor[count:]
        return views


@frozen(kw_only=True, eq=False)
class BufferHeads:
    """Heads of the device tensors of :class:`InputBuffers`, by their names there."""

    input_ids: Heads
    positions: Heads
    token_index: Heads
    logits_indices: Heads
    sampled_index: Heads
    query_start_loc: Heads
    seq_lens: Heads
    slot_mapping: tuple[Heads, ...]
    block_table: tuple[Heads, ...]


class StagedBuffer:
    """A device tensor at a fixed address and the host arrays it is filled from, one for each step in flight.

    On a CPU they are all the same memory.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: Device, depth: int) -> None:
        self._device = device
        if device.shares_host_memory:
            self.device = torch.zeros(*shape, dtype=dtype)
            self.ring = [self.device]
        else:
            self.device = torch.zeros(*shape, dtype=dtype, device=device.torch_device)
            pinned = device.torch_device.type == "cuda"
            self.ring = [torch.zeros(*shape, dtype=dtype, pin_memory=pinned) for _ in range(depth)]
        self._arrays: list[HostArray] = [tensor.numpy() for tensor in self.ring]
        self.slot = 0

    @property
    def array(self) -> HostArray:
        """This step's host array."""
        return self._arrays[self.slot]

    @property
    def host(self) -> torch.Tensor:
        """This step's host array, as a tensor."""
        return self.ring[self.slot]

    def turn(self, slot: int) -> None:
        """Use another host array from now on."""
        self.slot = slot % len(self.ring)

    def forget(self) -> None:
        """What the arrays hold is not known any more."""

    def flush(self) -> None:
        """Launch the copy to the device (nothing to do on a CPU)."""
        if not self._device.shares_host_memory:
            self._device.upload(self.host, self.device)

    def flush_first(self, count: int) -> None:
        """The same for the first ``count`` entries."""
        if not self._device.shares_host_memory:
            self._device.upload(self.host[:count], self.device[:count])


class PaddedBuffer(StagedBuffer):
    """Entries of a step, behind which there is padding up to the capacity; the last dimension counts the entries.

    Only what may have changed is padded anew and moves; this keeps account of it, here and on the device.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, padding: int, device: Device, depth: int) -> None:
        super().__init__(*shape, dtype=dtype, device=device, depth=depth)
        self._padding = padding
        self._num_fills = [0] * len(self.ring)
        self.forget()

    @property
    def num_fills(self) -> int:
        """How often this step's array was filled: as long as this stays, who filled it last knows what it holds."""
        return self._num_fills[self.slot]

    def forget(self) -> None:
        """All of it may be in use."""
        size = self.device.shape[-1]
        self._in_use = [size] * len(self.ring)
        self._on_device = size
        self._num_fills = [count + 1 for count in self._num_fills]

    def pad(self, count: int) -> HostArray:
        """Pad behind ``count`` entries, which are to be written next; the whole array."""
        array, slot = self.array, self.slot
        used = self._in_use[slot]
        if used > count:
            array[..., count:used] = self._padding
        self._in_use[slot] = count
        self._num_fills[slot] += 1
        return array

    def moving(self, count: int) -> int:
        """How many entries have to be brought to the device for it to hold ``count`` and padding behind them."""
        self._on_device = max(count, self._on_device)
        return self._on_device

    def moved(self, count: int) -> None:
        """They are on their way. Not before: an interrupt in between only makes the next step bring more."""
        self._on_device = count

    def flush_first(self, count: int) -> None:
        """Launch the copy of ``count`` entries, and of padding over those that the device held before."""
        if self._device.shares_host_memory:
            return
        moving = self.moving(count)
        self._device.upload(self.host[..., :moving], self.device[..., :moving])
        self.moved(count)


@define(eq=False)
class _HeldBlocks:
    """What a host array holds: the first ``counts`` blocks of each of ``rows``, at this ``version`` of their table."""

    rows: HostArray
    counts: HostArray
    version: int
    num_cuts: int


class BlockTableBuffer(StagedBuffer):
    """Block tables of the batch, int32 ``[max_reqs, max_blocks]``. They are large, so only what may have changed moves.

    Rows behind the batch hold the null block; this keeps account of which have to be reset, here and on the device.
    """

    def __init__(self, max_reqs: int, max_blocks: int, *, device: Device, depth: int) -> None:
        super().__init__(max_reqs, max_blocks, dtype=torch.int32, device=device, depth=depth)
        self._version = -1
        self.forget()

    def forget(self) -> None:
        """All rows may be in use, by nobody knows which requests."""
        max_reqs = self.device.shape[0]
        self._rows_in_use = [max_reqs] * len(self.ring)
        self._rows_on_device = max_reqs
        self._rows: HostArray | None = None
        self._held: list[_HeldBlocks | None] = [None] * len(self.ring)

    def fill(self, table: BlockTable, rows: HostArray) -> None:
        """Take in the blocks of these rows of the request table, and bring them to the device."""
        slot = self.slot
        held, self._held[slot] = self._held[slot], None  # an interrupt leaves nothing that could be taken for whole
        if held is None or held.rows is not rows or not self._append(held, table):
            held = self._write(table, rows)
        self._held[slot] = held
        if self._rows is rows and self._version == table.version:
            return
        self._rows = None  # as above
        self._rows_on_device = max(len(rows), self._rows_on_device)
        self.flush_first(self._rows_on_device)
        self._rows, self._version, self._rows_on_device = rows, table.version, len(rows)

    def _append(self, held: _HeldBlocks, table: BlockTable) -> bool:
        """Write what was appended since; False where all has to be written."""
        if held.version == table.version:
            return True
        counts = table.counts[held.rows]
        grown = (counts != held.counts).nonzero()[0]
        places = held.counts[grown]
        if held.num_cuts != table.num_cuts or not np.array_equal(counts[grown], places + 1):
            return False
        self.array[grown, places] = table.blocks[held.rows[grown], places]
        held.counts, held.version = counts, table.version
        return True

    def _write(self, table: BlockTable, rows: HostArray) -> _HeldBlocks:
        count, array, counts = len(rows), self.array, table.counts[rows]
        width = int(counts.max(initial=0))
        reset = max(count, self._rows_in_use[self.slot])
        self._rows_in_use[self.slot] = reset
        array[:count, :width] = table.blocks[rows, :width]
        array[count:reset] = NULL_BLOCK
        self._rows_in_use[self.slot] = count
        return _HeldBlocks(rows, counts, table.version, table.num_cuts)


class InputBuffers:
    """Token-level and request-level inputs of one step, up to ``max_tokens`` tokens and ``max_reqs`` requests.

    ``input_ids`` int32 ``[max_tokens]``. ``tokens`` int64 ``[4, max_tokens]``: positions, where each id lies in the
    flattened token table, ``logits_indices``, and where in that table the tokens that are sampled will lie (rows
    :data:`POSITIONS`, :data:`TOKEN_INDEX`, :data:`LOGITS_INDICES`, :data:`SAMPLED_INDEX`).
    ``requests`` int32 ``[2, max_reqs + 1]``: ``query_start_loc`` and ``seq_lens`` (rows :data:`QUERY_START_LOC`,
    :data:`SEQ_LENS`; the last place of the latter is unused). For each KV-cache group ``slot_mapping`` int64
    ``[max_tokens]`` and ``block_table`` int32 ``[max_reqs, max_blocks]``. After prepare_inputs and build_attn every
    tail, up to capacity, holds padding: id 0, position 0, slot -1, seq_len 0, the null block, and ``num_tokens`` in
    ``query_start_loc``. ``heads`` cut the device tensors to size.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_reqs: int,
        block_tables: Sequence[BlockTable],
        device: Device,
        depth: int = 3,
    ) -> None:
        """``depth`` is how many steps' host arrays exist: one more than steps may be in flight."""

        def padded(*shape: int, padding: int) -> PaddedBuffer:
            return PaddedBuffer(*shape, dtype=torch.int64, padding=padding, device=device, depth=depth)

        self.max_tokens = max_tokens
        self.max_reqs = max_reqs
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device.torch_device)
        self.tokens = padded(4, max_tokens, padding=0)
        self.requests = StagedBuffer(2, max_reqs + 1, dtype=torch.int32, device=device, depth=depth)
        self.slot_mapping = tuple(padded(max_tokens, padding=PAD_SLOT) for _ in block_tables)
        self.block_table = tuple(
            BlockTableBuffer(max_reqs, table.max_blocks, device=device, depth=depth) for table in block_tables
        )
        self.positions = self.tokens.device[POSITIONS]
        self.token_index = self.tokens.device[TOKEN_INDEX]
        self.logits_indices = self.tokens.device[LOGITS_INDICES]
        self.sampled_index = self.tokens.device[SAMPLED_INDEX]
        self.query_start_loc, self.seq_lens = self.requests.device
        self.heads = BufferHeads(
            input_ids=Heads(self.input_ids),
            positions=Heads(self.positions),
            token_index=Heads(self.token_index),
            logits_indices=Heads(self.logits_indices),
            sampled_index=Heads(self.sampled_index),
            query_start_loc=Heads(self.query_start_loc),
            seq_lens=Heads(self.seq_lens),
            slot_mapping=tuple(Heads(buffer.device) for buffer in self.slot_mapping),
            block_table=tuple(Heads(buffer.device) for buffer in self.block_table),
        )
        self._host_heads = [(Heads(host[QUERY_START_LOC]), Heads(host[SEQ_LENS])) for host in self.requests.ring]
        self._staged = (self.tokens, self.requests, *self.slot_mapping, *self.block_table)
        self._device = device
        self._slot = 0
        self._fences: list[Fence | None] = [None] * depth

    @property
    def slot(self) -> int:
        """Which of the host arrays are this step's; always 0 where host and device share memory."""
        return self._slot

    @property
    def depth(self) -> int:
        """How many slots there are."""
        return len(self._fences)

    @property
    def host_heads(self) -> tuple[Heads, Heads]:
        """This step's ``query_start_loc`` and ``seq_lens`` in host memory."""
        return self._host_heads[self.requests.slot]

    def forget(self) -> None:
        """To be called by who has written into the buffers outside of a step: all of it has to be filled anew."""
        for buffer in self._staged:
            buffer.forget()

    def begin_step(self) -> None:
        """Turn to host arrays that no copy reads any more; waits for the step that used them last, if it must."""
        if self._device.shares_host_memory:
            return
        self._fences[self._slot] = self._device.fence()
        self._slot = (self._slot + 1) % len(self._fences)
        fence = self._fences[self._slot]
        if fence is not None:
            fence.wait()
        for buffer in self._staged:
            buffer.turn(self._slot)

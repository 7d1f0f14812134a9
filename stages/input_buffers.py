"""Buffers at fixed addresses: everything a captured graph may read. Made and owned by the engine, filled by stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .block_table import BlockTable
from .device import Device, Fence, HostArray

POSITIONS, TOKEN_INDEX, LOGITS_INDICES = 0, 1, 2
QUERY_START_LOC, SEQ_LENS = 0, 1


class StagedBuffer:
    """A device tensor at a fixed address and the host arrays it is filled from, one for each step in flight.

    On a CPU they are all the same memory.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: Device, depth: int) -> None:
        self._device = device
        if device.shares_host_memory:
            self.device = torch.zeros(*shape, dtype=dtype)
            self._ring = [self.device]
        else:
            self.device = torch.zeros(*shape, dtype=dtype, device=device.torch_device)
            pinned = device.torch_device.type == "cuda"
            self._ring = [torch.zeros(*shape, dtype=dtype, pin_memory=pinned) for _ in range(depth)]
        self._arrays: list[HostArray] = [tensor.numpy() for tensor in self._ring]
        self._slot = 0

    @property
    def array(self) -> HostArray:
        """This step's host array."""
        return self._arrays[self._slot]

    @property
    def host(self) -> torch.Tensor:
        """This step's host array, as a tensor."""
        return self._ring[self._slot]

    def turn(self, slot: int) -> None:
        """Use another host array from now on."""
        self._slot = slot % len(self._ring)

    def flush(self) -> None:
        """Launch the copy to the device (nothing to do on a CPU)."""
        if not self._device.shares_host_memory:
            self._device.upload(self.host, self.device)


class InputBuffers:
    """Token-level and request-level inputs of one step, up to ``max_tokens`` tokens and ``max_reqs`` requests.

    ``input_ids`` int32 ``[max_tokens]``. ``tokens`` int64 ``[3, max_tokens]``: positions, where each id lies in the
    flattened token table, and ``logits_indices`` (rows :data:`POSITIONS`, :data:`TOKEN_INDEX`, :data:`LOGITS_INDICES`).
    ``requests`` int32 ``[2, max_reqs + 1]``: ``query_start_loc`` and ``seq_lens`` (rows :data:`QUERY_START_LOC`,
    :data:`SEQ_LENS`; the last place of the latter is unused). For each KV-cache group ``slot_mapping`` int64
    ``[max_tokens]`` and ``block_table`` int32 ``[max_reqs, max_blocks]``. After prepare_inputs and build_attn every
    tail, up to capacity, holds padding: id 0, position 0, slot -1, seq_len 0, the null block, and ``num_tokens`` in
    ``query_start_loc``.
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

        def buffer(*shape: int, dtype: torch.dtype) -> StagedBuffer:
            return StagedBuffer(*shape, dtype=dtype, device=device, depth=depth)

        self.max_tokens = max_tokens
        self.max_reqs = max_reqs
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device.torch_device)
        self.tokens = buffer(3, max_tokens, dtype=torch.int64)
        self.requests = buffer(2, max_reqs + 1, dtype=torch.int32)
        self.slot_mapping = tuple(buffer(max_tokens, dtype=torch.int64) for _ in block_tables)
        self.block_table = tuple(buffer(max_reqs, table.max_blocks, dtype=torch.int32) for table in block_tables)
        self.positions = self.tokens.device[POSITIONS]
        self.token_index = self.tokens.device[TOKEN_INDEX]
        self.logits_indices = self.tokens.device[LOGITS_INDICES]
        self.query_start_loc, self.seq_lens = self.requests.device
        self._staged = (self.tokens, self.requests, *self.slot_mapping, *self.block_table)
        self._device = device
        self._slot = 0
        self._fences: list[Fence | None] = [None] * depth

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

"""Buffers at fixed addresses: everything a captured graph may read. Made and owned by the engine, filled by stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from .block_table import BlockTable


class StagedBuffer:
    """A host array and the device tensor it is copied to; on a CPU they are one memory."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self.host = torch.zeros(*shape, dtype=dtype, pin_memory=not on_host)
        self.array: npt.NDArray[Any] = self.host.numpy()
        self.device = self.host if on_host else torch.zeros(*shape, dtype=dtype, device=device)

    def flush(self) -> None:
        """Start the copy to the device (nothing to do on a CPU)."""
        if self.device is not self.host:
            self.device.copy_(self.host, non_blocking=True)


class InputBuffers:
    """Token-level and request-level inputs of one step, up to ``max_tokens`` tokens and ``max_reqs`` requests.

    ``input_ids`` int32, ``positions`` and ``logits_indices`` int64 ``[max_tokens]``; ``query_start_loc`` int32
    ``[max_reqs + 1]``; ``seq_lens`` int32 ``[max_reqs]``; for each KV-cache group ``slot_mapping`` int64
    ``[max_tokens]`` and ``block_table`` int32 ``[max_reqs, max_blocks]``. After prepare_inputs and build_attn every
    tail, up to capacity, holds padding: id 0, position 0, slot -1, seq_len 0, the null block, and ``num_tokens`` in
    ``query_start_loc``.
    """

    def __init__(
        self, *, max_tokens: int, max_reqs: int, block_tables: Sequence[BlockTable], device: torch.device
    ) -> None:
        self.max_tokens = max_tokens
        self.max_reqs = max_reqs
        self.input_ids = StagedBuffer(max_tokens, dtype=torch.int32, device=device)
        self.positions = StagedBuffer(max_tokens, dtype=torch.int64, device=device)
        self.logits_indices = StagedBuffer(max_tokens, dtype=torch.int64, device=device)
        self.query_start_loc = StagedBuffer(max_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = StagedBuffer(max_reqs, dtype=torch.int32, device=device)
        self.slot_mapping = tuple(StagedBuffer(max_tokens, dtype=torch.int64, device=device) for _ in block_tables)
        self.block_table = tuple(
            StagedBuffer(max_reqs, table.max_blocks, dtype=torch.int32, device=device) for table in block_tables
        )

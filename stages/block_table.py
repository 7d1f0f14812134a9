"""Which blocks hold a request's keys and values: one table for each KV-cache group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .specs import NULL_BLOCK, KVCacheGroupSpec


class BlockTable:
    """Block ids by row of the request table: ``blocks`` int32 ``[num_rows, max_blocks]``.

    ``counts`` int64 ``[num_rows]`` says how many of a row are valid; entries behind them are never read. ``version``
    grows with every change, ``num_cuts`` whenever a row loses blocks: while it stays, blocks were appended only.
    """

    def __init__(self, num_rows: int, max_model_len: int, group: KVCacheGroupSpec) -> None:
        self.block_size = group.block_size
        self.max_blocks = -(-max_model_len // group.block_size)
        self.blocks = np.full((num_rows, self.max_blocks), NULL_BLOCK, dtype=np.int32)
        self.counts: npt.NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.version = 0
        self.num_cuts = 0

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks to the end of a row."""
        start = int(self.counts[row])
        self.version += 1
        self.blocks[row, start : start + len(block_ids)] = block_ids
        self.counts[row] = start + len(block_ids)

    def append_one(self, rows: npt.NDArray[np.int64], block_ids: npt.NDArray[np.int64]) -> None:
        """Add one block to the end of each of several rows, all distinct."""
        self.version += 1
        counts = self.counts[rows]
        self.blocks[rows, counts] = block_ids
        self.counts[rows] = counts + 1

    def clear(self, row: int) -> None:
        """Make a row empty."""
        self.version += 1
        self.num_cuts += 1
        self.counts[row] = 0

    def restore_count(self, row: int | npt.NDArray[np.int64], count: int | npt.NDArray[np.int64]) -> None:
        """Forget the blocks beyond ``count`` (undoes ``append`` of a row, or ``append_one`` of several)."""
        self.version += 1
        self.num_cuts += 1
        self.counts[row] = count

"""Which blocks hold a request's keys and values: one table for each KV-cache group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .specs import NULL_BLOCK, KVCacheGroupSpec


class BlockTable:
    """Block ids by row of the request table: ``blocks`` int32 ``[num_rows, max_blocks]``.

    ``counts`` int64 ``[num_rows]`` says how many of a row are valid; entries behind them are never read.
    """

    def __init__(self, num_rows: int, max_model_len: int, group: KVCacheGroupSpec) -> None:
        self.block_size = group.block_size
        self.max_blocks = -(-max_model_len // group.block_size)
        self.blocks = np.full((num_rows, self.max_blocks), NULL_BLOCK, dtype=np.int32)
        self.counts: npt.NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks to the end of a row."""
        start = int(self.counts[row])
        self.blocks[row, start : start + len(block_ids)] = block_ids
        self.counts[row] = start + len(block_ids)

    def clear(self, row: int) -> None:
        """Make a row empty."""
        self.counts[row] = 0

    def restore_count(self, row: int, count: int) -> None:
        """Forget the blocks beyond ``count`` (undoes ``append``)."""
        self.counts[row] = count

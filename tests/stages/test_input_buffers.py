"""Input buffers: views that are kept, and block tables that go to the device only when they have changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lazy_device import LazyDevice
from twostroke.stages.block_table import BlockTable
from twostroke.stages.device import HostDevice
from twostroke.stages.input_buffers import BlockTableBuffer, Heads, PaddedBuffer
from twostroke.stages.specs import NULL_BLOCK, KVCacheGroupSpec


def test_heads_and_rests_are_made_once_for_each_size() -> None:
    tensor = torch.arange(40)
    heads = Heads(tensor)
    assert heads.first(3) is heads.first(3)
    assert heads.rest(3) is heads.rest(3)
    for count in range(40):
        assert heads.first(count).tolist() == list(range(count))
        assert heads.rest(count).tolist() == list(range(count, 40))
    assert heads.first(3).data_ptr() == tensor.data_ptr()
    assert len(heads._views) <= 16


@pytest.mark.parametrize("device", [HostDevice(), LazyDevice()], ids=["host", "lazy"])
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_padding_covers_what_larger_steps_left(device: Any, shape: tuple[int, ...]) -> None:
    buffer = PaddedBuffer(*shape, dtype=torch.int64, padding=-1, device=device, depth=3)
    for step, count in enumerate([5, 2, 0, 8, 3, 3, 1, 7, 0, 4]):
        buffer.turn(step)
        buffer.pad(count)[..., :count] = 100 + step
        buffer.flush_first(count)
        assert (buffer.device[..., :count] == 100 + step).all()
        assert (buffer.device[..., count:] == -1).all()
        assert (torch.from_numpy(buffer.array)[..., count:] == -1).all()


class Tables:
    """A block table of six rows, and the buffer that batches of it go through."""

    def __init__(self) -> None:
        self.device = LazyDevice()
        self.table = BlockTable(6, 16, KVCacheGroupSpec(layers=(0,), block_size=4))
        self.buffer = BlockTableBuffer(4, 4, device=self.device, depth=3)
        self.num_steps = 0
        for row in range(1, 6):
            self.table.append(row, [10 * row])

    def step(self, rows: Any) -> int:
        """Fill; returns how many uploads that took, and finds the device to hold what it should."""
        self.buffer.turn(self.num_steps)
        self.num_steps += 1
        before = self.device.num_uploads
        self.buffer.fill(self.table, rows)
        for position, row in enumerate(rows.tolist()):
            count = self.table.counts[row]
            assert self.buffer.device[position, :count].tolist() == self.table.blocks[row, :count].tolist()
            assert self.buffer.array[position, :count].tolist() == self.table.blocks[row, :count].tolist()
        for tensor in (self.buffer.device, self.buffer.host):
            assert (tensor[len(rows) :] == NULL_BLOCK).all()
        return self.device.num_uploads - before


def test_tables_that_have_not_changed_stay_where_they_are() -> None:
    tables, rows = Tables(), np.array([3, 1, 2])
    assert [tables.step(rows) for _ in range(5)] == [1, 0, 0, 0, 0]
    tables.table.append(1, [77])
    assert [tables.step(rows) for _ in range(4)] == [1, 0, 0, 0]
    tables.table.restore_count(1, 1)
    assert tables.step(rows) == 1
    tables.table.append_one(rows, np.array([90, 91, 92]))
    assert tables.step(rows) == 1
    assert tables.step(rows.copy()) == 1


def test_rows_behind_the_batch_are_reset_wherever_they_were_used() -> None:
    tables = Tables()
    for size in (4, 1, 3, 1, 1, 4, 2, 1, 3):
        tables.step(np.arange(1, size + 1))
    tables.buffer.array[2:] = 10**6
    tables.step(np.arange(1, 5))

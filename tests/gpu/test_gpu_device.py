"""Copies between host and GPU: each in its own way, all in order, and none of them waited for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from twostroke.engine.cuda.device import MOST_BYTES_BY_KERNEL, CudaDevice

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    """Where a copy that waits is an error."""
    made = CudaDevice()
    torch.empty(1, device=made.torch_device)
    torch.cuda.set_sync_debug_mode("error")
    yield made
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("size", [1, 500, MOST_BYTES_BY_KERNEL])
def test_there_and_back(device: CudaDevice, size: int, is_pinned: bool) -> None:
    source = torch.arange(size)
    target = torch.zeros(size, dtype=torch.int64, device=device.torch_device)
    device.upload(source.pin_memory() if is_pinned else source, target)
    assert device.download(target).wait().tolist() == source.tolist()


def test_parts_of_rows(device: CudaDevice) -> None:
    source, target = torch.arange(40).view(4, 10).pin_memory(), torch.zeros(4, 30, device=device.torch_device).long()
    device.upload(source[:, :7], target[:, :7])
    wanted = torch.zeros(4, 30, dtype=torch.int64)
    wanted[:, :7] = source[:, :7]
    assert device.download(target).wait().tolist() == wanted.tolist()


def test_downloads_that_nobody_waits_for_keep_their_memory(device: CudaDevice) -> None:
    """A kernel writes it, of which the allocator knows nothing: another download must not get it too early."""
    sources = [torch.full((100,), value, device=device.torch_device) for value in range(200)]
    kept = [device.download(source) for source in sources][::7]
    assert [int(download.wait()[99]) for download in kept] == list(range(0, 200, 7))
    assert all((download.wait() == value).all() for download, value in zip(kept, range(0, 200, 7), strict=True))


@pytest.mark.parametrize("starts", [[90, 5, 2000], [5, 90, 7]])
def test_scattered_pieces(device: CudaDevice, starts: list[int]) -> None:
    """Of pieces that meet the later one counts."""
    pieces = [np.arange(count, dtype=np.int32) + 1000 * count for count in (300, 4, 6)]
    wanted = np.zeros(3000, dtype=np.int32)
    target = torch.zeros(3000, dtype=torch.int32, device=device.torch_device)
    for piece, start in zip(pieces, starts, strict=True):
        wanted[start : start + len(piece)] = piece
    device.scatter(pieces, starts, target)
    for piece in pieces:
        piece[:] = -1
    assert device.download(target).wait().tolist() == wanted.tolist()

"""A CUDA device: work and copies in the order of one stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ...stages.device import Download, Fence, HostArray
from ..kernels.copy import RowCopies
from ..kernels.tokens import scatter_pieces

MOST_BYTES_BY_KERNEL = 2**16


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """As rows of adjacent elements; what has other than two dimensions is contiguous, and one row."""
    return tensor if tensor.dim() == 2 else tensor.view(1, -1)


class CudaFence:
    """Everything that was launched before an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def ready(self) -> bool:
        """Whether the device has come past the event."""
        return self._event.query()

    def wait(self) -> None:
        """Wait for the event."""
        self._event.synchronize()


class CudaDownload:
    """Pinned memory that a copy fills."""

    def __init__(self, arriving: torch.Tensor, event: torch.cuda.Event) -> None:
        self._arriving = arriving
        self._event = event

    def ready(self) -> bool:
        """Whether the copy is done."""
        return self._event.query()

    def wait(self) -> HostArray:
        """Wait for the copy."""
        self._event.synchronize()
        return self._arriving.numpy()


class CudaDevice:
    """Launches and copies go to the current stream of the thread that steps.

    Small copies are kernels that read or write pinned memory where it lies: a copy engine takes 5 us longer to begin.
    """

    shares_host_memory = False

    def __init__(self, name: str = "cuda") -> None:
        device = torch.device(name)
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self._copy_rows = RowCopies()
        self._downloads: deque[CudaDownload] = deque()

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy without waiting; memory that is not pinned is copied to pinned memory first."""
        if not source.is_pinned():
            target.copy_(source.pin_memory(), non_blocking=True)
        elif source.is_contiguous() and target.is_contiguous() and source.nbytes > MOST_BYTES_BY_KERNEL:
            target.copy_(source, non_blocking=True)
        else:
            self._copy_rows(as_rows(source), as_rows(target))

    def scatter(self, pieces: Sequence[HostArray], starts: Sequence[int], target: torch.Tensor) -> None:
        """One copy and one kernel for all pieces; one after another where two of them meet."""
        ends = np.fromiter(accumulate(map(len, pieces), initial=0), dtype=np.int64, count=len(pieces) + 1)
        first = np.asarray(starts, dtype=np.int64)
        order = np.argsort(first, kind="stable")
        if (first[order][1:] < (first + np.diff(ends))[order][:-1]).any():
            for piece, start in zip(pieces, starts, strict=True):
                self.upload(torch.from_numpy(piece), target[start : start + len(piece)])
            return
        where = torch.from_numpy(np.concatenate((first, ends))).pin_memory()
        values = torch.from_numpy(np.concatenate(pieces)).pin_memory()
        device = self.torch_device
        scatter_pieces(where.to(device, non_blocking=True), values.to(device, non_blocking=True), target)

    def download(self, source: torch.Tensor) -> Download:
        """Copy to pinned memory in the order of the stream: so little that it is done before another could begin."""
        arriving = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        if 0 < source.nbytes <= MOST_BYTES_BY_KERNEL and source.is_contiguous():
            self._copy_rows(as_rows(source), as_rows(arriving))
        else:
            arriving.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        download = CudaDownload(arriving, event)
        while self._downloads and self._downloads[0].ready():
            self._downloads.popleft()
        self._downloads.append(download)  # until it is done: the allocator knows nothing of what a kernel writes
        return download

    def fence(self) -> Fence:
        """An event behind what was launched so far."""
        event = torch.cuda.Event()
        event.record()
        return CudaFence(event)

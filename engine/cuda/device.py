"""A CUDA device: work and copies in the order of one stream."""

from __future__ import annotations

import torch

from ...stages.device import Download, Fence, HostArray
from ..kernels.copy import copy_rows


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
    """Launches and copies go to the current stream of the thread that steps."""

    shares_host_memory = False

    def __init__(self, name: str = "cuda") -> None:
        device = torch.device(name)
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy without waiting; memory that is not pinned is copied to pinned memory first."""
        if not source.is_pinned():
            source = source.pin_memory()
        if source.is_contiguous() and target.is_contiguous():
            target.copy_(source, non_blocking=True)
        else:
            copy_rows(source, target)

    def download(self, source: torch.Tensor) -> Download:
        """Copy to pinned memory in the order of the stream: so little that it is done before another could begin."""
        arriving = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        arriving.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return CudaDownload(arriving, event)

    def fence(self) -> Fence:
        """An event behind what was launched so far."""
        event = torch.cuda.Event()
        event.record()
        return CudaFence(event)

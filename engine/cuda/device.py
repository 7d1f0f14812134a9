"""A CUDA device: work in the order of one stream, copies to the host beside it."""

from __future__ import annotations

import torch

from ...stages.device import Download, Fence, HostArray


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
    """Pinned memory that a copy fills. Keeps its source alive until it has arrived."""

    def __init__(self, source: torch.Tensor, arriving: torch.Tensor, event: torch.cuda.Event) -> None:
        self._source: torch.Tensor | None = source
        self._arriving = arriving
        self._event = event

    def ready(self) -> bool:
        """Whether the copy is done."""
        return self._event.query()

    def wait(self) -> HostArray:
        """Wait for the copy."""
        self._event.synchronize()
        self._source = None
        return self._arriving.numpy()


class CudaDevice:
    """Launches go to the current stream of the thread that steps; downloads go on beside the next forward."""

    shares_host_memory = False

    def __init__(self, name: str = "cuda") -> None:
        device = torch.device(name)
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self._downloads = torch.cuda.Stream(self.torch_device)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy without waiting; memory that is not pinned is copied to pinned memory first."""
        target.copy_(source if source.is_pinned() else source.pin_memory(), non_blocking=True)

    def download(self, source: torch.Tensor) -> Download:
        """Copy on a stream of its own, behind what was launched so far."""
        arriving = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        stream = self._downloads
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            arriving.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        source.record_stream(stream)  # it may be dropped, by a rollback, while it is being read
        return CudaDownload(source, arriving, event)

    def fence(self) -> Fence:
        """An event behind what was launched so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return CudaFence(event)

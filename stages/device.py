"""Where a step computes, and how data gets there and back without anybody waiting by accident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch

HostArray = npt.NDArray[Any]


class Fence(Protocol):
    """Everything that was launched on a device up to a moment."""

    def ready(self) -> bool:
        """Whether all of it is done. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until all of it is done."""
        ...


class Download(Protocol):
    """A copy from the device to the host that is on its way."""

    def ready(self) -> bool:
        """Whether it has arrived. Never waits."""
        ...

    def wait(self) -> HostArray:
        """Wait for it; the array is the caller's."""
        ...


class Device(Protocol):
    """Work on a device happens in the order in which it was launched, later than the launch."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        ...

    @property
    def shares_host_memory(self) -> bool:
        """Whether host arrays and device tensors are the same memory, so that nothing is ever copied."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Launch the copy of host memory to the device; ``source`` may not be written until a later fence is ready."""
        ...

    def scatter(self, pieces: Sequence[HostArray], starts: Sequence[int], target: torch.Tensor) -> None:
        """Launch the copies of host arrays to places of a flat device tensor; of two for a place the later one counts.

        The arrays may be written once this returns.
        """
        ...

    def download(self, source: torch.Tensor) -> Download:
        """Launch the copy of a device tensor to host memory; ``source`` may not be written by later launches."""
        ...

    def fence(self) -> Fence:
        """A fence behind all that was launched so far."""
        ...


class _Done:
    """A fence or a download that has nothing to wait for."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self._tensor = tensor

    def ready(self) -> bool:
        return True

    def wait(self) -> Any:
        return None if self._tensor is None else self._tensor.numpy()


class HostDevice:
    """The CPU: tensors are host memory, and what is launched is done when the launch returns."""

    torch_device = torch.device("cpu")
    shares_host_memory = True

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy, unless both are the same memory."""
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)

    def scatter(self, pieces: Sequence[HostArray], starts: Sequence[int], target: torch.Tensor) -> None:
        """Copy them one after another."""
        for piece, start in zip(pieces, starts, strict=True):
            target[start : start + len(piece)].copy_(torch.from_numpy(piece))

    def download(self, source: torch.Tensor) -> Download:
        """The tensor itself."""
        return _Done(source)

    def fence(self) -> Fence:
        """Always ready."""
        return _Done()

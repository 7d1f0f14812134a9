"""A device whose copies take as long as they may: a test double that makes a missing fence a failing test.

Device tensors are memory of their own. What an upload reads may not be written until the device is known to be done
with it, and what a download brings is not there until it is waited for; both are checked, not hoped for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from twostroke.stages.device import HostArray


class BufferRewritten(AssertionError):
    """Host memory was written while a copy might still have been reading it."""


class LazyDevice:
    """Nothing is done before somebody waits: neither uploads nor downloads count as arrived until then."""

    torch_device = torch.device("cpu")
    shares_host_memory = False

    def __init__(self) -> None:
        self._reading: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_uploads = 0
        self.num_waits = 0
        self.before_wait: Callable[[], None] | None = None

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy, and remember what the source held."""
        assert source.data_ptr() != target.data_ptr(), "device memory is never host memory"
        target.copy_(source)
        self._reading.append((source, source.clone()))
        self.num_uploads += 1

    def scatter(self, pieces: Sequence[HostArray], starts: Sequence[int], target: torch.Tensor) -> None:
        """Uploads of copies, one after another."""
        for piece, start in zip(pieces, starts, strict=True):
            self.upload(torch.from_numpy(piece.copy()), target[start : start + len(piece)])

    def download(self, source: torch.Tensor) -> LazyDownload:
        """A copy that arrives when it is waited for."""
        return LazyDownload(self, source.clone(), len(self._reading))

    def fence(self) -> LazyFence:
        """A fence behind everything so far."""
        return LazyFence(self, list(self._reading))

    def finish(self, uploads: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The device is done with these uploads: their sources must be what they were all the time."""
        self.num_waits += 1
        if self.before_wait is not None:
            self.before_wait()
        done = {id(upload[1]) for upload in uploads}
        for source, content in uploads:
            if any(content is held for _, held in self._reading) and not torch.equal(source, content):
                raise BufferRewritten(f"an upload of {tuple(source.shape)} {source.dtype} was overwritten on its way")
        self._reading = [upload for upload in self._reading if id(upload[1]) not in done]

    @property
    def uploads(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Uploads that are not known to be done."""
        return self._reading


class LazyFence:
    """Ready once waited for."""

    def __init__(self, device: LazyDevice, uploads: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._device, self._uploads, self._is_done = device, uploads, False

    def ready(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        if not self._is_done:
            self._device.finish(self._uploads)
            self._is_done = True


class LazyDownload:
    """Host memory that is garbage until it is waited for."""

    def __init__(self, device: LazyDevice, content: torch.Tensor, num_uploads: int) -> None:
        self._device, self._content = device, content
        self._uploads = device.uploads[:num_uploads]
        self._is_done = False

    def ready(self) -> bool:
        return self._is_done

    def wait(self) -> HostArray:
        if not self._is_done:
            self._device.finish(self._uploads)
            self._is_done = True
        return np.array(self._content.numpy())

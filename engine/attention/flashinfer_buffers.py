"""Memory that FlashInfer's plans are made in: page lists at fixed addresses, workspaces, and guarded pinned memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from ...stages.attention import AttentionBatch
from ...stages.device import Device, Fence
from ...stages.specs import AttentionLayerSpec
from ..kernels.pages import list_pages
from .flashinfer_library import group_size

PLAN_BYTES = 8 * 2**20
"""Of a plan's schedule, as FlashInfer's wrappers have it."""
RING_DEPTH = 3
"""Pinned copies of a schedule: one more than steps may be in flight, as of the step's input buffers."""
CTA_QUERIES = 128
DECODE_CTA_QUERIES = 16
"""Queries of a tile of FlashAttention-2's kernels: the most, and those of a decode step."""


@frozen(kw_only=True)
class AttentionLimits:
    """Bounds on every batch of a runner, ``max_blocks`` of one request, and what its caches hold."""

    max_num_seqs: int
    max_blocks: int
    dtype: torch.dtype


def workspace_bytes(layer: AttentionLayerSpec, limits: AttentionLimits, num_processors: int) -> int:
    """Bytes that the partial results of split keys take at most, in float32 with a weight a row.

    FlashInfer splits for two thread blocks a processor (FlashAttention-2) or a full device (CUDA cores, at most 16 a
    processor); in a graph a decode step has a tile a request at least. From ``scheduler.cuh`` of release 0.6.13.
    """
    group, row = group_size(layer), (layer.head_size + 1) * 4
    split = 2 * num_processors * CTA_QUERIES * group * row
    decode_tiles = -(-limits.max_num_seqs * group // DECODE_CTA_QUERIES) + limits.max_num_seqs
    decode = max(decode_tiles, 2 * num_processors) * DECODE_CTA_QUERIES * layer.num_heads * row
    cuda_cores = max(16 * num_processors, limits.max_num_seqs * layer.num_kv_heads) * group * row
    return max(split, decode, cuda_cores) + 2**16


class HostLengths(NamedTuple):
    """What a plan is made from, in host memory: int32, ``offsets`` of the pages ``[num_reqs + 1]``, the rest
    ``[num_reqs]``.
    """

    offsets: npt.NDArray[np.int32]
    last_page_len: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]

    @classmethod
    def of(cls, seq_lens: torch.Tensor, page_size: int) -> HostLengths:
        """Offsets and last lengths as :func:`~..kernels.pages.list_pages` writes them on the device."""
        lengths = seq_lens.numpy()
        num_pages = (lengths + (page_size - 1)) // page_size
        offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(num_pages, dtype=np.int32, out=offsets[1:])
        return cls(offsets, lengths - np.maximum(num_pages - 1, 0) * page_size, lengths)


class PageLists:
    """The batch's pages on the device, at fixed addresses: what FlashInfer's kernels read instead of a block table."""

    def __init__(self, limits: AttentionLimits, device: torch.device) -> None:
        self.offsets = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int32, device=device)
        self.pages = torch.zeros(limits.max_num_seqs * limits.max_blocks, dtype=torch.int32, device=device)
        self.last_page_len = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int32, device=device)

    def fill(self, batch: AttentionBatch, page_size: int) -> None:
        """Take in this batch, on the device: the host needs no block table, and nobody waits."""
        list_pages(batch.block_table, batch.seq_lens, page_size, self.offsets, self.pages, self.last_page_len)


class StagingSlot:
    """Pinned memory of one plan: its schedule, and the lengths copied beside it, int32 ``[4, max_reqs + 1]``."""

    def __init__(self, max_reqs: int, *, pinned: bool) -> None:
        self.schedule = torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._lengths = torch.zeros(4, max_reqs + 1, dtype=torch.int32, pin_memory=pinned)
        self._arrays = self._lengths.numpy()

    def write(self, *arrays: npt.NDArray[np.int32]) -> tuple[torch.Tensor, ...]:
        """Copies of up to four arrays."""
        for row, array in zip(self._arrays, arrays, strict=False):
            row[: len(array)] = array
        return tuple(self._lengths[index, : len(array)] for index, array in enumerate(arrays))


class StagingRing:
    """Pinned memory that is written again only after the copies from it are done."""

    def __init__(self, max_reqs: int, device: Device) -> None:
        pinned = device.torch_device.type == "cuda"
        self._device = device
        self._slots = [StagingSlot(max_reqs, pinned=pinned) for _ in range(RING_DEPTH)]
        self._fences: list[Fence | None] = [None] * RING_DEPTH
        self._index = 0

    def wait_for_slot(self) -> StagingSlot:
        """The slot used longest ago; waits for its copies if it must, which it need not in a steady loop."""
        self._index = (self._index + 1) % len(self._slots)
        fence = self._fences[self._index]
        if fence is not None:
            fence.wait()
            self._fences[self._index] = None
        return self._slots[self._index]

    def launched(self) -> None:
        """All copies from the slot are launched."""
        self._fences[self._index] = self._device.fence()


class PlanMemory:
    """Device and pinned memory of a plan for one KV-cache group.

    All plans that graphs hold share one: they are made in place before each replay, and only one graph runs at a time,
    in the order of the stream. Any other plan has its own, as two micro-batches are planned before either runs.
    """

    def __init__(self, limits: AttentionLimits, device: Device) -> None:
        self.pages = PageLists(limits, device.torch_device)
        self._limits = limits
        self._device = device
        self._lanes: dict[AttentionLayerSpec, tuple[torch.Tensor, StagingRing]] = {}

    def lane(self, layer: AttentionLayerSpec) -> tuple[torch.Tensor, StagingRing]:
        """Where the schedule for layers of this kind lies on the device, and what it is copied from."""
        if layer not in self._lanes:
            schedule = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=self._device.torch_device)
            self._lanes[layer] = schedule, StagingRing(self._limits.max_num_seqs, self._device)
        return self._lanes[layer]

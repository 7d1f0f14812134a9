"""FlashInfer's wrappers under one interface: planned from lengths on the host, run once a layer."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from ...stages.attention import AttentionBatch
from ...stages.specs import AttentionLayerSpec
from .flashinfer_buffers import HostLengths, PageLists, PlanMemory, StagingSlot
from .flashinfer_library import AttentionKernel, FlashInfer


@frozen(kw_only=True, eq=False)
class WorkPlace:
    """What a wrapper is made for: a kind of layer, its cache, and the memory that plans are made in."""

    library: FlashInfer
    layer: AttentionLayerSpec
    dtype: torch.dtype
    page_size: int
    workspace: torch.Tensor
    memory: PlanMemory

    def options(self) -> dict[str, Any]:
        """Arguments that every ``plan`` of FlashInfer takes. Its window does not count the query itself."""
        window = self.layer.sliding_window
        return {
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.layer.soft_cap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
            "sm_scale": self.layer.scale,
        }

    def shape(self) -> tuple[int, int, int, int]:
        """Query heads, key heads, head size, tokens of a page."""
        return self.layer.num_heads, self.layer.num_kv_heads, self.layer.head_size, self.page_size

    @property
    def pages(self) -> PageLists:
        """Where kernels find the pages."""
        return self.memory.pages


class Work(Protocol):
    """The kernel of one kind of layer in one plan."""

    def plan(self, batch: AttentionBatch, lengths: HostLengths) -> None:
        """Schedule this batch, whose pages are listed already."""
        ...

    def run(self, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """Attention of ``query`` ``[num_tokens, num_heads, head_size]``; tokens without a request come out as zeros."""
        ...


class _Staged:
    """A wrapper whose schedule lies in memory of ours.

    The wrappers make 8 MiB on either side for each of them, and write pinned memory again that a copy may still read.
    They have no public way to be given theirs, so it is put in their place.
    """

    def __init__(self, place: WorkPlace, wrapper: Any) -> None:
        self.place = place
        self.wrapper = wrapper
        self._schedule, self._ring = place.memory.lane(place.layer)
        wrapper._int_workspace_buffer = self._schedule

    def wait_for_slot(self) -> StagingSlot:
        """Pinned memory that this plan may write."""
        slot = self._ring.wait_for_slot()
        self.wrapper._pin_memory_int_workspace_buffer = slot.schedule
        return slot

    def launched(self) -> None:
        """The plan is made, and its copies are launched."""
        self._ring.launched()


class BatchSize(NamedTuple):
    """The size of every batch of a graph, padding included."""

    num_reqs: int
    num_tokens: int


class DecodeWork:
    """One token a request. ``size`` is that of a graph; None takes any batch, on CUDA cores only."""

    def __init__(self, place: WorkPlace, kernel: AttentionKernel, size: BatchSize | None) -> None:
        pages, count = place.pages, 1 if size is None else size.num_reqs
        assert size is not None or kernel is AttentionKernel.CUDA_CORES, "tensor cores plan for a fixed batch"
        buffers = {}
        if size is not None:
            buffers = {
                "paged_kv_indptr_buffer": pages.offsets[: count + 1],
                "paged_kv_indices_buffer": pages.pages,
                "paged_kv_last_page_len_buffer": pages.last_page_len[:count],
            }
        wrapper = place.library.module.BatchDecodeWithPagedKVCacheWrapper(
            place.workspace,
            "NHD",
            use_cuda_graph=size is not None,
            use_tensor_cores=kernel is AttentionKernel.TENSOR_CORES,
            **buffers,
        )
        self._staged = _Staged(place, wrapper)
        self._is_fixed = size is not None
        self._num_reqs = count
        self._prepare_sync(count)

    def _prepare_sync(self, count: int) -> None:
        """The wrapper's own plan, of requests of one token: it loads the kernels. It copies memory that is not pinned,
        and so may wait; ``fast_decode_plan`` does not, and needs this once before.
        """
        place, ones = self._staged.place, torch.ones(count, dtype=torch.int32)
        offsets = torch.arange(count + 1, dtype=torch.int32)
        self._staged.wait_for_slot()
        self._staged.wrapper.plan(offsets, torch.zeros_like(ones), ones, *place.shape(), **place.options())
        self._staged.launched()

    def plan(self, batch: AttentionBatch, lengths: HostLengths) -> None:
        """Schedule by lengths on the host; the kernels read the page lists on the device."""
        place, pages, count = self._staged.place, self._staged.place.pages, batch.num_reqs
        assert not self._is_fixed or count == self._num_reqs, "a graph's plan keeps its size"
        self._num_reqs = count
        offsets = torch.from_numpy(lengths.offsets)
        if self._is_fixed:  # the wrapper reads its fixed buffers, and of these only how long they are
            given = offsets, pages.pages, torch.from_numpy(lengths.last_page_len)
        else:
            given = pages.offsets[: count + 1], pages.pages, pages.last_page_len[:count]
        self._staged.wait_for_slot()
        place.library.module.fast_decode_plan(
            self._staged.wrapper, *given, *place.shape(), **place.options(), global_override_indptr_cpu=offsets
        )
        self._staged.launched()

    def run(self, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """Token i is that of request i."""
        count, output = self._num_reqs, torch.empty_like(query)
        if count < len(query):
            output[count:].zero_()
            query = query[:count]
        self._staged.wrapper.run(query, (kv_cache[0], kv_cache[1]), out=output[:count])
        return output


class MixedWork:
    """Any number of tokens a request. ``size`` is that of a graph; None takes any batch."""

    def __init__(self, place: WorkPlace, kernel: AttentionKernel, size: BatchSize | None) -> None:
        pages, buffers = place.pages, {}
        if size is not None:
            buffers = {
                "qo_indptr_buf": pages.query_start_loc[: size.num_reqs + 1],
                "paged_kv_indptr_buf": pages.offsets[: size.num_reqs + 1],
                "paged_kv_indices_buf": pages.pages,
                "paged_kv_last_page_len_buf": pages.last_page_len[: size.num_reqs],
            }
        wrapper = place.library.module.BatchPrefillWithPagedKVCacheWrapper(
            place.workspace,
            "NHD",
            use_cuda_graph=size is not None,
            backend="fa3" if kernel is AttentionKernel.FA3 else "fa2",
            **buffers,
        )
        self._staged = _Staged(place, wrapper)
        self._is_fixed = size is not None
        self._num_tokens = 0
        # A first plan loads the kernels; that of a graph's wrapper says how many tokens there may be: all of them
        # belong to its first request.
        size = size or BatchSize(1, 1)
        starts = np.full(size.num_reqs + 1, size.num_tokens, dtype=np.int32)
        starts[0] = 0
        lengths = torch.ones(size.num_reqs, dtype=torch.int32)
        self._plan(starts, HostLengths.of(lengths, place.page_size), size.num_tokens)

    def plan(self, batch: AttentionBatch, lengths: HostLengths) -> None:
        """Schedule by lengths on the host, all of them copied from pinned memory."""
        starts = batch.query_start_loc_host.numpy()
        self._num_tokens = int(starts[-1])
        if self._num_tokens:
            self._plan(starts, lengths, batch.max_query_len)

    def _plan(self, starts: npt.NDArray[np.int32], lengths: HostLengths, max_query_len: int) -> None:
        place = self._staged.place
        slot = self._staged.wait_for_slot()
        starts_host, offsets, last, seq_lens = slot.write(
            starts, lengths.offsets, lengths.last_page_len, lengths.seq_lens
        )
        self._staged.wrapper.plan(
            starts_host,
            offsets,
            place.pages.pages,
            last,
            *place.shape(),
            causal=True,
            seq_lens=seq_lens,
            max_token_per_sequence=max_query_len,
            **place.options(),
        )
        self._staged.launched()

    def run(self, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """Tokens behind the last request are padding."""
        pools = kv_cache[0], kv_cache[1]
        if self._is_fixed:
            # A replay may have any number of tokens, which the kernel reads on the device; the wrapper compares that
            # of the last plan with the query's.
            output = torch.zeros_like(query)
            self._staged.wrapper._qo_indptr_last = len(query)
            self._staged.wrapper.run(query, pools, out=output)
            return output
        count, output = self._num_tokens, torch.empty_like(query)
        if count < len(query):
            output[count:].zero_()
        if count:
            self._staged.wrapper.run(query[:count], pools, out=output[:count])
        return output

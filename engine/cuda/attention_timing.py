"""Times of attention kernels on this GPU, for a few sizes of batches, over keys that come from memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from attrs import frozen

from ...stages.attention import AttentionBatch, AttentionPlan
from ...stages.device import Device
from ...stages.specs import PAD_SLOT, AttentionLayerSpec, KVCacheGroupSpec, ModelSpec
from ..attention.flashinfer_buffers import AttentionLimits
from ..attention.flashinfer_library import DECODE_KERNELS, MIXED_KERNELS, AttentionKernel, FixedChoice, FlashInfer
from ..attention.flashinfer_paged import FlashInferBackend
from ..attention.triton_paged import TritonPagedBackend
from .attention_choice import AttentionTimes
from .timing import replay_time_us

_LOG = logging.getLogger(__name__)

Requests = Sequence[tuple[int, int]]

DECODE_SIZES = (1, 8, 32, 64, 128, 256)
DECODE_CONTEXTS = (512, 2048)
MIXED_CASES: tuple[Requests, ...] = (((0, 1024),) * 4, (*(((1023, 1),) * 63), (1024, 1024)))
"""(computed, scheduled) tokens: four prompts; a chunk among decodes."""
POOL_BYTES = 256 * 2**20
"""Of keys and values: several times any cache, so that little of a layer is there from the layer before."""
MOST_LAYERS = 64


@frozen(kw_only=True)
class TimedShape:
    """What is measured: a kind of layer, its cache, and where."""

    layer: AttentionLayerSpec
    dtype: torch.dtype
    block_size: int
    device: Device
    pdl: bool

    @property
    def group(self) -> KVCacheGroupSpec:
        """A group of the one layer."""
        return KVCacheGroupSpec(layers=(0,), block_size=self.block_size)

    @property
    def spec(self) -> ModelSpec:
        """A model of the one layer."""
        return ModelSpec(
            architecture="", vocab_size=1, hidden_size=1, max_position=2**20, attention_layers=(self.layer,)
        )

    def plan(self, kernel: AttentionKernel, library: FlashInfer) -> AttentionPlan:
        """An empty plan that runs on this kernel."""
        largest = max(DECODE_SIZES)
        if kernel is AttentionKernel.TRITON:
            backend = TritonPagedBackend(self.spec, largest, self.device.torch_device, pdl=self.pdl)
            return backend.make_plan(self.group)
        limits = AttentionLimits(
            max_num_seqs=largest,
            max_blocks=-(-max(DECODE_CONTEXTS) // self.block_size) + 1,
            dtype=self.dtype,
        )
        choice = FixedChoice(kernel, kernel)
        return FlashInferBackend(library, self.spec, limits, self.device, lambda _: choice).make_plan(self.group)


class AttentionPool:
    """Keys and values of many layers at once, and batches over them."""

    def __init__(self, shape: TimedShape, num_bytes: int) -> None:
        layer = shape.layer
        page_bytes = 2 * shape.block_size * layer.num_kv_heads * layer.head_size * shape.dtype.itemsize
        self._shape = shape
        self._device = shape.device.torch_device
        self.num_pages = max(num_bytes // page_bytes, 1)
        size = (2, self.num_pages, shape.block_size, layer.num_kv_heads, layer.head_size)
        self._pool = torch.empty(size, dtype=shape.dtype, device=self._device).normal_()

    def batch(self, requests: Requests, *, in_graph: bool) -> tuple[AttentionBatch, list[torch.Tensor]]:
        """A batch of these requests, and caches of as many layers as there are pages for.

        Where even one layer has too few, requests share pages far apart.
        """
        size = self._shape.block_size
        seq_lens = torch.tensor([sum(request) for request in requests], dtype=torch.int32)
        starts = torch.tensor([0, *(count for _, count in requests)]).cumsum(0).to(torch.int32)
        width = -(-int(seq_lens.max()) // size)
        needed = width * len(requests)
        table = (torch.randperm(needed) % self.num_pages).to(torch.int32).view(len(requests), width)
        own = min(needed, self.num_pages)
        num_layers = min(self.num_pages // own, MOST_LAYERS)
        caches = [self._pool[:, index * own : (index + 1) * own] for index in range(num_layers)]
        num_tokens = int(starts[-1])
        batch = AttentionBatch(
            num_reqs=len(requests),
            num_tokens=num_tokens,
            max_query_len=max(count for _, count in requests),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=starts.to(self._device),
            seq_lens=seq_lens.to(self._device),
            block_table=table.to(self._device),
            slot_mapping=torch.full((num_tokens,), PAD_SLOT, device=self._device),
            query_start_loc_host=starts,
            seq_lens_host=seq_lens,
            in_graph=in_graph,
        )
        return batch, caches

    def query(self, num_tokens: int) -> torch.Tensor:
        """Queries ``[num_tokens, num_heads, head_size]``."""
        layer = self._shape.layer
        size = (num_tokens, layer.num_heads, layer.head_size)
        return torch.empty(size, dtype=self._shape.dtype, device=self._device).normal_()


def measure_attention(shape: TimedShape, library: FlashInfer, kernels: Sequence[AttentionKernel]) -> AttentionTimes:
    """Time Triton's kernels and ``kernels``. What cannot be run is left out, with a warning."""
    pool = AttentionPool(shape, POOL_BYTES)
    decode: dict[int, dict[AttentionKernel, tuple[float, ...]]] = {count: {} for count in DECODE_SIZES}
    mixed: dict[AttentionKernel, tuple[float, ...]] = {}
    for kernel in (AttentionKernel.TRITON, *kernels):
        try:
            plan = shape.plan(kernel, library)
            if kernel not in MIXED_KERNELS:
                times = {count: _decode_times(shape, pool, plan, count) for count in DECODE_SIZES}
                for count, values in times.items():
                    decode[count][kernel] = values
            if kernel not in DECODE_KERNELS:
                mixed[kernel] = tuple(attention_time_us(shape, pool, plan, requests) for requests in MIXED_CASES)
        except Exception as error:
            if kernel is AttentionKernel.TRITON:
                raise
            _LOG.warning("%s is not used: %s: %s", kernel, type(error).__name__, error)
    return AttentionTimes(decode, mixed)


def _decode_times(shape: TimedShape, pool: AttentionPool, plan: AttentionPlan, count: int) -> tuple[float, ...]:
    return tuple(attention_time_us(shape, pool, plan, [(context - 1, 1)] * count) for context in DECODE_CONTEXTS)


def attention_time_us(shape: TimedShape, pool: AttentionPool, plan: AttentionPlan, requests: Requests) -> float:
    """Microseconds of one layer's attention for these requests; a decode step is planned as for a graph."""
    is_decode = all(count == 1 for _, count in requests)
    batch, caches = pool.batch(requests, in_graph=is_decode)
    query = pool.query(batch.num_tokens)
    plan.plan(batch)

    def work() -> None:
        for cache in caches:
            plan.run(query, None, None, cache, shape.layer)

    return replay_time_us(work, num_replays=4, num_rounds=3) / len(caches)

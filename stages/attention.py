"""Attention behind a protocol: plan once a step on the host, run once a layer."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from attrs import field, frozen

from .specs import AttentionLayerSpec, KVCacheGroupSpec


@frozen(kw_only=True, eq=False)
class AttentionBatch:
    """One micro-batch of one KV-cache group, as a backend sees it.

    Tensors are views of the engine's fixed buffers, padded to the planned shape: ``query_start_loc`` int32
    ``[num_reqs + 1]`` starting at 0, ``seq_lens`` int32 ``[num_reqs]`` (0 = padding), ``block_table`` int32
    ``[num_reqs, max_blocks]``, ``slot_mapping`` int64 ``[num_tokens]`` (-1 = padding). ``*_host`` hold the same in host
    memory. ``num_reqs`` and ``num_tokens`` are padded sizes, ``max_query_len`` and ``max_seq_len`` upper bounds.
    ``in_graph``: a FULL graph reads the plan, whose batches are then all of this size. Steps may share the object: the
    buffers that it shows are what changes.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    _max_seq_len: int | None = field(default=None, alias="max_seq_len")
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_host: torch.Tensor
    seq_lens_host: torch.Tensor
    in_graph: bool = False

    @property
    def max_seq_len(self) -> int:
        """An upper bound of ``seq_lens``; their maximum now where the constructor was not given any."""
        if self._max_seq_len is not None:
            return self._max_seq_len
        return int(np.maximum.reduce(self.seq_lens_host.numpy(), initial=0))


class AttentionPlan(Protocol):
    """The work of one micro-batch of one group, reusable by every layer of the group.

    A plan that a graph captured is kept and planned again in place for each replay: ``run`` may read nothing but what
    ``plan`` wrote into it and the fixed buffers.
    """

    def plan(self, batch: AttentionBatch) -> None:
        """Take in the lengths and tables of this step. Host work only; called before the forward."""
        ...

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        """Store key and value in the cache, unless they are None because they lie there already, then attend.

        Args:
            query: ``[num_tokens, num_heads, head_size]``.
            key, value: ``[num_tokens, num_kv_heads, head_size]``.
            kv_cache: ``[2, num_blocks, block_size, num_kv_heads, head_size]``.
            layer: heads, scale, window and cap of this layer.

        Returns:
            ``[num_tokens, num_heads, head_size]``; padded tokens hold zeros.
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans for one KV-cache group."""

    def make_plan(self, group: KVCacheGroupSpec) -> AttentionPlan:
        """An empty plan; ``plan`` fills it before its first ``run``."""
        ...

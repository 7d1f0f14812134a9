"""The paged KV cache: one tensor a layer, blocks shared by the layers of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..stages.specs import AttentionLayerSpec, KVCacheGroupSpec, ModelSpec
from .config import InvalidConfig


def kv_cache_groups(spec: ModelSpec, block_size: int) -> tuple[KVCacheGroupSpec, ...]:
    """Layers that can share block tables: those whose keys and values have the same shape.

    Sliding windows do not split groups: a window belongs to its layer, which then reads less of the same blocks.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(spec.attention_layers):
        by_shape.setdefault((layer.num_kv_heads, layer.head_size), []).append(index)
    return tuple(KVCacheGroupSpec(layers=tuple(layers), block_size=block_size) for layers in by_shape.values())


def block_bytes(layers: Sequence[AttentionLayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block id takes in all layers, keys and values."""
    return sum(2 * block_size * layer.num_kv_heads * layer.head_size * dtype.itemsize for layer in layers)


class KVCache:
    """Per-layer tensors ``[2, num_blocks, block_size, num_kv_heads, head_size]`` (keys, then values), zeroed.

    Every block id is valid in every layer, whichever group it was handed out for; block 0 is the null block.

    Raises:
        InvalidConfig: there is no memory for them; the message says how much they take.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: str) -> None:
        self.num_blocks = num_blocks
        self.generation = 0
        """How often the content was lost."""
        try:
            self.layers: list[torch.Tensor] = [
                torch.zeros(2, num_blocks, block_size, layer.num_kv_heads, layer.head_size, dtype=dtype, device=device)
                for layer in spec.attention_layers
            ]
        except RuntimeError as error:
            needed = num_blocks * block_bytes(spec.attention_layers, block_size, dtype)
            raise InvalidConfig(
                f"no memory for a KV cache of {num_blocks} blocks of {block_size} tokens, {needed} bytes; "
                "lower num_kv_blocks or kv_cache_memory_bytes"
            ) from error
        self._sizes = [layer.untyped_storage().nbytes() for layer in self.layers]

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        return sum(layer.untyped_storage().nbytes() for layer in self.layers)

    def release(self) -> None:
        """Give the memory back; the tensors stay, empty. Idempotent."""
        self.generation += self.num_bytes > 0
        for layer in self.layers:
            layer.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take the memory again, zeroed. Idempotent."""
        for layer, size in zip(self.layers, self._sizes, strict=True):
            if layer.untyped_storage().nbytes() != size:
                layer.untyped_storage().resize_(size)
                layer.zero_()

"""What a model and its KV cache look like to the stages. Torch-free."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class AttentionLayerSpec:
    """One attention layer. ``sliding_window`` counts the keys a query sees, itself included; it belongs to the layer.

    ``scale`` multiplies q·k; ``soft_cap`` c bends scores to ``c * tanh(score / c)`` before the mask.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None


@frozen(kw_only=True)
class ModelSpec:
    """The shape of a loaded model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    attention_layers: tuple[AttentionLayerSpec, ...]


@frozen(kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table: their blocks hold ``block_size`` tokens of the same request.

    ``layers`` are indices into :attr:`ModelSpec.attention_layers`.
    """

    layers: tuple[int, ...]
    block_size: int


NULL_BLOCK = 0
"""Block that is never handed out, written or read: what an empty entry of a block table holds."""

NULL_ROW = 0
"""Row of the request table that no request gets: padding and dummy runs use it."""

PAD_SLOT = -1
"""Slot of a token whose key and value are stored nowhere. Kernels check it and never index with it."""

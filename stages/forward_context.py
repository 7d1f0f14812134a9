"""What a model's layers get to see of the step: an explicit argument, no global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import frozen

from .attention import AttentionPlan
from .records import EAGER_SEGMENTS, ModelInputs, SegmentRunner
from .specs import ModelSpec

Tap = Callable[[str, torch.Tensor], torch.Tensor]
"""``tap(name, values)`` gives the values to go on with. Pieces of a model that name what they compute take one."""


def untapped(name: str, values: torch.Tensor) -> torch.Tensor:
    """The tap where nobody looks."""
    return values


class ForwardTaps:
    """Where a forward lets itself be looked at, and steered. This one does nothing."""

    def segments(self, segments: SegmentRunner, ubatch: int) -> SegmentRunner:
        """What is to run the pieces of micro-batch ``ubatch``: ``segments``, or a runner that hands pieces a tap."""
        return segments

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits ``[num_logits, vocab]`` to sample from."""
        return logits


NO_TAPS = ForwardTaps()


@frozen(eq=False)
class ForwardContext:
    """One forward of one micro-batch.

    ``plans[layer]``, ``kv_caches[layer]`` and ``slots[layer]`` (int64 ``[num_tokens]``, -1 = padding) are indexed by
    attention layer; layers of one group share plan and slots.
    """

    spec: ModelSpec
    plans: Sequence[AttentionPlan]
    kv_caches: Sequence[torch.Tensor]
    slots: Sequence[torch.Tensor] = ()
    segments: SegmentRunner = EAGER_SEGMENTS
    ubatch: int = 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor | None = None, value: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of ``layer``: ``[num_tokens, heads * head_size]`` in and out, or the same unflattened (3-D).

        Keys and values are stored in the paged cache on the way; None where the model has written them to their slots.
        """
        layer_spec = self.spec.attention_layers[layer]
        num_tokens, size = query.shape[0], layer_spec.head_size
        kv_shape = (num_tokens, layer_spec.num_kv_heads, size)
        output = self.plans[layer].run(
            query.view(num_tokens, layer_spec.num_heads, size),
            None if key is None else key.view(kv_shape),
            None if value is None else value.view(kv_shape),
            self.kv_caches[layer],
            layer_spec,
        )
        return output.view(query.shape)

    def segment(self, index: int, piece: Callable[..., Any], *args: Any) -> Any:
        """Run the piece of the model before attention ``index`` (the last index is the piece after all attention).

        A piece takes and returns tensors only and calls no attention, so that it can be one captured graph.
        """
        return self.segments.run(index, piece, *args)


class Model(Protocol):
    """What the forward stage calls. Layers keep no state between calls; the KV cache is in the context."""

    @property
    def spec(self) -> ModelSpec:
        """Shapes of this model."""
        ...

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        """Hidden states ``[num_tokens, hidden]`` after the final norm."""
        ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[n, vocab]`` of hidden states ``[n, hidden]``."""
        ...

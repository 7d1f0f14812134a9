"""The decoder on fused kernels: the same weights and pieces, fewer launches, keys stored on the way."""

from __future__ import annotations

from functools import partial

import torch
from attrs import frozen

from ...stages.forward_context import ForwardContext
from ...stages.records import ModelInputs
from ...stages.specs import ModelSpec
from ..kernels.norm import add_rms_norm, embed_rms_norm
from ..kernels.rope import HeadNorms, KeyPlace, RopeTables, rope_store
from ..models.decoder import Decoder
from .linear import CudaLinear

Pair = tuple[torch.Tensor, torch.Tensor]


@frozen(eq=False)
class _Layer:
    """What one layer computes with."""

    input_norm: torch.Tensor
    head_norms: HeadNorms | None
    qkv: CudaLinear
    output: CudaLinear
    post_attention_norm: torch.Tensor
    gate_up: CudaLinear
    down: CudaLinear

    @classmethod
    def of(cls, decoder: Decoder, index: int, *, pdl: bool) -> _Layer:
        weights = decoder.weights.layers[index]
        qkv, output, gate_up, down = (
            CudaLinear(decoder.weights.linears[f"layers.{index}.{name}"], pdl=pdl)
            for name in ("qkv", "output", "gate_up", "down")
        )
        norms = None
        if weights.query_norm is not None and weights.key_norm is not None:
            norms = HeadNorms(weights.query_norm, weights.key_norm, decoder.config.rms_norm_eps)
        return cls(
            input_norm=weights.input_norm,
            head_norms=norms,
            qkv=qkv,
            output=output,
            post_attention_norm=weights.post_attention_norm,
            gate_up=gate_up,
            down=down,
        )


def fuses(decoder: Decoder) -> bool:
    """Whether the fused kernels know everything that this decoder has."""
    return decoder.config.activation in ("silu", "swish")


class FusedDecoder:
    """A :class:`Model` over the weights of a :class:`Decoder` with a SiLU-gated feed-forward.

    A layer is six launches of a short step: qkv; head norms, rotation and the write to the cache; attention; output
    projection; residual and norm; gated product; down projection; residual and norm. Observed forwards, and those of
    embeddings, take the plain decoder.
    """

    def __init__(self, decoder: Decoder, *, pdl: bool) -> None:
        self._decoder = decoder
        self._pdl = pdl
        self._epsilon = decoder.config.rms_norm_eps
        self._rope = RopeTables(*decoder.rope_tables)
        self._layers = tuple(_Layer.of(decoder, index, pdl=pdl) for index in range(decoder.config.num_layers))
        self._head = CudaLinear(decoder.weights.linears["lm_head"], pdl=pdl)

    @property
    def spec(self) -> ModelSpec:
        """Shapes of the model."""
        return self._decoder.spec

    @property
    def observable(self) -> tuple[str, ...]:
        """What the plain decoder shows to a tap."""
        return self._decoder.observable

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        """Hidden states ``[num_tokens, hidden]`` after the final norm."""
        if inputs.input_ids is None or inputs.inputs_embeds is not None or context.segments.is_tapped:
            return self._decoder.forward(inputs, context)
        positions = inputs.positions
        residual, query = context.segment(0, partial(self._begin, context), inputs.input_ids, positions)
        last = len(self._layers) - 1
        for index in range(last):
            attended = context.attend(index, query)
            piece = partial(self._between, context, index)
            residual, query = context.segment(index + 1, piece, attended, residual, positions)
        attended = context.attend(last, query)
        return context.segment(last + 1, self._end, attended, residual)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[n, vocab]`` of hidden states ``[n, hidden]``."""
        return self._head.product_float32(hidden_states)

    def _begin(self, context: ForwardContext, token_ids: torch.Tensor, positions: torch.Tensor) -> Pair:
        table = self._decoder.weights.embedding
        residual, normed = embed_rms_norm(token_ids, table, self._layers[0].input_norm, self._epsilon)
        return residual, self._query(context, 0, normed, positions)

    def _between(
        self,
        context: ForwardContext,
        index: int,
        attended: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
    ) -> Pair:
        """The end of layer ``index`` and the beginning of the next."""
        following = self._layers[index + 1].input_norm
        residual, normed = self._finish(self._layers[index], attended, residual, following)
        return residual, self._query(context, index + 1, normed, positions)

    def _end(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._finish(self._layers[-1], attended, residual, self._decoder.weights.norm)[1]

    def _query(
        self, context: ForwardContext, index: int, normed: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Rotated queries ``[num_tokens, num_heads * head_size]``; keys and values are in the cache then."""
        layer = self._layers[index]
        return rope_store(
            layer.qkv.parts(normed),
            positions,
            self._rope,
            KeyPlace(context.kv_caches[index], context.slots[index]),
            layer.head_norms,
            pdl=self._pdl,
        )

    def _finish(
        self, layer: _Layer, attended: torch.Tensor, residual: torch.Tensor, following_norm: torch.Tensor
    ) -> Pair:
        """The residual after output projection and feed-forward, and its norm for what follows."""
        parts = layer.output.parts(attended)
        residual, normed = add_rms_norm(parts, residual, layer.post_attention_norm, self._epsilon, pdl=self._pdl)
        parts = layer.down.parts(layer.gate_up.gated(normed))
        return add_rms_norm(parts, residual, following_norm, self._epsilon, pdl=self._pdl)

"""One pre-norm decoder for llama, mistral, qwen2 and qwen3, cut into pieces between its attention calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from ...stages.forward_context import ForwardContext
from ...stages.records import ModelInputs
from ...stages.specs import ModelSpec
from .decoder_config import DecoderConfig
from .rope import rotate
from .weights import DecoderWeights, LayerWeights, fill

Tensors = tuple[torch.Tensor, ...]


class Decoder:
    """A :class:`~twostroke.stages.forward_context.Model`.

    Piece 0 embeds and prepares the first attention, piece i finishes layer i - 1 and prepares attention i, the last
    piece ends with the final norm. Pieces take and return tensors only. Rotation tables reach ``spec.max_position``.
    Weights start uninitialised: call :meth:`load_weights`.
    """

    def __init__(
        self, config: DecoderConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        device = torch.device(device)
        self.config = config
        self.weights = DecoderWeights.empty(config, device=device, dtype=dtype)
        self._spec = config.spec()
        self._cosines, self._sines = config.rope.tables(config.max_position, device=device, dtype=dtype)
        self._activate = _ACTIVATIONS[config.activation]
        self._between = tuple(partial(self._finish_and_prepare, *pair) for pair in pairwise(self.weights.layers))

    @property
    def spec(self) -> ModelSpec:
        """Shapes of this model."""
        return self._spec

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Every parameter by its Hugging Face name; parts of packed tensors are views. Writable in place."""
        return self.weights.named(self.config)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the model keeps, rotation tables too, each storage once: what takes memory."""
        return self.weights.owned() | {"rope.cosines": self._cosines, "rope.sines": self._sines}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, allow_missing: bool = False) -> None:
        """Copy tensors with Hugging Face names into the model, in place and converted to its dtype.

        ``allow_missing`` is for updates of some of the parameters.

        Raises:
            WeightsError: a missing, unexpected or mis-shaped tensor.
        """
        fill(self.parameters, weights, allow_missing=allow_missing)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        """Hidden states ``[num_tokens, hidden]`` after the final norm; embeddings are taken before token ids."""
        if inputs.inputs_embeds is not None:
            tensors = context.segment(0, self._start, inputs.inputs_embeds, inputs.positions)
        else:
            tensors = context.segment(0, self._embed_and_start, inputs.input_ids, inputs.positions)
        residual, cosines, sines, query, key, value = tensors
        for layer, piece in enumerate(self._between):
            attended = context.attend(layer, query, key, value)
            tensors = context.segment(layer + 1, piece, attended, residual, cosines, sines)
            residual, query, key, value = tensors
        last = len(self._between)
        attended = context.attend(last, query, key, value)
        return context.segment(last + 1, self._end, attended, residual)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[n, vocab]`` of hidden states ``[n, hidden]``."""
        return F.linear(hidden_states, self.weights.lm_head).float()

    def _embed_and_start(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Tensors:
        return self._start(F.embedding(input_ids, self.weights.embedding), positions)

    def _start(self, embeddings: torch.Tensor, positions: torch.Tensor) -> Tensors:
        cosines = self._cosines.index_select(0, positions).unsqueeze(1)
        sines = self._sines.index_select(0, positions).unsqueeze(1)
        attention_inputs = self._prepare_attention(self.weights.layers[0], embeddings, cosines, sines)
        return embeddings, cosines, sines, *attention_inputs

    def _finish_and_prepare(
        self,
        finished: LayerWeights,
        following: LayerWeights,
        attended: torch.Tensor,
        residual: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> Tensors:
        residual = self._finish_layer(finished, attended, residual)
        return residual, *self._prepare_attention(following, residual, cosines, sines)

    def _end(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._norm(self._finish_layer(self.weights.layers[-1], attended, residual), self.weights.norm)

    def _prepare_attention(
        self, layer: LayerWeights, residual: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> Tensors:
        """Rotated query ``[num_tokens, heads, head_dim]`` and key, and value ``[num_tokens, kv_heads, head_dim]``."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        packed = F.linear(self._norm(residual, layer.input_norm), layer.qkv, layer.qkv_bias)
        packed = packed.view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        heads, value = packed.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = heads.split((num_heads, num_kv_heads), dim=1)
            heads = torch.cat((self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)), dim=1)
        query, key = rotate(heads, cosines, sines).split((num_heads, num_kv_heads), dim=1)
        return query, key, value

    def _finish_layer(self, layer: LayerWeights, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The residual after output projection and feed-forward; new memory, since a graph keeps the old."""
        residual = F.linear(attended.flatten(1), layer.output, layer.output_bias).add_(residual)
        normed = self._norm(residual, layer.post_attention_norm)
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return F.linear(self._activate(gate).mul_(up), layer.down, layer.down_bias).add_(residual)

    def _norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(states, weight.shape, weight, self.config.rms_norm_eps)


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

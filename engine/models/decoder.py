"""One pre-norm decoder for llama, mistral, qwen2 and qwen3, cut into pieces between its attention calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from attrs import frozen

from ...stages.forward_context import ForwardContext, Tap, untapped
from ...stages.records import ModelInputs
from ...stages.specs import ModelSpec
from .decoder_config import DecoderConfig
from .linear import Linear
from .norm import RMSNorm
from .operations import Operations
from .weights import DecoderWeights, fill

Tensors = tuple[torch.Tensor, ...]


@frozen(eq=False)
class _Layer:
    """What one layer computes with."""

    input_norm: RMSNorm
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Linear
    post_attention_norm: RMSNorm
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, weights: DecoderWeights, index: int, norm: Callable[[torch.Tensor], RMSNorm]) -> _Layer:
        layer = weights.layers[index]
        qkv, output, gate_up, down = (
            weights.linears[f"layers.{index}.{name}"] for name in ("qkv", "output", "gate_up", "down")
        )
        return cls(
            input_norm=norm(layer.input_norm),
            qkv=qkv,
            query_norm=None if layer.query_norm is None else norm(layer.query_norm),
            key_norm=None if layer.key_norm is None else norm(layer.key_norm),
            output=output,
            post_attention_norm=norm(layer.post_attention_norm),
            gate_up=gate_up,
            down=down,
        )


class Decoder:
    """A :class:`~twostroke.stages.forward_context.Model`.

    Piece 0 embeds and prepares the first attention, piece i finishes layer i - 1 and prepares attention i, the last
    piece ends with the final norm. Pieces take and return tensors only. Rotation tables reach ``spec.max_position``.
    Weights start uninitialised: call :meth:`load_weights`. With ``native``, products in float32 on a CPU are those of
    the native kernels, where these can be had.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        native: bool = True,
    ) -> None:
        device = torch.device(device)
        self.config = config
        operations = _operations(native and device.type == "cpu" and dtype == torch.float32)
        self.weights = DecoderWeights.empty(config, device=device, dtype=dtype, operations=operations)
        self._spec = config.spec()
        self._cosines, self._sines = config.rope.tables(config.max_position, device=device, dtype=dtype)
        self._gate = operations.gate(config.activation)
        self._rotate = operations.rotate
        norm = partial(operations.norm, epsilon=config.rms_norm_eps)
        self._layers = tuple(_Layer.of(self.weights, index, norm) for index in range(config.num_layers))
        self._norm = norm(self.weights.norm)
        self._between = tuple(partial(self._finish_and_prepare, pair) for pair in pairwise(self._layers))

    @property
    def spec(self) -> ModelSpec:
        """Shapes of this model."""
        return self._spec

    @property
    def rope_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines ``[max_position, head_dim]`` (halves equal) and sines ``[max_position, head_dim / 2]``."""
        return self._cosines, self._sines

    @property
    def observable(self) -> tuple[str, ...]:
        """What its pieces show to a tap, as :mod:`~twostroke.engine.observe` names it, in the order of computing."""
        layers = range(len(self._layers))
        parts = ("attention_input", "attention", "mlp", "residual")
        return ("embedding", *(f"layers.{layer}.{part}" for layer in layers for part in parts), "norm")

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
        self.weights.refresh_copies()

    def refresh_stale_copies(self) -> None:
        """Bring copies of weights that were written in place up to date: what compiled pieces need before they run."""
        self.weights.refresh_stale_copies()

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
        return self.weights.linears["lm_head"](hidden_states).float()

    def _embed_and_start(self, input_ids: torch.Tensor, positions: torch.Tensor, tap: Tap = untapped) -> Tensors:
        return self._start(F.embedding(input_ids, self.weights.embedding), positions, tap)

    def _start(self, embeddings: torch.Tensor, positions: torch.Tensor, tap: Tap = untapped) -> Tensors:
        embeddings = tap("embedding", embeddings)
        cosines = self._cosines.index_select(0, positions).unsqueeze(1)
        sines = self._sines.index_select(0, positions).unsqueeze(1)
        attention_inputs = self._prepare_attention(self._layers[0], embeddings, cosines, sines, tap)
        return embeddings, cosines, sines, *attention_inputs

    def _finish_and_prepare(
        self,
        layers: tuple[_Layer, _Layer],
        attended: torch.Tensor,
        residual: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        *,
        tap: Tap = untapped,
    ) -> Tensors:
        """The end of one layer and the beginning of the next: what lies between two attention calls."""
        finished, following = layers
        residual = self._finish_layer(finished, attended, residual, tap)
        return residual, *self._prepare_attention(following, residual, cosines, sines, tap)

    def _end(self, attended: torch.Tensor, residual: torch.Tensor, tap: Tap = untapped) -> torch.Tensor:
        return tap("norm", self._norm(self._finish_layer(self._layers[-1], attended, residual, tap)))

    def _prepare_attention(
        self, layer: _Layer, residual: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, tap: Tap
    ) -> Tensors:
        """Rotated query ``[num_tokens, heads, head_dim]`` and key, and value ``[num_tokens, kv_heads, head_dim]``."""
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        packed = layer.qkv(tap("attention_input", layer.input_norm(residual)))
        packed = packed.view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        heads, value = packed.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = heads.split((num_heads, num_kv_heads), dim=1)
            heads = torch.cat((layer.query_norm(query), layer.key_norm(key)), dim=1)
        query, key = self._rotate(heads, cosines, sines).split((num_heads, num_kv_heads), dim=1)
        return query, key, value

    def _finish_layer(self, layer: _Layer, attended: torch.Tensor, residual: torch.Tensor, tap: Tap) -> torch.Tensor:
        """The residual after output projection and feed-forward; new memory, since a graph keeps the old."""
        residual = tap("attention", layer.output(attended.flatten(1))).add_(residual)
        gated = self._gate(layer.gate_up(layer.post_attention_norm(residual)))
        return tap("residual", tap("mlp", layer.down(gated)).add_(residual))


def _operations(native: bool) -> Operations:
    """The native ones, if they are wanted and can be had, or torch's."""
    if native:
        from ..native.operations import native_operations

        return native_operations() or Operations()
    return Operations()

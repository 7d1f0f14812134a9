"""The tensors of a decoder: stored packed, reached by their Hugging Face names, filled from a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from attrs import asdict, frozen

from .decoder_config import DecoderConfig
from .errors import WeightsError
from .linear import Linear, gains_by_copy
from .operations import Operations

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_SHOWN = 8

# Most bytes of transposed copies that a model keeps for products of a few rows; one that needs more does without.
MOST_COPY_BYTES = 2**31


@frozen(eq=False, kw_only=True)
class LayerWeights:
    """One layer. ``qkv`` stacks the rows of the query, key and value projections, ``gate_up`` those of gate and up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None

    @classmethod
    def empty(cls, config: DecoderConfig, *, device: torch.device, dtype: torch.dtype) -> LayerWeights:
        """Uninitialised tensors of the right shapes."""

        def new(*shape: int, when: bool = True) -> torch.Tensor | None:
            return torch.empty(shape, device=device, dtype=dtype) if when else None

        def always(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        hidden, inner = config.hidden_size, config.intermediate_size
        query_size = config.num_heads * config.head_dim
        qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
        return cls(
            input_norm=always(hidden),
            qkv=always(qkv_size, hidden),
            qkv_bias=new(qkv_size, when=config.has_qkv_bias),
            query_norm=new(config.head_dim, when=config.has_qk_norm),
            key_norm=new(config.head_dim, when=config.has_qk_norm),
            output=always(hidden, query_size),
            output_bias=new(hidden, when=config.has_output_bias),
            post_attention_norm=always(hidden),
            gate_up=always(2 * inner, hidden),
            gate_up_bias=new(2 * inner, when=config.has_mlp_bias),
            down=always(hidden, inner),
            down_bias=new(hidden, when=config.has_mlp_bias),
        )

    def named(self, config: DecoderConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Views by the name that each has in a Hugging Face layer."""
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        yield "input_layernorm.weight", self.input_norm
        yield "post_attention_layernorm.weight", self.post_attention_norm
        for kind, qkv, output, gate_up, down in (
            ("weight", self.qkv, self.output, self.gate_up, self.down),
            ("bias", self.qkv_bias, self.output_bias, self.gate_up_bias, self.down_bias),
        ):
            if qkv is not None:
                parts = qkv.split((query, key_value, key_value))
                yield from zip((f"self_attn.{name}_proj.{kind}" for name in "qkv"), parts, strict=True)
            if output is not None:
                yield f"self_attn.o_proj.{kind}", output
            if gate_up is not None:
                parts = gate_up.chunk(2)
                yield from zip((f"mlp.{name}_proj.{kind}" for name in ("gate", "up")), parts, strict=True)
            if down is not None:
                yield f"mlp.down_proj.{kind}", down
        if self.query_norm is not None and self.key_norm is not None:
            yield "self_attn.q_norm.weight", self.query_norm
            yield "self_attn.k_norm.weight", self.key_norm


@frozen(eq=False, kw_only=True)
class DecoderWeights:
    """All tensors of a decoder, and the products with them. A tied ``lm_head`` is the embedding itself.

    ``linears`` are named "lm_head" and like "layers.0.qkv"; the transposed copies that some keep belong to them.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor
    linears: Mapping[str, Linear]

    @classmethod
    def empty(
        cls, config: DecoderConfig, *, device: torch.device, dtype: torch.dtype, operations: Operations
    ) -> DecoderWeights:
        """Uninitialised tensors of the right shapes, and the products that ``operations`` make of them."""
        embedding = torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        lm_head = embedding if config.tie_word_embeddings else torch.empty_like(embedding)
        layers = tuple(LayerWeights.empty(config, device=device, dtype=dtype) for _ in range(config.num_layers))
        return cls(
            embedding=embedding,
            layers=layers,
            norm=torch.empty(config.hidden_size, device=device, dtype=dtype),
            lm_head=lm_head,
            linears=_linears(layers, lm_head, operations),
        )

    def named(self, config: DecoderConfig) -> dict[str, torch.Tensor]:
        """Every parameter by its Hugging Face name; parts of packed tensors are views."""
        named = {EMBEDDING: self.embedding, "model.norm.weight": self.norm}
        if not config.tie_word_embeddings:
            named[LM_HEAD] = self.lm_head
        for index, layer in enumerate(self.layers):
            named |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.named(config)}
        return named

    def owned(self) -> dict[str, torch.Tensor]:
        """Every tensor that has storage of its own, packed as it is kept, and the transposed copies."""
        owned = {"embedding": self.embedding, "norm": self.norm, "lm_head": self.lm_head}
        if self.lm_head is self.embedding:
            del owned["lm_head"]
        for index, layer in enumerate(self.layers):
            tensors = asdict(layer, recurse=False)
            owned |= {f"layers.{index}.{name}": tensor for name, tensor in tensors.items() if tensor is not None}
        copies = {f"{name}.transposed": linear.transposed for name, linear in self.linears.items()}
        return owned | {name: copy for name, copy in copies.items() if copy is not None}

    def refresh_copies(self) -> None:
        """Bring every transposed copy up to date with its weight."""
        for linear in self.linears.values():
            linear.refresh()

    def refresh_stale_copies(self) -> None:
        """The same, where the weight was written in place since."""
        for linear in self.linears.values():
            if linear.transposed is not None:
                linear.refresh_if_stale()


def _linears(layers: tuple[LayerWeights, ...], lm_head: torch.Tensor, operations: Operations) -> dict[str, Linear]:
    parts: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {"lm_head": (lm_head, None)}
    for index, layer in enumerate(layers):
        parts[f"layers.{index}.qkv"] = layer.qkv, layer.qkv_bias
        parts[f"layers.{index}.output"] = layer.output, layer.output_bias
        parts[f"layers.{index}.gate_up"] = layer.gate_up, layer.gate_up_bias
        parts[f"layers.{index}.down"] = layer.down, layer.down_bias
    copied = sum(weight.nbytes for weight, _ in parts.values() if gains_by_copy(weight)) <= MOST_COPY_BYTES
    return {name: operations.linear(weight, bias, keep_transposed=copied) for name, (weight, bias) in parts.items()}


def fill(
    parameters: Mapping[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]], *, allow_missing: bool
) -> None:
    """Copy a stream of named tensors into the parameters, in place, one at a time.

    Rotary frequencies and an ``lm_head`` beside tied embeddings are passed over: both repeat what is known.

    Raises:
        WeightsError: a tensor with a wrong shape or an unknown name (raised as it comes), or parameters that nothing
            filled. Parameters that came before it are already written.
    """
    filled: set[str] = set()
    for name, tensor in weights:
        if name not in parameters:
            if name == LM_HEAD or name.endswith("rotary_emb.inv_freq"):
                continue
            raise WeightsError(f"unexpected tensor {name!r}: the model has no such parameter", [name])
        parameter = parameters[name]
        if parameter.shape != tensor.shape:
            shapes = f"has shape {list(tensor.shape)}, expected {list(parameter.shape)}"
            raise WeightsError(f"tensor {name!r} {shapes}", [name])
        parameter.copy_(tensor)
        filled.add(name)
    missing = [name for name in parameters if name not in filled]
    if missing and not allow_missing:
        shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        raise WeightsError(f"{len(missing)} tensors are missing: {shown}", missing)

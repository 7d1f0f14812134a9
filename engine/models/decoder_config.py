"""What a ``config.json`` says about a decoder, checked and with every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ...stages.specs import AttentionLayerSpec, ModelSpec
from .errors import ModelLoadError, UnsupportedModel
from .rope import RopeParameters

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


@frozen(kw_only=True)
class Family:
    """What sets one architecture apart. Biases name the config key that switches them, or are fixed."""

    qkv_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    has_qk_norm: bool = False
    head_dim: int | None = None
    """Size of a head where the config does not say; None divides the hidden size."""
    window_by_layer: bool = False
    """Whether the config says which layers have the sliding window; otherwise all have it."""
    sliding_window: int | None = None
    """Window of every layer where the config has no such key."""
    ignores_window: bool = False


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", ignores_window=True
    ),
    "MistralForCausalLM": Family(sliding_window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window_by_layer=True),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias", output_bias="attention_bias", has_qk_norm=True, head_dim=128, window_by_layer=True
    ),
}


@frozen(kw_only=True)
class DecoderConfig:
    """A decoder of one of the supported families. Sizes are in elements, ``sliding_windows`` in tokens, one a layer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    rope: RopeParameters = field(repr=False)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a Hugging Face configuration.

        Raises:
            UnsupportedModel: an architecture, quantization, activation or rope type that is not supported.
            ModelLoadError: a key that is missing or no number.
        """
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise UnsupportedModel(
                f"the weights are quantized ({method}), which is not supported; use the original weights or a GGUF file"
            )
        activation = config.get("hidden_act") or "silu"
        if activation not in ACTIVATIONS:
            raise UnsupportedModel(f"hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        head_dim = _size(config, "head_dim", default=family.head_dim or hidden_size // num_heads)
        num_kv_heads = _size(config, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(f"config: {num_heads} attention heads cannot share {num_kv_heads} key-value heads")

        def switched(bias: str | bool) -> bool:
            return bool(config.get(bias, False)) if isinstance(bias, str) else bias

        num_layers, max_position = _size(config, "num_hidden_layers"), _size(config, "max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            activation=activation,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            has_qkv_bias=switched(family.qkv_bias),
            has_output_bias=switched(family.output_bias),
            has_mlp_bias=switched(family.mlp_bias),
            has_qk_norm=family.has_qk_norm,
            sliding_windows=_sliding_windows(config, family, num_layers),
            rope=RopeParameters.from_config(config, head_dim),
        )

    def spec(self) -> ModelSpec:
        """The shapes that the stages see."""
        layers = tuple(
            AttentionLayerSpec(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_dim,
                scale=self.head_dim**-0.5,
                sliding_window=window,
            )
            for window in self.sliding_windows
        )
        return ModelSpec(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_position=self.max_position,
            attention_layers=layers,
        )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    for architecture in named:
        if architecture in FAMILIES:
            return architecture
    shown = ", ".join(map(str, named)) or f"none named (model_type {config.get('model_type')!r})"
    raise UnsupportedModel(f"architecture {shown} is not supported; supported: {', '.join(FAMILIES)}")


def _size(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config: {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelLoadError(f"config: {key!r} must be a positive integer, got {value!r}")
    return value


def _sliding_windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, as transformers decides it."""
    window = config.get("sliding_window", family.sliding_window)
    if window is None or family.ignores_window:
        return (None,) * num_layers
    window = _size(config, "sliding_window", default=family.sliding_window)
    if not family.window_by_layer:
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"layer type {unknown[0]!r} is not supported; supported: full and sliding attention")
    if len(types) != num_layers:
        raise ModelLoadError(f"config: 'layer_types' names {len(types)} layers, expected {num_layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)

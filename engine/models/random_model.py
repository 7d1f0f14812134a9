"""Small models with random weights, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .decoder import Decoder
from .decoder_config import DecoderConfig
from .errors import UnsupportedModel
from .weights import EMBEDDING, LM_HEAD

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LOGIT_SPREAD = 3.0
"""Standard deviation of the logits, roughly: wide enough that arithmetic error rarely changes the best token."""

_GAIN = 2.0
_ATTENTION_GAIN = 4.0  # attention averages its values, which shrinks them; what a request read before must matter


def tiny_config(architecture: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A Hugging Face configuration of two narrow layers; ``overrides`` replace or add keys.

    Raises:
        UnsupportedModel: an architecture that is none of :data:`ARCHITECTURES`.
    """
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
    } | overrides


def random_model(
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    native: bool = True,
) -> Decoder:
    """A model of this Hugging Face configuration whose weights depend on ``seed`` alone, on every device.

    Layers outweigh the embedding in the residual, so greedy text wanders instead of repeating one token.

    Raises:
        ModelLoadError: a configuration that :class:`DecoderConfig` refuses.
    """
    model = Decoder(DecoderConfig.from_dict(config), device=device, dtype=dtype, native=native)
    model.load_weights(_random_weights(model.parameters, torch.Generator().manual_seed(seed)))
    return model


def _random_weights(
    parameters: Mapping[str, torch.Tensor], generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters.items():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            yield name, (_GAIN if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0) + 0.1 * noise
        elif name.endswith("bias"):
            yield name, 0.1 * noise
        else:
            gain = LOGIT_SPREAD if name in (EMBEDDING, LM_HEAD) else _ATTENTION_GAIN if "o_proj" in name else _GAIN
            yield name, noise * (gain / parameter.shape[1] ** 0.5)

"""The two Qwen3 shapes of the GPU benchmarks with random weights, and what others reach with them on an H200.

Peers' figures are of vLLM 0.25.1 (both of its model runners) and mini-sglang on one H200: bf16, random weights, 256
running requests, 16,384 batched tokens, no prefix cache; ``limit`` is all bytes of a step at 4.24 TB/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.models import Decoder
from twostroke.engine.models.decoder_config import DecoderConfig
from twostroke.engine.models.random_model import tiny_config

BATCH_SIZES = (1, 8, 32, 64, 128, 256)
SIZES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    # Small enough to try the benchmarks on a CPU.
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
BEST_PEER_MS = {"0.6b": (1.62, 1.64, 2.21, 3.02, 4.42, 7.31), "8b": (5.26, 5.64, 6.18, 7.25, 9.53, 15.06)}
LIMIT_MS = {"0.6b": (0.30, 0.42, 0.83, 1.39, 2.50, 4.72), "8b": (3.59, 3.75, 4.28, 5.00, 6.42, 9.27)}
BEST_PEER_TOKENS_PER_S = {("0.6b", 0.6): 23_000, ("0.6b", 0.0): 23_600, ("8b", 0.6): 9_050, ("8b", 0.0): 9_130}


def model(shape: str) -> Decoder:
    """A decoder of this shape on the GPU, or on a CPU where there is none; weights are normal with deviation 0.02."""
    config = tiny_config(
        "qwen3",
        **{
            "vocab_size": 151_936,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        }
        | SIZES[shape],
    )
    has_gpu = torch.cuda.is_available()
    decoder = Decoder(
        DecoderConfig.from_dict(config),
        device="cuda" if has_gpu else "cpu",
        dtype=torch.bfloat16 if has_gpu else torch.float32,
    )
    decoder.load_weights(_random(decoder))
    return decoder


def _random(decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in decoder.parameters.items():
        values = torch.empty_like(parameter)
        yield name, values.fill_(1.0) if "norm" in name else values.normal_(0.0, 0.02)


def runner(shape: str, **options: Any) -> ModelRunner:
    """A runner as the peers were set up; ``options`` are fields of :class:`EngineConfig`."""
    config = EngineConfig(
        **{
            "max_num_seqs": 256,
            "max_num_batched_tokens": 16_384,
            "max_model_len": 2048 if shape != "tiny" else 1024,
            "enable_prefix_caching": False,
        }
        | options
    )
    made = ModelRunner(config, model=model(shape))
    made.load_model()
    made.initialize_kv_cache()
    made.capture_model()
    return made

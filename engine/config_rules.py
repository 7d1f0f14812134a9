"""Decides every "auto" of a configuration and refuses what cannot work."""

from __future__ import annotations

import os

import torch

from ..stages.specs import ModelSpec
from .config import DTYPES, EngineConfig, InvalidConfig
from .kv_cache import block_bytes

_MAX_AUTO_CAPTURE_SIZE = 256


def resolved(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """``config`` with every "auto" decided for a model of this shape on this machine.

    Raises:
        InvalidConfig: naming the value, what is wrong with it, and what would work.
    """
    _check_sizes(config)
    device = resolved_device(config.device)
    dtype = resolved_dtype(config.dtype)
    max_model_len = _max_model_len(config, spec)
    num_kv_blocks = _num_kv_blocks(config, spec, DTYPES[dtype])
    usable = (num_kv_blocks - 1) * config.block_size
    if max_model_len > usable:
        if config.max_model_len != "auto":
            raise InvalidConfig(
                f"a request of max_model_len {max_model_len} does not fit the KV cache of {usable} tokens; "
                "lower max_model_len or raise num_kv_blocks / kv_cache_memory_bytes"
            )
        max_model_len = usable
    mode = config.cudagraph_mode
    if mode == "auto":
        mode = "NONE"
    return config.replace(
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        num_kv_blocks=num_kv_blocks,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=_capture_sizes(config, mode, max_model_len),
    )


def resolved_device(device: str) -> str:
    """The device to run on. There are no kernels for others than the CPU yet."""
    if device not in ("auto", "cpu"):
        raise InvalidConfig(f"device {device!r} is not supported yet; use 'cpu' or 'auto'")
    return "cpu"


def resolved_dtype(dtype: str) -> str:
    """The name of the compute type; "auto" is float32 on a CPU."""
    if dtype == "auto":
        return "float32"
    if dtype not in DTYPES:
        raise InvalidConfig(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)} or 'auto'")
    return dtype


def _check_sizes(config: EngineConfig) -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_ubatches"):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise InvalidConfig(f"{name} must be a positive integer, got {value!r}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise InvalidConfig(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is below max_num_seqs {config.max_num_seqs}: "
            "a decode step of every request would not fit"
        )
    for name in ("ubatch_decode_threshold", "ubatch_prefill_threshold"):
        if getattr(config, name) < 0:
            raise InvalidConfig(f"{name} must not be negative, got {getattr(config, name)}")


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len == "auto":
        return spec.max_position
    if not 1 <= config.max_model_len <= spec.max_position:
        raise InvalidConfig(
            f"max_model_len {config.max_model_len} must be between 1 and the model's {spec.max_position} positions"
        )
    return config.max_model_len


def _num_kv_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    if config.num_kv_blocks != "auto":
        if config.num_kv_blocks < 2:
            raise InvalidConfig(
                f"num_kv_blocks must be at least 2 (block 0 is the null block), got {config.num_kv_blocks}"
            )
        return config.num_kv_blocks
    size = block_bytes(spec.attention_layers, config.block_size, dtype)
    budget = min(config.kv_cache_memory_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    if budget < 2 * size:
        raise InvalidConfig(f"{budget} bytes hold no KV-cache block of {size} bytes; raise kv_cache_memory_bytes")
    return budget // size


def _capture_sizes(config: EngineConfig, mode: str, max_model_len: int) -> tuple[int, ...]:
    if mode == "NONE":
        return ()
    sizes = config.cudagraph_capture_sizes
    limit = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
    if sizes == "auto":
        top = min(_MAX_AUTO_CAPTURE_SIZE, config.max_num_seqs)
        return tuple(sorted({1, 2, 4, *range(8, top + 1, 8), top}))
    if not sizes or sizes[0] < 1 or sizes[-1] > limit:
        raise InvalidConfig(
            f"cudagraph_capture_sizes {sizes} must lie between 1 and {limit}, the tokens of the largest step"
        )
    return sizes

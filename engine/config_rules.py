"""Decides every "auto" of a configuration and refuses what cannot work."""

from __future__ import annotations

import os

import torch

from ..stages.specs import ModelSpec
from .config import DTYPES, EngineConfig, InvalidConfig
from .kv_cache import block_bytes, kv_cache_groups

_MAX_AUTO_CAPTURE_SIZE = 256
_AUTO_CPU_BYTES = 512 * 2**20
_MODES = ("auto", "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_ATTENTION_BACKENDS = ("auto", "triton", "flashinfer")
_INTEGERS = (
    # name, the least it may be, whether it may be "auto"
    ("max_num_seqs", 1, False),
    ("max_num_batched_tokens", 1, False),
    ("block_size", 1, False),
    ("max_model_len", 1, True),
    ("num_kv_blocks", 2, True),
    ("kv_cache_memory_bytes", 1, True),
    ("num_ubatches", 1, False),
    ("ubatch_decode_threshold", 0, False),
    ("ubatch_prefill_threshold", 0, False),
    ("seed", -(2**63), False),
)


def resolved(config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> EngineConfig:
    """``config`` with every "auto" decided for a model of this shape, whose weights lie on ``device`` in ``dtype``.

    Raises:
        InvalidConfig: naming the value, what is wrong with it, and what would work.
    """
    _check_values(config)
    _check_device(config, device)
    dtype_name = config.dtype if config.dtype != "auto" else _name_of(dtype)
    max_model_len = _max_model_len(config, spec)
    num_kv_blocks = _num_kv_blocks(config, spec, DTYPES[dtype_name], device)
    # Every KV-cache group keeps all tokens of a request, in blocks of the one pool.
    num_groups = len(kv_cache_groups(spec, config.block_size))
    usable = (num_kv_blocks - 1) // max(num_groups, 1) * config.block_size
    if not usable:
        raise InvalidConfig(
            f"{num_kv_blocks} KV blocks hold no block for each of {num_groups} groups of layers; raise num_kv_blocks"
        )
    if max_model_len > usable:
        if config.max_model_len != "auto":
            raise InvalidConfig(
                f"a request of max_model_len {max_model_len} does not fit the KV cache of {usable} tokens; "
                "lower max_model_len or raise num_kv_blocks / kv_cache_memory_bytes"
            )
        max_model_len = usable
    mode = config.cudagraph_mode
    if mode == "auto":
        mode = "NONE" if device.type == "cpu" else "FULL_AND_PIECEWISE"
    return config.replace(
        device=str(device),
        dtype=dtype_name,
        max_model_len=max_model_len,
        num_kv_blocks=num_kv_blocks,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=_capture_sizes(config, mode, max_model_len),
    )


def _check_device(config: EngineConfig, device: torch.device) -> None:
    """Whether the model lies where the configuration wants it, and everything asked for exists there."""
    if device.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device {str(device)!r} is not supported; use 'cpu', 'cuda' or 'auto'")
    if config.device != "auto":
        try:
            wanted = torch.device(config.device)
        except (RuntimeError, TypeError) as error:
            raise InvalidConfig(f"device {config.device!r} is unknown; use 'cpu', 'cuda' or 'auto'") from error
        if wanted.type != device.type or wanted.index not in (None, device.index):
            raise InvalidConfig(f"the model's weights lie on {device}, and the device is to be {config.device!r}")
    if config.attention_backend != "auto" and device.type != "cuda":
        raise InvalidConfig(
            f"attention_backend {config.attention_backend!r} has kernels for a GPU only; use 'auto' on {device}"
        )
    if config.batch_invariant and device.type != "cpu":
        raise InvalidConfig("batch_invariant has kernels for a CPU only; use device='cpu' with it")
    if config.compile and device.type != "cpu":
        raise InvalidConfig(
            f"compile=True is for a CPU only, and the model lies on {device}, where its pieces are kernels already; "
            "leave compile=False"
        )


def _name_of(dtype: torch.dtype) -> str:
    for name, known in DTYPES.items():
        if known is dtype:
            return name
    raise InvalidConfig(f"weights of {dtype} are not supported; use one of {', '.join(DTYPES)}")


def _check_values(config: EngineConfig) -> None:
    """What can be said of each value on its own."""
    for name, low, may_be_auto in _INTEGERS:
        value = getattr(config, name)
        if may_be_auto and value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            hint = " (block 0 is the null block)" if name == "num_kv_blocks" else ""
            auto = " or 'auto'" if may_be_auto else ""
            raise InvalidConfig(f"{name} must be an integer of at least {low}{hint}{auto}, got {value!r}")
    if config.dtype != "auto" and config.dtype not in DTYPES:
        raise InvalidConfig(f"dtype {config.dtype!r} is unknown; use one of {', '.join(DTYPES)} or 'auto'")
    share = config.gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InvalidConfig(f"gpu_memory_utilization must be above 0 and at most 1, got {share!r}")
    for name in ("enable_prefix_caching", "async_scheduling", "batch_invariant", "compile", "native"):
        if not isinstance(getattr(config, name), bool):
            raise InvalidConfig(f"{name} must be True or False, got {getattr(config, name)!r}")
    if config.compile and config.batch_invariant:
        raise InvalidConfig(
            "compile=True and batch_invariant=True exclude each other: compiled pieces add up in an order that depends "
            "on the number of rows; choose one"
        )
    if config.seed >= 2**64:
        raise InvalidConfig(f"seed must fit 64 bits, got {config.seed}")
    if config.attention_backend not in _ATTENTION_BACKENDS:
        raise InvalidConfig(
            f"attention_backend {config.attention_backend!r} is not one of {', '.join(_ATTENTION_BACKENDS)}"
        )
    if config.cudagraph_mode not in _MODES:
        raise InvalidConfig(f"cudagraph_mode {config.cudagraph_mode!r} is not one of {', '.join(_MODES)}")
    if not isinstance(config.stages, tuple) or any(
        not isinstance(text, str) for pair in config.stages for text in pair
    ):
        raise InvalidConfig(f"stages must be pairs of a place and the name of a stage, got {config.stages!r:.80}")
    sizes = config.cudagraph_capture_sizes
    if sizes != "auto" and not (isinstance(sizes, tuple) and all(isinstance(size, int) for size in sizes)):
        raise InvalidConfig(f"cudagraph_capture_sizes must be a list of integers or 'auto', got {sizes!r:.80}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise InvalidConfig(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is below max_num_seqs {config.max_num_seqs}: "
            "a decode step of every request would not fit"
        )


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len == "auto":
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise InvalidConfig(
            f"max_model_len {config.max_model_len} must be between 1 and the model's {spec.max_position} positions"
        )
    return config.max_model_len


def _num_kv_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    if config.num_kv_blocks != "auto":
        return config.num_kv_blocks
    size = block_bytes(spec.attention_layers, config.block_size, dtype)
    budget = config.kv_cache_memory_bytes
    if budget == "auto":
        budget = _AUTO_CPU_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        budget = min(budget, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
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
        return tuple(sorted(size for size in {1, 2, 4, *range(8, top + 1, 8), top} if size <= limit))
    if not sizes or sizes[0] < 1 or sizes[-1] > limit:
        raise InvalidConfig(
            f"cudagraph_capture_sizes {sizes} must lie between 1 and {limit}, the tokens of the largest step"
        )
    return sizes

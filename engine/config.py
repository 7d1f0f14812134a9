"""Configuration: frozen records; ``resolve`` returns a new one with every "auto" decided."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from attrs import evolve, field, frozen

from ..fsm.errors import TwoStrokeError
from ..stages.specs import ModelSpec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class InvalidConfig(TwoStrokeError, ValueError):
    """A configuration value that cannot work; the message names it and what would."""


def _sizes(value: Iterable[int] | Literal["auto"]) -> tuple[int, ...] | Literal["auto"]:
    try:
        return value if isinstance(value, str) else tuple(sorted({operator.index(size) for size in value}))
    except TypeError:  # what is no list of integers stays as it is, for `resolve` to name it
        return value  # pyright: ignore[reportReturnType]


def _pairs(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    try:
        pairs: Any = value.items() if isinstance(value, Mapping) else value
        return tuple((place, spec) for place, spec in pairs)
    except (TypeError, ValueError):  # as above
        return value  # pyright: ignore[reportReturnType]


@frozen(kw_only=True)
class EngineConfig:
    """Everything that decides how a runner is built.

    Sizes are in tokens unless the name says otherwise. ``num_kv_blocks`` includes the reserved null block; "auto" sizes
    the pool from ``kv_cache_memory_bytes``, whose "auto" is 512 MiB on a CPU; on a GPU it is what is left of
    ``gpu_memory_utilization`` of its memory beside the weights, the largest forward pass and the graphs, measured.
    ``async_scheduling`` makes ``sample_tokens`` return an output that is still on its way; without it, it waits.
    ``cudagraph_mode`` is one of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE ("auto" on a GPU); on a CPU
    the graphs are stand-ins that replay closures over fixed buffers ("auto" is NONE there).
    ``attention_backend`` is "triton" or "flashinfer" (which the extra ``twostroke[cuda]`` installs); "auto" on a GPU
    takes the faster kernel for each step, as measured once and kept in a file; on a CPU it must be "auto".
    ``stages`` are put in place when the runner is built: pairs of a stage's name (or ``after:NAME``, ``before:NAME``)
    and what :func:`~twostroke.engine.plugins.load_stage` takes.
    ``batch_invariant`` gives a request bit-equal logits alone and in any batch, chunking and padding, for more time.
    ``compile`` has ``torch.compile`` compile the decoder's pieces on a CPU while the first steps run: some 40 s, for
    no gain in decode.
    ``native`` computes products and attention in float32 on a CPU by kernels in C, which the system's compiler makes
    once for the machine; without a compiler, with another processor, and for products with ``compile``, torch computes.
    """

    model: str = "smollm2"
    device: str = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    max_model_len: int | Literal["auto"] = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_kv_blocks: int | Literal["auto"] = "auto"
    kv_cache_memory_bytes: int | Literal["auto"] = "auto"
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    attention_backend: str = "auto"
    cudagraph_mode: str = "auto"
    cudagraph_capture_sizes: tuple[int, ...] | Literal["auto"] = field(default="auto", converter=_sizes)
    num_ubatches: int = 1
    ubatch_decode_threshold: int = 32
    ubatch_prefill_threshold: int = 512
    seed: int = 0
    stages: tuple[tuple[str, str], ...] = field(default=(), converter=_pairs)
    batch_invariant: bool = False
    compile: bool = False
    native: bool = True

    def resolve(
        self, spec: ModelSpec, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> EngineConfig:
        """This configuration with every "auto" decided for a model whose weights lie on ``device`` in ``dtype``.

        Raises:
            InvalidConfig: a value that cannot work with this model or machine.
        """
        from .config_rules import resolved

        return resolved(self, spec, device or torch.device("cpu"), dtype)

    def replace(self, **changes: object) -> EngineConfig:
        """A copy with some values changed."""
        return evolve(self, **changes)  # pyright: ignore[reportArgumentType]

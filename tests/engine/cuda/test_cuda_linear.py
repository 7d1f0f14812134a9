"""Products by the split kernels or by the library: the same product, whichever is chosen for its size."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from driver import Wish, serve_alone
from modes import LIMITS
from twostroke.engine.config import EngineConfig
from twostroke.engine.cuda.linear import MOST_SHARED_BYTES, CudaLinear, fitting, gated_config, product_config
from twostroke.engine.kernels.linear import LinearConfig, shared_bytes
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models.linear import Linear
from twostroke.engine.models.random_model import random_model, tiny_config

pytestmark = pytest.mark.usefixtures("interpreted")

SIZES = (48, 896, 1024, 2048, 3072, 4096, 11008, 12288, 151_936)
ROWS = (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 2048)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_product(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.float(), wanted, atol=5e-3, rtol=5e-3)


def make(size_in: int, size_out: int, has_bias: bool, dtype: torch.dtype) -> tuple[CudaLinear, Linear]:
    """A product, and its weight and bias in float32."""
    weight, bias = randn(size_out, size_in) / size_in**0.5, randn(size_out, seed=1) if has_bias else None
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    exact = Linear(weight.float(), None if bias is None else bias.float())
    return CudaLinear(Linear(weight, bias), pdl=False), exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 40, 70, 130])
def test_parts_add_up_to_the_product(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    linear, exact = make(256, 80, has_bias, dtype)
    rows = randn(num_rows, 256, seed=2).to(dtype)
    parts = linear.parts(rows)
    config = product_config(256, 80, num_rows) if dtype == torch.float16 else None
    assert parts.shape[0] == (1 if config is None else config.split)
    assert_product(parts.float().sum(0), F.linear(rows.float(), exact.weight, exact.bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_the_gate_is_activated(dtype: torch.dtype, num_rows: int) -> None:
    linear, exact = make(64, 2 * 40, True, dtype)
    rows = randn(num_rows, 64, seed=2).to(dtype)
    gate, up = F.linear(rows.float(), exact.weight, exact.bias).chunk(2, dim=1)
    assert_product(linear.gated(rows), F.silu(gate) * up)


def test_heads_give_float32() -> None:
    linear, exact = make(64, 100, False, torch.float16)
    rows = randn(3, 64, seed=2).to(torch.float16)
    logits = linear.product_float32(rows)
    assert logits.dtype == torch.float32
    assert_product(logits, F.linear(rows.float(), exact.weight))


def test_every_size_has_a_kernel_that_fits_it_or_the_library() -> None:
    """A tile is a power of two, and no part is empty; what a program holds fits its processor's shared memory."""
    chosen: set[LinearConfig | None] = set()
    for size_in, size_out, num_rows in itertools.product(SIZES[:-1], SIZES, ROWS):
        for gated, choose in ((False, product_config), (True, gated_config)):
            config = fitting(choose(size_in, size_out, num_rows), size_in, num_rows, gated=gated)
            chosen.add(config)
            assert num_rows <= 128 or config is None
            if config is None:
                continue
            assert config.block_out.bit_count() == config.block_in.bit_count() == 1
            tiles = -(-size_in // config.block_in)
            assert -(-tiles // config.split) * (config.split - 1) < tiles
            assert not gated or config.split == 1
            assert shared_bytes(config, size_in, num_rows, gated=gated) <= MOST_SHARED_BYTES
    assert None in chosen
    assert len(chosen) > 8


def test_what_does_not_fit_is_cut_smaller() -> None:
    """Stages first, then the tiles; the library where nothing fits."""
    config = LinearConfig(64, 256, 1, 4, 6)
    assert fitting(config, 4096, 16) == config._replace(num_stages=4)
    assert fitting(config, 256, 16) == config
    assert fitting(config, 4096, 256) == LinearConfig(64, 64, 1, 4, 4)
    assert fitting(config._replace(block_out=4096), 4096, 16) is None
    assert fitting(None, 4096, 16) is None


def test_a_model_of_half_precision(make_fused_runner: Callable[..., ModelRunner]) -> None:
    """The split kernels in a whole model, against the plain decoder in the same precision."""
    config = tiny_config("qwen2", num_hidden_layers=1, hidden_size=256, intermediate_size=64, head_dim=16)
    model = random_model(config, dtype=torch.float16)
    wish = Wish("r", (3, 41, 7), 2)
    plain = build_runner(EngineConfig(**LIMITS), model=model)
    serve_alone(make_fused_runner(model), wish).assert_equals(serve_alone(plain, wish), 0.05)

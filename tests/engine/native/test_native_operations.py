"""Products, norms, gates and rotation by the native kernels: torch's numbers, for every shape and whatever the bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from twostroke.engine.models import random_model, tiny_config
from twostroke.engine.models.linear import Linear
from twostroke.engine.models.operations import ACTIVATIONS, Operations
from twostroke.engine.native.library import load_native
from twostroke.engine.native.operations import NativeOperations, native_operations

if load_native() is None:
    pytest.skip("the native kernels can't be had on this machine", allow_module_level=True)

MANY_ROWS = 72
"""From here on products.c multiplies in another way."""

SIZES = st.one_of(st.integers(1, 70), st.sampled_from([95, 96, 97, 144, 192, 193, 385, 600]))
INPUTS = st.one_of(st.integers(1, 70), st.sampled_from([383, 384, 385, 769, 1536, 1552, 1601]))
ROWS = st.one_of(st.integers(0, 14), st.sampled_from([31, 32, 47, 64, 71, 72, 73, 77, 78, 100]))
BAD = (math.nan, math.inf, -math.inf)


def native() -> NativeOperations:
    operations = native_operations()
    assert operations is not None, "the module is skipped without"
    return operations


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return native().linear(weight, bias, keep_transposed=True)(rows)


@given(ROWS, SIZES, INPUTS, st.booleans(), st.integers(0, 1000))
def test_products_are_those_of_torch(num_rows: int, size: int, num_inputs: int, has_bias: bool, seed: int) -> None:
    rows, weight = random(num_rows, num_inputs, seed=seed), random(size, num_inputs, seed=seed + 1)
    bias = random(size) if has_bias else None
    exact = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    # Error of a sum of n products of normal numbers, in any order: units of rounding times the root of n, some times.
    tolerance = 8 * 2**-23 * num_inputs**0.5 * max(1, math.log2(num_inputs))
    torch.testing.assert_close(product(rows, weight, bias).double(), exact, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, MANY_ROWS - 1, MANY_ROWS, 130])
@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_number_stays_in_its_row_and_output(num_rows: int, bad: float) -> None:
    rows, weight = random(num_rows, 100), random(77, 100)
    rows[num_rows // 2, 97] = bad
    weight[5, 3] = bad
    got, expected = product(rows, weight), F.linear(rows, weight)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert got.isfinite().sum() == (num_rows - 1) * 76


@pytest.mark.parametrize("num_rows", [1, 3, 4, 9, MANY_ROWS - 1, MANY_ROWS, 101])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(num_rows: int, threads: int) -> None:
    rows, weight, bias = random(num_rows, 801), random(613, 801), random(613)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = product(rows, weight, bias)
        torch.set_num_threads(threads)
        assert torch.equal(product(rows, weight, bias), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_inputs", [32, 577, 1536])
def test_a_row_has_the_same_bits_beside_any_few_others(num_inputs: int) -> None:
    rows, weight = random(MANY_ROWS - 1, num_inputs), random(100, num_inputs)
    whole = product(rows, weight)
    for first, last in ((0, 1), (3, 5), (7, 14), (20, 46)):
        assert torch.equal(product(rows[first:last], weight), whole[first:last])


def test_a_weight_written_in_any_way_counts_at_once() -> None:
    weight, rows = random(50, 30), random(3, 30)
    linear = native().linear(weight, None, keep_transposed=True)
    linear(rows)
    weight.data.mul_(2)
    torch.testing.assert_close(linear(rows), F.linear(rows, weight))
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(weight.nbytes)
    weight.fill_(1)
    torch.testing.assert_close(linear(rows), F.linear(rows, weight))


def test_a_model_keeps_nothing_beside_its_weights() -> None:
    config = tiny_config(intermediate_size=1024, vocab_size=1100)
    names = [set(random_model(config, native=native).tensors()) for native in (True, False)]
    assert names[0] < names[1]
    assert all(name.endswith(".transposed") for name in names[1] - names[0])


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (random(3, 2, 16), random(5, 16)),
        (random(3, 16).bfloat16(), random(5, 16).bfloat16()),
        (random(16, 6).t(), random(5, 16)),
        (random(4, 16), random(16, 5).t()),
        (random(0, 16), random(5, 16)),
        (torch.empty(4, 0), torch.empty(5, 0)),
    ],
    ids=["3-d", "bfloat16", "rows apart", "weight apart", "no rows", "no inputs"],
)
def test_other_tensors_come_out_as_torch_has_them(rows: torch.Tensor, weight: torch.Tensor) -> None:
    got = product(rows, weight)
    assert got.dtype == rows.dtype
    torch.testing.assert_close(got, F.linear(rows, weight))


def test_rows_of_another_size_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product(random(3, 15), random(5, 16))


def test_gradients_go_through() -> None:
    rows, gate_up = random(3, 16).requires_grad_(), random(2, 32).requires_grad_()
    product(rows, random(5, 16)).sum().backward()
    native().gate("silu")(gate_up).sum().backward()
    assert rows.grad is not None
    assert gate_up.grad is not None


def test_weights_get_gradients() -> None:
    weight, scale = random(5, 16).requires_grad_(), random(16).requires_grad_()
    product(random(3, 16), weight).sum().backward()
    native().norm(scale, 1e-6)(random(3, 16)).sum().backward()
    assert weight.grad is not None
    assert scale.grad is not None


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 32), (2, 3, 64), (4, 100), (200, 576)])
def test_norms_are_those_of_torch(shape: tuple[int, ...]) -> None:
    states, weight = random(*shape), random(shape[-1])
    for scale in (1, 1e-4, 1e4):
        expected = Operations().norm(weight, 1e-6)(states * scale)
        torch.testing.assert_close(native().norm(weight, 1e-6)(states * scale), expected, atol=1e-5, rtol=1e-5)
    assert not native().norm(weight, 1e-6)(torch.zeros(shape)).any()


def test_norms_of_parts_of_a_tensor() -> None:
    weight, states = random(8), random(5, 4, 8)[:, 1:3]
    torch.testing.assert_close(native().norm(weight, 1e-6)(states), Operations().norm(weight, 1e-6)(states))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("size", [1, 7, 8, 64, 100])
def test_gates_are_those_of_torch(activation: str, size: int) -> None:
    for num_rows in (0, 1, 5):
        gate_up = 8 * random(num_rows, 2 * size)
        expected = Operations().gate(activation)(gate_up)
        torch.testing.assert_close(native().gate(activation)(gate_up), expected, atol=1e-5, rtol=1e-5)


def test_silu_of_large_and_odd_numbers() -> None:
    gate = torch.tensor([-1e4, -100.0, -88.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 88.0, 1e4, math.inf, math.nan])
    got = native().gate("silu")(torch.cat((gate, torch.ones_like(gate)))[None])
    torch.testing.assert_close(got[0], F.silu(gate), atol=1e-30, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("least", [-1e38, -torch.finfo(torch.float32).max, -math.inf])
def test_silu_of_the_least_numbers(least: float) -> None:
    gate = torch.full((8,), least)
    got = native().gate("silu")(torch.cat((gate, torch.ones(8)))[None])
    torch.testing.assert_close(got[0], F.silu(gate), atol=1e-30, rtol=0, equal_nan=True)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 20), st.integers(0, 100))
def test_rotation_is_that_of_torch(num_tokens: int, num_heads: int, half: int, seed: int) -> None:
    packed = random(num_tokens, num_heads + 2, 2 * half, seed=seed)
    cosines, sines = random(num_tokens, 1, 2 * half), random(num_tokens, 1, half)
    for heads in (packed, packed[:, :num_heads]):
        expected = Operations().rotate(heads, cosines, sines)
        torch.testing.assert_close(native().rotate(heads, cosines, sines), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_model_gives_the_same_logits(architecture: str, logits_of: Callable[..., torch.Tensor]) -> None:
    config = tiny_config(architecture, num_hidden_layers=3)
    by_native, by_torch = (random_model(config, native=native) for native in (True, False))
    tokens = list(range(60))
    expected = logits_of(by_torch, tokens)
    torch.testing.assert_close(logits_of(by_native, tokens), expected, atol=1e-4, rtol=1e-4)
    assert not any(type(linear) is Linear for linear in by_native.weights.linears.values())

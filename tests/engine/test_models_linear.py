"""Products and norms of the CPU path: the same numbers by every kernel, and never from a stale copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from twostroke.engine.models import random_model, tiny_config
from twostroke.engine.models.linear import BLOCK, COPIED, MOST_BLOCKED_ROWS, MOST_COPY_ROWS, WIDE, Linear
from twostroke.engine.models.norm import RMSNorm
from twostroke.engine.models.weights import MOST_COPY_BYTES

WIDE_CONFIG: dict[str, Any] = {"intermediate_size": WIDE, "vocab_size": WIDE + 76}
TOKENS = [5, 3, 9]
Logits = Callable[..., torch.Tensor]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_rows", [0, 1, 2, MOST_COPY_ROWS, MOST_COPY_ROWS + 1, 33, MOST_BLOCKED_ROWS + 1])
@pytest.mark.parametrize("size", [COPIED, WIDE, WIDE + 1, 3 * BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("keep_transposed", [False, True])
def test_every_kernel_gives_the_plain_product(num_rows: int, size: int, has_bias: bool, keep_transposed: bool) -> None:
    weight, rows, bias = random(size, 24), random(num_rows, 24), random(size) if has_bias else None
    linear = Linear(weight, bias, keep_transposed=keep_transposed)
    torch.testing.assert_close(linear(rows), F.linear(rows, weight, bias), atol=1e-5, rtol=1e-5)


def test_only_float32_weights_much_wider_than_long_are_copied() -> None:
    assert Linear(random(COPIED, 8), keep_transposed=True).transposed is None
    assert Linear(random(COPIED + 1, 8).bfloat16(), keep_transposed=True).transposed is None
    assert Linear(random(COPIED + 1, 8)).transposed is None
    assert Linear(random(960, 641), keep_transposed=True).transposed is None
    for shape in ((COPIED + 1, 8), (960, 640)):
        copy = Linear(random(*shape), keep_transposed=True).transposed
        assert copy is not None
        assert copy.shape == shape[::-1]


@pytest.mark.parametrize("inference", [False, True])
def test_a_weight_that_was_written_in_place_is_copied_again(inference: bool) -> None:
    weight, rows = random(WIDE + 1, 8), random(1, 8)
    linear = Linear(weight, keep_transposed=True)
    linear.refresh()
    part = weight[7:900]  # as parameters are parts of packed weights
    with torch.inference_mode(inference):
        linear(rows)
        part.mul_(2)
        torch.testing.assert_close(linear(rows), F.linear(rows, weight))


def test_refresh_takes_in_what_torch_does_not_count() -> None:
    weight, rows = random(WIDE + 1, 8), random(2, 8)
    linear = Linear(weight, keep_transposed=True)
    linear(rows)
    weight.data.mul_(3)
    linear.refresh()
    torch.testing.assert_close(linear(rows), F.linear(rows, weight))


def test_loading_some_weights_reaches_the_copies(logits_of: Logits) -> None:
    model, other = (random_model(tiny_config(**WIDE_CONFIG), seed=seed, native=False) for seed in (0, 1))
    copied = [name for name in model.tensors() if name.endswith("transposed")]
    assert copied == ["lm_head.transposed", "layers.0.gate_up.transposed", "layers.1.gate_up.transposed"]
    logits_of(model, TOKENS)
    model.load_weights(other.parameters.items())
    assert torch.equal(logits_of(model, TOKENS), logits_of(other, TOKENS))
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in model.tensors().items())


def test_copies_are_released_and_come_back_with_the_weights(logits_of: Logits) -> None:
    model = random_model(tiny_config(tie_word_embeddings=True, **WIDE_CONFIG), native=False)
    before = logits_of(model, TOKENS)
    saved = {name: parameter.clone() for name, parameter in model.parameters.items()}
    owned = model.weights.owned()
    assert owned["lm_head.transposed"].data_ptr() != owned["embedding"].data_ptr()
    for tensor in owned.values():
        tensor.untyped_storage().resize_(0)
    for tensor in model.weights.owned().values():
        tensor.untyped_storage().resize_(tensor.nbytes)
        tensor.fill_(torch.nan)
    model.load_weights(saved.items())
    assert torch.equal(logits_of(model, TOKENS), before)


def test_a_model_too_large_for_copies_has_none(monkeypatch: pytest.MonkeyPatch, logits_of: Logits) -> None:
    assert MOST_COPY_BYTES == 2 * 2**30
    config = tiny_config(**WIDE_CONFIG)
    expected = logits_of(random_model(config, native=False), TOKENS)
    monkeypatch.setattr("twostroke.engine.models.weights.MOST_COPY_BYTES", 4 * 32 * (2 * 2 * WIDE + WIDE + 75))
    model = random_model(config, native=False)
    assert not any(name.endswith("transposed") for name in model.tensors())
    torch.testing.assert_close(logits_of(model, TOKENS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 576), (5, 576), (3, 4, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
def test_norms_equal_their_definition(shape: tuple[int, ...], dtype: torch.dtype, epsilon: float) -> None:
    states, weight = random(*shape).to(dtype), random(shape[-1]).to(dtype)
    wide = states.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    given = RMSNorm(weight, epsilon)(states)
    assert given.dtype == dtype
    torch.testing.assert_close(given.double(), expected, atol=tolerance, rtol=tolerance)
    assert not RMSNorm(weight, epsilon)(torch.zeros_like(states)).any()

"""Choosing tokens in one pass against the torch reference, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from twostroke.engine.kernels.logits_rows import LogitsRows
from twostroke.engine.kernels.sampling import DrawParams, choose_tokens
from twostroke.engine.kernels.truncation import Floors
from twostroke.stages.records import NOTHING_LEFT
from twostroke.stages.sampling.choose import scale_logits
from twostroke.stages.sampling.draw import gumbel_sample
from twostroke.stages.sampling.random import NoisePurpose, noise_keys

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def greedy(num_rows: int) -> DrawParams:
    words = torch.zeros(2, num_rows, dtype=torch.int32, device=DEVICE)
    return DrawParams(torch.zeros(num_rows, device=DEVICE), words, words[0])


@pytest.mark.parametrize("vocab", [50, 4096, 9001])
def test_choose_tokens_draws_what_the_torch_sampler_draws(vocab: int) -> None:
    logits = randn(6, vocab) * 3
    seeds = torch.randint(-(2**31), 2**31 - 1, (2, 6), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([5, 1, 0, 77, 2, 4096], dtype=torch.int32)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0, 0.7])
    params = DrawParams(temperatures.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE))
    tokens, health = choose_tokens(LogitsRows(logits), params)
    assert not health.any()
    scaled = logits.cpu() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    drawn = gumbel_sample(scaled, noise_keys(seeds[0], seeds[1], positions, NoisePurpose.SAMPLE))
    wanted = torch.where(temperatures > 0, drawn, logits.cpu().argmax(1))
    assert tokens.tolist() == wanted.tolist()


def test_choose_tokens_of_some_rows_and_their_health() -> None:
    logits = randn(5, 100)
    logits[1] = -torch.inf
    logits[3, 7] = torch.nan
    logits[3, 90] = torch.nan
    rows = torch.tensor([3, 1, 4], device=DEVICE)
    tokens, health = choose_tokens(LogitsRows(logits, rows), greedy(3))
    assert health.tolist() == [2, NOTHING_LEFT, 0]
    assert int(tokens[2]) == int(logits[4].argmax())
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_equal_logits_choose_the_lowest_id() -> None:
    logits = torch.zeros(2, 10_000, device=DEVICE)
    logits[0, [5000, 9000]] = 1.0
    assert choose_tokens(LogitsRows(logits), greedy(2))[0].tolist() == [5000, 0]


def test_huge_and_infinite_logits_leave_the_noise_its_say() -> None:
    logits = randn(4, 5000, seed=1)
    logits[:2] = logits[:2].round() * 1e30
    logits[2:, [7, 4500, 4999]] = torch.inf
    seeds = torch.arange(8, dtype=torch.int32).view(2, 4)
    positions, temperatures = torch.arange(4, dtype=torch.int32), torch.tensor([1.0, 2.0, 0.5, 1.5])
    params = DrawParams(*(part.to(DEVICE) for part in (temperatures, seeds, positions)))
    scaled = scale_logits(logits.cpu(), logits.cpu().amax(1), temperatures)
    wanted = gumbel_sample(scaled, noise_keys(seeds[0], seeds[1], positions, NoisePurpose.SAMPLE))
    tokens, health = choose_tokens(LogitsRows(logits), params)
    assert tokens.tolist() == wanted.tolist()
    assert not health.any()


def test_floors_are_for_the_rows_that_have_one() -> None:
    logits = randn(3, 5000, seed=2)
    logits[0, 4321] = torch.nan
    maxima = torch.stack([part.nan_to_num(torch.inf).amax(1) for part in logits.split(64, dim=1)], dim=1)
    peaks = logits.nan_to_num(-torch.inf).amax(1)
    floors = Floors(torch.tensor([-1.0, -torch.inf, -0.5], device=DEVICE), peaks, maxima)
    seeds = torch.arange(6, dtype=torch.int32).view(2, 3)
    positions, temperatures = torch.arange(3, dtype=torch.int32), torch.tensor([1.0, 2.0, 0.5])
    params = DrawParams(*(part.to(DEVICE) for part in (temperatures, seeds, positions)))
    tokens, health = choose_tokens(LogitsRows(logits), params, floors)
    scaled = scale_logits(logits.cpu(), peaks.cpu(), temperatures)
    keys = noise_keys(seeds[0], seeds[1], positions, NoisePurpose.SAMPLE)
    wanted = gumbel_sample(scaled.nan_to_num(-torch.inf), keys, floors.floors.cpu())
    assert health.tolist() == [1, 0, 0]
    assert tokens.tolist() == wanted.tolist()

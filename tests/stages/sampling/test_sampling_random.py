"""Counter-based noise: exact words, uniformity, independence of neighbours, and the law of what is drawn with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from twostroke.stages.sampling.draw import greedy_peaks, greedy_sample, gumbel_sample
from twostroke.stages.sampling.random import (
    NoiseKeys,
    NoisePurpose,
    exponential_of,
    gumbel_noise,
    mix,
    noise_keys,
    noise_words,
    seed_words,
)

MASK = 2**32 - 1


def chi_square_is_plausible(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Within five standard deviations, by Wilson and Hilferty's normal approximation."""
    degrees = observed.size - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return abs(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)) < 5


def keys_for(seeds: np.ndarray | list[int], positions: np.ndarray | list[int]) -> NoiseKeys:
    low, high = seed_words(np.asarray(seeds, dtype=np.uint64))
    return noise_keys(low, high, torch.as_tensor(np.asarray(positions, dtype=np.int32)), NoisePurpose.SAMPLE)


def unsigned(words: torch.Tensor) -> np.ndarray:
    return words.numpy().view(np.uint32)


def mixed(word: int) -> int:
    word = (word ^ word >> 16) * 0x7FEB352D & MASK
    word = (word ^ word >> 15) * 0x846CA68B & MASK
    return word ^ word >> 16


def test_words_are_those_of_unsigned_32_bit_arithmetic():
    seed, position, token = 0xFEDCBA9876543210, 2**31 - 1, 49151
    chains = []
    for start in (0x243F6A88, 0x85A308D3):
        word = start
        for part in (seed & MASK, seed >> 32, position, 1):
            word = mixed(word ^ part)
        chains.append(word)
    keys = keys_for([seed], [position])
    assert [int(unsigned(key)[0]) for key in keys] == chains

    expected = mixed(mixed(token ^ chains[0]) + chains[1] & MASK)
    assert int(unsigned(noise_words(keys, torch.tensor([token], dtype=torch.int32)))[0, 0]) == expected


def test_mixing_is_a_permutation():
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 65537
    assert len(mix(words).unique()) == len(words)


@pytest.mark.parametrize("shift", [0, 8, 23, 24])
def test_bytes_of_words_are_uniform(shift: int):
    words = unsigned(noise_words(keys_for(np.arange(16), np.arange(16)), torch.arange(2**14, dtype=torch.int32)))
    counts = np.bincount((words.ravel() >> np.uint32(shift)) & np.uint32(255), minlength=256)
    assert chi_square_is_plausible(counts, np.full(256, words.size / 256))


@pytest.mark.parametrize("neighbour", ["seed", "high seed", "position", "token", "first key", "second key"])
@pytest.mark.parametrize("shift", [0, 14, 27])
def test_neighbours_are_independent(neighbour: str, shift: int):
    """Words of neighbouring counters fill a 16 × 16 table evenly."""
    tokens = torch.arange(2**14, dtype=torch.int32)
    seeds, positions = np.arange(8, dtype=np.uint64), np.full(8, 5)
    keys = other = keys_for(seeds, positions)
    match neighbour:
        case "seed":
            other = keys_for(seeds + np.uint64(1), positions)
        case "high seed":
            other = keys_for(seeds + np.uint64(2**32), positions)
        case "position":
            other = keys_for(seeds, positions + 1)
        case "first key":
            other = NoiseKeys(keys.first + 1, keys.second)
        case "second key":
            other = NoiseKeys(keys.first, keys.second + 1)
    ours = unsigned(noise_words(keys, tokens))
    theirs = unsigned(noise_words(other, tokens + 1 if neighbour == "token" else tokens))
    pairs = ((ours >> np.uint32(shift)) & np.uint32(15)) * np.uint32(16) + (
        (theirs >> np.uint32(shift)) & np.uint32(15)
    )
    assert chi_square_is_plausible(np.bincount(pairs.ravel(), minlength=256), np.full(256, pairs.size / 256))


def test_words_of_many_rows_are_uncorrelated_across_rows():
    """For one token, over consecutive positions and seeds: what a stream of sampled tokens sees."""
    for keys in (keys_for(np.full(2**15, 7), np.arange(2**15)), keys_for(np.arange(2**15), np.full(2**15, 7))):
        words = unsigned(noise_words(keys, torch.tensor([3], dtype=torch.int32)))[:, 0] >> np.uint32(28)
        pairs = np.bincount(words[:-1] * np.uint32(16) + words[1:], minlength=256)
        assert chi_square_is_plausible(pairs, np.full(256, (len(words) - 1) / 256))


def test_exponential_variates_stay_finite_and_positive_at_the_extremes():
    words = torch.tensor([0, -1, 2**31 - 1, -(2**31), 2**31 - 64], dtype=torch.int32)
    values = exponential_of(words)
    assert torch.isfinite(values).all()
    assert (values > 0).all()
    assert values.max() < 16.7
    assert values[0] == pytest.approx(0.5 * 2.0**-31)
    assert torch.isfinite(values.log()).all()


def test_noise_has_the_moments_of_the_gumbel_law():
    noise = gumbel_noise(keys_for(np.arange(32), np.arange(32)), torch.arange(2**14, dtype=torch.int32)).double()
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize("counter", ["positions of one seed", "seeds at one position"])
@pytest.mark.parametrize("floor", [None, -1.5])
def test_draws_follow_softmax(counter: str, floor: float | None):
    draws = 20_000
    logits = torch.tensor([0.0, -0.5, -3.0, -1.0, -torch.inf, -1.5, -2.0, -0.1])
    one, many = np.full(draws, 12345), np.arange(draws)
    keys = keys_for(one, many) if counter.startswith("positions") else keys_for(many, one)
    floors = None if floor is None else torch.full((draws,), floor)
    drawn = gumbel_sample(logits.expand(draws, -1).contiguous(), keys, floors)
    kept = logits if floor is None else logits.masked_fill(logits < floor, -torch.inf)
    expected = kept.double().softmax(0).numpy() * draws
    observed = np.bincount(drawn.numpy(), minlength=len(logits))
    assert observed[expected == 0].sum() == 0
    assert chi_square_is_plausible(observed[expected > 0], expected[expected > 0])


def test_successive_draws_are_independent():
    draws = 20_000
    drawn = gumbel_sample(torch.zeros(draws, 5), keys_for(np.full(draws, 9), np.arange(draws))).numpy()
    pairs = np.bincount(drawn[:-1] * 5 + drawn[1:], minlength=25)
    assert chi_square_is_plausible(pairs, np.full(25, (draws - 1) / 25))


def test_a_draw_does_not_depend_on_the_rows_beside_it_or_on_the_vocabulary_tile():
    vocab = 8192 + 333
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0))
    together = gumbel_sample(logits, keys_for(np.arange(6), np.arange(6)))
    for row in range(6):
        assert gumbel_sample(logits[row : row + 1], keys_for([row], [row])) == together[row]
    token_ids = torch.tensor([8500, 3], dtype=torch.int32)
    whole = noise_words(keys_for([4], [2]), torch.arange(vocab, dtype=torch.int32))
    assert torch.equal(noise_words(keys_for([4], [2]), token_ids), whole[:, token_ids.long()])


def test_a_draw_is_the_same_whether_few_tokens_are_scored_or_all():
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    few = logits.topk(20).values[:, -1]
    for positions in range(20):
        keys = keys_for(np.arange(6), np.full(6, positions))
        alone = gumbel_sample(logits, keys, few)
        with_a_wide_row = gumbel_sample(logits, keys, torch.where(torch.arange(6) == 5, -torch.inf, few))
        assert torch.equal(alone[:5], with_a_wide_row[:5])


@pytest.mark.parametrize("vocab", [1, 7, 1023, 1024, 1025, 3000])
def test_greedy_takes_the_first_of_the_largest(vocab: int):
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)).mul(2).round()
    logits[3] = 1.0
    logits[4, vocab // 2] = torch.inf
    logits[5] = -torch.inf
    assert torch.equal(greedy_sample(logits), logits.argmax(dim=1))


@pytest.mark.parametrize("shape", [(1, 7), (3, 1024), (40, 1025), (5, 4096), (2, 5000)])
def test_a_look_by_numpy_and_one_by_tiles_find_the_same(shape: tuple[int, int]) -> None:
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    logits[0, shape[1] // 2 :] = logits[0].max()  # the first of equal ones
    logits[-1, 3], logits[-1, 5] = torch.nan, torch.nan
    for by_row in (logits, logits[:, 1:], torch.full_like(logits, -torch.inf)):
        tokens, peaks = greedy_peaks(by_row)
        tiled_tokens, tiled_peaks = greedy_peaks(by_row.double())  # numpy looks at float32 only
        assert torch.equal(tokens, tiled_tokens)
        torch.testing.assert_close(peaks.double(), tiled_peaks, rtol=0, atol=0, equal_nan=True)

"""Random numbers out of a counter: what a request draws depends on its seed and the position alone.

There is no generator and so no state to carry, rewind or keep apart: noise is a hash of (seed, position, purpose, token
id). A request that is chunked, preempted, resumed or batched with others draws the same numbers.

All arithmetic is on 32-bit words that wrap. torch has no uint32 multiplication, so words are int32 here: two's
complement sums, products and exclusive ors have the same bits as unsigned ones, and a logical shift is an arithmetic
one with the sign bits masked off. A GPU kernel gets the same words from plain uint32 arithmetic.

The mixing function is Chris Wellons' ``lowbias32``, a permutation of 32-bit words by xor-shifts and multiplications
that was found by a search for low bias (https://nullprogram.com/blog/2018/07/31/).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


_MULTIPLY_FIRST = _signed(0x7FEB352D)
_MULTIPLY_SECOND = _signed(0x846CA68B)
_START = (_signed(0x243F6A88), _signed(0x85A308D3))
_BELOW_ONE = 1.0 - 2.0**-24


class NoisePurpose(IntEnum):
    """What noise is drawn for; draws for different purposes at one position are independent."""

    SAMPLE = 1


class NoiseKeys(NamedTuple):
    """64 bits that stand for (seed, position, purpose) of each row: two int32 tensors ``[n]``."""

    first: torch.Tensor
    second: torch.Tensor


def _xor_shift_(words: torch.Tensor, bits: int) -> torch.Tensor:
    return words.bitwise_xor_((words >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def mix(words: torch.Tensor) -> torch.Tensor:
    """A permutation of 32-bit words (int32 tensor of any shape) that scatters neighbours."""
    return _mix_(words.clone())


def _mix_(words: torch.Tensor) -> torch.Tensor:
    words = _xor_shift_(words, 16).mul_(_MULTIPLY_FIRST)
    return _xor_shift_(_xor_shift_(words, 15).mul_(_MULTIPLY_SECOND), 16)


def seed_words(seeds: npt.NDArray[np.uint64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high halves of 64-bit seeds ``[n]`` as int32 words ``[n]``."""
    low = (seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    high = (seeds >> np.uint64(32)).astype(np.uint32).view(np.int32)
    return torch.from_numpy(low), torch.from_numpy(high)


def noise_keys(
    seed_low: torch.Tensor, seed_high: torch.Tensor, positions: torch.Tensor, purpose: NoisePurpose
) -> NoiseKeys:
    """Keys of rows.

    Each of the two words is a chain ``word = mix(word ^ input)`` over the inputs, from its own start.

    Args:
        seed_low, seed_high: int32 ``[n]``, the halves of the seeds.
        positions: int32 ``[n]``, where in its sequence the token that is drawn will stand.
        purpose: what the noise is for.
    """
    first, second = (mix(mix(mix(mix(seed_low ^ start) ^ seed_high) ^ positions) ^ int(purpose)) for start in _START)
    return NoiseKeys(first, second)


def noise_words(keys: NoiseKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform 32-bit words, int32 ``[n, m]``: ``mix(mix(token ^ first) + second)``.

    Args:
        keys: of ``n`` rows.
        token_ids: int32 ``[m]``, or ``[n, m]`` where rows differ.
    """
    return _mix_(_mix_(token_ids ^ keys.first[:, None]).add_(keys.second[:, None]))


def exponential_of(words: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates, float32, from uniform int32 words: between ``2**-32`` and 16.7, never 0 or inf.

    31 bits make the uniform variate, so that its small values, which decide who wins a race, keep their precision.
    """
    uniform = words.bitwise_and(0x7FFFFFFF).to(torch.float32)
    return uniform.add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE).neg_().log1p_().neg_()


def gumbel_noise(keys: NoiseKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel variates, float32 ``[n, m]``, all finite."""
    return exponential_of(noise_words(keys, token_ids)).log_().neg_()

"""From edited logits to tokens: greedy for some rows, a draw for others."""

from __future__ import annotations

import numpy as np
import torch

from .columns import Feature
from .draw import greedy_peaks, greedy_sample, gumbel_sample
from .random import NoisePurpose, noise_keys, seed_words
from .step import SamplingStep, to_device
from .truncation import min_p_floor, top_k_floor, top_p_floor

_RANDOM = int(Feature.RANDOM)


def choose_tokens(logits: torch.Tensor, step: SamplingStep) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row of ``logits`` ``[n, vocab]``, int64 ``[n]``, and the rows' maxima ``[n]``.

    Where all rows are greedy they are read once: their maximum is the logit of their token.
    """
    if not step.active & _RANDOM:
        return greedy_peaks(logits)
    peaks = logits.amax(dim=1)
    positions = step.positions_with(Feature.RANDOM)
    if len(positions) == len(step.rows):
        return _draw(logits, peaks, step, positions), peaks
    index = to_device(positions, logits.device)
    tokens = greedy_sample(logits)
    tokens[index] = _draw(logits[index], peaks[index], step, positions)
    return tokens, peaks


def scale_logits(logits: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``(logits - peak) / temperature``, at most 0, in new memory.

    Shifting changes no probability, and keeps rows with infinite or huge logits finite: several +inf share the whole
    probability.
    """
    limit = torch.finfo(logits.dtype).max
    shifted = logits - peaks.clamp(-limit, limit)[:, None]
    return shifted.clamp_(max=0).div_(temperature[:, None])


def _draw(logits: torch.Tensor, peaks: torch.Tensor, step: SamplingStep, positions: np.ndarray) -> torch.Tensor:
    """A random token for each of the step's ``positions``; ``logits`` and ``peaks`` are theirs."""
    device, params = logits.device, step.params[positions]
    scaled = scale_logits(logits, peaks, to_device(params["temperature"], device))
    low, high = (words.to(device) for words in seed_words(params["seed"]))
    places = to_device(step.num_tokens[positions].astype(np.int32), device)
    keys = noise_keys(low, high, places, NoisePurpose.SAMPLE)
    return gumbel_sample(scaled, keys, _floor(scaled, params, step))


def _floor(scaled: torch.Tensor, params: np.ndarray, step: SamplingStep) -> torch.Tensor | None:
    """The smallest scaled logit of each row that may be drawn: min_p, then top_k, then top_p of what these leave."""
    device, floor = scaled.device, None
    if step.uses(Feature.MIN_P):
        floor = min_p_floor(scaled, to_device(params["min_p"], device))
    if step.uses(Feature.TOP_K):
        top_k = params["top_k"]
        largest = top_k_floor(scaled, to_device(top_k, device), int(top_k.max()))
        floor = largest if floor is None else floor.maximum(largest)
    if step.uses(Feature.TOP_P):
        floor = top_p_floor(scaled, to_device(params["top_p"], device), floor)
    return floor

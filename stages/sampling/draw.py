"""Choosing one token a row: the most likely one, or one drawn by the Gumbel-max trick."""

from __future__ import annotations

import numpy as np
import torch

from .random import NoiseKeys, gumbel_noise

_ARGMAX_TILE = 1024
_NOISE_TILE = 8192
_FEW_TOKENS = 1024
_FEW_LOGITS = 4096


def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
    """Argmax of each row of ``logits`` ``[n, vocab]``, int64 ``[n]``; of equal values the lowest id."""
    return greedy_peaks(logits)[0]


def greedy_peaks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The argmax of each row of ``logits`` ``[n, vocab]``, int64 ``[n]``, and the logit there; NaN if a row has any.

    In host memory numpy finds both in one vectorised look, unless there is little to look at. Elsewhere it goes by the
    maxima of tiles, and looks for the index inside the winning tile only.
    """
    if logits.is_cpu and logits.dtype is torch.float32 and logits.numel() > _FEW_LOGITS:
        values = logits.numpy()
        places = values.argmax(axis=1)
        peaks = values.reshape(-1)[places + np.arange(0, values.size, values.shape[1])]
        return torch.from_numpy(places), torch.from_numpy(peaks)
    vocab_size, tile = logits.shape[1], _ARGMAX_TILE
    if vocab_size <= tile:
        peaks, tokens = logits.max(dim=1)
        return tokens, peaks
    if vocab_size % tile:
        peaks = torch.stack([part.amax(dim=1) for part in logits.split(tile, dim=1)], dim=1)
    else:
        peaks = logits.unflatten(1, (-1, tile)).amax(dim=2)
    first = (peaks.argmax(dim=1) * tile).clamp_(max=vocab_size - tile)
    window = first[:, None] + torch.arange(tile, device=logits.device)
    peaks, places = logits.gather(1, window).max(dim=1)
    return first + places, peaks


def gumbel_sample(logits: torch.Tensor, keys: NoiseKeys, floor: torch.Tensor | None = None) -> torch.Tensor:
    """A token of each row drawn from softmax(logits) among those at or above the row's floor, int64 ``[n]``.

    The argmax of logits plus Gumbel noise has exactly that law, and needs no normalised probabilities (Gumbel 1954; the
    "Gumbel-max trick"). The noise of a token depends on the row's key and its own id only: it is the same whether all
    tokens are scored or, where floors leave few, just those (finding out how many they leave waits for the device).

    Args:
        logits: float32 ``[n, vocab]``, already divided by the temperature.
        keys: what decides the noise of each row.
        floor: float32 ``[n]``, the smallest logit kept, or None to keep all.
    """
    if floor is not None:
        most_kept = int((logits >= floor[:, None]).sum(dim=1).max())
        if most_kept <= _FEW_TOKENS:
            kept_ids = logits.topk(max(most_kept, 1), dim=1).indices.sort(dim=1).values
            scores = _scores(logits.gather(1, kept_ids), keys, kept_ids.to(torch.int32), floor)
            return kept_ids.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    tiles = zip(logits.split(_NOISE_TILE, dim=1), token_ids.split(_NOISE_TILE), strict=True)
    return greedy_sample(torch.cat([_scores(part, keys, ids, floor) for part, ids in tiles], dim=1))


def _scores(logits: torch.Tensor, keys: NoiseKeys, token_ids: torch.Tensor, floor: torch.Tensor | None) -> torch.Tensor:
    scores = gumbel_noise(keys, token_ids).add_(logits)
    return scores if floor is None else scores.masked_fill_(logits < floor[:, None], -torch.inf)

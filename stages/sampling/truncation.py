"""min_p, top_k and top_p as floors: the smallest logit of a row that may still be drawn.

Each keeps a leading part of the row's tokens by probability, so one number a row says it all, nothing has to be masked
in between, and several of them combine by their maximum. Tokens equal to the floor are all kept: the result can't
depend on how a sort happens to order ties. Logits are float32 ``[n, vocab]``, already divided by the temperature.
"""

from __future__ import annotations

import torch

_FIRST_WIDTH = 256
_WIDENING = 16


def min_p_floor(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keeps tokens at least ``min_p`` (``[n]``, 0 = off) times as likely as the likeliest (Nguyen et al. 2024)."""
    return logits.amax(dim=1) + min_p.log()


def top_k_floor(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Keeps the ``top_k`` likeliest tokens, and those equal to the last of them.

    Args:
        logits: ``[n, vocab]``.
        top_k: int64 ``[n]``, at most ``max_top_k``; 0 = off.
        max_top_k: the largest of them, between 1 and vocab.
    """
    values = logits.topk(max_top_k, dim=1).values
    last = values.gather(1, (top_k - 1).clamp_(min=0)[:, None])[:, 0]
    return torch.where(top_k > 0, last, -torch.inf)


def top_p_floor(logits: torch.Tensor, top_p: torch.Tensor, floor: torch.Tensor | None = None) -> torch.Tensor:
    """Keeps the smallest set of likeliest tokens that holds ``top_p`` of the probability (Holtzman et al. 2019).

    Probabilities are taken over the tokens at or above ``floor``. A token is kept when those strictly likelier hold
    less than ``top_p``. Only the head of a row is sorted, and a longer head of the rows that it was too short for; that
    question waits for the device. Sums are in float64, so that their order, which may differ with the batch, does not
    show.

    Args:
        logits: ``[n, vocab]``.
        top_p: float32 ``[n]`` above 0; 1 = off.
        floor: ``[n]``, what other truncations left, or None; the result is never below it.
    """
    num_rows, vocab_size = logits.shape
    peaks = logits.amax(dim=1, keepdim=True)
    weights = (logits - peaks).exp_()
    if floor is None:
        floor = logits.new_full((num_rows,), -torch.inf)
    else:
        weights.mul_(logits >= floor[:, None])
    wanted = weights.sum(dim=1, dtype=torch.float64) * top_p
    result, width = floor.clone(), min(_FIRST_WIDTH, vocab_size)
    pending = torch.nonzero(top_p < 1)[:, 0]
    while len(pending):
        values = (logits if len(pending) == num_rows else logits[pending]).topk(width, dim=1).values
        head = (values - peaks[pending]).exp_().double().mul_(values >= floor[pending, None])
        mass = head.cumsum(dim=1)
        num_kept = (mass - head < wanted[pending, None]).sum(dim=1)
        result[pending] = values.gather(1, (num_kept - 1).clamp_(min=0)[:, None])[:, 0].maximum(floor[pending])
        pending = pending[(mass[:, -1] < wanted[pending]) & (width < vocab_size)]
        width = min(width * _WIDENING, vocab_size)
    return result

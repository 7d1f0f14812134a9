"""Repetition, frequency and presence penalties."""

from __future__ import annotations

import torch
from attrs import frozen


@frozen(eq=False)
class History:
    """Known tokens of ``m`` requests: ``token_ids`` int64 ``[m, length]``, prompt then outputs, of which the first
    ``num_tokens`` (int64 ``[m]``, at least 1) count; the first ``num_prompt_tokens`` of these are the prompt."""

    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    num_prompt_tokens: torch.Tensor


@frozen(eq=False)
class Penalties:
    """Float32 ``[m]`` each: repetition multiplies (1 = off), frequency and presence are subtracted (0 = off)."""

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


def apply_penalties(logits: torch.Tensor, rows: torch.Tensor, history: History, penalties: Penalties) -> None:
    """Make tokens that were there before less likely, in place.

    A token of the prompt or the output has its logit divided by ``repetition`` when positive and multiplied by it
    otherwise (Keskar et al. 2019). After that an output token loses ``frequency`` for each time it was generated, and
    ``presence`` once. Only the logits of known tokens are touched.

    Args:
        logits: float32 ``[n, vocab]``.
        rows: int64 ``[m]``, distinct rows of ``logits``.
        history: what those requests hold.
        penalties: their parameters.
    """
    places = torch.arange(history.token_ids.shape[1], device=logits.device)
    is_known = places < history.num_tokens[:, None]
    is_output = is_known & (places >= history.num_prompt_tokens[:, None])
    # Places behind the last token may hold anything: they stand for the first token, which gets the same value again.
    tokens = torch.where(is_known, history.token_ids, history.token_ids[:, :1])
    counts = logits.new_zeros(len(rows), logits.shape[1]).scatter_add_(1, tokens, is_output.to(logits.dtype))
    count = counts.gather(1, tokens)
    index = (rows[:, None], tokens)
    values = logits[index]
    repetition = penalties.repetition[:, None]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - penalties.frequency[:, None] * count - penalties.presence[:, None] * (count > 0)
    logits[index] = values

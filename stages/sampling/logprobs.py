"""Log probabilities of chosen tokens and of the likeliest ones."""

from __future__ import annotations

import torch

from ..records import LogprobsTensors

_BLOCK_ROWS = 64
_LOW_WORD = 2**32 - 1


def top_tokens(values: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the ``k`` largest of each row of float32 ``[n, vocab]``, int64 ``[n, k]``, largest first.

    Of equal values the lower id comes first, so that the order is the same for every ``k`` and in any batch. ``topk``
    alone leaves open which of several equal values it takes; rows where that matters are ordered whole.
    """
    vocab_size = values.shape[1]
    if values.is_cuda:  # where looking for ties would wait for the device
        return _ordered_ids(values, torch.arange(vocab_size, device=values.device), k)
    head = values.topk(min(k + 1, vocab_size), dim=1)
    result = _ordered_ids(head.values, head.indices, k)
    if k < vocab_size:
        tied = torch.nonzero(head.values[:, k - 1] == head.values[:, k])[:, 0]
        if len(tied):
            result[tied] = _ordered_ids(values[tied], torch.arange(vocab_size, device=values.device), k)
    return result


def _ordered_ids(values: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """The first ``k`` of int64 ``ids`` by larger value, then lower id; both are packed into one integer to sort."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: minus zero has other bits than zero
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (ascending.to(torch.int64) << 32) | (_LOW_WORD - ids)
    return _LOW_WORD - (packed.topk(k, dim=1).values & _LOW_WORD)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsTensors:
    """Log probabilities of one chosen token a row and of the ``k`` likeliest.

    Args:
        logits: float32 ``[n, vocab]``; +inf counts as the largest float.
        token_ids: int64 ``[n]``.
        k: between 0 and vocab.

    Returns:
        ``1 + k`` columns; the rank of a token is 1 + the number of tokens that are strictly likelier.
    """
    chosen = token_ids[:, None]
    parts: list[LogprobsTensors] = []
    # A prompt can have thousands of rows: in blocks, the temporaries stay small.
    for rows, tokens in zip(logits.split(_BLOCK_ROWS), chosen.split(_BLOCK_ROWS), strict=True):
        logprobs = rows.clamp(max=torch.finfo(rows.dtype).max).log_softmax(dim=1)
        value = logprobs.gather(1, tokens)
        ids = torch.cat([tokens, top_tokens(logprobs, k)], dim=1) if k else tokens
        parts.append(LogprobsTensors(ids, logprobs.gather(1, ids), (logprobs > value).sum(dim=1) + 1))
    return LogprobsTensors(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

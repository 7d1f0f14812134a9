"""Operations that forbid or favour single tokens, in place on float32 logits ``[n, vocab]``.

The logits hold no +inf (see :func:`twostroke.stages.sampling.edits.edit_logits`); NaN stays NaN or is masked. ``rows``
tensors are int64 indices of logits rows. None of these waits for the device.
"""

from __future__ import annotations

import torch


def apply_grammar_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Forbid every token whose bit is 0.

    Args:
        logits: ``[n, vocab]``.
        rows: ``[g]``, distinct.
        bitmask: int32 ``[g, ceil(vocab / 32)]``; bit ``token % 32`` of word ``token // 32`` belongs to ``token``.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask[:, :, None] >> shifts).bitwise_and_(1).view(len(rows), -1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(allowed == 0, -torch.inf)


def apply_allowed_token_ids(
    logits: torch.Tensor, rows: torch.Tensor, token_rows: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """Forbid all tokens of ``rows`` but the listed ones: ``token_ids[i]`` stays allowed in row ``token_rows[i]``."""
    kept = logits[token_rows, token_ids]
    logits[rows] = -torch.inf
    logits[token_rows, token_ids] = kept


def mask_token_ids(logits: torch.Tensor, token_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Forbid ``token_ids[i]`` in row ``token_rows[i]``."""
    logits[token_rows, token_ids] = -torch.inf


def apply_bad_words(logits: torch.Tensor, word_rows: torch.Tensor, words: torch.Tensor, recent: torch.Tensor) -> None:
    """Forbid the token that would complete a word whose other tokens were just generated.

    Args:
        logits: ``[n, vocab]``.
        word_rows: ``[num_words]``, the row that each word is forbidden in.
        words: int64 ``[num_words, width]``, filled up with -1 on the left.
        recent: int64 ``[num_words, width - 1]``, the latest output tokens of that row, filled up with -1 on the left.
    """
    prefix, last = words[:, :-1], words[:, -1]
    complete = ((prefix < 0) | (prefix == recent)).all(dim=1)
    ban = torch.where(complete, -torch.inf, 0.0).to(logits.dtype)
    # Added, not assigned: two words of a row may end in one token and only one of them be complete.
    logits.index_put_((word_rows, last), ban, accumulate=True)


def add_logit_bias(
    logits: torch.Tensor, token_rows: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor
) -> None:
    """Add ``biases[i]`` to the logit of ``token_ids[i]`` in row ``token_rows[i]``."""
    logits.index_put_((token_rows, token_ids), biases, accumulate=True)

"""Everything that changes logits before a token is chosen: masks, bias, penalties."""

from __future__ import annotations

import torch

from .columns import LOGIT_EDITS, Feature, SamplingColumns, pad_words
from .grammar import GrammarRows
from .masks import add_logit_bias, apply_allowed_token_ids, apply_bad_words, apply_grammar_bitmask, mask_token_ids
from .penalties import History, Penalties, apply_penalties
from .step import SamplingStep, TokenHistory, repeated, to_device

_LOGIT_EDITS = int(LOGIT_EDITS)


def edit_logits(
    logits: torch.Tensor,
    step: SamplingStep,
    columns: SamplingColumns,
    table: TokenHistory,
    grammar: GrammarRows | None,
) -> torch.Tensor:
    """Logits ``[n, vocab]`` that the step's requests choose from; the argument itself when nothing edits them.

    The argument is never written. +inf becomes the largest float in the copy: adding to it can't make NaN then.
    The order is grammar, allowed tokens, bad words, minimum length, bias, penalties.
    """
    if grammar is None and not step.active & _LOGIT_EDITS:
        return logits
    edited = logits.clamp(max=torch.finfo(logits.dtype).max)
    if grammar is not None:
        device = logits.device
        apply_grammar_bitmask(edited, grammar.positions.to(device), grammar.bitmask.to(device))
    if step.uses(Feature.ALLOWED_TOKENS):
        _allow(edited, step, columns)
    if step.uses(Feature.BAD_WORDS):
        _forbid_bad_words(edited, step, columns, table)
    if step.uses(Feature.MIN_TOKENS):
        positions, lists = step.lists_with(Feature.MIN_TOKENS, columns)
        mask_token_ids(edited, *repeated(positions, [entry.end_ids for entry in lists], edited.device))
    if step.uses(Feature.LOGIT_BIAS):
        _bias(edited, step, columns)
    if step.uses(Feature.PENALTIES):
        _penalise(edited, step, table)
    return edited


def _allow(logits: torch.Tensor, step: SamplingStep, columns: SamplingColumns) -> None:
    positions, lists = step.lists_with(Feature.ALLOWED_TOKENS, columns)
    token_rows, token_ids = repeated(positions, [entry.allowed_ids for entry in lists], logits.device)
    apply_allowed_token_ids(logits, to_device(positions, logits.device), token_rows, token_ids)


def _bias(logits: torch.Tensor, step: SamplingStep, columns: SamplingColumns) -> None:
    positions, lists = step.lists_with(Feature.LOGIT_BIAS, columns)
    token_rows, token_ids = repeated(positions, [entry.bias_ids for entry in lists], logits.device)
    add_logit_bias(logits, token_rows, token_ids, torch.cat([entry.biases for entry in lists]).to(logits.device))


def _forbid_bad_words(logits: torch.Tensor, step: SamplingStep, columns: SamplingColumns, table: TokenHistory) -> None:
    positions, lists = step.lists_with(Feature.BAD_WORDS, columns)
    width = max(entry.bad_words.shape[1] for entry in lists)
    padded = [pad_words(entry.bad_words, width) for entry in lists]
    word_rows, words = repeated(positions, padded, logits.device)
    recent = recent_outputs(table, step, width - 1)
    apply_bad_words(logits, word_rows, words, recent[word_rows])


def recent_outputs(table: TokenHistory, step: SamplingStep, count: int) -> torch.Tensor:
    """The last ``count`` output tokens of each request of the step, int64 ``[n, count]``, -1 where there are fewer."""
    device = table.token_ids.device
    places = to_device(step.num_tokens, device)[:, None] + torch.arange(-count, 0, device=device)
    is_output = places >= to_device(step.num_prompt_tokens, device)[:, None]
    tokens = table.token_ids[to_device(step.rows, device)[:, None], places.clamp(min=0)]
    return torch.where(is_output, tokens.to(torch.int64), -1)


def _penalise(logits: torch.Tensor, step: SamplingStep, table: TokenHistory) -> None:
    positions = step.positions_with(Feature.PENALTIES)
    device = logits.device
    rows, params = step.rows[positions], step.params[positions]
    length = int(step.num_tokens[positions].max())
    history = History(
        table.token_ids[:, :length].index_select(0, to_device(rows, device)).to(torch.int64),
        to_device(step.num_tokens[positions], device),
        to_device(step.num_prompt_tokens[positions], device),
    )
    penalties = Penalties(
        *(to_device(params[f"{name}_penalty"], device) for name in ("repetition", "frequency", "presence"))
    )
    apply_penalties(logits, to_device(positions, device), history, penalties)

"""Log probabilities of chosen tokens and of the likeliest ones, and ranks, out of one pass over the logits.

What is asked of a row beyond the sum of its exponentials concerns its likeliest tokens: only chunks are read whose
maximum says that they can hold one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...stages.records import LogprobsTensors
from ...stages.sampling.logprobs import gather_logprobs
from .launching import kernel
from .logits_rows import CHUNK, LARGEST, NOT_THERE, LogitsRows, list_chunks, ordered, row_of, summarise_chunks, value_of

MOST_TOP_TOKENS = 32
"""For more of a row's likeliest tokens torch sorts it."""

CHUNKS = 2 * MOST_TOP_TOKENS
"""Chunks that a program reads at once: all that can hold the likeliest tokens."""


TAKEN = tl.constexpr(-(2**63))
"""What takes the place of a token that was among the likeliest."""


@triton.jit
def _logprob(logits, peak, log_total):
    """Rounded as torch does: first the peak, then the logarithm; +inf counts as the largest float."""
    return tl.where(logits > LARGEST, LARGEST, logits) - peak - log_total


@triton.jit
def _load_chunks(
    start, ids_ptr, first, num_listed, peak, log_total, VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Of the listed chunks from ``first`` on: int64 numbers in the order of the log probability, then of lower ids."""
    places = first + tl.arange(0, CHUNKS)
    ids = tl.load(ids_ptr + places, mask=places < num_listed, other=0)
    tokens = ids[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (places < num_listed)[:, None] & (tokens < VOCAB)
    logits = tl.load(start + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    keys = tl.where(inside, ordered(_logprob(logits, peak, log_total)), NOT_THERE)
    return (keys.to(tl.int64) << 32) + (0x7FFFFFFF - tokens)


@kernel(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["rows_ptr", "tokens_ptr"])
def _logprobs_kernel(
    logits_ptr,
    rows_ptr,
    edited_ptr,
    slots_ptr,
    row_stride,
    tokens_ptr,
    maxima_ptr,
    masses_ptr,
    ids_ptr,
    top_ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    num_top,
    VOCAB: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_EDITED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    NUM: tl.constexpr,
):
    row = tl.program_id(0)
    start = row_of(row, logits_ptr, rows_ptr, edited_ptr, slots_ptr, row_stride, VOCAB, HAS_ROWS, HAS_EDITED)
    chunks = tl.arange(0, NUM)
    inside = chunks < ROW_CHUNKS
    place = row.to(tl.int64) * ROW_CHUNKS
    ids_ptr += place
    maxima = tl.load(maxima_ptr + place + chunks, mask=inside, other=-float("inf"))
    maxima = tl.where(maxima > LARGEST, LARGEST, maxima)
    peak = tl.max(maxima)
    masses = tl.load(masses_ptr + place + chunks, mask=inside, other=0.0)
    log_total = tl.log(tl.sum(masses * tl.exp(maxima - peak)))
    tops = _logprob(maxima, peak, log_total)
    keys = tl.where(inside, ordered(tops), NOT_THERE)

    token = tl.load(tokens_ptr + row)
    chosen = _logprob(tl.load(start + token).to(tl.float32), peak, log_total)
    columns = row.to(tl.int64) * (num_top + 1)
    tl.store(top_ids_ptr + columns, token)
    tl.store(logprobs_ptr + columns, chosen)
    chosen_key = ordered(chosen)
    num_listed = list_chunks(keys > chosen_key, ids_ptr, NUM)
    rank = tl.full((), 1, tl.int32)
    for first in range(0, num_listed, CHUNKS):
        packed = _load_chunks(start, ids_ptr, first, num_listed, peak, log_total, VOCAB, CHUNK, CHUNKS)
        rank += tl.sum(((packed >> 32) > chosen_key.to(tl.int64)).to(tl.int32))
    tl.store(ranks_ptr + row, rank.to(tl.int64))

    # The maxima of num_top chunks are so many tokens: the likeliest ones are not below the least of these, and of those
    # equal to it the first chunks have the lowest ids.
    low = tl.min(tl.where(inside, keys, 0x7FFFFFFF)).to(tl.int64)
    high = tl.max(keys).to(tl.int64) + 1
    while (high - low > 1) & (num_top > 0):
        middle = low + (high - low) // 2
        is_reached = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32)) >= num_top
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    is_least = keys == low.to(tl.int32)
    is_first = is_least & (tl.cumsum(is_least.to(tl.int32), axis=0) <= num_top)
    num_listed = list_chunks((keys > low.to(tl.int32)) | is_first, ids_ptr, NUM)
    packed = _load_chunks(start, ids_ptr, 0, num_listed, peak, log_total, VOCAB, CHUNK, CHUNKS)
    for index in range(0, num_top):
        best = tl.max(tl.max(packed, axis=1), axis=0)
        packed = tl.where(packed == best, TAKEN, packed)
        tl.store(top_ids_ptr + columns + 1 + index, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        tl.store(logprobs_ptr + columns + 1 + index, value_of((best >> 32).to(tl.int32)))


def score_tokens(source: LogitsRows, token_ids: torch.Tensor, num_top: int) -> LogprobsTensors:
    """What :func:`twostroke.stages.sampling.logprobs.gather_logprobs` gives of these rows, without waiting.

    Args:
        source: raw logits.
        token_ids: int64 ``[num_rows]``, a token of each row.
        num_top: how many of the likeliest tokens; between 0 and vocab.
    """
    num_rows, logits = token_ids.shape[0], source.logits
    if num_top > MOST_TOP_TOKENS:
        wanted = logits[:num_rows] if source.rows is None else logits[source.rows]
        return gather_logprobs(wanted, token_ids, num_top)
    device = logits.device
    top_ids = torch.empty(num_rows, 1 + num_top, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, 1 + num_top, dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return LogprobsTensors(top_ids, logprobs, ranks)
    summary = summarise_chunks(source, num_rows)
    num_chunks = summary.maxima.shape[1]
    padded = max(triton.next_power_of_2(num_chunks), 2)
    ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    _logprobs_kernel[(num_rows,)](
        *source.pointers(),
        token_ids,
        *summary,
        ids,
        top_ids,
        logprobs,
        ranks,
        num_top,
        **source.constants(),
        CHUNK=CHUNK,
        CHUNKS=min(CHUNKS, padded),
        ROW_CHUNKS=num_chunks,
        NUM=padded,
        num_warps=8,
    )
    return LogprobsTensors(top_ids, logprobs, ranks)

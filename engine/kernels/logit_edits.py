"""Everything that changes logits before a token is chosen, in one pass over the rows that it changes.

The pass copies a row without what the grammar and the list of allowed tokens forbid; the program of a tile then goes
through the row's short lists (biases, bad words, end ids) for tokens of its tile, and through its share of the known
tokens, which it counts for the penalties. Penalties are a second kernel, which touches known tokens only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launching import kernel
from .logits_rows import LARGEST, TILE, EditedRows, LogitsRows

LIST_BLOCK = 128
HISTORY_BLOCK = 1024

IN_PROMPT = tl.constexpr(1 << 30)
"""Added to the count of a token that the prompt holds."""

EDIT_FIELDS = (
    "position",
    "table_row",
    "num_prompt_tokens",
    "min_tokens",
    "allowed_mask",
    "first_bias",
    "num_biases",
    "first_word",
    "num_words",
    "word_width",
    "first_end_id",
    "num_end_ids",
    "count_slot",
)
"""What is known of a request that edits its logits: int32 columns of :attr:`EditLists.requests`.

``position`` is its place among those that sample, ``table_row`` its row in the table of tokens. Lists lie in
:attr:`EditLists.items` from ``first_…`` on: token ids of biases (their values follow all of the ids, as float32 bits),
words of ``word_width`` ids (filled up with -1 on the left), end ids, which are forbidden until ``min_tokens`` were
generated. ``allowed_mask`` and ``count_slot`` are -1 for none.
"""

_NUM_FIELDS = tl.constexpr(len(EDIT_FIELDS))


class EditLists(NamedTuple):
    """What requests change their logits by: int32 ``requests`` ``[num_edited, fields]``, int32 ``items``, int32
    ``allowed`` ``[num_masks, words]`` (bit ``token % 32`` of word ``token // 32``), float32 ``penalties``
    ``[3, num_edited]`` (repetition, frequency, presence; off: 1, 0, 0), int32 ``slots`` ``[num_rows]`` (as in
    :class:`EditedRows`)."""

    requests: torch.Tensor
    items: torch.Tensor
    allowed: torch.Tensor
    penalties: torch.Tensor
    slots: torch.Tensor


class GrammarMasks(NamedTuple):
    """Int32 ``masks`` ``[num_masks, words]`` and, of each edited request, its mask or -1: int32
    ``mask_index`` ``[num_edited]``."""

    masks: torch.Tensor
    mask_index: torch.Tensor


class KnownTokens(NamedTuple):
    """The table of tokens: int32 ``token_ids`` ``[num_table_rows, length]``; int32 ``lengths`` ``[num_rows]``, the
    known tokens of each request that samples, and on the host how many the longest of the penalised ones has."""

    token_ids: torch.Tensor
    lengths: torch.Tensor
    longest: int


@triton.jit
def _field(requests_ptr, edited, INDEX: tl.constexpr):
    return tl.load(requests_ptr + edited * _NUM_FIELDS + INDEX)


@triton.jit
def _is_allowed(masks_ptr, mask_row, tokens, inside, VOCAB: tl.constexpr):
    """Bits of tokens in a row of masks."""
    words = (VOCAB + 31) // 32
    word = tl.load(masks_ptr + mask_row.to(tl.int64) * words + tokens // 32, mask=inside, other=0)
    return ((word >> (tokens % 32)) & 1) != 0


@triton.jit
def _edit_lists(
    out_ptr, requests_ptr, items_ptr, table_ptr, edited, length, tile, BLOCK: tl.constexpr, LIST: tl.constexpr
):
    """Bias, then forbid, the listed tokens of one tile, which has been written."""
    tl.debug_barrier()
    num_prompt = _field(requests_ptr, edited, 2)
    first, count = _field(requests_ptr, edited, 5), _field(requests_ptr, edited, 6)
    for start in range(0, count, LIST):
        places = start + tl.arange(0, LIST)
        tokens = tl.load(items_ptr + first + places, mask=places < count, other=-1)
        is_here = (tokens >= tile * BLOCK) & (tokens < (tile + 1) * BLOCK)
        bias = tl.load(items_ptr + first + count + places, mask=is_here, other=0).to(tl.float32, bitcast=True)
        tl.store(out_ptr + tokens, tl.load(out_ptr + tokens, mask=is_here, other=0.0) + bias, mask=is_here)
    tl.debug_barrier()
    first, count, width = (
        _field(requests_ptr, edited, 7),
        _field(requests_ptr, edited, 8),
        _field(requests_ptr, edited, 9),
    )
    for start in range(0, count, LIST):
        places = start + tl.arange(0, LIST)
        words = items_ptr + first + places * width
        tokens = tl.load(words + width - 1, mask=places < count, other=-1)
        is_here = (tokens >= tile * BLOCK) & (tokens < (tile + 1) * BLOCK)
        for index in range(0, width - 1):
            wanted = tl.load(words + index, mask=is_here, other=-1)
            at = length - (width - 1) + index
            found = -2
            if at >= num_prompt:
                found = tl.load(table_ptr + at)
            is_here = is_here & ((wanted < 0) | (wanted == found))
        before = tl.load(out_ptr + tokens, mask=is_here, other=0.0)
        tl.store(out_ptr + tokens, tl.where(before == before, -float("inf"), before), mask=is_here)
    tl.debug_barrier()
    first, count = _field(requests_ptr, edited, 10), _field(requests_ptr, edited, 11)
    if length - num_prompt < _field(requests_ptr, edited, 3):
        for start in range(0, count, LIST):
            places = start + tl.arange(0, LIST)
            tokens = tl.load(items_ptr + first + places, mask=places < count, other=-1)
            is_here = (tokens >= tile * BLOCK) & (tokens < (tile + 1) * BLOCK)
            tl.store(out_ptr + tokens, tl.full([LIST], -float("inf"), tl.float32), mask=is_here)


@triton.jit
def _count_tokens(table_ptr, counts_ptr, start, step, length, num_prompt, VOCAB: tl.constexpr, HISTORY: tl.constexpr):
    """Count output tokens, and mark those of the prompt, in every ``step``-th part of the known tokens."""
    for first in range(start, length, step):
        places = first + tl.arange(0, HISTORY)
        tokens = tl.load(table_ptr + places, mask=places < length, other=-1)
        is_known = (tokens >= 0) & (tokens < VOCAB)
        is_output = is_known & (places >= num_prompt)
        tl.atomic_add(counts_ptr + tokens, tl.full([HISTORY], 1, tl.int32), mask=is_output, sem="relaxed")
        marks = tl.full([HISTORY], IN_PROMPT, tl.int32)
        tl.atomic_or(counts_ptr + tokens, marks, mask=is_known & (places < num_prompt), sem="relaxed")


@kernel(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "lengths_ptr", "items_ptr", "allowed_ptr", "mask_index_ptr"],
)
def _edit_kernel(
    logits_ptr,
    rows_ptr,
    row_stride,
    requests_ptr,
    items_ptr,
    allowed_ptr,
    masks_ptr,
    mask_index_ptr,
    table_ptr,
    lengths_ptr,
    counts_ptr,
    edited_ptr,
    num_nan_ptr,
    table_stride,
    VOCAB: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_GRAMMAR: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    HISTORY: tl.constexpr,
):
    tile = tl.program_id(0)
    edited = tl.program_id(1)
    position = _field(requests_ptr, edited, 0)
    source = position.to(tl.int64)
    if HAS_ROWS:
        source = tl.load(rows_ptr + position)
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < VOCAB
    logits = tl.load(logits_ptr + source * row_stride + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    tl.store(num_nan_ptr + edited * TILES + tile, tl.sum((logits != logits).to(tl.int32)))
    logits = tl.where(logits > LARGEST, LARGEST, logits)  # adding to +inf could make NaN
    if HAS_GRAMMAR:
        mask_row = tl.load(mask_index_ptr + edited)
        if mask_row >= 0:
            logits = tl.where(_is_allowed(masks_ptr, mask_row, tokens, inside, VOCAB), logits, -float("inf"))
    mask_row = _field(requests_ptr, edited, 4)
    if mask_row >= 0:
        logits = tl.where(_is_allowed(allowed_ptr, mask_row, tokens, inside, VOCAB), logits, -float("inf"))
    out_ptr = edited_ptr + edited.to(tl.int64) * VOCAB
    tl.store(out_ptr + tokens, logits, mask=inside)
    length = tl.load(lengths_ptr + position)
    table_ptr += _field(requests_ptr, edited, 1).to(tl.int64) * table_stride
    _edit_lists(out_ptr, requests_ptr, items_ptr, table_ptr, edited, length, tile, BLOCK, LIST)
    if HAS_COUNTS:
        slot = _field(requests_ptr, edited, 12)
        if slot >= 0:
            num_prompt = _field(requests_ptr, edited, 2)
            counts_ptr += slot.to(tl.int64) * VOCAB
            _count_tokens(table_ptr, counts_ptr, tile * HISTORY, TILES * HISTORY, length, num_prompt, VOCAB, HISTORY)


@kernel(
    do_not_specialize=["table_stride", "num_edited"],
    do_not_specialize_on_alignment=["lengths_ptr"],
)
def _penalty_kernel(
    requests_ptr,
    penalties_ptr,
    table_ptr,
    lengths_ptr,
    counts_ptr,
    edited_ptr,
    table_stride,
    num_edited,
    VOCAB: tl.constexpr,
    HISTORY: tl.constexpr,
):
    edited = tl.program_id(1)
    slot = _field(requests_ptr, edited, 12)
    length = tl.load(lengths_ptr + _field(requests_ptr, edited, 0))
    if slot >= 0:
        places = tl.program_id(0) * HISTORY + tl.arange(0, HISTORY)
        table_ptr += _field(requests_ptr, edited, 1).to(tl.int64) * table_stride
        tokens = tl.load(table_ptr + places, mask=places < length, other=-1)
        is_known = (tokens >= 0) & (tokens < VOCAB)
        nothing = tl.zeros([HISTORY], tl.int32)
        # Whoever finds a count takes it: a token is penalised once, and the counts are zero again afterwards.
        count = tl.atomic_xchg(counts_ptr + slot.to(tl.int64) * VOCAB + tokens, nothing, mask=is_known, sem="relaxed")
        is_mine = is_known & (count != 0)
        out_ptr = edited_ptr + edited.to(tl.int64) * VOCAB
        logits = tl.load(out_ptr + tokens, mask=is_mine, other=0.0)
        repetition = tl.load(penalties_ptr + edited)
        logits = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        num_outputs = (count & (IN_PROMPT - 1)).to(tl.float32)
        logits -= tl.load(penalties_ptr + num_edited + edited) * num_outputs
        logits -= tl.where(num_outputs > 0, tl.load(penalties_ptr + 2 * num_edited + edited), 0.0)
        tl.store(out_ptr + tokens, logits, mask=is_mine)


def edit_logits(
    source: LogitsRows,
    lists: EditLists,
    known: KnownTokens,
    counts: torch.Tensor | None = None,
    grammar: GrammarMasks | None = None,
) -> EditedRows:
    """The logits of the requests that change theirs, as :mod:`twostroke.stages.sampling.edits` changes them.

    Args:
        source: raw logits, which are never written.
        lists: what is changed, and for whom.
        known: the tokens that penalties and bad words look at.
        counts: int32 ``[num_counted, vocab]``, all zero, and zero again once the kernels ran; None if nobody has
            penalties.
        grammar: masks of this step.
    """
    logits, num_edited, device = source.logits, lists.requests.shape[0], source.logits.device
    vocab, num_tiles = logits.shape[1], source.num_tiles
    edited = torch.empty(num_edited, vocab, dtype=torch.float32, device=device)
    num_nan = torch.empty(num_edited, num_tiles, dtype=torch.int32, device=device)
    table_stride = known.token_ids.stride(0)
    _edit_kernel[(num_tiles, num_edited)](
        logits,
        logits if source.rows is None else source.rows,
        logits.stride(0),
        *lists[:3],
        *((lists.requests, lists.requests) if grammar is None else grammar),
        known.token_ids,
        known.lengths,
        lists.requests if counts is None else counts,
        edited,
        num_nan,
        table_stride,
        VOCAB=vocab,
        HAS_ROWS=source.rows is not None,
        HAS_GRAMMAR=grammar is not None,
        HAS_COUNTS=counts is not None,
        TILES=num_tiles,
        BLOCK=TILE,
        LIST=LIST_BLOCK,
        HISTORY=HISTORY_BLOCK,
        num_warps=4,
    )
    if counts is not None:
        _penalty_kernel[(-(-known.longest // HISTORY_BLOCK), num_edited)](
            lists.requests,
            lists.penalties,
            known.token_ids,
            known.lengths,
            counts,
            edited,
            table_stride,
            num_edited,
            VOCAB=vocab,
            HISTORY=HISTORY_BLOCK,
            num_warps=4,
        )
    return EditedRows(edited, lists.slots, num_nan)

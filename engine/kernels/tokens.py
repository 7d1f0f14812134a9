"""Writing tokens where the next step looks for them: sampled ones, and those that requests bring."""

from __future__ import annotations

import torch
import triton.language as tl

from .launching import Relaunched, kernel


@kernel(
    do_not_specialize=["num_tokens", "vocab_size"],
    do_not_specialize_on_alignment=["sampled_ptr", "index_ptr", "table_ptr"],
)
def _store_tokens_kernel(sampled_ptr, index_ptr, table_ptr, num_tokens, vocab_size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_tokens
    token = tl.load(sampled_ptr + places, mask=mask, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    tl.store(table_ptr + tl.load(index_ptr + places, mask=mask, other=0), token, mask=mask)


class TokenWriter:
    """Stores sampled tokens; one object for all steps."""

    def __init__(self) -> None:
        self._launch = Relaunched(_store_tokens_kernel, num_warps=1)

    def __call__(self, table: torch.Tensor, index: torch.Tensor, sampled: torch.Tensor, vocab_size: int) -> None:
        """``table[index] = sampled``, ids kept inside the vocabulary.

        Args:
            table: int32, flat.
            index: int64 ``[n]``, distinct places.
            sampled: int64 ``[n]``.
            vocab_size: one more than the largest id.
        """
        num_tokens = sampled.shape[0]
        if num_tokens:
            self._launch(None, (-(-num_tokens // 256), 1, 1), sampled, index, table, num_tokens, vocab_size, 256)


@kernel(do_not_specialize=["num_pieces"])
def _scatter_kernel(pieces_ptr, values_ptr, target_ptr, num_pieces, BLOCK: tl.constexpr):
    piece = tl.program_id(0)
    start = tl.load(pieces_ptr + piece)
    first = tl.load(pieces_ptr + num_pieces + piece)
    stop = tl.load(pieces_ptr + num_pieces + piece + 1)
    for begin in range(first, stop, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        mask = places < stop
        values = tl.load(values_ptr + places, mask=mask)
        tl.store(target_ptr + start + places - first, values, mask=mask)


def scatter_pieces(pieces: torch.Tensor, values: torch.Tensor, target: torch.Tensor) -> None:
    """Write adjacent ``values`` piece by piece to other places; pieces do not overlap there.

    Args:
        pieces: int64 ``[2 * n + 1]``: where each of n pieces begins in ``target``, then where each begins in
            ``values``, and where the last one ends.
        values: flat, of the target's type.
        target: flat.
    """
    num_pieces = (pieces.shape[0] - 1) // 2
    if num_pieces:
        _scatter_kernel[(num_pieces,)](pieces, values, target, num_pieces, BLOCK=512, num_warps=2)

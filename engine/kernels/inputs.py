"""The inputs of a step, brought to fixed memory by one kernel: what the host counted, and the ids that go with it."""

from __future__ import annotations

import torch
import triton.language as tl

from .launching import Relaunched, kernel

_BLOCK = 256


@kernel(
    do_not_specialize=["max_tokens", "num_moved", "num_tokens", "num_ids", "num_token_blocks", "num_words"],
    do_not_specialize_on_alignment=[
        "from_tokens_ptr",
        "tokens_ptr",
        "from_requests_ptr",
        "requests_ptr",
        "table_ptr",
        "ids_ptr",
    ],
)
def _bring_inputs_kernel(
    from_tokens_ptr,
    tokens_ptr,
    from_requests_ptr,
    requests_ptr,
    table_ptr,
    ids_ptr,
    max_tokens,
    num_moved,
    num_tokens,
    num_ids,
    num_token_blocks,
    num_words,
    ROWS: tl.constexpr,
    INDEX_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    if block < num_token_blocks:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        for row in tl.static_range(ROWS):  # pyright: ignore[reportGeneralTypeIssues]
            values = tl.load(from_tokens_ptr + row * max_tokens + columns, mask=columns < num_moved, other=0)
            tl.store(tokens_ptr + row * max_tokens + columns, values, mask=columns < num_moved)
            if row == INDEX_ROW:
                ids = tl.load(table_ptr + values, mask=columns < num_tokens, other=0)
                tl.store(ids_ptr + columns, ids, mask=columns < num_ids)
    else:
        words = (block - num_token_blocks) * BLOCK + tl.arange(0, BLOCK)
        counts = tl.load(from_requests_ptr + words, mask=words < num_words)
        tl.store(requests_ptr + words, counts, mask=words < num_words)


class BringInputs:
    """Copies from host memory that the device can read, and looks up ids; one object for all steps."""

    def __init__(self, index_row: int) -> None:
        """``index_row`` is the row of ``tokens`` that says where ids lie."""
        self._index_row = index_row
        self._launch = Relaunched(_bring_inputs_kernel, num_warps=4)

    def __call__(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        requests: tuple[torch.Tensor, torch.Tensor],
        ids: tuple[torch.Tensor, torch.Tensor],
        num_moved: int,
        num_tokens: int,
        num_ids: int,
    ) -> None:
        """Launch it.

        Args:
            tokens: int64 ``[rows, max_tokens]`` on the host and on the device, of which ``num_moved`` columns move.
            requests: int32, contiguous, on the host and on the device, all of which moves.
            ids: int32, flat: the table, and ``[max_tokens]`` that is filled for ``num_tokens`` tokens, 0 up to
                ``num_ids``.
            num_moved, num_tokens, num_ids: as above; ``num_tokens`` is the least.
        """
        num_token_blocks = -(-max(num_moved, num_ids) // _BLOCK)
        num_words = requests[0].numel()
        self._launch(
            None,
            (num_token_blocks + -(-num_words // _BLOCK), 1, 1),
            *tokens,
            *requests,
            *ids,
            tokens[0].shape[1],
            num_moved,
            num_tokens,
            num_ids,
            num_token_blocks,
            num_words,
            tokens[0].shape[0],
            self._index_row,
            _BLOCK,
        )

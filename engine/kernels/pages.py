"""Block tables as FlashInfer wants them: the pages of all requests in one list, cut by offsets."""

from __future__ import annotations

import torch
import triton.language as tl

from .launching import kernel


@kernel(do_not_specialize=["table_stride"])
def _list_pages_kernel(
    table_ptr,
    lengths_ptr,
    offsets_ptr,
    pages_ptr,
    last_ptr,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request: count the pages of those before it, then copy its own behind them."""
    request = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    first = 0
    for start in range(0, request, BLOCK):
        others = start + places
        lengths = tl.load(lengths_ptr + others, mask=others < request, other=0)
        first += tl.sum((lengths + PAGE - 1) // PAGE)
    length = tl.load(lengths_ptr + request)
    num_pages = (length + PAGE - 1) // PAGE
    tl.store(offsets_ptr + request + 1, first + num_pages)
    tl.store(last_ptr + request, length - tl.maximum(num_pages - 1, 0) * PAGE)
    table = table_ptr + request.to(tl.int64) * table_stride
    if request == 0:
        tl.store(offsets_ptr, 0)
    for start in range(0, num_pages, BLOCK):
        mine = start + places
        blocks = tl.load(table + mine, mask=mine < num_pages, other=0)
        tl.store(pages_ptr + first + mine, blocks, mask=mine < num_pages)


def list_pages(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    offsets: torch.Tensor,
    pages: torch.Tensor,
    last_page_len: torch.Tensor,
) -> None:
    """Flatten ``block_table`` int32 ``[num_reqs, max_blocks]`` by ``seq_lens`` int32 ``[num_reqs]``.

    Writes ``offsets`` int32 ``[num_reqs + 1 or more]``: where each request's pages begin in ``pages`` int32
    ``[num_reqs * max_blocks or more]``, and ``last_page_len`` int32 ``[num_reqs or more]``: tokens in its last page. A
    request of length 0 has no page and a last length of 0. What lies behind is left as it was.
    """
    _list_pages_kernel[(seq_lens.shape[0],)](
        block_table,
        seq_lens,
        offsets,
        pages,
        last_page_len,
        block_table.stride(0),
        PAGE=page_size,
        BLOCK=256,
    )

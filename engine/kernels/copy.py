"""Copies that the copy engines would take several commands for."""

from __future__ import annotations

import torch
import triton.language as tl

from .launching import Relaunched, kernel


@kernel(
    do_not_specialize=["num_columns", "source_stride", "target_stride"],
    do_not_specialize_on_alignment=["source_ptr", "target_ptr"],
)
def _copy_rows_kernel(source_ptr, target_ptr, num_columns, source_stride, target_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    values = tl.load(source_ptr + row * source_stride + columns, mask=mask)
    tl.store(target_ptr + row * target_stride + columns, values, mask=mask)


class RowCopies:
    """Copies rows; one object for all copies of a device."""

    def __init__(self) -> None:
        self._launch = Relaunched(_copy_rows_kernel)

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """``target.copy_(source)`` for ``[num_rows, num_columns]`` of one type.

        Columns are adjacent, rows any distance apart. Either may be pinned host memory, which the kernel reads or
        writes where it lies.
        """
        num_rows, num_columns = source.shape
        block = 1024
        grid = (-(-num_columns // block), num_rows, 1)
        self._launch(source.dtype, grid, source, target, num_columns, source.stride(0), target.stride(0), block)

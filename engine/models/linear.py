"""Products with a weight, by the kernel that is fastest on a CPU for the number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Weights with more outputs than this are wide. BLAS handles few rows times a wide weight badly: in blocks of outputs
# that stay in the cache, 8 rows cost 0.55 to 0.85 of the one call, and from 256 rows on as much as the one call.
WIDE = 1024
BLOCK = 512
MOST_BLOCKED_ROWS = 256

# Up to this many rows a product is bound by reading the weight, which is 1.3 to 2 times as fast input after input, if
# it has more outputs than COPIED and COPIED_RATIO times as many as inputs; others gain nothing or lose.
MOST_COPY_ROWS = 3
COPIED = 768
COPIED_RATIO = 1.5


class Linear:
    """``x @ weight.T + bias`` for ``x`` ``[num_rows, in]``, ``weight`` ``[out, in]`` and ``bias`` ``[out]`` or None.

    With ``keep_transposed`` a weight that gains by it (:func:`gains_by_copy`) is kept a second time, ``[in, out]``, for
    a few rows. That copy is made by :meth:`refresh`, and made again before it is used when the weight was written in
    place since. Writes that torch does not count (through ``weight.data``, or into its storage) need a call of
    :meth:`refresh`. Compiled code does not look for writes: :meth:`refresh_if_stale` comes before it.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, keep_transposed: bool = False
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._is_blocked = is_wide(weight)
        self.transposed: torch.Tensor | None = None
        if keep_transposed and gains_by_copy(weight):
            with torch.inference_mode(False):  # or it could not be written outside of inference mode
                self.transposed = weight.new_empty(weight.shape[1], weight.shape[0])
        self._copied_version = -1

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The product ``[num_rows, out]``, in new memory."""
        num_rows = rows.shape[0]
        is_compiling = torch.compiler.is_compiling()
        if self.transposed is not None and num_rows <= MOST_COPY_ROWS:
            if not is_compiling:
                self.refresh_if_stale()
            return rows @ self.transposed if self.bias is None else torch.addmm(self.bias, rows, self.transposed)
        if self._is_blocked and not is_compiling and 1 < num_rows <= MOST_BLOCKED_ROWS:
            return self._in_blocks(rows)
        return F.linear(rows, self.weight, self.bias)

    def refresh(self) -> None:
        """Copy the weight again, if there is a copy."""
        if self.transposed is not None:
            self.transposed.copy_(self.weight.t())
            self._copied_version = self.weight._version

    def refresh_if_stale(self) -> None:
        """Copy the weight again if it was written in place since."""
        if self._copied_version != self.weight._version:
            self.refresh()

    def _in_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        product = rows.new_empty(rows.shape[0], self.weight.shape[0])
        for weight, part in zip(self.weight.t().split(BLOCK, 1), product.split(BLOCK, 1), strict=True):
            torch.mm(rows, weight, out=part)
        return product if self.bias is None else product.add_(self.bias)


def is_wide(weight: torch.Tensor) -> bool:
    """Whether products with this weight are worth more than one plain call: wide, float32 and on a CPU."""
    return _is_plain(weight) and weight.shape[0] > WIDE


def gains_by_copy(weight: torch.Tensor) -> bool:
    """Whether a transposed copy of this weight is read faster: float32, on a CPU, and much wider than long."""
    num_outputs, num_inputs = weight.shape
    return _is_plain(weight) and num_outputs > COPIED and num_outputs >= COPIED_RATIO * num_inputs


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32

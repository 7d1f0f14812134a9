"""The rows that sample in one step, and what they use."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from ..records import IntArray
from .columns import Feature, SamplingColumns, TokenLists


class TokenHistory(Protocol):
    """The known tokens of every row of the request table.

    ``token_ids`` int32 ``[num_rows, length]`` holds prompt, then outputs; ``num_tokens`` counts both,
    ``num_prompt_tokens`` the prompt, int64 ``[num_rows]``.
    """

    token_ids: torch.Tensor
    num_tokens: IntArray
    num_prompt_tokens: IntArray


@frozen(eq=False)
class RowParameters:
    """What the columns hold of some rows: ``params`` and ``flags`` ``[n]``, and the flags that any of them has.

    It is read once for all steps with the same ``rows`` object, as long as the columns' ``version`` stays.
    """

    rows: IntArray
    version: int
    params: npt.NDArray[np.void]
    flags: IntArray
    active: int

    @classmethod
    def read(cls, columns: SamplingColumns, rows: IntArray, before: RowParameters | None = None) -> RowParameters:
        """Read them, or give those that were read ``before`` where they still hold."""
        if before is not None and before.rows is rows and before.version == columns.version:
            return before
        params = columns.rows[rows]
        flags = params["flags"].copy()
        return cls(rows, columns.version, params, flags, int(np.bitwise_or.reduce(flags)))


@frozen(eq=False)
class SamplingStep:
    """One step of sampling, ``n`` requests. Positions count among them: position 0 is the first that samples.

    ``rows`` int64 ``[n]`` are their rows in the request table, ``params`` ``[n]`` their parameters (of
    :data:`~twostroke.stages.sampling.columns.ROW_DTYPE`), ``flags`` int64 ``[n]`` the features that each uses now, and
    ``active`` those that any uses. ``num_tokens`` and ``num_prompt_tokens`` int64 ``[n]`` are counted as in the table.
    """

    rows: IntArray
    params: npt.NDArray[np.void]
    flags: IntArray
    active: int
    num_tokens: IntArray
    num_prompt_tokens: IntArray

    @classmethod
    def gather(cls, columns: SamplingColumns, table: TokenHistory, rows: IntArray) -> SamplingStep:
        """Read what the columns and the table hold of ``rows``."""
        return cls.of(RowParameters.read(columns, rows), table)

    @classmethod
    def of(cls, parameters: RowParameters, table: TokenHistory) -> SamplingStep:
        """These parameters, and what the table holds of their rows now."""
        rows, flags, active = parameters.rows, parameters.flags, parameters.active
        num_tokens, num_prompt_tokens = table.num_tokens[rows], table.num_prompt_tokens[rows]
        if active & int(Feature.MIN_TOKENS):
            is_reached = num_tokens - num_prompt_tokens >= parameters.params["min_tokens"]
            flags = np.where(is_reached, flags & ~int(Feature.MIN_TOKENS), flags)
            active = int(np.bitwise_or.reduce(flags))
        return cls(rows, parameters.params, flags, active, num_tokens, num_prompt_tokens)

    def uses(self, features: Feature) -> bool:
        """Whether any request uses any of the features."""
        return bool(self.active & int(features))

    def positions_with(self, feature: Feature) -> IntArray:
        """Positions of the requests that use a feature."""
        return np.flatnonzero(self.flags & int(feature))

    def lists_with(self, feature: Feature, columns: SamplingColumns) -> tuple[IntArray, list[TokenLists]]:
        """Positions of the requests that use a feature, and their lists."""
        positions = self.positions_with(feature)
        return positions, [columns.lists[row] for row in self.rows[positions].tolist()]


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A host array on the device, by way of pinned memory; on a CPU the two share memory."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda" and host.numel():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def repeated(positions: IntArray, parts: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged parts as flat pairs: the position of each element, and the elements."""
    token_rows = np.repeat(positions, [len(part) for part in parts])
    return to_device(token_rows, device), torch.cat(parts).to(device, non_blocking=True)

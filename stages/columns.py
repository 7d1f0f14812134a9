"""Columns: what a feature keeps for each row of the request table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .request_table import RequestRecord


class Column(Protocol):
    """Per-request state of one feature, indexed by row of the request table.

    Rows never move: there is no swap and no condense to get wrong. A column must not assume that ``drop`` was called
    before ``add``; whatever the row held before, ``add`` leaves nothing of it.
    """

    def add(self, row: int, request: RequestRecord) -> None:
        """Take in what the feature needs of a request that was given ``row``."""
        ...

    def drop(self, row: int) -> None:
        """Set the row back to its defaults. Dropping an empty row changes nothing."""
        ...

    def flush(self) -> None:
        """Make what was added and dropped since the last flush visible to the device, in one go."""
        ...

"""Connections on which nothing is asked: of clients that vanished, or that send a header for ever."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class IdleConnections:
    """Closes connections that have had no request, or only part of a header, for ``limit_s`` seconds.

    uvicorn closes those that wait for their next request; one that never sent a whole header it leaves open.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since: dict[Any, tuple[Any, float]] = {}

    def sweep(self, connections: Iterable[Any], now: float) -> int:
        """Look at all of uvicorn's connections; gives how many were closed. ``now`` is in seconds, of any clock."""
        since: dict[Any, tuple[Any, float]] = {}
        closed = 0
        for connection in list(connections):
            request = connection.cycle  # the last one
            if request is not None and not request.response_complete:
                continue
            seen = self._since.get(connection)
            began = seen[1] if seen is not None and seen[0] is request else now
            if now - began >= self.limit_s:
                connection.transport.abort()
                closed += 1
            else:
                since[connection] = (request, began)
        self._since = since
        return closed

"""Connections that ask for nothing are closed; those in use are not."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from twostroke.engine.serve.connections import IdleConnections


class Connection:
    """One of uvicorn's, as far as it is looked at."""

    def __init__(self) -> None:
        self.cycle: Any = None
        self.is_closed = False
        self.transport = SimpleNamespace(abort=self._abort)

    def _abort(self) -> None:
        self.is_closed = True

    def request(self, *, is_done: bool) -> None:
        self.cycle = SimpleNamespace(response_complete=is_done)


def test_only_what_stays_without_a_request_is_closed() -> None:
    idle, asking, polling = Connection(), Connection(), Connection()
    connections, seen = [idle, asking, polling], IdleConnections(10)
    asking.request(is_done=False)
    for now in range(10):
        polling.request(is_done=True)  # between two looks, which is no reason to be closed
        assert seen.sweep(connections, now) == 0
    assert seen.sweep(connections, 10) == 1
    assert [connection.is_closed for connection in connections] == [True, False, False]
    asking.request(is_done=True)
    assert seen.sweep([asking, polling], 18) == 0
    assert seen.sweep([asking, polling], 19) == 1
    assert polling.is_closed
    assert seen.sweep([asking], 28) == 1


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: loc"], ids=["nothing", "half_a_header"])
def test_a_client_that_asks_for_nothing_is_let_go(start: Callable[..., Any], stack: ExitStack, sent: bytes) -> None:
    served = start(stack, header_timeout_s=0.2)
    with socket.create_connection(("127.0.0.1", served.background.server.port), timeout=20) as connection:
        connection.sendall(sent)
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    with served.http() as http:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        lines = http.post("/v1/completions", json=body).text.splitlines()
        assert lines[-2] == "data: [DONE]"
        assert json.loads(lines[-4].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"

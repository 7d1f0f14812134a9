"""The server: uvicorn around the application, signals, draining, and what happens when the engine can't go on."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from .config import ServeConfig
from .connections import IdleConnections

if TYPE_CHECKING:
    from .service import Service

_LOG = logging.getLogger(__name__)
EXIT_OK, EXIT_FAULT, EXIT_FORCED = 0, 3, 130
_WATCH_S = 0.1
_AFTER_DRAIN_S = 5.0


class ApiServer(uvicorn.Server):
    """Serves an application made by :func:`~twostroke.engine.serve.app.create_app` until it is asked to stop.

    The first SIGTERM or SIGINT drains: no new requests, those in flight may end for ``drain_timeout_s``, then they
    are told why they end. The second one stops at once. ``exit_code`` is 0, 3 after a fault of the engine that
    ``exit_on_fault`` ended, 130 where it was forced. ``on_started`` is called when it listens.
    """

    def __init__(
        self, app: Starlette, config: ServeConfig, on_started: Callable[[ApiServer], object] = lambda server: None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                ws="none",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=None,
            )
        )
        self.exit_code = EXIT_OK
        self._service: Service = app.state.service
        self._limits = config
        self._on_started = on_started

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        return self.servers[0].sockets[0].getsockname()[1]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until the end; safe in a thread of its own, where no signals are heard."""
        watches = [asyncio.create_task(self._watch()), asyncio.create_task(self._close_idle())]
        try:
            await super().serve(sockets)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    def stop(self) -> None:
        """Drain, and then end; from any thread. Called again, it ends at once."""
        in_flight = {"facts": {"in_flight": self._service.calls.num_sequences}}
        _LOG.info("stopping at once" if self._service.is_draining else "draining", extra=in_flight)
        if self._service.is_draining:
            self.exit_code = self.exit_code or EXIT_FORCED
            self.force_exit = True
        self._service.is_draining = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. The third one ends the process on the spot."""
        if self.force_exit:
            os._exit(EXIT_FORCED)
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        if self.started:
            self._on_started(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain; what is left after ``drain_timeout_s`` is aborted and told so."""
        self._service.is_draining = True
        deadline = asyncio.create_task(self._end_of_drain())
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
            with suppress(asyncio.CancelledError):
                await deadline

    async def _end_of_drain(self) -> None:
        waited = 0.0
        while waited < self._limits.drain_timeout_s and not self.force_exit:
            await asyncio.sleep(_WATCH_S)
            waited += _WATCH_S
        left = self._service.calls.all()
        if left:
            _LOG.warning("%d requests were not done in time and are aborted", len(left))
        for call in left:
            for handle in call.handles:
                self._service.calls.close_soon(handle)
        waited = 0.0
        while waited < _AFTER_DRAIN_S and not self.force_exit:
            await asyncio.sleep(_WATCH_S)
            waited += _WATCH_S
        self.force_exit = True
        for connection in self.server_state.connections:  # of clients that neither read nor leave
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()

    async def _watch(self) -> None:
        """Look at the engine's health, and end the server when it is gone for good."""
        while self._service.loop.healthy or self._service.is_draining:
            await asyncio.sleep(_WATCH_S)
        _LOG.error("the engine can't go on: %s", self._service.fault())
        if self._limits.exit_on_fault:
            self.exit_code = EXIT_FAULT
            self.stop()

    async def _close_idle(self) -> None:
        """Let nobody hold connections open who asks for nothing."""
        idle = IdleConnections(self._limits.header_timeout_s)
        while True:
            await asyncio.sleep(min(max(idle.limit_s / 4, _WATCH_S), 1.0))
            if closed := idle.sweep(self.server_state.connections, asyncio.get_running_loop().time()):
                _LOG.info("closed %d connections without a request", closed)


def bound_socket(config: ServeConfig) -> socket.socket:
    """A socket for a server's ``run``; nobody is let in before that.

    Raises:
        OSError: the address is in use, or is not one of this machine's.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
    except BaseException:
        bound.close()
        raise
    return bound


class BackgroundServer:
    """A server in a thread of its own, for programs that go on meanwhile. A context manager; ``url`` says where.

    Raises:
        OSError: on entering, the address can't be used.
    """

    def __init__(self, app: Starlette, config: ServeConfig) -> None:
        self.server = ApiServer(app, config)
        self._thread = threading.Thread(target=self._run, name="twostroke-http", daemon=True)
        self._config = config

    @property
    def url(self) -> str:
        """Without a slash at the end."""
        return f"http://{self._config.host}:{self.server.port}"

    def __enter__(self) -> BackgroundServer:
        self._socket = bound_socket(self._config)
        self._thread.start()
        while not self.server.started and self._thread.is_alive():
            self._thread.join(0.005)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread.is_alive():
            self.server.stop()
        self.join()

    def _run(self) -> None:
        self.server.run([self._socket])

    def join(self) -> None:
        """Wait until the server has ended."""
        self._thread.join()


def describe(server: ApiServer, app: Starlette, config: ServeConfig) -> str:
    """One line for the terminal."""
    who = "with a key" if config.api_keys else "without a key"
    return f"serving {', '.join(app.state.service.model.names)} on http://{config.host}:{server.port} ({who})"

"""Server-sent events, and noticing that a client has left."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from attrs import frozen
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...fsm.errors import TwoStrokeError
from .calls import Call
from .errors import ApiError, ClientGone, as_api_error

_LOG = logging.getLogger(__name__)
_LAST_WORDS_S = 1.0
DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


def event(data: Mapping[str, Any]) -> bytes:
    """One event with a JSON object."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives; it is cancelled when the client closes the connection.

    Raises:
        ClientGone: it did.
    """
    job = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((job, gone), return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise ClientGone("the client left before its answer was complete")
    finally:
        for task in (job, gone):
            task.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # the rest of a body that nobody wants


@frozen(eq=False)
class Deadline:
    """When a request must be done, by the event loop's clock."""

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        return cls(asyncio.get_running_loop().time() + seconds, seconds)

    def error(self) -> ApiError:
        """What to tell the client."""
        message = f"the request was not done within {self.seconds:g} s; the server's --request-timeout sets this limit"
        return ApiError(504, message, code="timeout")

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives.

        Raises:
            ApiError: 504, it took too long and was cancelled.
        """
        try:
            async with asyncio.timeout_at(self.at):
                return await work
        except TimeoutError as error:
            raise self.error() from error


class EventStream(Response):
    """Sends events while they come; what goes wrong on the way is the last event. Closes its call at the end."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        call: Call,
        deadline: Deadline,
        headers: Mapping[str, str],
        param_names: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._call = call
        self._deadline = deadline
        self._param_names = param_names
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs to the end of the stream, or until the client leaves."""
        try:
            await until_gone(receive, self._send_all(send))
        finally:
            self._call.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._deadline.keep(self._send_events(send))
        except TwoStrokeError as error:
            failure = as_api_error(error, self._param_names)
            _LOG.warning("a stream ended early: %s", failure.message, extra={"facts": {"call": self._call.id}})
            try:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await send({"type": "http.response.body", "body": event(failure.body()), "more_body": False})
            except TimeoutError as silence:
                raise ClientGone("the client had stopped reading") from silence
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})

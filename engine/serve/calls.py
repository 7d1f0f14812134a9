"""The calls in flight: their completions as they come, how many there may be, and their end."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from typing import TypeVar

from ...fsm.errors import TwoStrokeError
from ..loop_handle import RequestHandle
from ..outputs import RequestOutput
from .errors import ApiError
from .metrics import Metrics
from .tracing import NoTracing, RequestSpan

T = TypeVar("T")
_LONGEST_RETRY_S = 60


class Call:
    """One HTTP request's prompts, each with its handle. Closing it aborts what has not finished; idempotent."""

    def __init__(
        self, call_id: str, request_id: str, handles: Sequence[RequestHandle], num_sequences: int, calls: Calls
    ) -> None:
        self.id = call_id
        self.request_id = request_id
        self.num_sequences = num_sequences
        self.created = int(time.time())
        self.handles = handles
        self.num_generated = 0
        self._calls = calls
        self.span: RequestSpan = NoTracing()
        self.tracks = [calls.metrics.track() for _ in handles]

    async def deltas(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What is new, with the index of its prompt. A reader slower than the model gets more at once.

        Raises:
            TwoStrokeError: a request failed, or the loop did.
        """
        async with aclosing(merged(self.handles)) as news:
            try:
                async for index, delta in news:
                    self.num_generated += self.tracks[index].note(delta)
                    yield index, delta
            except TwoStrokeError as error:
                self._failed(error)
                raise

    async def results(self) -> list[RequestOutput]:
        """Everything, in the order of the prompts.

        Raises:
            TwoStrokeError: a request failed, or the loop did.
        """
        try:
            results = await asyncio.gather(*(handle.wait() for handle in self.handles))
        except TwoStrokeError as error:
            self._failed(error)
            raise
        for result, track in zip(results, self.tracks, strict=True):
            self.num_generated += track.note(result)
        return results

    def _failed(self, error: TwoStrokeError) -> None:
        self._calls.metrics.failed.inc()
        self.span.failed(error)

    def close(self) -> None:
        """Abort what is left, without waiting for it, and make room for others."""
        self._calls.end(self)


class Calls:
    """Every call in flight. Its methods may be called from any thread and wait for nothing.

    Args:
        capacity: completions that may be in flight, running and waiting.
        num_running: how many of them run at once; the others wait.
        workers: where handles are closed, which may wait for the loop's lock.
    """

    def __init__(self, capacity: int, num_running: int, workers: ThreadPoolExecutor, metrics: Metrics) -> None:
        self.capacity = capacity
        self.metrics = metrics
        self._num_running = num_running
        self._workers = workers
        self._lock = threading.Lock()
        self._live: dict[str, Call] = {}
        self._num_sequences = 0
        self._mean_seconds = 1.0

    @property
    def num_sequences(self) -> int:
        """Completions that were let in and have not ended."""
        return self._num_sequences

    def reserve(self, count: int) -> None:
        """Take room for so many completions.

        Raises:
            ApiError: 429 when there is none now, 400 when there never will be.
        """
        with self._lock:
            if self._num_sequences + count <= self.capacity:
                self._num_sequences += count
                return
            waiting = max(self._num_sequences - self._num_running, 0)
        if count > self.capacity:
            message = f"n: {count} completions at once are more than this server takes ({self.capacity})"
            raise ApiError(400, message, param="n", code="invalid_value")
        self.metrics.rejected.inc()
        seconds = self._mean_seconds * (1 + waiting / self._num_running)
        retry = min(max(math.ceil(seconds), 1), _LONGEST_RETRY_S)
        message = f"{self._num_sequences} completions are in flight and {self.capacity} may be; try again in {retry} s"
        raise ApiError(429, message, code="queue_full", retry_after_s=retry)

    def give_back(self, count: int) -> None:
        """Room that was reserved and is not needed."""
        with self._lock:
            self._num_sequences -= count

    def begin(self, call: Call) -> None:
        """A call whose room was reserved."""
        with self._lock:
            self._live[call.id] = call

    def end(self, call: Call) -> None:
        """It is over; what has not finished is aborted."""
        with self._lock:
            if self._live.pop(call.id, None) is None:
                return
            self._num_sequences -= call.num_sequences
        unfinished = [handle for handle in call.handles if not handle.finished]
        if not unfinished:
            self._mean_seconds += 0.1 * (time.time() - call.created - self._mean_seconds)
        for handle in unfinished:
            self.metrics.aborted.inc()
            self.close_soon(handle)
        call.span.end(call.tracks)

    def close_soon(self, handle: RequestHandle) -> None:
        """Abort a request on another thread; here where those have ended."""
        try:
            self._workers.submit(handle.close)
        except RuntimeError:  # the server is going down
            handle.close()

    def named(self, name: str) -> list[Call]:
        """Calls whose answer or request has this id."""
        with self._lock:
            return [call for call in self._live.values() if name in (call.id, call.request_id)]

    def all(self) -> list[Call]:
        """Every one."""
        with self._lock:
            return list(self._live.values())


async def merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Deltas of several requests as they come, each with the index of its request."""
    if len(handles) == 1:
        async for delta in handles[0]:
            yield 0, delta
        return
    pending = {asyncio.ensure_future(anext(handle)): index for index, handle in enumerate(handles)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:  # this request is done; the others go on
                    continue
                pending[asyncio.ensure_future(anext(handles[index]))] = index
                yield index, delta
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def in_thread(
    pool: ThreadPoolExecutor,
    fn: Callable[[], T],
    *,
    unwanted: Callable[[T], object],
    never_ran: Callable[[], object],
) -> T:
    """What ``fn`` gives, computed on a thread of the pool.

    Once nobody waits any more, its result is handed to ``unwanted``; ``never_ran`` is called if it was not begun.
    """
    future = pool.submit(fn)

    def drop(done: Future[T]) -> None:
        if done.cancelled():
            never_ran()
        elif done.exception() is None:
            unwanted(done.result())

    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(drop)
        raise

"""The consumer's end of a request: an iterator of deltas, an async iterator, and the whole result."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

from attrs import define, evolve, field

from .outputs import CompletionOutput, FinishName, PositionLogprobs, RequestOutput


class Piece(NamedTuple):
    """What one step added to one completion."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[PositionLogprobs] = ()
    finish_reason: FinishName | None = None
    stop_reason: int | str | None = None


@define(eq=False)
class _Completion:
    """Everything of one completion, and how much of it the iterator has handed out."""

    index: int
    with_logprobs: bool
    texts: list[str] = field(factory=list)
    token_ids: list[int] = field(factory=list)
    logprobs: list[PositionLogprobs] = field(factory=list)
    finish_reason: FinishName | None = None
    stop_reason: int | str | None = None
    texts_taken: int = 0
    tokens_taken: int = 0
    has_news: bool = False

    def add(self, piece: Piece) -> None:
        text, token_ids, logprobs, finish_reason, stop_reason = piece
        if text:
            self.texts.append(text)
        self.token_ids.extend(token_ids)
        if logprobs:
            self.logprobs.extend(logprobs)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
        self.has_news = True

    def take_delta(self) -> CompletionOutput:
        delta = self.output(self.texts_taken, self.tokens_taken)
        self.texts_taken, self.tokens_taken, self.has_news = len(self.texts), len(self.token_ids), False
        return delta

    def output(self, first_text: int = 0, first_token: int = 0) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self.texts[first_text:]),
            token_ids=tuple(self.token_ids[first_token:]),
            logprobs=tuple(self.logprobs[first_token:]) if self.with_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestHandle:
    """One request in flight (all ``n`` completions of it), to be read from any thread or event loop.

    Iterating gives a :class:`RequestOutput` of what is new since the last one; a consumer slower than the model gets
    bigger deltas, not a longer queue. :meth:`result` gives the whole. Both raise the request's error, after what came
    before it. As a context manager, leaving it aborts what has not finished.
    """

    def __init__(
        self,
        blank: RequestOutput,
        child_ids: Sequence[str],
        *,
        with_logprobs: bool,
        close: Callable[[RequestHandle], None],
    ) -> None:
        self._output = blank
        self.child_ids = tuple(child_ids)
        """What the scheduler calls the completions: the request's own id, or one id for each of ``n``."""
        self._completions = [_Completion(index, with_logprobs) for index in range(len(child_ids))]
        self._close = close
        self._error: Exception | None = None
        self._has_tokens = False
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._end = threading.Condition(self._lock)  # apart, so that who waits for it sleeps through the deltas
        self._num_readers = 0  # threads that wait for news; nobody is woken where there are none
        self._waiters: list[asyncio.Future[None]] = []
        self._end_waiters: list[asyncio.Future[None]] = []  # apart, as above

    @property
    def request_id(self) -> str:
        """The id it was added under."""
        return self._output.request_id

    @property
    def finished(self) -> bool:
        """Whether nothing more will come (there may be deltas left to read)."""
        return self._output.finished

    @property
    def has_tokens(self) -> bool:
        """Whether the first token has come."""
        return self._has_tokens

    def close(self) -> None:
        """Abort the request unless it has finished; never blocks on the model."""
        self._close(self)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait until the request has finished and give all of it; may be called again, and beside iterating.

        Raises:
            TimeoutError: not finished within ``timeout`` seconds; the request goes on.
            TwoStrokeError: the request failed, or the loop did.
        """
        with self._lock:
            if not self._end.wait_for(lambda: self._output.finished, timeout):
                raise TimeoutError(f"request {self.request_id!r} did not finish within {timeout} s")
            if self._error is not None:
                raise self._error
            return evolve(self._output, outputs=tuple(completion.output() for completion in self._completions))

    async def wait(self) -> RequestOutput:
        """:meth:`result` for an event loop: nothing is done for the tokens on the way. Raises what that raises."""
        while not self._output.finished:
            with self._lock:
                if self._output.finished:
                    break
                waiter = asyncio.get_running_loop().create_future()
                self._end_waiters = [waiter, *(other for other in self._end_waiters if not other.done())]
            await waiter
        return self.result(0)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        with self._lock:
            self._num_readers += 1
            try:
                self._news.wait_for(self._has_news)
            finally:
                self._num_readers -= 1
            delta = self._take_delta()
        if delta is None:
            raise StopIteration
        return delta

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            with self._lock:
                if self._has_news():
                    delta = self._take_delta()
                    break
                waiter = asyncio.get_running_loop().create_future()
                self._waiters = [waiter, *(other for other in self._waiters if not other.done())]
            await waiter
        if delta is None:
            raise StopAsyncIteration
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # The loop's end.

    def put(self, index: int, piece: Piece) -> None:
        """Add to completion ``index``; ignored once that has finished (it was aborted meanwhile)."""
        with self._lock:
            completion = self._completions[index]
            if completion.finish_reason is not None:
                return
            completion.add(piece)
            if not self._has_tokens and piece.token_ids:
                self._has_tokens = True
                metrics = evolve(self._output.metrics, first_token_time=time.monotonic())
                self._output = evolve(self._output, metrics=metrics)
            if piece.finish_reason is not None and all(other.finish_reason for other in self._completions):
                self._finish()
            if self._num_readers or self._waiters:
                self._notify()

    def begin(self) -> None:
        """Part of it was scheduled; only the first time counts."""
        with self._lock:
            if self._output.metrics.scheduled_time is None:
                metrics = evolve(self._output.metrics, scheduled_time=time.monotonic())
                self._output = evolve(self._output, metrics=metrics)

    def describe(self, **facts: object) -> None:
        """Fill in ``prompt_logprobs`` or ``num_cached_tokens``."""
        with self._lock:
            self._output = evolve(self._output, **facts)  # pyright: ignore[reportArgumentType]

    def end(self, finish_reason: FinishName, error: Exception | None = None) -> None:
        """Finish every completion that has not; with an error, reading on raises it."""
        with self._lock:
            if self._output.finished:
                return
            for completion in self._completions:
                if completion.finish_reason is None:
                    completion.add(Piece(finish_reason=finish_reason))
            self._error = error
            self._finish()
            self._notify()

    def _finish(self) -> None:
        metrics = evolve(self._output.metrics, finished_time=time.monotonic())
        self._output = evolve(self._output, metrics=metrics, finished=True)
        self._end.notify_all()
        waiters, self._end_waiters = self._end_waiters, []
        _wake_all(waiters)

    def _has_news(self) -> bool:
        return self._output.finished or any(completion.has_news for completion in self._completions)

    def _take_delta(self) -> RequestOutput | None:
        """What is new; None at the end. The error, where there is one, comes in place of the end."""
        news = tuple(completion.take_delta() for completion in self._completions if completion.has_news)
        if news:
            return evolve(self._output, outputs=news)
        if self._error is not None:
            raise self._error
        return None

    def _notify(self) -> None:
        self._news.notify_all()
        waiters, self._waiters = self._waiters, []
        _wake_all(waiters)


def _wake_all(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        try:
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)
        except RuntimeError:  # its event loop was closed: nobody waits any more
            continue


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

"""The requests in flight: who gets what a step brought."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import define

from ..stages.errors import RequestFailed
from ..stages.io import LogprobsLists, NewRequestData
from .loop_grammar import GrammarProvider
from .loop_handle import Piece, RequestHandle
from .loop_text import OutputText
from .outputs import FinishName, Logprob, PositionLogprobs
from .scheduler_records import FinishReason, RequestRefused, RequestUpdate


@define(eq=False)
class _Completion:
    """One of the ``n`` completions of a request, as the scheduler knows it."""

    handle: RequestHandle
    index: int
    text: OutputText
    is_new: bool = True


class LiveRequests:
    """Requests by their id and completions by theirs, both only while they live. The serving loop's lock guards it.

    ``grammar`` hears of every token and every end.
    """

    def __init__(self, grammar: GrammarProvider) -> None:
        self._grammar = grammar
        self._handles: dict[str, RequestHandle] = {}
        self._completions: dict[str, _Completion] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, req_id: str) -> bool:
        """Whether a request or a completion goes by this id."""
        return req_id in self._handles or req_id in self._completions

    def require_free(self, request_id: str, *child_ids: str) -> None:
        """Raises RequestRefused where a live request or completion goes by one of these ids."""
        for req_id in (request_id, *child_ids):
            if req_id in self:
                raise RequestRefused(request_id, f"the id {req_id!r} is in use by a live request; choose another")

    def get(self, request_id: str) -> RequestHandle | None:
        """The live request of that id."""
        return self._handles.get(request_id)

    def begin(self, scheduled: Iterable[NewRequestData]) -> None:
        """These completions are in the next step; some may not be new."""
        for data in scheduled:
            if (completion := self._completions.get(data.req_id)) is not None:
                completion.handle.begin()

    def add(self, handle: RequestHandle, texts: Sequence[OutputText]) -> None:
        """Take in a request, with the text of each completion."""
        self._handles[handle.request_id] = handle
        for index, (child_id, text) in enumerate(zip(handle.child_ids, texts, strict=True)):
            self._completions[child_id] = _Completion(handle, index, text)

    def end(self, handle: RequestHandle, finish_reason: FinishName, error: Exception | None = None) -> tuple[str, ...]:
        """Finish a request before its time. Returns the ids for the scheduler to drop; none if it is not live."""
        if self._handles.get(handle.request_id) is not handle:
            return ()
        del self._handles[handle.request_id]
        ended = tuple(child_id for child_id in handle.child_ids if self._is_of(child_id, handle))
        for child_id in ended:
            self._forget(child_id)
        handle.end(finish_reason, error)
        return ended

    def handles(self) -> tuple[RequestHandle, ...]:
        """Every live request."""
        return tuple(self._handles.values())

    def deliver(self, update: RequestUpdate) -> Sequence[str]:
        """Hand one update to its request.

        Returns ids for the scheduler to drop: of what a stop string ended, or of the siblings of what failed.
        """
        completion = self._completions.get(update.req_id)
        if completion is None:
            return ()
        if update.error is not None:
            return self.end(completion.handle, "error", update.error)
        try:
            self._grammar.accept(update.req_id, update.new_token_ids)
        except Exception as error:
            failure = RequestFailed(update.req_id, f"its grammar failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return self.end(completion.handle, "error", failure)
        piece = _piece(update, completion.text)
        if completion.is_new:
            completion.is_new = False
            if completion.index == 0:
                self._describe(update, completion.handle)
        if piece.finish_reason is None:
            completion.handle.put(completion.index, piece)
            return ()
        self._remove(update.req_id, completion.handle)
        completion.handle.put(completion.index, piece)
        return (update.req_id,) if update.finish_reason is None else ()

    def _remove(self, child_id: str, handle: RequestHandle) -> None:
        """Before the consumer can see the end, so that it may use the id again at once."""
        self._forget(child_id)
        if not any(self._is_of(sibling, handle) for sibling in handle.child_ids):
            del self._handles[handle.request_id]

    def _forget(self, child_id: str) -> None:
        del self._completions[child_id]
        self._grammar.release(child_id)

    def _is_of(self, child_id: str, handle: RequestHandle) -> bool:
        """Whether a completion lives; one that has finished may have left its id to another request."""
        completion = self._completions.get(child_id)
        return completion is not None and completion.handle is handle

    def _describe(self, update: RequestUpdate, handle: RequestHandle) -> None:
        if update.num_cached_tokens:
            handle.describe(num_cached_tokens=update.num_cached_tokens)
        if update.prompt_logprobs is not None:
            handle.describe(prompt_logprobs=(None, *position_logprobs(update.prompt_logprobs)))


def position_logprobs(table: LogprobsLists) -> list[PositionLogprobs]:
    """The candidates of each position by token id, the chosen one first."""
    rows = zip(
        table.logprob_token_ids.tolist(), table.logprobs.tolist(), table.sampled_token_ranks.tolist(), strict=True
    )
    return [
        {
            token: Logprob(logprob, column or chosen_rank)
            for column, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
            if token >= 0
        }
        for token_ids, logprobs, chosen_rank in rows
    ]


def _piece(update: RequestUpdate, text: OutputText) -> Piece:
    token_ids, reason = update.new_token_ids, update.finish_reason
    if reason is None:
        shown, count = text.extend(token_ids)
    else:
        shown, count = text.extend(token_ids, ends_with_stop_token=reason is FinishReason.STOP, is_last=True)
    logprobs = position_logprobs(update.logprobs) if update.logprobs is not None else ()
    if text.matched is not None:
        return Piece(shown, token_ids[:count], logprobs[:count], "stop", text.matched)
    return Piece(shown, token_ids, logprobs, None if reason is None else reason.value, update.stop_reason)

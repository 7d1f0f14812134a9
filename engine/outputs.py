"""What a user of the serving loop gets: frozen, torch-free records with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from attrs import field, frozen

FinishName = Literal["stop", "length", "abort", "error"]
"""Why a completion ended: end of sequence or a stop token or string, a length limit, an abort, an error."""


class Logprob(NamedTuple):
    """One candidate for a token: its natural-log probability and its rank (1 is the most likely)."""

    logprob: float
    rank: int


PositionLogprobs = Mapping[int, Logprob]
"""Candidates for one position by token id; the chosen token is always among them."""


@frozen(kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds of :func:`time.monotonic`; None until they do."""

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that has part of it."""
        return None if self.scheduled_time is None else self.scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@frozen(kw_only=True)
class CompletionOutput:
    """One completion, or what is new of it. ``index`` counts from 0 to ``n - 1``.

    ``stop_reason`` is the stop string or the stop token id that ended it, None for an end-of-sequence token.
    ``token_ids`` includes the tokens that ``text`` leaves out (end of sequence, the stop string).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: FinishName | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@frozen(kw_only=True)
class RequestOutput:
    """A whole result, or a delta of a stream: then ``outputs`` holds what is new, of those completions that have news.

    ``prompt`` is None where the prompt was given as token ids. ``prompt_logprobs`` has an entry for each prompt token
    (None for the first). ``num_cached_tokens`` prompt tokens came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = field(default=None, repr=False)
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first completion here: all there is to read when ``n`` is 1."""
        return self.outputs[0].text if self.outputs else ""

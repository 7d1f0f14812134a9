"""Errors that name a request or a field of the input; each says what was expected and what to do."""

from __future__ import annotations

from ..fsm.errors import InputRefused, TwoStrokeError


class InvalidSchedulerOutput(InputRefused):
    """A scheduler output that contradicts itself or what the runner knows. Nothing was changed."""

    def __init__(self, reason: str, *, req_id: str | None = None) -> None:
        self.req_id = req_id
        self.reason = reason
        super().__init__(f"request {req_id!r}: {reason}" if req_id is not None else reason)


class InvalidGrammarOutput(InputRefused):
    """A grammar bitmask that does not fit the batch or the vocabulary. The step can be sampled again."""


class InvalidSamplingParams(TwoStrokeError, ValueError):
    """A sampling parameter outside its domain; ``parameter`` names it."""

    def __init__(self, parameter: str, reason: str) -> None:
        self.parameter = parameter
        super().__init__(f"{parameter}: {reason}")


class RequestFailed(TwoStrokeError):
    """One request cannot go on (its logits are not numbers, its mask allows nothing); its neighbours are unaffected."""

    def __init__(self, req_id: str, reason: str) -> None:
        self.req_id = req_id
        self.reason = reason
        super().__init__(f"request {req_id!r}: {reason}")


class NothingToSample(RequestFailed):
    """A request's own parameters forbid every token."""

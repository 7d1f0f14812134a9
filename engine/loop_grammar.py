"""Constrained requests in the serving loop: who says which tokens may come next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ..fsm import TwoStrokeError
from ..stages.io import GrammarOutput, SchedulerOutput


class GrammarFailed(TwoStrokeError, RuntimeError):
    """A grammar provider raised instead of giving masks; its exception is the ``__cause__``."""


class GrammarProvider(Protocol):
    """Keeps the grammar state of requests, by the ids that the scheduler uses (``"id#0"`` … where ``n`` is above 1).

    The loop makes one call at a time and holds its lock meanwhile. Requests are registered with the provider before
    they are added to the loop. What ``grammar_output`` or ``accept`` raises fails the requests that it was about.
    """

    def constrained(self, scheduled: SchedulerOutput) -> Collection[str]:
        """The requests of a step that have a grammar."""
        ...

    def grammar_output(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
        """The masks of a step whose forward pass was launched, or None for no masks.

        Every token of its constrained requests was accepted before. A request may have ended meanwhile: its mask is
        not looked at. May be asked again for the same step, or for a part of it, when sampling failed.
        """
        ...

    def accept(self, req_id: str, token_ids: Sequence[int]) -> None:
        """Tokens that a request got, in order; called for requests without a grammar too."""
        ...

    def release(self, req_id: str) -> None:
        """A request has ended; its id may be used again at once."""
        ...


class NoGrammar:
    """For a loop without constrained requests."""

    def constrained(self, scheduled: SchedulerOutput) -> Collection[str]:
        """None of them."""
        return ()

    def grammar_output(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
        """No masks."""
        return None

    def accept(self, req_id: str, token_ids: Sequence[int]) -> None:
        """Nothing to keep."""

    def release(self, req_id: str) -> None:
        """Nothing to forget."""

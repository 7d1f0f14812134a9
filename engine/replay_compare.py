"""Two runs of the same steps, compared token by token. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field, frozen

from .recording_reader import Logprobs, RecordedOutput, Recording

Lead = Callable[[str, int, int, int], float | None]
"""``lead(req_id, position, ours, theirs)``: by how much our token beat theirs, in units of logits; None if unknown."""


@frozen(kw_only=True)
class Tolerance:
    """What counts as equal: log probabilities and logits within ``logprobs``, tokens that lead by less than ``tie``."""

    logprobs: float = 1e-3
    tie: float = 0.01


@frozen(kw_only=True)
class Difference:
    """The first or a later place where two runs differ. ``position`` counts in the request's tokens, prompt included.

    ``lead`` is by how much the token that was drawn beat the recorded one, where that is known.
    """

    step: int
    req_id: str
    position: int
    what: str
    recorded: object
    got: object
    lead: float | None = None
    is_near_tie: bool = False

    def __str__(self) -> str:
        """One line."""
        lead = "" if self.lead is None else f" (lead {self.lead:.4f}{', a near tie' if self.is_near_tie else ''})"
        where = f"step {self.step}, request {self.req_id!r}, position {self.position}"
        return f"{where}: {self.what} {self.got} instead of {self.recorded}{lead}"


@define(eq=False)
class Comparison:
    """Collects what differs. Near ties are differences that rounding explains; they are listed apart."""

    tolerance: Tolerance
    differences: list[Difference] = field(factory=list)
    near_ties: list[Difference] = field(factory=list)
    num_tokens: int = 0
    num_logprobs: int = 0

    @property
    def first(self) -> Difference | None:
        """The first difference that is no near tie."""
        return self.differences[0] if self.differences else None

    def add(self, difference: Difference) -> None:
        """File a difference."""
        (self.near_ties if difference.is_near_tie else self.differences).append(difference)

    def outputs(
        self, step: int, ends: Mapping[str, int], recorded: RecordedOutput, got: RecordedOutput, lead: Lead
    ) -> set[str]:
        """Compare what one step gave; returns the requests whose tokens differ.

        Where tokens are redacted, only how many there are is compared.
        """
        differing: set[str] = set()
        hidden = recorded.is_redacted or got.is_redacted
        for req_id, theirs in recorded.tokens.items():
            ours, position = got.tokens.get(req_id, ()), ends[req_id]
            self.num_tokens += len(theirs)
            if len(ours) != len(theirs) or (not hidden and list(ours) != list(theirs)):
                differing.add(req_id)
                self._tokens(Place(step, req_id, position), theirs, ours, recorded, got, lead)
            elif not hidden and req_id in recorded.logprobs and req_id in got.logprobs:
                self._logprobs(Place(step, req_id, position), recorded.logprobs[req_id], got.logprobs[req_id])
        for req_id, table in recorded.prompt_logprobs.items():
            if not hidden and req_id in got.prompt_logprobs:
                self._logprobs(Place(step, req_id, 1), table, got.prompt_logprobs[req_id])
        return differing

    def _tokens(
        self,
        place: Place,
        theirs: Sequence[int],
        ours: Sequence[int],
        recorded: RecordedOutput,
        got: RecordedOutput,
        lead: Lead,
    ) -> None:
        req_id = place.req_id
        theirs_shown = list(theirs) or recorded.errors.get(req_id, "no token")
        ours_shown = list(ours) or got.errors.get(req_id, "no token")
        ahead = lead(req_id, place.position, ours[0], theirs[0]) if len(ours) == len(theirs) == 1 else None
        if len(ours) == len(theirs) == 1:
            theirs_shown, ours_shown = theirs[0], ours[0]
        self.add(
            Difference(
                step=place.step,
                req_id=req_id,
                position=place.position,
                what="token",
                recorded=theirs_shown,
                got=ours_shown,
                lead=ahead,
                is_near_tie=ahead is not None and abs(ahead) < self.tolerance.tie,
            )
        )

    def _logprobs(self, place: Place, recorded: Logprobs, got: Logprobs) -> None:
        """Values by rank, so that neighbours which swap places within the tolerance are equal."""
        for offset, (theirs, ours) in enumerate(itertools.zip_longest(recorded[1], got[1], fillvalue=())):
            self.num_logprobs += len(theirs)
            far = _distance(theirs, ours)
            if not far <= self.tolerance.logprobs:
                self.add(
                    Difference(
                        step=place.step,
                        req_id=place.req_id,
                        position=place.position + offset,
                        what="log probabilities",
                        recorded=list(theirs),
                        got=list(ours),
                    )
                )
                return


@frozen
class Place:
    """A position of a request, and the step that gave it."""

    step: int
    req_id: str
    position: int


def _distance(theirs: Sequence[float | None], ours: Sequence[float | None]) -> float:
    """The largest difference of two rows; None stands for minus infinity, which is far from all but itself."""
    if len(theirs) != len(ours):
        return math.inf
    pairs = ((own, other) for own, other in zip(theirs, ours, strict=True) if own != other)
    return max((math.inf if own is None or other is None else abs(own - other) for own, other in pairs), default=0.0)


def compare_recordings(recording: Recording, other: Recording, tolerance: Tolerance) -> Comparison:
    """What differs between two recordings, by request and position: their schedules need not be alike."""
    comparison = Comparison(tolerance)
    theirs = {
        (req_id, step.ends[req_id]): (step.output, req_id)
        for step in other.steps
        if step.output is not None
        for req_id, tokens in step.output.tokens.items()
        if tokens or req_id in step.output.errors
    }
    for step in recording.steps:
        if step.output is None:
            continue
        for req_id, tokens in step.output.tokens.items():
            end = step.ends[req_id]
            if not tokens and req_id not in step.output.errors:
                continue
            found = theirs.get((req_id, end))
            if found is None:
                comparison.add(
                    Difference(
                        step=step.number,
                        req_id=req_id,
                        position=end,
                        what="token",
                        recorded=tokens[0] if len(tokens) == 1 else list(tokens),
                        got="none",
                    )
                )
                continue
            own = _only(step.output, req_id)
            comparison.outputs(step.number, {req_id: end}, own, _only(found[0], req_id), _lead_of(own, found[0]))
    return comparison


def _only(output: RecordedOutput, req_id: str) -> RecordedOutput:
    def pick(values: Mapping[str, Logprobs]) -> dict[str, Logprobs]:
        return {req_id: values[req_id]} if req_id in values else {}

    return RecordedOutput(
        tokens={req_id: output.tokens[req_id]},
        logprobs=pick(output.logprobs),
        prompt_logprobs=pick(output.prompt_logprobs),
        errors=output.errors,
        is_redacted=output.is_redacted,
    )


def _lead_of(recorded: RecordedOutput, got: RecordedOutput) -> Lead:
    """From the other run's log probabilities, where both tokens are among them."""

    def lead(req_id: str, position: int, ours: int, theirs: int) -> float | None:
        if req_id not in got.logprobs:
            return None
        ids, values, _ = got.logprobs[req_id]
        by_token = dict(zip(ids[0], values[0], strict=True))
        own, other = by_token.get(ours), by_token.get(theirs)
        return None if own is None or other is None else own - other

    return lead

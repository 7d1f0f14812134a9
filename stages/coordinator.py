"""What data-parallel ranks agree on before a step runs: one size, one mode, micro-batches or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from .records import CUDAGraphMode


@frozen(kw_only=True)
class DispatchVote:
    """What one rank would do alone.

    ``num_scheduled_tokens`` counts the tokens of its requests (0 on an idle rank), ``num_tokens`` the same padded to
    the graph it would use. ``should_ubatch`` and ``mode`` are upper bounds: the rank can follow anything lower.
    """

    num_scheduled_tokens: int
    num_tokens: int
    should_ubatch: bool
    mode: CUDAGraphMode


@frozen(kw_only=True)
class DispatchAgreement:
    """What all ranks do; equal on every rank.

    ``num_tokens`` is the largest padded size, ``mode`` the lowest mode, ``should_ubatch`` whether all ranks want it.
    ``num_tokens_across_dp[rank]`` are the scheduled tokens of each rank; all zero means that nobody has work.
    """

    num_tokens: int
    should_ubatch: bool
    mode: CUDAGraphMode
    num_tokens_across_dp: tuple[int, ...]


def combine_votes(votes: Sequence[DispatchVote]) -> DispatchAgreement:
    """The agreement that follows from one vote of each rank, in rank order. Pure, so every rank reaches the same."""
    return DispatchAgreement(
        num_tokens=max(vote.num_tokens for vote in votes),
        should_ubatch=all(vote.should_ubatch for vote in votes),
        mode=min((vote.mode for vote in votes), key=lambda mode: mode.value),
        num_tokens_across_dp=tuple(vote.num_scheduled_tokens for vote in votes),
    )


class DataParallelCoordinator(Protocol):
    """Lets the ranks of a data-parallel group agree. A collective: every rank calls it exactly once a step."""

    def agree(self, vote: DispatchVote) -> DispatchAgreement:
        """Give this rank's vote, wait for the others, return what :func:`combine_votes` makes of them."""
        ...


class SoloCoordinator:
    """The only rank: its vote is the agreement."""

    def __init__(self) -> None:
        self._latest: tuple[DispatchVote, DispatchAgreement] | None = None

    def agree(self, vote: DispatchVote) -> DispatchAgreement:
        """The vote itself."""
        latest = self._latest
        if latest is None or latest[0] is not vote:  # most steps vote as the one before
            latest = self._latest = vote, combine_votes((vote,))
        return latest[1]

"""What the scheduler is told and what it tells: configuration, refusals, updates of requests, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from attrs import frozen

from ..fsm.errors import TwoStrokeError
from ..stages.io import LogprobsLists


class InvalidSchedulerConfig(TwoStrokeError, ValueError):
    """A scheduler setting that cannot work; ``setting`` names it and the message says what would."""

    def __init__(self, setting: str, reason: str) -> None:
        self.setting = setting
        super().__init__(f"{setting}: {reason}")


class RequestRefused(TwoStrokeError, ValueError):
    """A request that the scheduler could never serve. Nothing was added; the message says why and what to change."""

    def __init__(self, req_id: str, reason: str) -> None:
        self.req_id = req_id
        self.reason = reason
        super().__init__(f"request {req_id!r}: {reason}")


class RunnerOutputMismatch(TwoStrokeError, ValueError):
    """A model runner output that leaves out a request of its step. Nothing was changed."""

    def __init__(self, req_ids: tuple[str, ...]) -> None:
        self.req_ids = req_ids
        super().__init__(
            f"the runner's output does not list scheduled request {req_ids[0]!r} (of {len(req_ids)} missing); "
            "req_id_to_index must hold every request of the step: update with this step's own output, or roll it back"
        )


@frozen(kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Args:
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: token budget of one step.
        max_model_len: tokens of one request, prompt and output.
        num_kv_blocks: blocks of the pool, the null block (id 0, never handed out) included.
        block_sizes: tokens a block, one entry for each KV-cache group; all groups draw from the one pool.
        enable_prefix_caching: whether requests share the blocks of equal prefixes.
        long_prefill_token_threshold: longest prompt chunk of one request in one step, so that a long prompt leaves
            room for others; 0 is off.

    Raises:
        InvalidSchedulerConfig: a limit that is not a positive integer, or contradicts another one.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_kv_blocks: int
    block_sizes: tuple[int, ...]
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.block_sizes, tuple | list) or not self.block_sizes:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidSchedulerConfig(
                "block_sizes", f"must list the block size of each KV-cache group, got {self.block_sizes!r}"
            )
        for size in self.block_sizes:
            _check_at_least("block_sizes", size, 1)
        _check_at_least("max_num_seqs", self.max_num_seqs, 1)
        _check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_at_least("max_model_len", self.max_model_len, 2, "one prompt token and one output")
        _check_at_least(
            "num_kv_blocks",
            self.num_kv_blocks,
            1 + len(self.block_sizes),
            "the null block and one block for each group",
        )
        _check_at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, "0 is off")
        if self.long_prefill_token_threshold > self.max_num_batched_tokens:
            raise InvalidSchedulerConfig(
                "long_prefill_token_threshold",
                f"{self.long_prefill_token_threshold} is above max_num_batched_tokens {self.max_num_batched_tokens}, "
                "so it would never apply; lower it, or use 0 for off",
            )

    @property
    def max_chunk(self) -> int:
        """The most tokens that one request gets in one step."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens


def _check_at_least(setting: str, value: int, least: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSchedulerConfig(setting, f"must be an integer, got {value!r}")
    if value < least:
        raise InvalidSchedulerConfig(setting, f"must be at least {least}{f' ({why})' if why else ''}, got {value}")


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestUpdate(NamedTuple):
    """What one step brought to one request. (A named tuple: one is made a request and step, and it is made fastest.)

    ``stop_reason`` is the token of ``stop_token_ids`` that ended it (None for end of sequence). ``num_cached_tokens``
    counts prompt tokens that came from the prefix cache when the request was first scheduled. ``error`` goes with
    ``FinishReason.ERROR``. ``logprobs`` has one position for each of ``new_token_ids``.
    """

    req_id: str
    new_token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: LogprobsLists | None = None
    prompt_logprobs: LogprobsLists | None = None
    error: Exception | None = None
    num_cached_tokens: int = 0


def first_positions(logprobs: LogprobsLists, count: int) -> LogprobsLists:
    """The first ``count`` positions: without those of tokens that were dropped after the one that ended a request."""
    if len(logprobs.logprobs) <= count:
        return logprobs
    return LogprobsLists(
        logprobs.logprob_token_ids[:count], logprobs.logprobs[:count], logprobs.sampled_token_ranks[:count]
    )


@frozen(kw_only=True)
class SchedulerStats:
    """A moment's figures. ``kv_cache_usage`` is 0 to 1; prefix cache queries and hits count tokens since the start."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int

"""One request as the scheduler keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from attrs import define, field

from ..stages.sampling_params import SamplingParams
from .scheduler_records import FinishReason


class RequestStatus(Enum):
    """Where a request is: in the waiting queue, in the running list, or in neither for good."""

    WAITING = 1
    RUNNING = 2
    FINISHED = 3


@define(eq=False, kw_only=True)
class Request:
    """A live request: its tokens, its blocks, and how far it is.

    ``num_computed_tokens`` runs ahead when a step is scheduled; ``num_written_tokens`` follows when that step is
    settled. The two differ exactly while a step with this request is in flight. ``token_ids`` are the tokens whose
    values are known here; ``num_tokens`` counts those too that steps in flight will sample, whose values only the
    runner has. ``num_slots`` is how many tokens the blocks of its table have room for; ``block_ids`` has one list a
    KV-cache group, ``block_hashes`` the chained hashes of its full blocks as far as they were needed.
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    max_total_tokens: int
    cache_salt: str = ""

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_written_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int | None = None

    block_ids: tuple[list[int], ...] = ()
    num_slots: int = 0
    block_hashes: tuple[list[bytes], ...] = ()

    eos_token_ids: frozenset[int] = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        params = self.sampling_params
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.prompt_token_ids)
        self.eos_token_ids = frozenset(() if params.ignore_eos else params.eos_token_ids)
        self.end_token_ids = self.eos_token_ids | frozenset(params.stop_token_ids)

    @property
    def is_in_flight(self) -> bool:
        """Whether a step that was not settled yet computes some of its tokens."""
        return self.num_computed_tokens > self.num_written_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may skip cached tokens: the log probabilities of a prompt need every position computed."""
        return self.sampling_params.prompt_logprobs is None

    def append_until_end(self, sampled: Sequence[int]) -> tuple[Sequence[int], FinishReason | None, int | None]:
        """Append sampled tokens up to the first that ends the request.

        Returns the tokens that were kept, and the finish and stop reason. A token that ends it is kept.
        """
        token_ids = self.token_ids
        token_ids.extend(sampled)
        if len(token_ids) < self.max_total_tokens and self.end_token_ids.isdisjoint(sampled):
            return sampled, None, None
        del token_ids[len(token_ids) - len(sampled) :]
        first_stop = self.num_prompt_tokens + self.sampling_params.min_tokens
        for count, token in enumerate(sampled, 1):
            token_ids.append(token)
            length = len(token_ids)
            if token in self.end_token_ids and length >= first_stop:
                return sampled[:count], FinishReason.STOP, None if token in self.eos_token_ids else token
            if length >= self.max_total_tokens:
                return sampled[:count], FinishReason.LENGTH, None
        return sampled, None, None

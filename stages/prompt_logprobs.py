"""Log probabilities of a prompt, collected position by position until the table is whole."""

from __future__ import annotations

import numpy as np
from attrs import define, field

from .io import LogprobsLists
from .sampling_params import ALL_LOGPROBS, SamplingParams


@define(eq=False)
class PromptLogprobs:
    """Rows for prompt positions ``1 … prompt_len - 1`` (row ``i`` scores position ``i + 1``).

    Each has ``width`` = 1 + k columns.

    Writes are absolute, so a chunk that is computed again (a retry, a resumption) changes nothing. ``num_done`` counts
    leading positions that were computed; the table is delivered once, when all are.
    """

    num_positions: int
    width: int
    num_done: int = 0
    is_delivered: bool = False
    _token_ids: np.ndarray = field(init=False)
    _logprobs: np.ndarray = field(init=False)
    _ranks: np.ndarray = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._token_ids = np.full((self.num_positions, self.width), -1, dtype=np.int64)
        self._logprobs = np.full((self.num_positions, self.width), -np.inf, dtype=np.float32)
        self._ranks = np.zeros(self.num_positions, dtype=np.int64)

    @classmethod
    def wanted_by(cls, params: SamplingParams, prompt_len: int, vocab_size: int) -> PromptLogprobs | None:
        """An empty table for a request's prompt; None if it wants none."""
        count = params.prompt_logprobs
        if count is None:
            return None
        return cls(prompt_len - 1, 1 + (vocab_size if count == ALL_LOGPROBS else count))

    @property
    def num_left(self) -> int:
        """Positions still to be scored."""
        return self.num_positions - self.num_done

    def write(self, position: int, rows: LogprobsLists) -> None:
        """Fill rows from ``position`` on with log probabilities of ``width`` columns."""
        part = slice(position, position + len(rows.sampled_token_ranks))
        self._token_ids[part] = rows.logprob_token_ids
        self._logprobs[part] = rows.logprobs
        self._ranks[part] = rows.sampled_token_ranks

    def advance(self, stop: int) -> None:
        """Positions before ``stop`` are computed; their rows arrive with the step's output, in order."""
        self.num_done = max(self.num_done, stop)

    def restore(self, num_done: int, is_delivered: bool) -> None:
        """Go back to an earlier progress (undoes ``advance`` and delivery)."""
        self.num_done, self.is_delivered = num_done, is_delivered

    def table(self) -> LogprobsLists:
        """The whole table, copied."""
        return LogprobsLists(self._token_ids.copy(), self._logprobs.copy(), self._ranks.copy())

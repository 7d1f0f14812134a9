"""Sampling parameters by row of the request table."""

from __future__ import annotations

from enum import IntFlag
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from attrs import frozen

from ..sampling_params import ALL_LOGPROBS, SamplingParams


class SampledRequest(Protocol):
    """What sampling needs of a request; ``sampling_params`` were checked for the vocabulary, ``seed`` fits 64 bits."""

    @property
    def sampling_params(self) -> SamplingParams:
        """How the request is sampled."""
        ...

    @property
    def seed(self) -> int:
        """Decides every draw of the request."""
        ...


class Feature(IntFlag):
    """What a row uses. A step does the work of the features that any of its rows has, and no other."""

    RANDOM = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    ALLOWED_TOKENS = 16
    BAD_WORDS = 32
    MIN_TOKENS = 64
    LOGIT_BIAS = 128
    PENALTIES = 256
    LOGPROBS = 512


LOGIT_EDITS = Feature.ALLOWED_TOKENS | Feature.BAD_WORDS | Feature.MIN_TOKENS | Feature.LOGIT_BIAS | Feature.PENALTIES
"""Features that change logits; a step with none of them (and no grammar) reads the logits where they are."""

ROW_DTYPE = np.dtype(
    [
        ("flags", np.int64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("min_tokens", np.int64),
        ("num_logprobs", np.int64),
        ("num_prompt_logprobs", np.int64),
        ("seed", np.uint64),
    ]
)
DEFAULT_ROW = np.array((0, 1, 0, 0, 1, 1, 0, 0, 0, -1, -1, 0), ROW_DTYPE)
"""What an unused row holds: greedy, everything off. The counts of log probabilities say -1 for none."""

_FLOAT_LIMIT = float(np.finfo(np.float32).max)
_SMALLEST_REPETITION = float(np.finfo(np.float32).tiny)


@frozen(eq=False)
class TokenLists:
    """The lists of one row, int64 tensors, empty where unused.

    ``bad_words`` is ``[num_words, longest]``, filled up with -1 on the left; ``end_ids`` are masked until
    ``min_tokens``; ``bias_ids`` and ``biases`` (float32) run parallel.
    """

    allowed_ids: torch.Tensor
    bad_words: torch.Tensor
    end_ids: torch.Tensor
    bias_ids: torch.Tensor
    biases: torch.Tensor


class SamplingColumns:
    """A column of the request table: what the sample stage needs to know of each row.

    ``rows`` is a structured array ``[num_rows]`` of :data:`ROW_DTYPE`, so that a step gathers every parameter of its
    requests at once and a row is reset by one assignment. ``lists`` maps the few rows that have token lists to them.
    ``version`` grows with every change.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows: npt.NDArray[np.void] = np.full(num_rows, DEFAULT_ROW)
        self.lists: dict[int, TokenLists] = {}
        self.version = 0

    def add(self, row: int, request: SampledRequest) -> None:
        """Take in the parameters of the request that was given ``row``."""
        self.drop(row)
        params = request.sampling_params
        lists = self._lists_of(params)
        flags = _flags_of(params, lists)
        self.rows[row] = (
            int(flags),
            params.temperature if flags & Feature.RANDOM else 1.0,
            params.min_p,
            min(max(params.top_k, 0), self.vocab_size),
            params.top_p,
            max(params.repetition_penalty, _SMALLEST_REPETITION),
            params.frequency_penalty,
            params.presence_penalty,
            params.min_tokens,
            self._count(params.logprobs),
            self._count(params.prompt_logprobs),
            request.seed % 2**64,
        )
        if flags & (Feature.ALLOWED_TOKENS | Feature.BAD_WORDS | Feature.MIN_TOKENS | Feature.LOGIT_BIAS):
            self.lists[row] = lists

    def drop(self, row: int) -> None:
        """Set the row back to :data:`DEFAULT_ROW`, without lists."""
        self.version += 1
        self.rows[row] = DEFAULT_ROW
        self.lists.pop(row, None)

    def flush(self) -> None:
        """Nothing is staged: a step copies the parameters of its own rows to the device."""

    def is_default(self, row: int) -> bool:
        """Whether nothing of any request is left in the row."""
        return bool(self.rows[row] == DEFAULT_ROW) and row not in self.lists

    def _count(self, asked: int | None) -> int:
        if asked is None:
            return -1
        return self.vocab_size if asked == ALL_LOGPROBS else min(asked, self.vocab_size)

    def _lists_of(self, params: SamplingParams) -> TokenLists:
        bias = params.logit_bias or {}
        # What overflows float32 must not turn into an infinity; -inf itself forbids the token.
        biases = [
            value if value == -np.inf else min(max(value, -_FLOAT_LIMIT), _FLOAT_LIMIT) for value in bias.values()
        ]
        width = max((len(word) for word in params.bad_words_token_ids), default=1)
        words = [[-1] * (width - len(word)) + list(word) for word in params.bad_words_token_ids]
        # An end id beyond the vocabulary (a tokenizer may know more ids than the model) can't be sampled anyway.
        end_ids = [token for token in params.end_token_ids if 0 <= token < self.vocab_size] if params.min_tokens else []
        return TokenLists(
            allowed_ids=torch.tensor(params.allowed_token_ids or (), dtype=torch.int64),
            bad_words=torch.tensor(words, dtype=torch.int64).view(len(words), width),
            end_ids=torch.tensor(end_ids, dtype=torch.int64),
            bias_ids=torch.tensor(tuple(bias), dtype=torch.int64),
            biases=torch.tensor(biases, dtype=torch.float32),
        )


def pad_words(words: torch.Tensor, width: int) -> torch.Tensor:
    """Words ``[num_words, w]`` filled up on the left with -1 to ``[num_words, width]``."""
    return F.pad(words, (width - words.shape[1], 0), value=-1)


def _flags_of(params: SamplingParams, lists: TokenLists) -> Feature:
    is_random = not params.is_greedy
    used = {
        Feature.RANDOM: is_random,
        Feature.MIN_P: is_random and params.min_p > 0,
        Feature.TOP_K: is_random and params.top_k > 0,
        Feature.TOP_P: is_random and params.top_p < 1,
        Feature.ALLOWED_TOKENS: params.allowed_token_ids is not None,
        Feature.BAD_WORDS: len(lists.bad_words) > 0,
        Feature.MIN_TOKENS: len(lists.end_ids) > 0,
        Feature.LOGIT_BIAS: len(lists.bias_ids) > 0,
        Feature.PENALTIES: params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0,
        Feature.LOGPROBS: params.logprobs is not None,
    }
    flags = Feature(0)
    for feature, is_used in used.items():
        if is_used:
            flags |= feature
    return flags

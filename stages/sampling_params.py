"""How one request is sampled: torch-free, frozen, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from .errors import InvalidSamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""

ALL_LOGPROBS = -1
"""``logprobs`` / ``prompt_logprobs`` of -1 asks for the whole vocabulary."""


def _ids(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


@frozen(kw_only=True)
class SamplingParams:
    """Sampling parameters with vLLM's names and meanings.

    ``top_k`` 0 or -1 is off; ``logprobs`` None is off, 0 gives the chosen token's alone, -1 the whole vocabulary.
    Repetition penalty counts prompt and output, presence and frequency penalties the output only. ``eos_token_ids`` are
    the model's end-of-sequence ids, filled in by the engine: they end a request unless ``ignore_eos``, and are masked
    (like ``stop_token_ids``) until ``min_tokens`` were generated. ``bad_words`` are strings for the engine to tokenize;
    the runner reads ``bad_words_token_ids``. ``stop`` strings are for the loop. ``extra`` is for plug-in stages.

    Raises:
        InvalidSamplingParams: a value outside its domain.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=tuple)
    eos_token_ids: tuple[int, ...] = field(default=(), converter=tuple)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_ids)
    bad_words: tuple[str, ...] = field(default=(), converter=_strings)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(
        default=(), converter=lambda words: tuple(tuple(word) for word in words)
    )
    extra: Mapping[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidSamplingParams(name, f"must be a number, got {value!r}")
            if not low <= value <= high:
                raise InvalidSamplingParams(name, f"must be between {low} and {high}, got {value}")
        if not self.top_p > 0:
            raise InvalidSamplingParams("top_p", f"must be above 0, got {self.top_p}")
        if not self.repetition_penalty > 0:
            raise InvalidSamplingParams("repetition_penalty", f"must be above 0, got {self.repetition_penalty}")
        for name, low in _INTEGERS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidSamplingParams(name, f"must be an integer, got {value!r}")
            if value is not None and value < low:
                raise InvalidSamplingParams(name, f"must be at least {low}, got {value}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParams("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidSamplingParams("seed", f"must fit 64 bits, got {self.seed}")
        self._check_collections()

    def _check_collections(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidSamplingParams(
                "allowed_token_ids", "is empty: no token could ever be sampled; use None for off"
            )
        if any(not word for word in self.bad_words_token_ids) or any(not word for word in self.bad_words):
            raise InvalidSamplingParams("bad_words", "holds an empty word")
        if any(not text for text in self.stop):
            raise InvalidSamplingParams("stop", "holds an empty string, which every text contains")
        for token, bias in (self.logit_bias or {}).items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise InvalidSamplingParams("logit_bias", f"token id {token!r} is not a non-negative integer")
            if not isinstance(bias, (int, float)) or math.isnan(bias) or bias == math.inf:
                raise InvalidSamplingParams("logit_bias", f"bias of token {token} is {bias!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken (temperature zero, or too small to divide by)."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every token id that may end this request: end of sequence and ``stop_token_ids``."""
        return tuple(dict.fromkeys((*self.eos_token_ids, *self.stop_token_ids)))

    def checked_for(self, vocab_size: int) -> SamplingParams:
        """These parameters, fit for a vocabulary: ids in range, ``top_k`` clamped to it.

        Raises:
            InvalidSamplingParams: a token id outside the vocabulary, or more logprobs than it has entries.
        """
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", tuple(self.logit_bias or ())),
            ("bad_words_token_ids", tuple(token for word in self.bad_words_token_ids for token in word)),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidSamplingParams(name, f"token id {token} is outside the vocabulary of {vocab_size}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise InvalidSamplingParams(name, f"asks for {count} of a vocabulary of {vocab_size}; use -1 for all")
        return evolve(self, top_k=vocab_size) if self.top_k > vocab_size else self


_RANGES = (
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 1e6),
)
_INTEGERS = (
    ("n", 1),
    ("top_k", -1),
    ("max_tokens", 1),
    ("min_tokens", 0),
    ("logprobs", ALL_LOGPROBS),
    ("prompt_logprobs", ALL_LOGPROBS),
    ("seed", -(2**63)),
)

"""How one request is sampled: torch-free, frozen, checked when it is made."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve, field, frozen

from .errors import InvalidSamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""

ALL_LOGPROBS = -1
"""``logprobs`` / ``prompt_logprobs`` of -1 asks for the whole vocabulary."""


# Converters never raise: what is not what it should be stays as it is, and the checks name its field.


def _optional_ids(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else _ids(value)


def _ids(value: Iterable[int] | None) -> tuple[int, ...]:
    try:
        return () if value is None else tuple(map(operator.index, value))
    except TypeError:
        return value  # pyright: ignore[reportReturnType]


def _words(value: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...]:
    try:
        return () if value is None else tuple(map(_ids, value))
    except TypeError:
        return value  # pyright: ignore[reportReturnType]


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        return () if value is None else tuple(value)
    except TypeError:
        return value  # pyright: ignore[reportReturnType]


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(token, int) for token in value)


@frozen(kw_only=True)
class SamplingParams:
    """Sampling parameters with vLLM's names and meanings.

    ``top_k`` 0 or -1 is off; ``logprobs`` None is off, 0 gives the chosen token's alone, -1 the whole vocabulary.
    Repetition penalty counts prompt and output, presence and frequency penalties the output only. ``eos_token_ids`` are
    the model's end-of-sequence ids, filled in by the engine: they end a request unless ``ignore_eos``, and are masked
    (like ``stop_token_ids``) until ``min_tokens`` were generated. ``bad_words`` are strings for the engine to tokenize;
    the runner reads ``bad_words_token_ids``. ``stop`` strings are for the loop. ``extra`` is for plug-in stages:
    the runner refuses names that none of its columns reads.

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
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    eos_token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_optional_ids)
    bad_words: tuple[str, ...] = field(default=(), converter=_strings)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default=(), converter=_words)
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
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidSamplingParams(name, f"must be an integer, got {value!r}")
            if value < low:
                raise InvalidSamplingParams(name, f"must be at least {low}, got {value}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingParams("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidSamplingParams("seed", f"must fit 64 bits, got {self.seed}")
        self._check_collections()

    def _check_collections(self) -> None:
        for name in ("stop_token_ids", "eos_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if not _are_ids(ids) and not (ids is None and name == "allowed_token_ids"):
                raise InvalidSamplingParams(name, f"must be a list of token ids, got {ids!r:.80}")
        words = self.bad_words_token_ids
        if not isinstance(words, tuple) or not all(map(_are_ids, words)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidSamplingParams("bad_words_token_ids", f"must be lists of token ids, got {words!r:.80}")
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
                raise InvalidSamplingParams(name, f"must be a string or a list of strings, got {texts!r:.80}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidSamplingParams(
                "allowed_token_ids", "is empty: no token could ever be sampled; use None for off"
            )
        if any(not word for word in self.bad_words_token_ids) or any(not word for word in self.bad_words):
            raise InvalidSamplingParams("bad_words", "holds an empty word")
        if any(not text for text in self.stop):
            raise InvalidSamplingParams("stop", "holds an empty string, which every text contains")
        if not isinstance(self.extra, Mapping) or not all(isinstance(name, str) for name in self.extra):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidSamplingParams("extra", f"must map names to values, got {self.extra!r:.80}")
        bias_of = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias_of, Mapping):
            raise InvalidSamplingParams("logit_bias", f"must map token ids to biases, got {bias_of!r:.80}")
        for token, bias in bias_of.items():
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
_OPTIONAL = frozenset({"max_tokens", "logprobs", "prompt_logprobs", "seed"})

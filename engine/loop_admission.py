"""What a user adds, made ready for the scheduler: text to tokens, parameters completed and checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard

from attrs import evolve, frozen

from ..stages.errors import InvalidSamplingParams
from ..stages.sampling_params import SamplingParams
from .loop_seeds import SeedsOfReusedIds
from .scheduler_records import RequestRefused
from .tokenizer import InvalidText

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, chat messages (``role`` and ``content``), ``{"prompt": …}`` or ``{"prompt_token_ids": …}``."""


class TextEncoder(Protocol):
    """What is needed of a tokenizer to take requests in."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of a text."""
        ...


class ChatRenderer(Protocol):
    """A chat template."""

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = ...) -> str:
        """The text of a conversation, up to where the model is to go on."""
        ...


@frozen(kw_only=True)
class Admission:
    """A request that may be added: ``children`` has the parameters of each of its ``n`` completions."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    children: tuple[SamplingParams, ...]


class Admissions:
    """Turns prompts and parameters into what the scheduler takes, or refuses them.

    Args:
        tokenizer: None when only token ids will be given and asked for.
        chat_template: None when the model has none.
        eos_token_ids: the model's end-of-sequence ids.
        vocab_size: token ids are below this.
        check: raises InvalidSamplingParams for parameters that the runner would refuse.
        engine_seed: what requests without a seed draw by, besides their ids.
    """

    def __init__(
        self,
        tokenizer: TextEncoder | None,
        chat_template: ChatRenderer | None,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        check: Callable[[SamplingParams], object] = lambda params: None,
        engine_seed: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._check = check
        self._seeded = SeedsOfReusedIds(engine_seed)

    def prepare(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Admission:
        """Tokenize and check.

        Raises:
            RequestRefused: a prompt that can't be understood, or needs a tokenizer or chat template that isn't there.
            InvalidSamplingParams: parameters that don't fit the vocabulary, or each other.
        """
        if not isinstance(request_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestRefused(repr(request_id), "the id of a request must be a string")
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidSamplingParams("sampling_params", f"must be SamplingParams, got {params!r:.80}")
        text, token_ids = self._tokens(request_id, prompt)
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                reason = f"token id {token} of the prompt is outside the vocabulary of {self._vocab_size}"
                raise RequestRefused(request_id, reason)
        completed = self._completed(params).checked_for(self._vocab_size)
        self._check(completed)
        completed = self._seeded(request_id, completed)
        return Admission(prompt=text, prompt_token_ids=token_ids, children=_children(completed))

    @contextmanager
    def taken_back_if_refused(self, request_id: str, params: SamplingParams) -> Iterator[None]:
        """What :meth:`prepare` prepared is as if it had not been asked for where the block ends with an error."""
        try:
            yield
        except BaseException:
            self._seeded.take_back(request_id, params)
            raise

    def _tokens(self, request_id: str, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, Mapping):
            prompt = _unwrapped(request_id, prompt)
        if isinstance(prompt, str):
            return prompt, tuple(self._encode(request_id, prompt, add_special_tokens=True))
        if is_chat(prompt):
            if self._chat_template is None:
                raise RequestRefused(request_id, "this model has no chat template; give the prompt as text")
            text = self._chat_template.render(prompt, add_generation_prompt=True)
            return text, tuple(self._encode(request_id, text, add_special_tokens=False))
        return None, _checked_ids(request_id, prompt)

    def _encode(self, request_id: str, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise RequestRefused(request_id, "there is no tokenizer; give the prompt as token ids")
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except InvalidText as error:
            raise RequestRefused(request_id, f"its prompt {error}") from error

    def _completed(self, params: SamplingParams) -> SamplingParams:
        """With the end-of-sequence ids and the tokens of the bad words, both from the tokenizer's side."""
        if params.stop and not (params.detokenize and self._tokenizer is not None):
            raise InvalidSamplingParams("stop", "needs text to look in: a tokenizer, and detokenize=True")
        return evolve(
            params,
            eos_token_ids=params.eos_token_ids or self._eos_token_ids,
            bad_words_token_ids=(*params.bad_words_token_ids, *self._bad_words(params.bad_words)),
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at the start of a text and after a space."""
        if not words:
            return ()
        if self._tokenizer is None:
            raise InvalidSamplingParams("bad_words", "needs a tokenizer; give bad_words_token_ids")
        spellings = (text for word in words for text in (word, " " + word.lstrip()))
        try:
            encoded = [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in spellings]
        except InvalidText as error:
            raise InvalidSamplingParams("bad_words", str(error)) from error
        return tuple(dict.fromkeys(ids for ids in encoded if ids))


def is_chat(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether this is a conversation: a non-empty sequence of messages with a role."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def _unwrapped(request_id: str, prompt: Mapping[str, Any]) -> Any:
    for key in ("prompt_token_ids", "prompt"):
        if prompt.get(key) is not None:
            return prompt[key]
    reason = f'a prompt given as a dict needs "prompt" or "prompt_token_ids", got the keys {sorted(map(str, prompt))}'
    raise RequestRefused(request_id, reason)


def _checked_ids(request_id: str, prompt: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError as error:
        reason = "a prompt is text, a list of token ids, or a list of chat messages with role and content"
        raise RequestRefused(request_id, f"{reason}; got {prompt!r:.80}") from error


def _children(params: SamplingParams) -> tuple[SamplingParams, ...]:
    """One set of parameters for each of ``n`` completions; those of a seeded request have seeds of their own."""
    if params.n == 1:
        return (params,)
    seeds = (None if params.seed is None else _wrapped(params.seed + index) for index in range(params.n))
    first, *others = (evolve(params, n=1, seed=seed) for seed in seeds)
    return (first, *(evolve(other, prompt_logprobs=None) for other in others))  # the prompt is the same: once will do


def _wrapped(seed: int) -> int:
    return seed if seed < 2**64 else seed - 2**64

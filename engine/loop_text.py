"""From the tokens of one completion to the text that may be shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..stages.sampling_params import SamplingParams
from .stop_strings import StopStrings
from .tokenizer import IncrementalDetokenizer, Tokenizer


class Detokenizer(Protocol):
    """Turns tokens into text as they come, keeping back what is not yet a whole character."""

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """What was kept back, at the end."""
        ...


class OutputText(Protocol):
    """The text of one completion."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended it, or None."""
        ...

    def extend(
        self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False, is_last: bool = False
    ) -> tuple[str, int]:
        """The text to show now, and how many of the tokens belong to it (a stop string may cut some off).

        The text of a stop token is left out unless ``include_stop_str_in_output``.
        """
        ...


def text_of(params: SamplingParams, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> OutputText:
    """What a request with these parameters needs, after this prompt."""
    if tokenizer is None or not params.detokenize:
        return NoText()
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens)
    return StoppableText(detokenizer, params) if params.stop else PlainText(detokenizer, params)


class NoText:
    """For a request that wants token ids alone."""

    matched: str | None = None

    def extend(
        self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False, is_last: bool = False
    ) -> tuple[str, int]:
        """No text; every token counts."""
        return "", len(token_ids)


class PlainText:
    """For a request without stop strings."""

    matched: str | None = None

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._keep_stop_token = params.include_stop_str_in_output

    def extend(
        self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False, is_last: bool = False
    ) -> tuple[str, int]:
        """The text that is complete; at the end, all of it."""
        if not is_last:
            return self._detokenizer.append(token_ids), len(token_ids)
        hidden = ends_with_stop_token and not self._keep_stop_token
        text = self._detokenizer.append(token_ids[:-1] if hidden else token_ids)
        return text + self._detokenizer.flush(), len(token_ids)


class StoppableText:
    """For a request with stop strings; they are looked for in what comes after the first ``min_tokens`` tokens."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        self._keep_stop_token = params.include_stop_str_in_output
        self._tokens_unsearched = params.min_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.matched

    def extend(
        self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False, is_last: bool = False
    ) -> tuple[str, int]:
        """Token by token, since those after a stop string do not count."""
        hidden = ends_with_stop_token and not self._keep_stop_token
        shown = ""
        for count, token_id in enumerate(token_ids[:-1] if hidden else token_ids, 1):
            text = self._detokenizer.append((token_id,))
            if self._tokens_unsearched > 0:
                self._tokens_unsearched -= 1
                shown += text
                continue
            shown += self._stops.push(text)
            if self.matched is not None:
                return shown, count
        if is_last:
            shown += self._stops.push(self._detokenizer.flush())
            if self.matched is None:
                shown += self._stops.flush()
        return shown, len(token_ids)

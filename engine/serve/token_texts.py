"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..outputs import Logprob, PositionLogprobs
from ..tokenizer import REPLACEMENT, Tokenizer

_LOWEST = -9999.0  # JSON has no infinity


class TokenTexts:
    """Single tokens as text and bytes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """Text and UTF-8 bytes of one token; part of a character is written as its bytes (``bytes:\\xe2\\x82``)."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            text = f"token_id:{token_id}"
            return text, list(text.encode())
        if not self._tokenizer.is_byte_level:
            text = self._tokenizer.decode((token_id,), skip_special_tokens=False)
            if REPLACEMENT in text or not text:
                text = self._tokenizer.id_to_token(token_id) or text
            return text, list(text.encode())
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    def chat(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], count: int) -> dict[str, Any]:
        """``logprobs`` of a chat choice, with the ``count`` most likely tokens of each position."""
        content: list[dict[str, Any]] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            best = sorted(position.items(), key=lambda item: item[1].rank)[:count]
            entry = self._chat_token(token_id, position[token_id])
            entry["top_logprobs"] = [self._chat_token(other, logprob) for other, logprob in best]
            content.append(entry)
        return {"content": content, "refusal": None}

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
        count: int,
        first_offset: int,
    ) -> tuple[dict[str, Any], int]:
        """``logprobs`` of a completion's choice, and where its text ends.

        Offsets are in characters, from ``first_offset``; a token that goes on with a character has that character's.
        A position of None (the first token of a prompt) has no probabilities.
        """
        texts = [self.of(token_id)[0] for token_id in token_ids]
        offsets, end = list[int](), first_offset
        for token_id in token_ids:
            data = self.of(token_id)[1]
            offsets.append(max(end - 1, 0) if data and not _begins_character(data[0]) else end)
            end += sum(map(_begins_character, data))
        chosen: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen.append(None if position is None else _finite(position[token_id].logprob))
            tops.append(None if position is None else self._top(token_id, position, count))
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}, end

    def _top(self, token_id: int, position: PositionLogprobs, count: int) -> dict[str, float]:
        """The ``count`` most likely, and the chosen one."""
        best = sorted(position.items(), key=lambda item: item[1].rank)[:count]
        shown = {self.of(other)[0]: _finite(logprob.logprob) for other, logprob in best}
        shown.setdefault(self.of(token_id)[0], _finite(position[token_id].logprob))
        return shown

    def _chat_token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text, data = self.of(token_id)
        return {"token": text, "logprob": _finite(logprob.logprob), "bytes": data}


def _begins_character(byte: int) -> bool:
    """Whether a byte of UTF-8 is the first of its character."""
    return byte & 0xC0 != 0x80


def _finite(value: float) -> float:
    return max(value, _LOWEST)

"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from ..outputs import Logprob, PositionLogprobs
from ..tokenizer import REPLACEMENT, Tokenizer

_LOWEST = -9999.0  # JSON has no infinity


class TextLength:
    """How many characters the bytes of a text make so far."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def add(self, data: Sequence[int]) -> int:
        """Go on with a token's bytes; gives the offset of the character that they begin in."""
        num_ended = len(self._decoder.decode(bytes(data[:1])))
        is_within, _ = self._decoder.getstate()
        # A byte that does not go on with a character ends it, though it was not complete.
        offset = self._length + max(num_ended - (not is_within), 0)
        self._length += num_ended + len(self._decoder.decode(bytes(data[1:])))
        return offset


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
        written: TextLength,
    ) -> dict[str, Any]:
        """``logprobs`` of a completion's choice, after what was ``written`` of it, to which its text is added.

        Offsets are in characters; a token that goes on with a character has that character's.
        A position of None (the first token of a prompt) has no probabilities.
        """
        texts = [self.of(token_id)[0] for token_id in token_ids]
        offsets = [written.add(self.of(token_id)[1]) for token_id in token_ids]
        chosen: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen.append(None if position is None else _finite(position[token_id].logprob))
            tops.append(None if position is None else self._top(token_id, position, count))
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token_id: int, position: PositionLogprobs, count: int) -> dict[str, float]:
        """The ``count`` most likely, and the chosen one."""
        best = sorted(position.items(), key=lambda item: item[1].rank)[:count]
        shown = {self.of(other)[0]: _finite(logprob.logprob) for other, logprob in best}
        shown.setdefault(self.of(token_id)[0], _finite(position[token_id].logprob))
        return shown

    def _chat_token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text, data = self.of(token_id)
        return {"token": text, "logprob": _finite(logprob.logprob), "bytes": data}


def _finite(value: float) -> float:
    return max(value, _LOWEST)

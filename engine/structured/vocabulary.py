"""The bytes of every token, as the compiler of grammars wants them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tokenizers

from ..tokenizer import Tokenizer
from .spec import InvalidGrammar

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def token_texts(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """``[vocab_size]`` byte strings; special tokens and ids without a token have none, so that no grammar allows them.

    Raises:
        InvalidGrammar: a tokenizer whose tokens have no text of their own.
    """
    spell = tokenizer.token_bytes if tokenizer.is_byte_level else _Pieces(tokenizer).token_bytes
    special = tokenizer.special_token_ids
    known = min(vocab_size, tokenizer.vocab_size)
    texts = [b"" if token_id in special else spell(token_id) for token_id in range(known)]
    return texts + [b""] * (vocab_size - known)


def without_control_characters(texts: Sequence[bytes]) -> list[bytes]:
    """For JSON, which has none but line ends, and those outside of strings only."""
    return [b"" if any(byte < 0x20 and byte != 0x0A for byte in text) else text for text in texts]


class _Pieces:
    """SentencePiece spelling: ``▁`` for a space, ``<0xE2>`` for a byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend
        has_bytes = any(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in (0x0A, 0x41, 0xE2))
        if not has_bytes and not isinstance(backend.decoder, tokenizers.decoders.Metaspace):
            raise InvalidGrammar(
                "grammar", "the tokens of this model have no text of their own; byte-level and SentencePiece ones do"
            )
        self._backend = backend

    def token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        if match := _BYTE.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(_SPACE, " ").encode()

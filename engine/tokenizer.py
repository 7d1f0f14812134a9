"""Text to token ids and back, and back again piece by piece while tokens arrive."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from ..fsm.errors import TwoStrokeError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 4  # a character has at most four bytes, so at most four tokens
_LONGEST_WAIT = 64
_LONG_TEXT = 4096  # characters, a millisecond or so


class TokenizerError(TwoStrokeError, ValueError):
    """A tokenizer that is missing, broken, or of a kind that is not supported."""


class InvalidText(TwoStrokeError, ValueError):
    """A text that has no token ids."""


def read_tokenizer_config(folder: Path) -> Mapping[str, Any]:
    """What ``tokenizer_config.json`` of a Hugging Face folder holds; empty where there is none.

    Raises:
        TokenizerError: a file that is no JSON object.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Whatever building a tokenizer raises is the fault of its files; the library's panics are not even Exceptions."""
    try:
        yield
    except (TwoStrokeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{problem}: {error}") from error


class Tokenizer:
    """A Hugging Face ``tokenizers`` tokenizer with the ids of its end and beginning of sequence."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_token_id: int | None = None, bos_token_id: int | None = None
    ) -> None:
        self.backend = backend
        self.eos_token_id = eos_token_id
        self.bos_token_id = bos_token_id
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = _is_byte_level(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read ``tokenizer.json``, and the end and beginning of sequence from ``tokenizer_config.json``.

        Raises:
            TokenizerError: no ``tokenizer.json``, or a file that cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        with _refusing(f"{path} cannot be read"):
            backend = tokenizers.Tokenizer.from_file(str(path))
        config = read_tokenizer_config(folder)
        eos, bos = (_id_of(backend, config.get(name)) for name in ("eos_token", "bos_token"))
        return cls(backend, eos_token_id=eos, bos_token_id=bos)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes.

        Raises:
            TokenizerError: a tokenizer model or pre-tokenizer that is not supported, or metadata that is incomplete.
        """
        from .loading.gguf_tokenizer import build_backend

        with _refusing("the tokenizer in the GGUF file is malformed"):
            backend = build_backend(metadata)
        return cls(
            backend,
            eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with ``add_special_tokens`` as the model wants a prompt (a beginning of sequence …).

        Raises:
            InvalidText: not a string, or one with half a surrogate pair, which no UTF-8 can hold.
        """
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise InvalidText(f"cannot be tokenized: expected a string of whole characters ({error})") from error
        if len(text) < _LONG_TEXT:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Alone this one lets other threads run meanwhile.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """The id of one token as the vocabulary spells it, or None."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """One token as the vocabulary spells it, or None."""
        return self.backend.id_to_token(token_id)

    @property
    def is_byte_level(self) -> bool:
        """Whether a text is the UTF-8 of its tokens' bytes, one after the other (:meth:`token_bytes`)."""
        return self._is_byte_level

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token of a byte-level tokenizer; none for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id) or ""
            try:
                known = bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:  # an added token is spelled as it is, not in the byte alphabet
                known = token.encode()
            self._bytes[token_id] = known
        return known


class IncrementalDetokenizer:
    """The text of a growing sequence, whole characters only, in constant time a token.

    What :meth:`append` and at last :meth:`flush` return, put together, is the ``decode`` of all ids. After
    ``prompt_ids`` it is their continuation: a space between prompt and text is kept.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._skipped = skipped
        self._steps = _ByteSteps(tokenizer) if tokenizer.is_byte_level else _WindowSteps(tokenizer, skip_special_tokens)
        self._steps.start([token for token in prompt_ids[-_CONTEXT_TOKENS:] if token not in skipped])

    def append(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; an unfinished character waits for its other bytes."""
        texts = [self._steps.step(token_id) for token_id in token_ids if token_id not in self._skipped]
        return texts[0] if len(texts) == 1 else "".join(texts)

    def flush(self) -> str:
        """What was kept back, at the end: U+FFFD for characters that nothing finished."""
        return self._steps.flush()


class _ByteSteps:
    """For byte-level tokenizers: the bytes of the tokens through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True  # nothing is kept back

    def start(self, prompt_tail: Sequence[int]) -> None:
        for token_id in prompt_tail:
            self.step(token_id)

    def step(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        if self._is_whole and data.isascii():  # most tokens of most texts, and four times as fast
            return str(data, "ascii")
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self._is_whole = True
        return self._decoder.decode(b"", final=True)


class _WindowSteps:
    """For every other tokenizer: decode what is new after the last token that was shown.

    Tokens wait while they end in a byte (``<0xE2>``) or an unfinished character: how a run of bytes reads is known only
    at its end.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._waiting: list[int] = []

    def start(self, prompt_tail: Sequence[int]) -> None:
        self._context = list(prompt_tail)

    def step(self, token_id: int) -> str:
        self._waiting.append(token_id)
        if len(self._waiting) < _LONGEST_WAIT and self._is_byte(token_id):
            return ""
        text = self._text_of_waiting()
        if text.endswith(REPLACEMENT) and len(self._waiting) < _LONGEST_WAIT:
            return ""
        self._context, self._waiting = [token_id], []
        return text

    def flush(self) -> str:
        text = self._text_of_waiting()
        self._waiting = []
        return text

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def _text_of_waiting(self) -> str:
        shown = len(self._decode(self._context))
        return self._decode(self._context + self._waiting)[shown:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Mapping[str, int] = {**_byte_alphabet()}


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    return isinstance(backend.decoder, tokenizers.decoders.ByteLevel)


def _id_of(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return backend.token_to_id(text) if isinstance(text, str) else None

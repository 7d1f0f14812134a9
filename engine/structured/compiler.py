"""Compiles specifications with xgrammar (Dong et al., MLSys 2025), which is imported on first use."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..tokenizer import Tokenizer
from .expressions import checked_expression
from .schema import checked_schema
from .spec import GrammarSpec, InvalidGrammar, StructuredOutputMissing
from .vocabulary import token_texts, without_control_characters

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE = 20
_CACHE_BYTES = 256 * 2**20
_THREADS = 2
_WHERE = re.compile(r"\[[\d:]+\] \S+:\d+: ")


@frozen(eq=False)
class CompiledGrammar:
    """A grammar that any number of requests may follow, at once and one after the other."""

    spec: GrammarSpec
    matched: xgrammar.CompiledGrammar


class Compiler:
    """Compiles for one vocabulary, on the thread that asks; for any thread. Equal specifications are compiled once.

    xgrammar gives up the interpreter's lock while it compiles, so other threads go on.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._first_use = threading.Lock()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile, or take what was compiled before.

        Raises:
            InvalidGrammar: it can't be compiled, or holds what would not be enforced.
            StructuredOutputMissing: xgrammar is not installed.
        """
        if not isinstance(spec, GrammarSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidGrammar("grammar", f"must be a GrammarSpec, got {spec!r:.80}")
        compilation = self._compilation(spec)
        try:
            return CompiledGrammar(spec, compilation())
        except (RuntimeError, ValueError) as error:
            raise InvalidGrammar(spec.kind, _reason(error)) from error

    @cached_property
    def library(self) -> Any:
        """The xgrammar module.

        Raises:
            StructuredOutputMissing: it is not installed.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise StructuredOutputMissing(
                f"structured output needs xgrammar ({error}); pip install 'twostroke[serve]'"
            ) from error
        return xgrammar

    def _compilation(self, spec: GrammarSpec) -> Callable[[], xgrammar.CompiledGrammar]:
        """What is left to do once the specification has been checked."""
        with self._first_use:
            text, for_json = self._for_text, self._for_json
        if spec.regex is not None:
            expression = checked_expression("regex", spec.regex)
            return lambda: text.compile_regex(expression)
        if spec.choice is not None or spec.grammar is not None:
            grammar = spec.grammar if spec.grammar is not None else _alternatives(spec.choice or ())
            return lambda: text.compile_grammar(grammar)
        schema = {"type": "object", "additionalProperties": True}
        if spec.json_schema is not None:
            schema = checked_schema(spec.json_schema)
        written = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        return lambda: for_json.compile_json_schema(written, max_whitespace_cnt=MAX_WHITESPACE)

    @cached_property
    def _texts(self) -> list[bytes]:
        if not self._eos_token_ids:
            raise InvalidGrammar("grammar", "the model has no end-of-sequence token, so that no text could end")
        return token_texts(self._tokenizer, self._vocab_size)

    @cached_property
    def _for_text(self) -> Any:
        return self._compiler(self._texts)

    @cached_property
    def _for_json(self) -> Any:
        """xgrammar lets strings of a limited length hold control characters, which JSON has none of: no token may."""
        return self._compiler(without_control_characters(self._texts))

    def _compiler(self, texts: list[bytes]) -> Any:
        library = self.library
        kind = library.VocabType.RAW
        info = library.TokenizerInfo(texts, kind, vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids)
        return library.GrammarCompiler(info, max_threads=_THREADS, cache_limit_bytes=_CACHE_BYTES)


def _alternatives(texts: Sequence[str]) -> str:
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, text))}"' for text in texts)


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() and character.isascii() else f"\\U{ord(character):08x}"


def _reason(error: Exception) -> str:
    """The library's message without the places in its source."""
    return " ".join(_WHERE.sub("", str(error)).split()) or type(error).__name__

"""Structured output for the server: what a request asks for, compiled for the loop."""

from __future__ import annotations

from typing import Any, Literal

from attrs import frozen

from ..serving_loop import ServingLoop
from ..structured import CompiledGrammar, GrammarBook, GrammarSpec, InvalidGrammar, StructuredOutputMissing
from .errors import ApiError

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@frozen
class Constraint:
    """What the text must be; ``param`` is the field of the request that says so."""

    kind: Kind
    value: Any
    param: str

    def compiled_for(self, loop: ServingLoop) -> CompiledGrammar:
        """Compiled on this thread, or taken from what was compiled before.

        Raises:
            ApiError: 400, it can't be compiled, or nothing here compiles.
        """
        if not isinstance(loop.grammar, GrammarBook):
            raise self._refused("structured output is switched off: the loop has no GrammarBook", "unsupported_field")
        try:
            return loop.grammar.compile(GrammarSpec(**{self.kind: self.value}))
        except InvalidGrammar as error:
            raise self._refused(str(error), "invalid_grammar") from error
        except StructuredOutputMissing as error:
            raise self._refused(str(error), "unsupported_field") from error

    def _refused(self, reason: str, code: str) -> ApiError:
        return ApiError(400, f"{self.param}: {reason}", param=self.param, code=code)

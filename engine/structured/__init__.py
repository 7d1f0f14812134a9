"""Structured output: requests whose text follows a JSON schema, a regular expression, a choice or a grammar."""

from .book import CompiledGrammar, GrammarBook, GrammarRejected, GrammarTooSlow
from .spec import GrammarSpec, InvalidGrammar, StructuredOutputMissing

__all__ = [
    "CompiledGrammar",
    "GrammarBook",
    "GrammarRejected",
    "GrammarSpec",
    "GrammarTooSlow",
    "InvalidGrammar",
    "StructuredOutputMissing",
]

"""Requests of a serving loop that bring a grammar of their own."""

from __future__ import annotations

from collections.abc import Sequence

from ..stages.errors import InvalidSamplingParams
from ..stages.sampling_params import SamplingParams
from .loop_grammar import GrammarProvider, NoGrammar
from .scheduler_records import RequestRefused
from .structured import CompiledGrammar, GrammarBook, GrammarSpec
from .tokenizer import Tokenizer

Structure = GrammarSpec | CompiledGrammar
"""What a text has to be: as it is written, or compiled before."""


def book_for(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarProvider:
    """The provider of a loop that was given none."""
    return NoGrammar() if tokenizer is None else GrammarBook(tokenizer, vocab_size, eos_token_ids)


def compiled_for(
    provider: GrammarProvider, request_id: str, grammar: Structure | None, params: SamplingParams
) -> CompiledGrammar | None:
    """The grammar of a request, compiled on this thread.

    Raises:
        InvalidGrammar: it can't be compiled.
        InvalidSamplingParams: parameters with which its end would not end the request.
        RequestRefused: the loop has nothing to compile it with.
    """
    if grammar is None:
        return None
    if not isinstance(provider, GrammarBook):
        reason = "its grammar can't be compiled: the loop has a grammar provider of its own, or no tokenizer"
        raise RequestRefused(request_id, f"{reason}; give ServingLoop a GrammarBook, or a tokenizer")
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids)}
    if not ends.issuperset(provider.eos_token_ids):
        name = "ignore_eos" if params.ignore_eos else "eos_token_ids"
        raise InvalidSamplingParams(
            name, f"leaves out {provider.eos_token_ids}, with which a grammar ends; leave {name} out, or the grammar"
        )
    return grammar if isinstance(grammar, CompiledGrammar) else provider.compile(grammar)


def constrain(provider: GrammarProvider, req_ids: Sequence[str], compiled: CompiledGrammar | None) -> None:
    """Have requests that are about to be scheduled follow what :func:`compiled_for` gave."""
    if compiled is not None:
        assert isinstance(provider, GrammarBook), "only a book compiles"
        provider.register(req_ids, compiled)

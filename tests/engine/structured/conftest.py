"""A tokenizer of single bytes, and books of grammars over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from twostroke.engine.structured import GrammarBook
from twostroke.engine.tokenizer import Tokenizer
from twostroke.stages.io import GrammarOutput, SchedulerOutput

EOS, OTHER_SPECIAL, VOCAB_SIZE = 256, 257, 260


@pytest.fixture(scope="session")
def letters() -> Tokenizer:
    """Token ``i`` is byte ``i``; then an end of sequence, another special token, and two ids that mean nothing."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    backend = Backend(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<|x|>"])
    return Tokenizer(backend, eos_token_id=EOS)


@pytest.fixture(scope="session")
def shared_book(letters: Tokenizer) -> GrammarBook:
    """One book for tests that only compile, or use ids of their own."""
    return GrammarBook(letters, VOCAB_SIZE, (EOS,))


def step_of(*req_ids: str) -> SchedulerOutput:
    """A step in which these requests have a token each."""
    counts = dict.fromkeys(req_ids, 1)
    return SchedulerOutput(num_scheduled_tokens=counts, total_num_scheduled_tokens=len(counts))


def tokens_in(output: GrammarOutput, req_id: str) -> set[int]:
    """The tokens that a request's mask allows."""
    row = output.grammar_bitmask[list(output.structured_output_request_ids).index(req_id)]
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture
def allowed() -> Callable[..., set[int]]:
    """``allowed(book, req_id)``: the tokens that may come next."""

    def tokens(book: Any, req_id: str) -> set[int]:
        return tokens_in(book.grammar_output(step_of(req_id)), req_id)

    return tokens

"""Keeps what constrained requests have said so far, and says what they may say next."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from attrs import define

from ...fsm.errors import TwoStrokeError
from ...stages.io import GrammarOutput, SchedulerOutput
from ..tokenizer import Tokenizer
from .compiler import CompiledGrammar, Compiler
from .spec import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

__all__ = ["CompiledGrammar", "GrammarBook", "GrammarRejected", "GrammarTooSlow"]


class GrammarRejected(TwoStrokeError, RuntimeError):
    """A token that a request's grammar does not allow: it was sampled without the mask."""


class GrammarTooSlow(TwoStrokeError, RuntimeError):
    """A grammar so ambiguous that one token takes longer than may be spent on it."""


@define(eq=False)
class _Follower:
    """One request's place in its grammar. ``mask`` is of the next token, made once however often it is asked for."""

    matcher: xgrammar.GrammarMatcher
    mask: npt.NDArray[np.int32] | None = None
    seconds: float = 0.0  # of this thread, on the next token


class GrammarBook:
    """The :class:`~twostroke.engine.loop_grammar.GrammarProvider` for grammars that xgrammar compiles. For any thread.

    Nothing is imported or built before the first specification is compiled. A follower moves when a token is delivered
    and at no other time, so that steps that are retried, rolled back or computed anew don't concern it.

    Args:
        tokenizer: of the model.
        vocab_size: of the model; its masks are that wide.
        eos_token_ids: what ends a text; allowed where the grammar may end, and alone where it must.
        max_token_seconds: processor time that one token of one request may take; a request above it fails.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        max_token_seconds: float = 0.25,
    ) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        self._compiler = Compiler(tokenizer, vocab_size, self.eos_token_ids)
        self._num_words = -(-vocab_size // 32)
        self._max_token_seconds = max_token_seconds
        self._followers: dict[str, _Follower] = {}
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile on this thread (milliseconds; seconds the first time, for the import), or take what was compiled.

        Raises:
            InvalidGrammar: it can't be compiled, or holds what would not be enforced.
            StructuredOutputMissing: xgrammar is not installed.
        """
        return self._compiler.compile(spec)

    def register(self, req_ids: Sequence[str], compiled: CompiledGrammar) -> None:
        """Have requests that are about to be added follow a grammar, each from its start; replaces what they had."""
        followers = [_Follower(self._compiler.library.GrammarMatcher(compiled.matched)) for _ in req_ids]
        with self._lock:
            self._followers |= dict(zip(req_ids, followers, strict=True))

    # ---- what the loop asks

    def constrained(self, scheduled: SchedulerOutput) -> Collection[str]:
        """The requests of a step that follow a grammar."""
        if not self._followers:
            return ()
        with self._lock:
            return [req_id for req_id in scheduled.num_scheduled_tokens if req_id in self._followers]

    def grammar_output(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
        """Their masks, for the token after the last that was accepted."""
        req_ids = self.constrained(scheduled)
        with self._lock:
            followers = {req_id: self._followers[req_id] for req_id in req_ids if req_id in self._followers}
            masks = [self._mask(follower) for follower in followers.values()]
        if not masks:
            return None
        return GrammarOutput(structured_output_request_ids=tuple(followers), grammar_bitmask=np.stack(masks))

    def accept(self, req_id: str, token_ids: Sequence[int]) -> None:
        """Move a request on; what comes after the end of its grammar is passed over.

        Raises:
            GrammarRejected: the grammar does not allow a token here.
            GrammarTooSlow: the last token took too long.
        """
        with self._lock:
            follower = self._followers.get(req_id)
            if follower is None or not token_ids:
                return
            started = time.thread_time()
            for token_id in token_ids:
                if follower.matcher.is_terminated():
                    break
                if not follower.matcher.accept_token(token_id):
                    raise GrammarRejected(
                        f"request {req_id!r}: token {token_id} is not what its grammar allows here; "
                        "every step of a constrained request has to be sampled with its mask"
                    )
            seconds = follower.seconds + time.thread_time() - started
            follower.mask, follower.seconds = None, 0.0
        if seconds > self._max_token_seconds:
            took = f"one token took {seconds:.2f} s in its grammar, above {self._max_token_seconds} s"
            raise GrammarTooSlow(
                f"request {req_id!r}: {took}; make it less ambiguous: no repetition of what may be empty or repeats"
            )

    def release(self, req_id: str) -> None:
        """Forget a request; nothing happens for one without a grammar."""
        with self._lock:
            self._followers.pop(req_id, None)

    def _mask(self, follower: _Follower) -> npt.NDArray[np.int32]:
        """int32 ``[words]``."""
        if follower.mask is None:
            started = time.thread_time()
            follower.mask = self._filled(follower.matcher)
            follower.seconds += time.thread_time() - started
        return follower.mask

    def _filled(self, matcher: xgrammar.GrammarMatcher) -> npt.NDArray[np.int32]:
        mask = np.zeros((1, self._num_words), dtype=np.int32)
        if not matcher.is_terminated():
            matcher.fill_next_token_bitmask(mask)
            return mask[0]
        words = mask.view(np.uint32)  # it goes on after its end all the same
        for token_id in self.eos_token_ids:
            words[0, token_id // 32] |= np.uint32(1 << token_id % 32)
        return mask[0]

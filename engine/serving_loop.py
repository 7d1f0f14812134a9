"""Serves requests from any thread with one runner and one scheduler, in a thread of its own."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Self, TypeVar, get_args

from ..fsm import InputRefused, LifeState, TwoStrokeError
from ..stages.sampling_params import SamplingParams
from .loop_admission import Admission, Admissions, Prompt
from .loop_grammar import GrammarProvider
from .loop_handle import RequestHandle
from .loop_jobs import Job, PauseMode
from .loop_requests import LiveRequests
from .loop_setup import depth_for, handle_for, scheduler_for
from .loop_steps import StepLoop
from .loop_structured import Structure, book_for, compiled_for, constrain
from .loop_text import text_of
from .scheduler import Scheduler

if TYPE_CHECKING:
    from .model_runner import ModelRunner
    from .structured import CompiledGrammar
    from .tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_DEFAULT_PARAMS = SamplingParams()
T = TypeVar("T")


class ServingLoopDown(TwoStrokeError, RuntimeError):
    """The loop does not run: not started, stopped, or dead; ``__cause__`` is what it died of."""


class LoopThreadError(TwoStrokeError, RuntimeError):
    """A call that would wait for itself."""


class LoopState(StrEnum):
    """Where a loop is in its life; there is no way back."""

    CREATED = "CREATED"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    DEAD = "DEAD"


_RUNNING, _ASLEEP = LoopState.RUNNING, LifeState.ASLEEP  # to look one up in its class is a call


class ServingLoop:
    """Adds, aborts and streams requests from any thread, while its own thread steps the runner.

    A request's error goes to that request: a refusal is raised by :meth:`add`, a failure by its stream. A step that
    fails is run in parts until it is known who is to blame; the others get their tokens. Anything unexpected, or a
    runner that can't go on, ends the loop: every stream raises :class:`ServingLoopDown` with the cause, and so does
    :meth:`add` from then on.

    Args:
        runner: ready to step; the loop is the only one to step it, and does not shut it down.
        scheduler: None for the reference scheduler with the runner's limits.
        tokenizer: None for the model's own.
        depth: how many steps may be in flight; with 1, each is waited for before the next is scheduled. None for 2
            where the runner's outputs are asynchronous, 1 where they are not.
        grammar: says which tokens constrained requests may get; None for a :class:`GrammarBook` of the tokenizer.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        depth: int | None = None,
        grammar: GrammarProvider | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler or scheduler_for(runner)
        self.depth = depth_for(runner, depth)
        loaded = runner.loaded
        self._tokenizer = tokenizer or (loaded.tokenizer if loaded is not None else None)
        eos_token_ids = loaded.eos_token_ids if loaded is not None else ()
        self._admissions = Admissions(
            self._tokenizer,
            loaded.chat_template if loaded is not None else None,
            eos_token_ids,
            runner.spec.vocab_size,
            runner.check_params,
            runner.config.seed,
        )
        self.grammar = grammar or book_for(self._tokenizer, runner.spec.vocab_size, eos_token_ids)
        self._live = LiveRequests(self.grammar)
        self._state = LoopState.CREATED
        self._cause: BaseException | None = None
        self._numbers = itertools.count()
        self._jobs: deque[Job] = deque()
        self._pause: PauseMode | None = None
        self._is_paused = False  # the pause has taken effect
        # Guards everything above and the scheduler; told when there is something to do, and when a pause takes effect.
        self._changed = threading.Condition()
        self._steps = StepLoop(runner, self.scheduler, self._live, self.grammar, depth=self.depth, lock=self._changed)
        self._thread = threading.Thread(target=self._run, name="twostroke-serving-loop", daemon=True)

    # ---- for any thread

    @property
    def state(self) -> LoopState:
        """CREATED, RUNNING, STOPPED or DEAD."""
        return self._state

    @property
    def healthy(self) -> bool:
        """Whether requests are being served, or will be after a pause or the runner's sleep."""
        can_step = self.runner.life in (LifeState.READY, LifeState.ASLEEP)
        return can_step and self._state is LoopState.RUNNING and self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        """Whether a pause has taken effect."""
        return self._is_paused

    @property
    def num_steps(self) -> int:
        """Steps so far; those count too that only told the runner who has finished."""
        return self._steps.num_steps

    @property
    def num_live_requests(self) -> int:
        """Requests that have not finished."""
        return len(self._live)

    def start(self) -> Self:
        """Start serving; once started, nothing happens.

        Raises:
            ServingLoopDown: it was stopped or died; make a new one.
        """
        with self._changed:
            if self._state is LoopState.CREATED:
                self._state = LoopState.RUNNING
                self._thread.start()
            self._require_running()
        return self

    def stop(self) -> None:
        """Stop after the step in flight and wait for that; every live request ends with finish reason "abort"."""
        with self._changed:
            if self._state is LoopState.CREATED:
                self._state = LoopState.STOPPED
            elif self._state is LoopState.RUNNING:
                self._state = LoopState.STOPPED
                for handle in self._live.handles():
                    self.scheduler.finish_requests(self._live.end(handle, "abort"))
                self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams = _DEFAULT_PARAMS,
        request_id: str | None = None,
        *,
        grammar: Structure | None = None,
    ) -> RequestHandle:
        """Queue a request: text, token ids, or chat messages. Never waits for the model.

        Its text follows ``grammar``, which is compiled on this thread unless ``loop.grammar.compile`` did it before.

        Raises:
            RequestRefused: it could never be served, or a live request goes by this id.
            InvalidSamplingParams: parameters that don't fit the model or each other.
            InvalidGrammar: a grammar that can't be compiled.
            ServingLoopDown: the loop is not running.
        """
        arrival_time = time.monotonic()
        self._require_running()
        if request_id is None:
            request_id = next(name for number in self._numbers if (name := f"request-{number}") not in self._live)
        admission = self._admissions.prepare(request_id, prompt, params)
        with self._admissions.taken_back_if_refused(request_id, params):
            compiled = compiled_for(self.grammar, request_id, grammar, admission.children[0])
            handle = handle_for(request_id, admission, arrival_time, self._close)
            texts = [text_of(child, self._tokenizer, admission.prompt_token_ids) for child in admission.children]
            with self._changed:
                self._require_running()
                self._live.require_free(request_id, *handle.child_ids)
                self._schedule_children(handle, admission, compiled)
                self._live.add(handle, texts)
                self._changed.notify_all()
        return handle

    def abort(self, request_id: str) -> bool:
        """End a request now, with finish reason "abort"; its id is free again. False if no live request has this id."""
        with self._changed:
            handle = self._live.get(request_id)
            return handle is not None and self._end(handle)

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop stepping; returns when nothing is in flight. Requests may still be added: they wait for :meth:`resume`.

        "abort" ends every live request with finish reason "abort"; with "wait", requests that have begun finish first;
        "keep" leaves them where they are. Idempotent; another mode takes the place of the one before.

        Raises:
            ServingLoopDown: the loop is not running, or stops meanwhile.
            LoopThreadError: called on the loop's own thread.
            InputRefused: another mode.
        """
        if mode not in get_args(PauseMode):
            raise InputRefused(f"pause mode {mode!r}: use one of {', '.join(get_args(PauseMode))}")
        self._require_other_thread("pause")
        with self._changed:
            self._require_running()
            if mode == "abort":
                for handle in self._live.handles():
                    self._end(handle)
            if mode != self._pause:
                self._pause, self._is_paused = mode, False
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._is_paused or self._pause != mode or self._state is not LoopState.RUNNING
            )
            self._require_running()

    def resume(self) -> None:
        """Go on after :meth:`pause`: no request has lost a token. Idempotent.

        Where the runner slept meanwhile, requests are computed anew from their tokens.
        """
        with self._changed:
            self._pause, self._is_paused = None, False
            self._changed.notify_all()

    def between_steps(self, fn: Callable[[], T], *, recompute: bool = False) -> T:
        """Run ``fn`` on the loop's thread while no step is open and none in flight; gives what it returns.

        This is how a runner is changed while it serves: ``runner.sleep``, ``wake_up``, ``update_weights``, edits of its
        stages. No step starts while the runner is asleep. Requests whose keys and values it gave away are computed anew
        from their tokens; with ``recompute``, all are, and cached prefixes forgotten: for new weights, whose keys and
        values are not to mix with the old ones.

        Raises:
            ServingLoopDown: the loop is not running.
            LoopThreadError: called on the loop's own thread.
            Exception: whatever ``fn`` raised; the loop goes on.
        """
        self._require_other_thread("between_steps")
        job = Job(fn, recompute)
        with self._changed:
            self._require_running()
            self._jobs.append(job)
            self._changed.notify_all()
        return job.result()

    def _end(self, handle: RequestHandle) -> bool:
        child_ids = self._live.end(handle, "abort")
        self.scheduler.finish_requests(child_ids)
        self._changed.notify_all()
        return bool(child_ids)

    def _close(self, handle: RequestHandle) -> None:
        with self._changed:
            self._end(handle)

    def _schedule_children(self, handle: RequestHandle, admission: Admission, compiled: CompiledGrammar | None) -> None:
        """All of them or, if one is refused, none."""
        try:
            for child_id, params in zip(handle.child_ids, admission.children, strict=True):
                self.scheduler.add_request(child_id, admission.prompt_token_ids, params)
            constrain(self.grammar, handle.child_ids, compiled)
        except BaseException:
            self.scheduler.finish_requests(handle.child_ids)
            raise

    def _require_other_thread(self, call: str) -> None:
        if threading.current_thread() is self._thread:
            raise LoopThreadError(f"{call}() waits for the loop's thread, so it can't be called on it; use another one")

    def _require_running(self) -> None:
        if self._state is not LoopState.RUNNING:
            raise self._down()

    def _down(self) -> ServingLoopDown:
        message = {
            LoopState.CREATED: "the serving loop has not been started; call start(), or use it as a context manager",
            LoopState.RUNNING: "the serving loop is running",
            LoopState.STOPPED: "the serving loop was stopped; make a new one",
            LoopState.DEAD: f"the serving loop died of {type(self._cause).__name__}: {self._cause}",
        }[self._state]
        error = ServingLoopDown(message)
        error.__cause__ = self._cause
        return error

    # ---- the loop's own thread

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except BaseException as error:
            self._die(error)

    def _serve(self) -> bool:
        """Wait for something to do, and do some of it. False once stopped, with nothing left to tell the runner."""
        with self._changed:
            self._changed.wait_for(self._has_something_to_do)
            num_jobs, is_stopped = len(self._jobs), self._state is not _RUNNING
            mode = None if is_stopped else self._pause
        may_step = not num_jobs and mode != "keep" and self.runner.life is not _ASLEEP
        if may_step and self._steps.turn(admit_new=mode is None and not is_stopped):
            return True
        self._steps.settle()
        for _ in range(num_jobs):
            self._jobs.popleft().run(self._steps.recompute)
        with self._changed:
            if mode is not None and mode == self._pause and not num_jobs:
                self._is_paused = True
                self._changed.notify_all()
        return num_jobs > 0 or not is_stopped

    def _has_something_to_do(self) -> bool:
        if self._jobs or self._steps.num_in_flight or self._state is not _RUNNING:
            return True
        if self._pause is not None:
            return not self._is_paused
        return self.scheduler.has_work() and self.runner.life is not _ASLEEP

    def _die(self, error: BaseException) -> None:
        _LOG.error("the serving loop died; every live request fails", exc_info=error)
        with self._changed:
            self._state, self._cause = LoopState.DEAD, error
            for handle in self._live.handles():
                self._live.end(handle, "error", self._down())
            for job in self._jobs:
                job.refuse(self._down())
            self._changed.notify_all()

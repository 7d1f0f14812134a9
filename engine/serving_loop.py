"""Serves requests from any thread with one runner and one scheduler, in a thread of its own."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Collection
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from ..fsm import InputRefused, LifeState, StageFailed, StepState, TwoStrokeError
from ..stages.errors import InvalidSchedulerOutput
from ..stages.io import SchedulerOutput
from ..stages.sampling_params import SamplingParams
from .loop_admission import Admission, Admissions, Prompt
from .loop_handle import RequestHandle
from .loop_requests import LiveRequests
from .loop_text import NoText, OutputText, output_text
from .outputs import RequestMetrics, RequestOutput
from .scheduler import RequestRefused, Scheduler, SchedulerConfig
from .tokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from .model_runner import ModelRunner
    from .tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_DEFAULT_PARAMS = SamplingParams()


class ServingLoopDown(TwoStrokeError, RuntimeError):
    """The loop does not run: not started, stopped, or dead; ``__cause__`` is what it died of."""


class SchedulerStalled(TwoStrokeError, RuntimeError):
    """The scheduler says that there is work, and gives a step without any."""


class LoopState(StrEnum):
    """Where a loop is in its life; there is no way back."""

    CREATED = "CREATED"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    DEAD = "DEAD"


class ServingLoop:
    """Adds, aborts and streams requests from any thread, while its own thread steps the runner.

    A request's error goes to that request: a refusal is raised by :meth:`add`, a failure by its stream. A step that
    fails takes its requests with it and nobody else. Anything unexpected, or a runner that can't go on, ends the loop:
    every stream raises :class:`ServingLoopDown` with the cause, and so does :meth:`add` from then on.

    Args:
        runner: ready to step; the loop is the only one to step it, and does not shut it down.
        scheduler: None for the reference scheduler with the runner's limits.
        tokenizer: None for the model's own.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler | None = None, tokenizer: Tokenizer | None = None
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler or scheduler_for(runner)
        loaded = runner.loaded
        self._tokenizer = tokenizer or (loaded.tokenizer if loaded is not None else None)
        self._admissions = Admissions(
            self._tokenizer,
            loaded.chat_template if loaded is not None else None,
            loaded.eos_token_ids if loaded is not None else (),
            runner.spec.vocab_size,
        )
        self._live = LiveRequests()
        self._state = LoopState.CREATED
        self._cause: BaseException | None = None
        self._numbers = itertools.count()
        self._step_number = 0
        # Guards everything above and the scheduler; told when there is something to do.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="twostroke-serving-loop", daemon=True)

    # ---- for any thread

    @property
    def state(self) -> LoopState:
        """CREATED, RUNNING, STOPPED or DEAD."""
        return self._state

    @property
    def healthy(self) -> bool:
        """Whether requests are being served."""
        return self._state is LoopState.RUNNING and self._thread.is_alive()

    @property
    def num_steps(self) -> int:
        """Steps so far; those count too that only told the runner who has finished."""
        return self._step_number

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
                self._changed.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def add(
        self, prompt: Prompt, params: SamplingParams = _DEFAULT_PARAMS, request_id: str | None = None
    ) -> RequestHandle:
        """Queue a request: text, token ids, or chat messages. Never waits for the model.

        Raises:
            RequestRefused: it could never be served, or a live request goes by this id.
            InvalidSamplingParams: parameters that don't fit the model or each other.
            ServingLoopDown: the loop is not running.
        """
        arrival_time = time.monotonic()
        if request_id is None:
            request_id = next(name for number in self._numbers if (name := f"request-{number}") not in self._live)
        admission = self._admissions.prepare(request_id, prompt, params)
        handle = self._handle(request_id, admission, arrival_time)
        texts = [self._text(admission, child) for child in admission.children]
        with self._changed:
            self._require_running()
            for req_id in (request_id, *handle.child_ids):
                if req_id in self._live:
                    raise RequestRefused(request_id, f"the id {req_id!r} is in use by a live request; choose another")
            self._schedule_children(handle, admission)
            self._live.add(handle, texts, self._step_number)
            self._changed.notify()
        return handle

    def abort(self, request_id: str) -> bool:
        """End a request now, with finish reason "abort"; its id is free again. False if no live request has this id."""
        with self._changed:
            handle = self._live.get(request_id)
            return handle is not None and self._end(handle)

    def _end(self, handle: RequestHandle) -> bool:
        child_ids = self._live.end(handle, "abort")
        self.scheduler.finish_requests(child_ids)
        self._changed.notify()
        return bool(child_ids)

    def _close(self, handle: RequestHandle) -> None:
        with self._changed:
            self._end(handle)

    def _schedule_children(self, handle: RequestHandle, admission: Admission) -> None:
        """All of them or, if one is refused, none."""
        try:
            for child_id, params in zip(handle.child_ids, admission.children, strict=True):
                self.scheduler.add_request(child_id, admission.prompt_token_ids, params)
        except BaseException:
            self.scheduler.finish_requests(handle.child_ids)
            raise

    def _handle(self, request_id: str, admission: Admission, arrival_time: float) -> RequestHandle:
        count = len(admission.children)
        blank = RequestOutput(
            request_id=request_id,
            prompt=admission.prompt,
            prompt_token_ids=admission.prompt_token_ids,
            outputs=(),
            finished=False,
            metrics=RequestMetrics(arrival_time=arrival_time),
        )
        child_ids = (request_id,) if count == 1 else tuple(f"{request_id}#{index}" for index in range(count))
        with_logprobs = admission.children[0].logprobs is not None
        return RequestHandle(blank, child_ids, with_logprobs=with_logprobs, close=self._close)

    def _text(self, admission: Admission, params: SamplingParams) -> OutputText:
        if self._tokenizer is None or not params.detokenize:
            return NoText()
        prompt_ids, skip = admission.prompt_token_ids, params.skip_special_tokens
        return output_text(IncrementalDetokenizer(self._tokenizer, prompt_ids, skip_special_tokens=skip), params)

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
            while self._step():
                pass
        except BaseException as error:
            self._die(error)

    def _step(self) -> bool:
        """Wait for work and do one step of it. False once stopped, and the runner was told of every request's end."""
        with self._changed:
            self._changed.wait_for(lambda: self.scheduler.has_work() or self._state is not LoopState.RUNNING)
            if not self.scheduler.has_work():
                return False
            scheduled = self._schedule()
        try:
            output = self.runner.execute_model(scheduled)
            if output is None:
                output = self.runner.sample_tokens().get_output()
        except (StageFailed, InputRefused) as error:
            self._fail_step(scheduled, error)
            return True
        with self._changed:
            for update in self.scheduler.update_from_output(scheduled, output):
                if dropped := self._live.deliver(update):
                    self.scheduler.finish_requests(dropped)
        return True

    def _schedule(self) -> SchedulerOutput:
        scheduled = self.scheduler.schedule()
        if not (scheduled.num_scheduled_tokens or scheduled.finished_req_ids or scheduled.preempted_req_ids):
            raise SchedulerStalled("the scheduler has work, but scheduled nothing and finished nothing")
        self._step_number += 1
        return scheduled

    def _fail_step(self, scheduled: SchedulerOutput, error: Exception) -> None:
        """Undo a step and fail its requests; everyone else goes on, if the runner can."""
        if self.runner.state is StepState.FORWARDED:
            self.runner.rollback()
        with self._changed:
            self.scheduler.rollback(scheduled)
            failed = self._live.fail(_blamed(scheduled, error), self._step_number, error)
            self.scheduler.finish_requests(failed)
        if self.runner.life is LifeState.FAULTED or not scheduled.num_scheduled_tokens:
            raise error

    def _die(self, error: BaseException) -> None:
        _LOG.error("the serving loop died; every live request fails", exc_info=error)
        with self._changed:
            self._state, self._cause = LoopState.DEAD, error
            for handle in self._live.handles():
                self._live.end(handle, "error", self._down())


def scheduler_for(runner: ModelRunner) -> Scheduler:
    """The reference scheduler with a runner's limits."""
    config = runner.config
    max_model_len, num_kv_blocks = config.max_model_len, config.num_kv_blocks
    assert isinstance(max_model_len, int), "the configuration of a loaded runner is resolved"
    assert isinstance(num_kv_blocks, int), "the configuration of a loaded runner is resolved"
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            num_kv_blocks=num_kv_blocks,
            block_sizes=tuple(group.block_size for group in runner.kv_groups),
            enable_prefix_caching=config.enable_prefix_caching,
        )
    )


def _blamed(scheduled: SchedulerOutput, error: Exception) -> Collection[str]:
    """The one request that a refusal names, or everyone in the step."""
    in_step = scheduled.num_scheduled_tokens
    if isinstance(error, InvalidSchedulerOutput) and error.req_id is not None and error.req_id in in_step:
        return (error.req_id,)
    return tuple(in_step)

"""What the endpoints share: the loop, its model, the limits, and the threads that do what the event loop must not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from uuid import uuid4

from attrs import evolve, frozen

from ...stages.sampling_params import SamplingParams
from ..loop_handle import RequestHandle
from ..serving_loop import LoopState, ServingLoop
from .calls import Call, Calls, in_thread
from .config import ServeConfig
from .errors import ApiError
from .grammars import Constraint
from .metrics import Metrics
from .prompts import PromptTokens
from .served_model import ServedModel
from .token_texts import TokenTexts
from .tracing import tracing_to

T = TypeVar("T")
_WORKERS, _ADMINS = 4, 16


@frozen(kw_only=True, eq=False)
class Plan:
    """What a request asks of the engine. Without ``shows_output`` it is the prompt alone that is of interest."""

    prompts: Sequence[PromptTokens]
    params: SamplingParams
    constraint: Constraint | None = None
    shows_output: bool = True


class Service:
    """One server's state. Made and used on one event loop; the methods with plain ``def`` are for any thread."""

    def __init__(self, loop: ServingLoop, config: ServeConfig, model: ServedModel) -> None:
        self.loop = loop
        self.config = config
        self.model = model
        self.token_texts = TokenTexts(model.tokenizer)
        self.started_at = time.time()
        self.is_draining = False
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="twostroke-serve")
        self._admins = ThreadPoolExecutor(_ADMINS, thread_name_prefix="twostroke-admin")
        self._room = threading.BoundedSemaphore(_ADMINS)
        self.tracing = tracing_to(config.otlp_traces_endpoint, model.name)
        self.metrics = Metrics(loop, model.name, vllm_names=config.vllm_metrics)
        num_running = loop.scheduler.config.max_num_seqs
        self.calls = Calls(num_running + config.max_queue, num_running, self._workers, self.metrics)

    def close(self) -> None:
        """Abort what is in flight and end the threads. The loop goes on: it is its owner's."""
        for call in self.calls.all():
            call.close()
        self._workers.shutdown(wait=False)
        self._admins.shutdown(wait=False, cancel_futures=True)
        self.metrics.close()
        self.tracing.close()

    def why_not_ready(self) -> str | None:
        """Why new requests would not be served now; None if they would."""
        if self.is_draining:
            return "the server is shutting down"
        if not self.loop.healthy:
            return self.fault()
        if self.loop.runner.life.name == "ASLEEP":
            return "the engine is asleep; POST /wake_up"
        if self.loop.is_paused:
            return "the engine is paused; POST /resume"
        return None

    def fault(self) -> str:
        """What is wrong with the engine."""
        runner = self.loop.runner
        return runner.fault_reason or f"the serving loop is {self.loop.state}, the runner is {runner.life}"

    async def begin(
        self, prefix: str, request_id: str, num_sequences: int, plan: Callable[[], Plan]
    ) -> tuple[Call, Plan]:
        """Let a request in: ``plan`` is called on another thread, and what it gives is added to the loop.

        Raises:
            ApiError: 429 where there is no room, 503 while shutting down.
            TwoStrokeError: what ``plan`` or the loop refuse.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down; try another one", code="shutting_down")
        self.calls.reserve(num_sequences)
        call_id = f"{prefix}-{uuid4().hex}"

        def add() -> tuple[Call, Plan]:
            try:
                chosen = plan()
                handles = self._add(chosen, call_id)
            except BaseException:
                self.calls.give_back(num_sequences)
                raise
            call = Call(call_id, request_id, handles, num_sequences, self.calls)
            self.calls.begin(call)
            return call, chosen

        return await in_thread(
            self._workers,
            add,
            unwanted=lambda added: added[0].close(),
            never_ran=lambda: self.calls.give_back(num_sequences),
        )

    async def work(self, fn: Callable[[], T]) -> T:
        """Run something short on another thread (tokenizing)."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, fn)

    async def administer(self, fn: Callable[[], T]) -> T:
        """Run something that may wait for the engine on another thread, which it has to itself.

        Raises:
            ApiError: 429, too many wait already.
        """
        if not self._room.acquire(blocking=False):
            message = f"{_ADMINS} calls wait for the engine already; POST /resume ends those that wait for a pause"
            raise ApiError(429, message, code="too_many_waiting", retry_after_s=1)
        try:
            future = self._admins.submit(fn)
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(future)

    def aborted_by(self) -> ApiError | None:
        """Why requests end with "abort" if it is the server's doing; None if somebody asked for it."""
        if self.loop.state is LoopState.STOPPED or self.is_draining:
            return ApiError(503, "the server is shutting down; the request was aborted", code="shutting_down")
        return None

    def _add(self, plan: Plan, call_id: str) -> list[RequestHandle]:
        """All prompts or, if one is refused, none."""
        grammar = None if plan.constraint is None else plan.constraint.compiled_for(self.loop)
        params = evolve(plan.params, eos_token_ids=self.model.eos_token_ids)
        handles: list[RequestHandle] = []
        try:
            for index, prompt in enumerate(plan.prompts):
                name = call_id if len(plan.prompts) == 1 else f"{call_id}-{index}"
                ids = {"prompt_token_ids": prompt.token_ids}
                handles.append(self.loop.add(ids, params, name, grammar=grammar))
        except BaseException:
            for handle in handles:
                handle.close()
            raise
        return handles


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Mapping[str, object]:
    """The counts of tokens that clients pay for."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }

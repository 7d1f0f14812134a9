"""Forward passes without requests: warm-up, profiling and graph capture, as inputs to the ordinary stages."""

from __future__ import annotations

import resource
import time

import numpy as np
import torch
from attrs import frozen

from ..fsm import InputRefused, Pipeline, Transaction, WiringError
from ..stages.dispatch import FixedDispatch
from ..stages.forward import Forward
from ..stages.io import SchedulerOutput
from ..stages.records import Batch, BatchExecutionDescriptor
from ..stages.specs import NULL_ROW
from .assembly import Assembly


@frozen(kw_only=True)
class ProfileResult:
    """What the largest forward pass took. ``peak_bytes`` is memory beyond what was held before it."""

    num_tokens: int
    num_reqs: int
    seconds: float
    peak_bytes: int


class DummyRuns:
    """Batches of the null row, sent through the dummy pipeline: every slot is padding, so nothing is stored."""

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts

    def run(self, num_tokens: int) -> None:
        """One forward pass of ``num_tokens`` tokens, dispatched like a real step of decodes.

        Raises:
            InputRefused: more tokens than the largest step has, or none.
        """
        most = self._most_tokens
        if not isinstance(num_tokens, int) or not 1 <= num_tokens <= most:
            raise InputRefused(
                f"a dummy run takes 1 to {most} tokens, the tokens of the largest step; got {num_tokens!r}"
            )
        self._run(self._batch(num_tokens, min(num_tokens, self._parts.config.max_num_seqs)), self._parts.stages.dummy)

    def profile(self) -> ProfileResult:
        """The largest batch that the limits allow: all tokens, spread over all requests, logits for each."""
        config = self._parts.config
        num_reqs, num_tokens = config.max_num_seqs, self._most_tokens
        before, start = _peak_bytes(), time.perf_counter()
        self._run(self._batch(num_tokens, num_reqs), self._parts.stages.dummy)
        seconds = time.perf_counter() - start
        peak = _peak_bytes() - before
        return ProfileResult(num_tokens=num_tokens, num_reqs=num_reqs, seconds=seconds, peak_bytes=max(peak, 0))

    def capture(self) -> int:
        """Capture all graphs of the dispatch table in its order; returns how many.

        Raises:
            WiringError: the forward stage was replaced by one that cannot capture.
        """
        stages, count = self._parts.stages, 0
        self._parts.graphs.drop("being captured again")
        for plan in self._parts.dispatch.capture_plans():
            forward = stages["forward"]
            if not isinstance(forward, Forward):
                raise WiringError(
                    f"the forward stage {forward!r} cannot be captured; use cudagraph_mode='NONE' with it, "
                    "or wrap the model instead of the stage"
                )
            self.run_plan(plan, stages.dummy.replace("forward", forward.capturing()))
            count += 1
        return count

    @property
    def graph_bytes(self) -> int:
        """What the captured graphs hold."""
        return self._parts.graphs.describe().static_bytes

    def drop_graphs(self) -> None:
        """Forget what was captured."""
        self._parts.graphs.drop("only measured")

    def run_plan(self, plan: BatchExecutionDescriptor, pipeline: Pipeline | None = None) -> None:
        """One forward pass of exactly this plan, through the dummy pipeline or one derived from it."""
        pipeline = pipeline or self._parts.stages.dummy
        self._run(self._batch(plan.num_tokens, plan.num_reqs), pipeline.replace("dispatch", FixedDispatch(plan)))

    @property
    def _most_tokens(self) -> int:
        """Tokens of the largest step that the limits allow."""
        config = self._parts.config
        return min(config.max_num_batched_tokens, config.max_num_seqs * self._parts.table.max_model_len)

    def _batch(self, num_tokens: int, num_reqs: int) -> Batch:
        counts = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int64)
        counts[: num_tokens % num_reqs] += 1
        zeros = np.zeros(num_reqs, dtype=np.int64)
        return Batch(
            req_ids=[""] * num_reqs,
            rows=zeros + NULL_ROW,
            num_scheduled_tokens=counts,
            num_computed_tokens=zeros,
            num_tokens=num_tokens,
        )

    def _run(self, batch: Batch, pipeline: Pipeline) -> None:
        transaction = Transaction(0)
        with torch.inference_mode():
            pipeline.run({SchedulerOutput: SchedulerOutput.make_empty(), Transaction: transaction, Batch: batch})
        transaction.commit()


def _peak_bytes() -> int:
    """High-water mark of the process's memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""What a serving loop takes from its runner where it is not told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .loop_admission import Admission
from .loop_handle import RequestHandle
from .outputs import RequestMetrics, RequestOutput
from .scheduler import InvalidSchedulerConfig, Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from .model_runner import ModelRunner


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


def depth_for(runner: ModelRunner, depth: int | None) -> int:
    """How many steps may be in flight: ``depth``, or what suits the runner.

    Raises:
        InvalidSchedulerConfig: below 1.
    """
    if depth is None:
        return 2 if runner.config.async_scheduling else 1
    if depth < 1:
        raise InvalidSchedulerConfig("depth", f"must be at least 1, got {depth}")
    return depth


def handle_for(
    request_id: str, admission: Admission, arrival_time: float, close: Callable[[RequestHandle], None]
) -> RequestHandle:
    """The consumer's end of a request that is about to be added; ``close`` aborts it."""
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
    return RequestHandle(blank, child_ids, with_logprobs=with_logprobs, close=close)

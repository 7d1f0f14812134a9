"""What a serving loop takes from its runner where it is not told."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

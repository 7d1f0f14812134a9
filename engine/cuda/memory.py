"""How much of a GPU's memory is left for the KV cache: measured, not estimated."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config import EngineConfig, InvalidConfig
from ..dummy_runs import DummyRuns

SLACK_BYTES = 256 * 2**20
"""For what libraries allocate later: workspaces, staging, the allocator's own rounding."""


def kv_cache_budget(config: EngineConfig, device: torch.device, trial: Callable[[EngineConfig], DummyRuns]) -> int:
    """Bytes for the KV cache within ``config.gpu_memory_utilization``.

    ``trial`` makes dummy runs with tables of their own and the smallest cache. The largest forward pass is run once,
    and every graph captured once and dropped again.

    Raises:
        InvalidConfig: nothing is left.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trial(config.replace(cudagraph_mode="NONE", cudagraph_capture_sizes=())).profile()
    forward = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    graphs = 0
    if config.cudagraph_mode != "NONE":
        runs = trial(config)
        runs.capture()
        graphs = runs.graph_bytes
        runs.drop_graphs()
        torch.cuda.empty_cache()
    budget = int(total * config.gpu_memory_utilization) - taken - forward - graphs - SLACK_BYTES
    if budget <= 0:
        raise InvalidConfig(
            f"no memory is left for a KV cache on {device}: of {total >> 20} MiB, {taken >> 20} are taken, the largest "
            f"step needs {forward >> 20} and graphs {graphs >> 20}; raise gpu_memory_utilization "
            f"({config.gpu_memory_utilization}) or lower max_num_batched_tokens or cudagraph_capture_sizes"
        )
    return budget

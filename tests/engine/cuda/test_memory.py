"""The KV cache takes what is left of a GPU: the sum over a device that is only counted."""

from __future__ import annotations

import pytest
import torch
from twostroke.engine.config import EngineConfig, InvalidConfig
from twostroke.engine.cuda.memory import SLACK_BYTES, kv_cache_budget

MIB = 2**20
TOTAL, TAKEN, FORWARD, GRAPHS = 1000 * MIB, 300 * MIB, 70 * MIB, 25 * MIB
DEVICE = torch.device("cuda:0")


class CountedGPU:
    """Stands in for ``torch.cuda``, and for the dummy runs that a measurement makes on it."""

    def __init__(self) -> None:
        self.allocated = TAKEN // 2  # by this process; the rest is others', or held by the allocator
        self.cached = 40 * MIB
        self.peak = 900 * MIB  # of before
        self.tried: list[EngineConfig] = []
        self.captured = 0
        self.graph_bytes = 0

    def trial(self, config: EngineConfig) -> CountedGPU:
        self.tried.append(config)
        return self

    def profile(self) -> None:
        self.peak = max(self.peak, self.allocated + FORWARD)

    def capture(self) -> int:
        self.graph_bytes = GRAPHS
        self.captured += 1
        return 3

    def drop_graphs(self) -> None:
        self.captured -= 1

    def synchronize(self, device: torch.device) -> None:
        assert device == DEVICE

    def empty_cache(self) -> None:
        self.cached = 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        return TOTAL - TAKEN - self.cached, TOTAL

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CountedGPU:
    counted = CountedGPU()
    for name in (
        "synchronize",
        "empty_cache",
        "mem_get_info",
        "reset_peak_memory_stats",
        "memory_allocated",
        "max_memory_allocated",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(counted, name))
    return counted


def budget(gpu: CountedGPU, config: EngineConfig) -> int:
    return kv_cache_budget(config, DEVICE, gpu.trial)  # pyright: ignore[reportArgumentType]


def test_what_is_left_beside_weights_forward_and_graphs(gpu: CountedGPU) -> None:
    config = EngineConfig(cudagraph_mode="FULL", cudagraph_capture_sizes=(1, 2), gpu_memory_utilization=0.8)
    assert budget(gpu, config) == 800 * MIB - TAKEN - FORWARD - GRAPHS - SLACK_BYTES
    assert gpu.captured == 0, "graphs that were only measured are dropped"
    assert [tried.cudagraph_mode for tried in gpu.tried] == ["NONE", "FULL"]
    assert gpu.tried[0].cudagraph_capture_sizes == ()


def test_without_graphs_none_are_measured(gpu: CountedGPU) -> None:
    config = EngineConfig(cudagraph_mode="NONE", gpu_memory_utilization=1.0)
    assert budget(gpu, config) == TOTAL - TAKEN - FORWARD - SLACK_BYTES
    assert [tried.cudagraph_mode for tried in gpu.tried] == ["NONE"]


def test_nothing_left_is_refused_with_what_took_it(gpu: CountedGPU) -> None:
    config = EngineConfig(cudagraph_mode="FULL", gpu_memory_utilization=0.6)
    with pytest.raises(InvalidConfig) as raised:
        budget(gpu, config)
    assert str(raised.value) == (
        "no memory is left for a KV cache on cuda:0: of 1000 MiB, 300 are taken, the largest step needs 70 and graphs "
        "25; raise gpu_memory_utilization (0.6) or lower max_num_batched_tokens or cudagraph_capture_sizes"
    )

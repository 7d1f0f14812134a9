"""Time on a GPU, read from events around replays of a graph, so that the cost of launching does not show."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def replay_time_us(work: Callable[[], object], *, num_replays: int = 20, num_rounds: int = 5) -> float:
    """Median microseconds of one replay of ``work``, which launches kernels on the current device and nothing else."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles, and lets libraries allocate
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
        rounds: list[float] = []
        for _ in range(num_rounds):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            for _ in range(num_replays):
                graph.replay()
            stop.record(stream)
            stop.synchronize()
            rounds.append(start.elapsed_time(stop) * 1000 / num_replays)
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(rounds)

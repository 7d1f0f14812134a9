"""The server under load: nobody loses a token or gets one twice, whatever the others do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from load import Load, Wanted, run_load
from twostroke.stages.sampling_params import SamplingParams

ENGINE = {"max_num_seqs": 32, "batch_invariant": True, "num_kv_blocks": 400}
"""Few blocks, so that requests are preempted; batch-invariant, so that texts don't depend on the company."""


@pytest.mark.parametrize(
    ("clients", "max_queue", "amount"),
    [
        pytest.param(200, 200, {"requests": 3}, id="short"),
        pytest.param(200, 8, {"seconds": 120.0}, id="long", marks=pytest.mark.e2e),
    ],
)
def test_no_token_is_lost_or_doubled(
    start: Callable[..., Any], stack: ExitStack, clients: int, max_queue: int, amount: dict[str, Any]
) -> None:
    served = start(stack, engine=ENGINE, max_queue=max_queue)
    prompts = [f"prompt number {index} " * (1 + index % 3) for index in range(12)]
    wanted: list[Wanted] = []
    for prompt in prompts:
        result = served.loop.add(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)).result(30)
        wanted.append(Wanted(prompt, result.text, len(result.outputs[0].token_ids)))
    load = Load(served.background.server.port, wanted, clients, seed=1, **amount)
    with ThreadPoolExecutor(1) as pool:  # a browser's driver may have left a running event loop on this thread
        report = pool.submit(lambda: asyncio.run(run_load(load))).result()
    print(f"\n{report}")
    assert +report.errors == {}
    assert (report.lost, report.doubled) == (0, 0)
    kinds = {"stream", "whole", "slow", "leave", "pair", "bad", "garbage"}
    assert (kinds | {"refused with 429"} if max_queue < clients else kinds) <= report.requests.keys()
    deadline = time.monotonic() + 10
    while served.service.calls.num_sequences or served.loop.scheduler.has_work():
        assert time.monotonic() < deadline, "requests are left over"
        time.sleep(0.01)
    assert served.loop.scheduler.stats().num_running == 0
    assert report.memory_growth_bytes < 64 * 2**20

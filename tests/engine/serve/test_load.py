"""The server under load: nobody loses a token or gets one twice, whatever the others do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from load import Load, Wanted, run_load
from twostroke.stages.sampling_params import SamplingParams

ENGINE = {"max_num_seqs": 32, "batch_invariant": True, "num_kv_blocks": 400}
"""Few blocks, so that requests are preempted; batch-invariant, so that texts don't depend on the company."""


@pytest.mark.parametrize(
    ("clients", "amount"),
    [
        pytest.param(48, {"requests": 4}, id="short"),
        pytest.param(200, {"seconds": 120.0}, id="long", marks=pytest.mark.e2e),
    ],
)
def test_no_token_is_lost_or_doubled(
    start: Callable[..., Any], stack: ExitStack, clients: int, amount: dict[str, Any]
) -> None:
    served = start(stack, engine=ENGINE, max_queue=8)
    prompts = [f"prompt number {index} " * (1 + index % 3) for index in range(12)]
    wanted: list[Wanted] = []
    for prompt in prompts:
        result = served.loop.add(prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)).result(30)
        wanted.append(Wanted(prompt, result.text, len(result.outputs[0].token_ids)))
    report = asyncio.run(run_load(Load(served.background.server.port, wanted, clients, seed=1, **amount)))
    print(f"\n{report}")
    assert +report.errors == {}
    assert (report.lost, report.doubled) == (0, 0)
    assert {"stream", "whole", "slow", "leave", "pair", "bad", "garbage", "refused with 429"} <= report.requests.keys()
    deadline = time.monotonic() + 10
    while served.service.calls.num_sequences or served.loop.scheduler.has_work():
        assert time.monotonic() < deadline, "requests are left over"
        time.sleep(0.01)
    assert served.loop.scheduler.stats().num_running == 0
    assert report.memory_growth_bytes < 64 * 2**20

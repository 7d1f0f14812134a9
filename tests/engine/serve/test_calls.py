"""The engine's end of a call: waiting for a whole result on an event loop, merging several, work on other threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from twostroke.engine.serve.calls import in_thread, merged
from twostroke.engine.serving_loop import ServingLoopDown
from twostroke.stages.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def test_a_whole_result_is_waited_for_without_its_tokens(served: Any) -> None:
    want = served.loop.add("abc", PARAMS).result(30)

    async def wait() -> list[Any]:
        handles = [served.loop.add("abc", PARAMS) for _ in range(3)]
        return [*await asyncio.gather(*(handle.wait() for handle in handles)), await handles[0].wait()]

    assert [result.outputs for result in asyncio.run(wait())] == [want.outputs] * 4


def test_who_waits_hears_of_aborts_and_failures(served: Any) -> None:
    async def wait_and_abort() -> Any:
        handle = served.loop.add("abc", SamplingParams(max_tokens=400, ignore_eos=True))
        waiting = asyncio.ensure_future(handle.wait())
        await asyncio.sleep(0)
        served.loop.abort(handle.request_id)
        return await waiting

    assert asyncio.run(wait_and_abort()).outputs[0].finish_reason == "abort"

    async def wait_and_fail() -> None:
        handle = served.loop.add("abc", SamplingParams(max_tokens=400, ignore_eos=True))
        waiting = asyncio.ensure_future(handle.wait())
        await asyncio.sleep(0)
        handle.end("error", ServingLoopDown("for a test"))
        served.loop.abort(handle.request_id)
        await waiting

    with pytest.raises(ServingLoopDown, match="for a test"):
        asyncio.run(wait_and_fail())


def test_several_requests_are_merged_in_the_order_of_their_news(served: Any) -> None:
    prompts = ["a", "bb", "ccc"]
    wanted = [served.loop.add(prompt, PARAMS).result(30).text for prompt in prompts]

    async def collect() -> list[str]:
        texts = [""] * 3
        async for index, delta in merged([served.loop.add(prompt, PARAMS) for prompt in prompts]):
            texts[index] += delta.text
        return texts

    assert asyncio.run(collect()) == wanted


@pytest.mark.parametrize("is_begun", [True, False])
def test_what_nobody_waits_for_any_more_is_given_back(is_begun: bool) -> None:
    happened: list[str] = []
    began, may_end, told = threading.Event(), threading.Event(), threading.Event()

    def tell(what: str) -> None:
        happened.append(what)
        told.set()

    def work() -> str:
        began.set()
        assert may_end.wait(10)
        return "a result"

    async def leave(pool: ThreadPoolExecutor) -> None:
        blocker = pool.submit(may_end.wait) if not is_begun else None
        task = asyncio.ensure_future(in_thread(pool, work, unwanted=tell, never_ran=lambda: tell("never ran")))
        await asyncio.sleep(0)
        assert began.wait(10) if is_begun else not began.is_set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_end.set()
        assert blocker is None or blocker.result(10)

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(leave(pool))
        assert told.wait(10)
    assert happened == ["a result" if is_begun else "never ran"]

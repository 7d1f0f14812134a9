"""The serving loop inside somebody's asyncio program: python examples/embed_in_asyncio.py

The engine steps on a thread of its own; the program's event loop never waits for it. ``async for`` takes what is new,
``await handle.wait()`` the whole, and leaving a ``with`` block early (here: a time limit) aborts the request.
"""

import asyncio

from twostroke.engine import EngineConfig, SamplingParams, ServingLoop, build_runner

PARAMS = SamplingParams(temperature=0, max_tokens=16)


async def ticker(ticks: list[float]) -> None:
    """What the program does besides: it goes on all the time."""
    while True:
        ticks.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)


async def stream(loop: ServingLoop, question: str) -> str:
    text = ""
    async for delta in loop.add([{"role": "user", "content": question}], PARAMS):
        text += delta.text
    return text


async def whole(loop: ServingLoop, prompt: str) -> str:
    return (await loop.add(prompt, PARAMS).wait()).text


async def impatient(loop: ServingLoop, prompt: str) -> str:
    with loop.add(prompt, SamplingParams(max_tokens=2000, ignore_eos=True)) as handle:
        try:
            async with asyncio.timeout(0.3):
                await handle.wait()
        except TimeoutError:
            return "gave up, and the request is aborted"
    return "was done in time"


async def main() -> None:
    ticks: list[float] = []
    background = asyncio.create_task(ticker(ticks))
    runner = await asyncio.to_thread(build_runner, EngineConfig(model="smollm2", device="cpu"))
    with ServingLoop(runner) as loop:
        work = (stream(loop, "Name three colours."), whole(loop, "The capital of France is"), impatient(loop, "Once"))
        for answer in await asyncio.gather(*work):
            print(repr(answer))
    background.cancel()
    print(f"the program ticked {len(ticks)} times meanwhile")
    runner.shutdown()


asyncio.run(main())

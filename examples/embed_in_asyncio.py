"""The serving loop inside somebody's asyncio program, which never waits for it: python examples/embed_in_asyncio.py"""

import asyncio

from twostroke.engine import EngineConfig, SamplingParams, ServingLoop, build_runner


async def stream(loop: ServingLoop, question: str) -> str:
    text = ""
    async for delta in loop.add([{"role": "user", "content": question}], SamplingParams(temperature=0)):
        text += delta.text
    return text


async def whole(loop: ServingLoop, prompt: str) -> str:
    return (await loop.add(prompt, SamplingParams(temperature=0)).wait()).text


async def impatient(loop: ServingLoop, prompt: str) -> str:
    with loop.add(prompt, SamplingParams(max_tokens=2000, ignore_eos=True)) as handle:
        try:
            async with asyncio.timeout(0.3):
                return (await handle.wait()).text
        except TimeoutError:
            return "gave up, and leaving the block aborts the request"


async def main() -> None:
    runner = await asyncio.to_thread(build_runner, EngineConfig(model="smollm2", device="cpu"))
    with ServingLoop(runner) as loop:
        work = (stream(loop, "Name three colours."), whole(loop, "The capital of France is"), impatient(loop, "Once"))
        for answer in await asyncio.gather(*work):
            print(repr(answer))
    runner.shutdown()


asyncio.run(main())

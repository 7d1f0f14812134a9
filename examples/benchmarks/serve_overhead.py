"""What the HTTP server adds to the serving loop: 32 requests, SmolLM2 in float32 on a CPU.

    python examples/benchmarks/serve_overhead.py --threads 1
    python examples/benchmarks/serve_overhead.py --quick

The workload is that of ``cpu_offline.py`` (random prompts of 16 to 128 tokens, 16 to 64 greedy outputs). In one
process, round by round: the loop alone (requests added, results waited for), and the same loop behind the server, asked
for 32 streams at once, and for 32 whole answers, by a client in a process of its own. The ratio is the server's wall
time over the loop's (limit 1.10); beside it that of the processor's time of the process that serves, which other work
on the machine disturbs less. Times to the first token and between tokens are the client's, from when it asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

LIMIT = 1.10


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="What the HTTP server adds to the serving loop.")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds")
    parser.add_argument("--quick", action="store_true", help="4 short requests, one round")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.client:
        client()
    elif chosen.quick:
        measure(bodies(4, (8, 16), (4, 8)), chosen.threads, 1)
    else:
        measure(bodies(32, (16, 128), (16, 64)), chosen.threads, chosen.repeats)


def bodies(num_requests: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[dict[str, Any]]:
    """Requests with sizes drawn evenly from ranges, ends included."""
    import numpy as np

    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(100, 40_000, size).tolist() for size in rng.integers(prompt[0], prompt[1] + 1, num_requests)
    ]
    lengths = rng.integers(output[0], output[1] + 1, num_requests).tolist()
    return [
        {"prompt": ids, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        for ids, length in zip(prompts, lengths, strict=True)
    ]


def measure(requests: Sequence[dict[str, Any]], num_threads: int, repeats: int) -> None:
    """Rounds of all contenders, the first one uncounted, and their table."""
    import torch
    from twostroke.engine import EngineConfig, ServingLoop, build_runner
    from twostroke.engine.serve import ServeConfig, create_app
    from twostroke.engine.serve.server import BackgroundServer

    torch.set_num_threads(num_threads)
    config = EngineConfig(
        model="smollm2",
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=32,
        kv_cache_memory_bytes=400 * 2**20,
        enable_prefix_caching=False,
    )
    runner = build_runner(config)
    settings = ServeConfig(port=0)
    command = [sys.executable, __file__, "--client"]
    timings: dict[str, list[dict[str, Any]]] = {"loop alone": [], "server, streams": [], "server, whole": []}
    with ServingLoop(runner) as loop, BackgroundServer(create_app(loop, settings), settings) as background:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        port = background.server.port
        contenders: dict[str, Callable[[], dict[str, Any]]] = {
            "loop alone": lambda: loop_alone(loop, requests),
            "server, streams": lambda: ask(process, port, [{**body, "stream": True} for body in requests]),
            "server, whole": lambda: ask(process, port, requests),
        }
        for repeat in range(repeats + 1):
            for name, contender in contenders.items():
                began = time.process_time()
                result = contender()
                result["processor"] = time.process_time() - began
                if repeat:
                    timings[name].append(result)
        process.communicate()
    runner.shutdown()
    if len({tuple(result["texts"]) for results in timings.values() for result in results}) > 1:
        print("the texts differ: rounding depends on what was computed together")
    show(requests, timings, f"torch {torch.__version__}, {num_threads} of {os.cpu_count()} cores")


def loop_alone(loop: Any, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The texts, and seconds on the wall."""
    from twostroke.engine import SamplingParams

    began = time.perf_counter()
    handles = [
        loop.add(body["prompt"], SamplingParams(**{key: value for key, value in body.items() if key != "prompt"}))
        for body in requests
    ]
    return {"texts": [handle.result().text for handle in handles], "seconds": time.perf_counter() - began}


def ask(process: subprocess.Popen[str], port: int, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the client's process makes of these requests."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps({"port": port, "requests": requests}), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def show(requests: Sequence[dict[str, Any]], timings: dict[str, list[dict[str, Any]]], where: str) -> None:
    """The table, and how soon tokens came."""
    num_outputs = sum(body["max_tokens"] for body in requests)
    num_prompt = sum(len(body["prompt"]) for body in requests)
    alone = timings["loop alone"]
    print(f"{where}, load {os.getloadavg()[0]:.1f}; {len(requests)} requests, {num_prompt} prompt tokens, ", end="")
    print(f"{num_outputs} outputs; medians of {len(alone)}")
    print(f"{'':18}{'seconds':>9}{'tokens/s':>10}{'ratio':>8}{'CPU s':>9}{'ratio':>8}")
    for name, results in timings.items():
        line = f"{name:18}"
        for key in ("seconds", "processor"):
            value = median(result[key] for result in results)
            ratio = median(result[key] / base[key] for result, base in zip(results, alone, strict=True))
            line += f"{value:9.3f}" + (f"{num_outputs / value:10.1f}" if key == "seconds" else "") + f"{ratio:8.3f}"
        print(line)
    print(f"ratios to the loop alone are medians of each round's; limit {LIMIT:.2f}")
    for label, key in (("time to first token", "first"), ("between tokens", "gaps")):
        values = sorted(value for result in timings["server, streams"] for value in result[key])
        p50, p99 = (values[min(int(len(values) * share), len(values) - 1)] * 1000 for share in (0.5, 0.99))
        print(f"{label}: p50 {p50:.1f} ms, p99 {p99:.1f} ms")


def client() -> None:
    """One workload a line from standard input, one result a line; needs nothing but the standard library."""
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps(asyncio.run(run(work["port"], work["requests"]))), flush=True)


async def run(port: int, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All requests at once."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(one(port, body) for body in requests))
    seconds = time.perf_counter() - began
    first = [times[1] - times[0] for _, times in answers if len(times) > 1]
    gaps = [later - earlier for _, times in answers for earlier, later in pairwise(times[1:])]
    return {"seconds": seconds, "texts": [text for text, _ in answers], "first": first, "gaps": gaps}


async def one(port: int, body: dict[str, Any]) -> tuple[str, list[float]]:
    """The text, and when it was asked for and pieces of it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "host: localhost", "connection: close", "content-type: application/json")
    head = "\r\n".join((*lines, f"content-length: {len(data)}", "", ""))
    times = [time.perf_counter()]
    writer.write(head.encode() + data)
    text, is_stream = "", bool(body.get("stream"))
    while line := await reader.readline():
        if line.startswith(b"data: {" if is_stream else b"{"):
            piece = json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
            text += piece
            if is_stream and piece:
                times.append(time.perf_counter())
    writer.close()
    return text, times


if __name__ == "__main__":
    main()

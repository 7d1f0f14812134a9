"""Memory on a CPU: the demo, the tables of many long requests, and growth over many steps.

    OMP_NUM_THREADS=1 python examples/benchmarks/memory.py
    OMP_NUM_THREADS=1 python examples/benchmarks/memory.py --only tables growth --steps 2000

Every part runs in a process of its own; resident sizes are read from /proc, after a collection of garbage and after
the allocator gave back what is free.

demo: SmolLM2 in float32, loaded and after serving 32 requests, against the bytes of its weights.
tables: what 256 requests of 2,048 tokens take in the request table, block tables, sampling columns and input buffers of
a runner, and by how much the process grew, against the bytes of the token ids themselves (int32). The model is a toy;
all tokens but each request's last count as computed, so that the KV cache is hardly touched.
growth: 10,000 decode steps of a serving loop over a toy model, with requests coming and going, some of them aborted, of
all sampling parameters. By how much the process grew after the first fifth of the steps, in KiB for 1,000 steps, and
against its resident size; and the blocks of Python's allocator.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from sys import getallocatedblocks
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from attrs import frozen
from twostroke.engine import EngineConfig, SamplingParams, ServingLoop, build_runner
from twostroke.engine.models import random_model, tiny_config
from twostroke.stages.io import CachedRequestData, NewRequestData, SchedulerOutput

MIB = 2**20
PARTS = ("demo", "tables", "growth")
STEPS = 10_000
TABLE_REQUESTS, TABLE_TOKENS, BLOCK_SIZE = 256, 2048, 16
LIVE_REQUESTS = 16


def resident_bytes(field: str = "VmRSS") -> int:
    """The resident size of this process, or another field of its status."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def arrays_of(value: Any, seen: set[int]) -> Iterator[tuple[int, int]]:
    """Address and bytes of the storage of every tensor and array that an object holds, itself or through others."""
    if id(value) in seen or isinstance(value, type | str | int | float | FunctionType | ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        base: Any = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        yield base.ctypes.data, base.nbytes
    else:
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        named = [getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for child in (*inner, *named, *getattr(value, "__dict__", {}).values()):
            yield from arrays_of(child, seen)


def bytes_of(*values: Any) -> int:
    """Bytes of all arrays that these blocks hold, shared ones once."""
    seen: set[int] = set()
    return sum({address: size for value in values for address, size in arrays_of(value, seen)}.values())


@frozen
class Figures:
    """What one part found: bytes by name, each against ``peer`` bytes of ``peer_name``, and what else is to be said."""

    title: str
    peer: int
    peer_name: str
    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """As it is printed."""
        lines = [
            f"  {name:44}{size / MIB:10.2f} MiB{size / self.peer:8.3f}x of {self.peer_name}"
            for name, size in self.sizes.items()
        ]
        return "\n".join((self.title, *(f"  {note}" for note in self.notes), *lines))


def demo() -> Figures:
    """SmolLM2: loaded, and after serving."""
    empty = resident_bytes()
    runner = build_runner(EngineConfig(device="cpu", max_model_len=512, kv_cache_memory_bytes=256 * MIB))
    assert runner.loaded is not None, "the runner read its model itself"
    model = runner.loaded.model
    weights = sum(tensor.nbytes for name, tensor in model.tensors().items() if not name.endswith(".transposed"))
    copies = sum(tensor.nbytes for tensor in model.tensors().values()) - weights
    cache = bytes_of(runner.parts.kv_cache)
    sizes = {
        "weights": weights,
        "transposed copies (read faster by a few rows)": copies,
        "KV cache": cache,
        "python, torch and this package": empty,
        "grown when loaded": resident_bytes() - empty,
        "peak while loading": resident_bytes("VmHWM") - empty,
    }
    with ServingLoop(runner) as loop:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        rng = np.random.default_rng(0)
        for handle in [loop.add(rng.integers(100, 40_000, 64).tolist(), params) for _ in range(32)]:
            handle.result()
    sizes |= {
        "grown after serving": resident_bytes() - empty,
        "peak": resident_bytes("VmHWM") - empty,
        "beyond weights, copies and cache": resident_bytes() - empty - weights - copies - cache,
    }
    title = f"demo: SmolLM2 in {runner.config.dtype}, 32 requests of 64 + 32 tokens"
    return Figures(title, weights, "the weights", sizes)


def tables() -> Figures:
    """256 requests of 2,048 tokens."""
    num_blocks = TABLE_TOKENS // BLOCK_SIZE
    model = random_model(tiny_config(num_hidden_layers=1, max_position_embeddings=TABLE_TOKENS))
    config = EngineConfig(
        device="cpu",
        max_num_seqs=TABLE_REQUESTS,
        max_model_len=TABLE_TOKENS,
        block_size=BLOCK_SIZE,
        num_kv_blocks=TABLE_REQUESTS * num_blocks + 1,
    )
    runner = build_runner(config, model=model)
    ids = TABLE_REQUESTS * TABLE_TOKENS * np.dtype(np.int32).itemsize
    names = [f"r{index}" for index in range(TABLE_REQUESTS)]

    def step(new: tuple[NewRequestData, ...], **others: Any) -> None:
        """One token of each request, unless they are finished."""
        counts = {} if "finished_req_ids" in others else dict.fromkeys(names, 1)
        scheduled = SchedulerOutput(
            scheduled_new_reqs=new, num_scheduled_tokens=counts, total_num_scheduled_tokens=len(counts), **others
        )
        if runner.execute_model(scheduled) is None:
            runner.sample_tokens().get_output()

    def request(index: int, length: int) -> NewRequestData:
        """A prompt of which only the last token is left to compute."""
        first = 1 + index * num_blocks
        return NewRequestData(
            req_id=names[index],
            prompt_token_ids=[7] * length,
            block_ids=[list(range(first, first + -(-(length + 1) // BLOCK_SIZE)))],
            num_computed_tokens=length - 1,
            sampling_params=SamplingParams(temperature=0.7, top_p=0.9),
        )

    parts = runner.parts
    step(tuple(request(index, 2) for index in range(TABLE_REQUESTS)))  # what a first step brings with it
    step((), finished_req_ids=set(names))
    empty = resident_bytes()
    step(tuple(request(index, TABLE_TOKENS - 1) for index in range(TABLE_REQUESTS)))
    computed = [TABLE_TOKENS - 1] * TABLE_REQUESTS
    step((), scheduled_cached_reqs=CachedRequestData(req_ids=names, num_computed_tokens=computed))
    assert int(parts.table.num_tokens.sum()) >= TABLE_REQUESTS * TABLE_TOKENS, "every request is at its full length"
    table, columns, buffers = parts.table, parts.columns, parts.buffers
    held = bytes_of(table, columns, buffers, parts.kv_cache, model)
    sizes = {
        "the ids themselves": ids,
        "token table": bytes_of(table.token_ids, table.token_ids_host),
        "block tables": bytes_of(table.block_tables),
        "prompts kept by the requests": bytes_of(table.records),
        "sampling columns": bytes_of(columns),
        "input buffers": bytes_of(buffers),
        "all of it": bytes_of(table, columns, buffers),
        "attention's plan, and what it gathers": bytes_of(parts.stages) - held,
        "growth of the process": resident_bytes() - empty,
    }
    title = f"tables: {TABLE_REQUESTS} requests of {TABLE_TOKENS} tokens, {table.num_rows} rows"
    return Figures(title, ids, f"{TABLE_REQUESTS} x {TABLE_TOKENS} ids", sizes)


def parameters(index: int) -> SamplingParams:
    """Of many kinds, one after the other."""
    extras: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.0, "logprobs": 3, "min_p": 0.05},
        {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
        {"temperature": 0.9, "logit_bias": {3: 2.0}, "allowed_token_ids": [3, 4, 5, 9]},
        {"temperature": 0, "prompt_logprobs": 1},
    )
    return SamplingParams(max_tokens=20 + index * 7 % 60, ignore_eos=True, **extras[index % len(extras)])


def growth(num_steps: int) -> Figures:
    """Many steps, requests coming and going."""
    model = random_model(tiny_config(num_hidden_layers=1, max_position_embeddings=256))
    config = EngineConfig(device="cpu", max_num_seqs=LIVE_REQUESTS, max_model_len=256, num_kv_blocks=120)
    runner, rng = build_runner(config, model=model), np.random.default_rng(0)
    readings: list[tuple[int, int, int]] = []
    num_requests = 0
    with ServingLoop(runner) as loop:
        live: list[Any] = []
        while loop.num_steps < num_steps:
            while len(live) < LIVE_REQUESTS + 4:
                prompt = rng.integers(0, 64, rng.integers(1, 120)).tolist()
                live.append(loop.add(prompt, parameters(num_requests)))
                num_requests += 1
            if num_requests % 9 == 0:
                loop.abort(live.pop(-1).request_id)
            live.pop(0).result()
            if loop.num_steps >= (len(readings) + 1) * num_steps // 10:
                readings.append(loop.between_steps(lambda: (loop.num_steps, resident_bytes(), getallocatedblocks())))
    first, last = readings[1], readings[-1]
    steps, size, blocks = (after - before for before, after in zip(first, last, strict=True))
    notes = [f"step {step:6d}: {resident / MIB:8.2f} MiB, {count} blocks" for step, resident, count in readings]
    notes.append(f"{num_requests} requests; from step {first[0]} on {blocks:+d} blocks of Python's allocator")
    notes.append(f"{size / steps * 1000 / 1024:.1f} KiB for 1,000 steps")
    title = f"growth: {num_steps} steps of up to {LIVE_REQUESTS} requests"
    return Figures(title, last[1], "the process", {f"growth over {steps} steps": size}, tuple(notes))


def measured(part: str, num_steps: int = STEPS) -> Figures:
    """One part's figures, from a process of its own."""
    work = {"demo": demo, "tables": tables, "growth": partial(growth, num_steps)}[part]
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work).result()


def main() -> None:
    """Each part in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the part about growth")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, load before {os.getloadavg()[0]:.1f}")
    for part in args.only:
        print(measured(part, args.steps).text(), flush=True)


if __name__ == "__main__":
    main()

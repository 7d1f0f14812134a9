"""Which kernel configuration is fastest for which product and batch size on this GPU.

    python examples/benchmarks/gpu_sweep.py [--shape 0.6b|8b] [--what linear|decode|prefill] [--jobs 12]

Prints, for each product of a Qwen3 layer and number of rows, the time of cuBLAS, of the best split Triton kernel and of
the bytes; for decode attention the best configurations, and the time of the one in use over FlashInfer's best; the same
ratio for prompts and for a chunk among decodes (``prefill``), where FlashInfer is installed. Each time is a call within
one graph over many layers, so that weights and keys come from memory. ``--jobs`` processes compile beforehand.
GPU_NOTES.md holds figures of one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from twostroke.engine.attention.flashinfer_library import (
    DECODE_KERNELS,
    MIXED_KERNELS,
    AttentionKernel,
    FlashInfer,
    FlashInferMissing,
)
from twostroke.engine.cuda.attention_timing import POOL_BYTES, AttentionPool, Requests, TimedShape, attention_time_us
from twostroke.engine.cuda.device import CudaDevice
from twostroke.engine.cuda.linear import MOST_SHARED_BYTES
from twostroke.engine.cuda.timing import replay_time_us
from twostroke.engine.kernels.decode_attention import DecodeConfig, DecodeWorkspace, PagedKeys, decode_attention
from twostroke.engine.kernels.linear import LinearConfig, shared_bytes, skinny_linear
from twostroke.stages.specs import AttentionLayerSpec

BYTES_PER_US = 4.24e6
SHAPES = {
    # hidden, intermediate, heads, KV heads, layers measured
    "0.6b": (1024, 3072, 16, 8, 28),
    "8b": (4096, 12288, 32, 8, 6),
}
VOCAB, HEAD, PAGE, CONTEXT = 151_936, 128, 16, 640
ROWS = (1, 8, 32, 64, 128, 256)


def products(shape: str) -> dict[str, tuple[int, int, bool, int]]:
    """Name to (in, out, gated, copies) of the products of a layer and of the head."""
    hidden, inner, heads, kv_heads, layers = SHAPES[shape]
    return {
        "qkv": (hidden, (heads + 2 * kv_heads) * HEAD, False, layers),
        "output": (heads * HEAD, hidden, False, layers),
        "gate_up": (hidden, 2 * inner, True, layers),
        "down": (inner, hidden, False, layers),
        "lm_head": (hidden, VOCAB, False, 1),
    }


def linear_configs(size_in: int, size_out: int, gated: bool, rows: int) -> Iterator[LinearConfig]:
    """Configurations that give the GPU enough programs and each of them enough to do, and that fit."""
    outs = size_out // 2 if gated else size_out
    for block_out, block_in, split, (warps, stages) in itertools.product(
        (16, 32, 64, 128),
        (64, 128, 256, 512, 1024),
        (1,) if gated or size_out == VOCAB else (1, 2, 3, 4, 6, 8, 12),
        ((4, 3), (4, 4), (8, 3)),
    ):
        config = LinearConfig(block_out, block_in, split, warps, stages)
        programs, tile = -(-outs // block_out) * split, block_out * (2 if gated else 1)
        if size_in % (split * block_in) or programs < 90 or programs > (800 if size_out != VOCAB else 10_000):
            continue
        if shared_bytes(config, size_in, rows, gated=gated) > MOST_SHARED_BYTES or tile * block_in > warps * 2**13:
            continue
        if (rows >= 64 and tile < 64) or (warps == 8 and tile * block_in < 2**15):
            continue
        yield config


def decode_configs(rows: int, kv_heads: int) -> Iterator[DecodeConfig]:
    """Configurations with 100 to 5,000 programs, or as many as the context gives."""
    for keys, splits, warps, stages in itertools.product((32, 64, 128), (1, 2, 3, 5, 8, 10, 16), (2, 4, 8), (2, 3)):
        programs = rows * kv_heads * splits
        if splits > CONTEXT // keys or (programs < 100 and splits * 2 <= CONTEXT // keys):
            continue
        if (programs > 5000 and splits > 1) or keys * HEAD * 4 * stages > 200_000 or (warps == 8 and keys < 128):
            continue
        yield DecodeConfig(keys, splits, warps, stages)


def linear_work(op: tuple[int, int, bool, int], rows: int) -> Callable[[LinearConfig | None], Callable[[], object]]:
    """Makes the work of a configuration, or of cuBLAS, over all copies of the weight."""
    size_in, size_out, gated, copies = op
    weights = [torch.randn(size_out, size_in, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    states = torch.randn(rows, size_in, device="cuda", dtype=torch.bfloat16)

    def work(config: LinearConfig | None) -> Callable[[], object]:
        if config is None:
            return lambda: [torch.mm(states, weight.t()) for weight in weights]
        return lambda: [skinny_linear(states, weight, None, config, gated=gated, pdl=True) for weight in weights]

    return work


def decode_work(shape: str, rows: int) -> tuple[int, Callable[[DecodeConfig], Callable[[], object]]]:
    """Number of layers measured, and what makes the work of a configuration over them."""
    _, _, heads, kv_heads, _ = SHAPES[shape]
    spec = AttentionLayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=HEAD, scale=HEAD**-0.5)
    layers, blocks = (28 if rows <= 32 else 4), rows * CONTEXT // PAGE
    caches = [
        torch.randn(2, blocks + 1, PAGE, kv_heads, HEAD, device="cuda", dtype=torch.bfloat16) for _ in range(layers)
    ]
    table = (torch.randperm(blocks, device="cuda") + 1).to(torch.int32).view(rows, -1)
    lengths = torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda")
    query = torch.randn(rows, heads, HEAD, device="cuda", dtype=torch.bfloat16)
    workspace = DecodeWorkspace(rows, rows * 32, heads, HEAD, torch.device("cuda"))

    def work(config: DecodeConfig) -> Callable[[], object]:
        return lambda: [
            decode_attention(query, PagedKeys(cache, table, lengths), spec, workspace, config, pdl=True)
            for cache in caches
        ]

    return layers, work


def tasks(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(shape, product or kind of step, rows)."""
    names = {"linear": [*products("0.6b")], "decode": ["decode"], "prefill": ["prefill", "mixed"]}[args.what]
    return list(itertools.product(args.shape, names, args.rows))


def requests_of(name: str, rows: int) -> Requests:
    """(computed, scheduled) tokens: decodes, prompts of up to 16,384 tokens in all, or a chunk among decodes."""
    if name == "prefill":
        return [(0, min(CONTEXT, max(16_384 // rows, 1)))] * rows
    decodes: Requests = [(CONTEXT - 1, 1)] * rows
    return decodes if name == "decode" else [*decodes[1:], (512, 512)]


def attention_times(shape: str, name: str, rows: int) -> dict[str, float | str]:
    """Microseconds of a layer by kernel, or why there are none, and Triton's over the best of FlashInfer's."""
    _, _, heads, kv_heads, _ = SHAPES[shape]
    layer = AttentionLayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=HEAD, scale=HEAD**-0.5)
    timed = TimedShape(layer=layer, dtype=torch.bfloat16, block_size=PAGE, device=CudaDevice(), pdl=True)
    pool, times = AttentionPool(timed, POOL_BYTES), dict[str, float | str]()
    try:
        library = FlashInfer.load()
    except FlashInferMissing as error:
        return {"flashinfer": str(error)}
    for kernel in (AttentionKernel.TRITON, *(DECODE_KERNELS if name == "decode" else MIXED_KERNELS)):
        if kernel is not AttentionKernel.TRITON and not library.is_built(kernel, layer, torch.bfloat16):
            times[kernel] = "not built"
            continue
        plan = timed.plan(kernel, library)
        times[kernel] = round(attention_time_us(timed, pool, plan, requests_of(name, rows)), 2)
    others = [us for kernel, us in times.items() if kernel != AttentionKernel.TRITON and isinstance(us, float)]
    triton = times[AttentionKernel.TRITON]
    if others and isinstance(triton, float):
        times["triton/flashinfer"] = round(triton / min(others), 3)
    return times


def compile_share(args: argparse.Namespace) -> None:
    """Launch every configuration of this process's share once, so that the cache on disk has its binary."""
    everything: list[Callable[[], object]] = []
    for shape, name, rows in tasks(args):
        if name == "decode":
            _, work = decode_work(shape, min(rows, 8))
            everything += [work(config) for config in decode_configs(rows, SHAPES[shape][3])]
        else:
            size_in, size_out, gated, _ = products(shape)[name]
            work = linear_work((size_in, size_out, gated, 1), rows)
            everything += [work(config) for config in linear_configs(size_in, size_out, gated, rows)]
    for work in everything[args.share :: args.jobs]:
        try:
            work()
        except Exception as error:  # the timing run reports it
            print(f"share {args.share}: {type(error).__name__}", file=sys.stderr)
    torch.cuda.synchronize()


def measure(args: argparse.Namespace) -> None:
    """Time everything, and print a line for each product and number of rows."""
    for shape, name, rows in tasks(args):
        if args.what == "prefill":
            times = attention_times(shape, name, rows)
            print(json.dumps({"shape": shape, "op": name, "rows": rows} | times), flush=True)
            continue
        results: list[tuple[float, LinearConfig | DecodeConfig]] = []
        tried: list[tuple[LinearConfig | DecodeConfig, Callable[[], object]]]
        if name == "decode":
            layers, work = decode_work(shape, rows)
            tried = [(config, work(config)) for config in decode_configs(rows, SHAPES[shape][3])]
            limit, base = rows * CONTEXT * SHAPES[shape][3] * HEAD * 4, None
        else:
            size_in, size_out, gated, layers = products(shape)[name]
            work = linear_work((size_in, size_out, gated, layers), rows)
            tried = [(config, work(config)) for config in linear_configs(size_in, size_out, gated, rows)]
            limit, base = size_in * size_out * 2, replay_time_us(work(None)) / layers
        for config, timed in tried:
            try:
                results.append((replay_time_us(timed, num_replays=5, num_rounds=3) / layers, config))
            except Exception as error:
                print(
                    json.dumps({"shape": shape, "op": name, "rows": rows, "config": config, "error": str(error)[:80]})
                )
        results.sort(key=lambda pair: pair[0])
        best = [(round(us, 2), tuple(config)) for us, config in results[:3]]
        line = {"shape": shape, "op": name, "rows": rows, "limit_us": round(limit / BYTES_PER_US, 2), "best": best}
        other = attention_times(shape, name, rows) if base is None else {"cublas_us": round(base, 2)}
        print(json.dumps(line | other), flush=True)


def main() -> None:
    """Compile in parallel, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    parser.add_argument("--what", choices=["linear", "decode", "prefill"], default="linear")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--share", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        compile_share(args)
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--jobs", str(args.jobs)]
    num_shares = 0 if args.what == "prefill" else args.jobs  # one kernel is not worth processes
    shares = [subprocess.Popen([*command, "--share", str(share)]) for share in range(num_shares)]
    for share in shares:
        share.wait()
    measure(args)


if __name__ == "__main__":
    main()

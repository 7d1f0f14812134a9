"""Calls the native kernels on memory that ends where a page begins that nobody may touch: a program.

A read or write beyond a tensor, before or behind it, ends it with a signal.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys

import numpy as np
import torch
from twostroke.engine.native.library import Layer, NativeLibrary, Step, Tokens, load_native

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Tensors between two pages that can be neither read nor written; each test case has its own."""

    def __init__(self, generator: random.Random) -> None:
        self._random = generator
        self._maps: list[mmap.mmap] = []

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random values, at the end or at the beginning of what may be touched."""
        count = int(np.prod(shape))
        num_bytes = max(count, 1) * dtype.itemsize
        room = -(-num_bytes // PAGE) * PAGE
        memory = mmap.mmap(-1, room + 2 * PAGE)
        self._maps.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for guard in (start, start + PAGE + room):
            if _LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        offset = PAGE + (room - num_bytes if self._random.random() < 0.7 else 0)
        made = torch.frombuffer(memory, dtype=dtype, count=max(count, 1), offset=offset)[:count].view(shape)
        return made.copy_(torch.randn(shape)) if dtype is torch.float32 else made.zero_()


def products(library: NativeLibrary, guarded: Guarded, pick: random.Random) -> None:
    """A product, with and without bias."""
    rows = pick.choice((1, 2, 3, 4, 5, 7, 8, 24, 31, 71, 72, 80))
    size_in, size_out = pick.choice((1, 8, 15, 16, 24, 64, 100, 400)), pick.choice((1, 3, 11, 12, 32, 50, 97, 200))
    x, weight = guarded.tensor(rows, size_in), guarded.tensor(size_out, size_in)
    bias = guarded.tensor(size_out) if pick.random() < 0.5 else None
    wanted = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(library.linear(x, weight, bias), wanted, atol=1e-3, rtol=1e-4)


def rows_at_a_time(library: NativeLibrary, guarded: Guarded, pick: random.Random) -> None:
    """Norm, gate and rotation."""
    rows, size = pick.choice((1, 3, 9)), pick.choice((2, 6, 8, 20, 64))
    library.norm(guarded.tensor(rows, size), guarded.tensor(size), 1e-6)
    library.gated_silu(guarded.tensor(rows, 2 * size))
    heads = pick.choice((1, 3))
    library.rotate(guarded.tensor(rows, heads, size), guarded.tensor(rows, size), guarded.tensor(rows, size // 2))


def attention(library: NativeLibrary, guarded: Guarded, pick: random.Random) -> None:
    """A step of a few requests, each with blocks of its own."""
    kv_heads, group, size, page = pick.choice((1, 3)), pick.choice((1, 2, 3)), pick.choice((8, 24, 64)), 4
    counts = [(pick.choice((0, 3, 130)), pick.choice((1, 1, 5))) for _ in range(pick.choice((1, 4)))]
    lengths = [before + new for before, new in counts]
    num_tokens, width = sum(new for _, new in counts), -(-max(lengths) // page)
    blocks = guarded.tensor(len(counts), width, dtype=torch.int32)
    blocks.copy_(torch.arange(blocks.numel()).view(blocks.shape))
    starts = guarded.tensor(len(counts) + 1, dtype=torch.int32)
    starts.copy_(torch.tensor([0, *np.cumsum([new for _, new in counts])]))
    seq_lens = guarded.tensor(len(counts), dtype=torch.int32).copy_(torch.tensor(lengths))
    slots = guarded.tensor(num_tokens, dtype=torch.int64)
    places = [
        int(blocks[request, position // page]) * page + position % page
        for request, (before, new) in enumerate(counts)
        for position in range(before, before + new)
    ]
    slots.copy_(torch.tensor(places))
    cache = guarded.tensor(2, blocks.numel(), page, kv_heads, size)
    query, key, value = (guarded.tensor(num_tokens, n, size) for n in (kv_heads * group, kv_heads, kv_heads))
    tokens = Tokens(query=query.data_ptr(), key=key.data_ptr(), value=value.data_ptr())
    tokens.query_stride, tokens.key_stride, tokens.value_stride = query.stride(0), key.stride(0), value.stride(0)
    step = Step(num_tokens=num_tokens, num_reqs=len(counts), block_size=page, blocks_stride=width)
    step.starts, step.lengths, step.blocks = starts.data_ptr(), seq_lens.data_ptr(), blocks.data_ptr()
    step.slots = slots.data_ptr()
    layer = Layer(num_heads=kv_heads * group, num_kv_heads=kv_heads, head_size=size, window=pick.choice((0, 5)))
    layer.scale, layer.soft_cap = 0.3, pick.choice((0.0, 4.0))
    output = guarded.tensor(num_tokens, kv_heads * group, size)
    library.attend(layer, step, tokens, cache, output)
    assert output.isfinite().all()


def main() -> None:
    """As many cases of each kind as the first argument says."""
    library = load_native()
    if library is None:
        print("no native kernels")
        return
    pick = random.Random(0)
    torch.manual_seed(0)
    for number in range(int(sys.argv[1])):
        torch.set_num_threads(1 + number % 2)
        for case in (products, rows_at_a_time, attention):
            case(library, Guarded(pick), pick)
    print("done")


if __name__ == "__main__":
    main()

"""The paged attention kernels against a dense loop, over a pool that is NaN wherever a request has no key."""

from __future__ import annotations

import pytest
import torch
from twostroke.engine.kernels.decode_attention import DecodeConfig, DecodeWorkspace, PagedKeys, decode_attention
from twostroke.engine.kernels.mixed_attention import mixed_attention
from twostroke.stages.specs import AttentionLayerSpec

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SHAPES = [(4, 2, 8), (6, 1, 24), *([(2, 2, 16), (4, 1, 128)] if CUDA else [])]  # the interpreter is slow


def layer(num_heads: int, num_kv_heads: int, head_size: int, **options: float) -> AttentionLayerSpec:
    window = options.get("sliding_window")
    return AttentionLayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=1.2 * head_size**-0.5,
        sliding_window=None if window is None else int(window),
        soft_cap=options.get("soft_cap"),
    )


def paged_pool(lengths: list[int], spec: AttentionLayerSpec, page: int, dtype: torch.dtype) -> PagedKeys:
    """Shuffled pages with random keys and values in the places of the requests."""
    generator = torch.Generator().manual_seed(sum(lengths))
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator) + 1
    cache = torch.full((2, sum(counts) + 4, page, spec.num_kv_heads, spec.head_size), torch.nan)
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    first = 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = order[first : first + count]
        first += count
        table[index, :count] = blocks
        places = torch.arange(length)
        slots = blocks[places // page] * page + places % page if length else places
        flat = cache.view(2, -1, spec.num_kv_heads, spec.head_size)
        flat[:, slots] = torch.randn(2, length, spec.num_kv_heads, spec.head_size, generator=generator)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return PagedKeys(cache.to(DEVICE, dtype), table.to(DEVICE), lens.to(DEVICE))


def dense(query: torch.Tensor, paged: PagedKeys, index: int, spec: AttentionLayerSpec) -> torch.Tensor:
    """Attention of the last queries ``[n, heads, size]`` of request ``index``, in float64."""
    page, length = paged.kv_cache.shape[2], int(paged.seq_lens[index])
    places = torch.arange(length, device=DEVICE)
    slots = paged.block_table[index].long()[places // page] * page + places % page
    keys, values = (pool.reshape(-1, *pool.shape[2:])[slots].double() for pool in paged.kv_cache)
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (pool.repeat_interleave(group, dim=1) for pool in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    reach = torch.arange(length - len(query), length, device=DEVICE)[:, None]
    hidden = places > reach
    if spec.sliding_window is not None:
        hidden |= places <= reach - spec.sliding_window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert (got.double() - wanted).abs().max().item() <= TOLERANCE[dtype] * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", [DecodeConfig(16, 1), DecodeConfig(16, 3), DecodeConfig(16, 4, least_keys=20)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"soft_cap": 2.0}])
def test_decode(
    dtype: torch.dtype, shape: tuple[int, int, int], config: DecodeConfig, options: dict[str, float]
) -> None:
    spec, lengths = layer(*shape, **options), [1, 16, 17, 0, 60]
    paged = paged_pool(lengths, spec, 4, dtype)
    query = torch.randn(len(lengths), spec.num_heads, spec.head_size, generator=torch.Generator().manual_seed(1))
    query = query.to(DEVICE, dtype)
    workspace = DecodeWorkspace(8, 8 * 4, spec.num_heads, spec.head_size, DEVICE)
    for _ in range(2):  # the counters of arrived parts must be ready for the next step
        output = decode_attention(query, paged, spec, workspace, config)
        assert not output[3].any()
        for index in (0, 1, 2, 4):
            assert_close(output[index], dense(query[index : index + 1], paged, index, spec)[0], dtype)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"soft_cap": 2.0}])
@pytest.mark.parametrize(
    "requests", [[(0, 1)], [(3, 1), (0, 20), (9, 4), (0, 0), (31, 1)], [(0, 70), (5, 1), (0, 0), (0, 0)]]
)
def test_mixed(
    dtype: torch.dtype, shape: tuple[int, int, int], options: dict[str, float], requests: list[tuple[int, int]]
) -> None:
    spec = layer(*shape, **options)
    paged = paged_pool([computed + new for computed, new in requests], spec, 4, dtype)
    counts = [new for _, new in requests]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)
    num_tokens = sum(counts)
    query = torch.randn(num_tokens + 3, spec.num_heads, spec.head_size, generator=torch.Generator().manual_seed(2))
    query = query.to(DEVICE, dtype)
    query[num_tokens:] = torch.nan  # padding
    output = mixed_attention(query, paged, starts, spec, max(counts))
    for index, count in enumerate(counts):
        if count:
            start = int(starts[index])
            assert_close(output[start : start + count], dense(query[start : start + count], paged, index, spec), dtype)
    assert not output[num_tokens:].any()

"""Each kernel against its torch reference, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from twostroke.engine.kernels.copy import RowCopies
from twostroke.engine.kernels.inputs import BringInputs
from twostroke.engine.kernels.linear import LinearConfig, skinny_linear
from twostroke.engine.kernels.norm import add_rms_norm, embed_rms_norm, silu_mul
from twostroke.engine.kernels.rope import HeadNorms, KeyPlace, RopeTables, rope_store
from twostroke.engine.kernels.tokens import TokenWriter, scatter_pieces
from twostroke.engine.models.norm import RMSNorm
from twostroke.engine.models.rope import rotate

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=DEVICE, dtype=dtype)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == wanted.shape
    scale = wanted.float().abs().max().clamp(min=1.0)
    assert ((got.float() - wanted.float()).abs().max() / scale).item() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 16, 33])
@pytest.mark.parametrize(
    ("size_in", "size_out", "config"),
    [
        (64, 48, LinearConfig(16, 16, 1)),
        (96, 40, LinearConfig(16, 32, 3)),
        (100, 33, LinearConfig(32, 32, 2)),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_skinny_linear_parts_add_up_to_the_product(
    dtype: torch.dtype, num_rows: int, size_in: int, size_out: int, config: LinearConfig, has_bias: bool
) -> None:
    rows, weight = randn(num_rows, size_in, dtype=dtype), randn(size_out, size_in, dtype=dtype, seed=1)
    bias = randn(size_out, dtype=dtype, seed=2) if has_bias else None
    parts = skinny_linear(rows, weight, bias, config)
    assert parts.shape == (config.split, num_rows, size_out)
    assert_close(parts.float().sum(0), F.linear(rows, weight, bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_gated_linear_activates_the_gate(dtype: torch.dtype, num_rows: int) -> None:
    rows, weight = randn(num_rows, 64, dtype=dtype), randn(2 * 40, 64, dtype=dtype, seed=1) * 0.1
    gate, up = F.linear(rows.float(), weight.float()).chunk(2, dim=1)
    got = skinny_linear(rows, weight, None, LinearConfig(16, 32, 1), gated=True)
    assert_close(got[0], F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("split", "num_rows", "size"), [(1, 1, 32), (3, 4, 48), (2, 7, 1000)])
def test_add_rms_norm(dtype: torch.dtype, split: int, num_rows: int, size: int) -> None:
    parts, residual = randn(split, num_rows, size), randn(num_rows, size, dtype=dtype, seed=1)
    weight = randn(size, dtype=dtype, seed=2)
    total, normed = add_rms_norm(parts, residual, weight, 1e-5)
    wanted = (parts.sum(0) + residual.float()).to(dtype)
    assert_close(total, wanted, dtype)
    assert_close(normed, RMSNorm(weight.float().cpu(), 1e-5)(total.float().cpu()).to(DEVICE), dtype)


def test_embed_rms_norm() -> None:
    ids = torch.tensor([3, 0, 3, 9], dtype=torch.int32, device=DEVICE)
    table, weight = randn(10, 24), randn(24, seed=1)
    states, normed = embed_rms_norm(ids, table, weight, 1e-6)
    assert torch.equal(states, table[ids.long()])
    assert_close(normed, F.rms_norm(states, (24,), weight, 1e-6), torch.float32)


def test_silu_mul() -> None:
    gate_up = randn(5, 2 * 70)
    gate, up = gate_up.chunk(2, dim=1)
    assert_close(silu_mul(gate_up), F.silu(gate) * up, torch.float32)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(4, 2, 8), (3, 1, 24)])
@pytest.mark.parametrize(("num_tokens", "split"), [(1, 2), (5, 1), (65, 1)])
def test_rope_store(
    has_norm: bool, num_heads: int, num_kv_heads: int, head_size: int, num_tokens: int, split: int
) -> None:
    parts = randn(split, num_tokens, (num_heads + 2 * num_kv_heads) * head_size)
    positions = torch.arange(num_tokens, device=DEVICE) * 3 % 50
    angles = randn(50, head_size // 2, seed=4)
    rope = RopeTables(torch.cat((angles.cos(), angles.cos()), 1), angles.sin())
    norms = HeadNorms(randn(head_size, seed=5), randn(head_size, seed=6), 1e-6) if has_norm else None
    slots = torch.randperm(num_tokens + 8, generator=torch.Generator().manual_seed(7))[:num_tokens].to(DEVICE)
    if num_tokens > 1:
        slots[num_tokens // 2] = -1
    cache = torch.full((2, (num_tokens + 11) // 4, 4, num_kv_heads, head_size), torch.nan, device=DEVICE)
    before = cache.clone()
    query = rope_store(parts, positions, rope, KeyPlace(cache, slots), norms)

    heads = parts.sum(0).view(num_tokens, -1, head_size)
    queries, keys, values = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        queries = F.rms_norm(queries, (head_size,), norms.query, 1e-6)
        keys = F.rms_norm(keys, (head_size,), norms.key, 1e-6)
    cosines, sines = rope.cosines[positions][:, None], rope.sines[positions][:, None]
    assert_close(query.view(queries.shape), rotate(queries, cosines, sines), torch.float32)
    stored = slots >= 0
    flat = cache.view(2, -1, num_kv_heads, head_size)
    assert_close(flat[0, slots[stored]], rotate(keys, cosines, sines)[stored], torch.float32)
    assert_close(flat[1, slots[stored]], values[stored], torch.float32)
    others = torch.ones(flat.shape[1], dtype=torch.bool, device=DEVICE)
    others[slots[stored]] = False
    assert flat[:, others].isnan().all()
    assert before.isnan().all()


def test_store_tokens_keeps_ids_inside_the_vocabulary() -> None:
    table = torch.zeros(700, dtype=torch.int32, device=DEVICE)
    index = torch.randperm(700, generator=torch.Generator().manual_seed(0))[:300].to(DEVICE)
    sampled = torch.arange(-20, 280, device=DEVICE)
    TokenWriter()(table, index, sampled, 250)
    assert table[index].tolist() == sampled.clamp(0, 249).tolist()
    assert int(table.count_nonzero()) == int((sampled.clamp(0, 249) != 0).sum())
    TokenWriter()(table, index[:0], sampled[:0], 250)


@pytest.mark.parametrize(
    ("num_moved", "num_tokens", "num_ids"), [(1, 1, 1), (300, 300, 300), (300, 7, 400), (7, 7, 600), (600, 600, 600)]
)
def test_bring_inputs(num_moved: int, num_tokens: int, num_ids: int) -> None:
    generator = torch.Generator().manual_seed(0)
    host, requests = torch.randint(0, 5000, (4, 600), generator=generator), torch.arange(2 * 401, dtype=torch.int32)
    if CUDA:
        host, requests = host.pin_memory(), requests.pin_memory()
    table = torch.randint(1, 99, (5000,), generator=generator).to(torch.int32)
    tokens, ids = torch.full((4, 600), -1, device=DEVICE), torch.full((600,), -1, dtype=torch.int32, device=DEVICE)
    brought = torch.zeros_like(requests, device=DEVICE)
    BringInputs(2)((host, tokens), (requests, brought), (table.to(DEVICE), ids), num_moved, num_tokens, num_ids)
    assert torch.equal(tokens[:, :num_moved].cpu(), host[:, :num_moved])
    assert (tokens[:, num_moved:] == -1).all()
    assert torch.equal(brought.cpu(), requests)
    assert torch.equal(ids[:num_tokens].cpu(), table[host[2, :num_tokens]])
    assert not ids[num_tokens:num_ids].any()
    assert (ids[num_ids:] == -1).all()


def test_scatter_pieces() -> None:
    lengths, starts = [1, 700, 0, 512, 3], [90, 100, 95, 2000, 0]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.arange(1, int(ends[-1]) + 1, dtype=torch.int32)
    wanted = torch.zeros(3000, dtype=torch.int32)
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        wanted[start : start + length] = values[ends[index] : ends[index + 1]]
    target = torch.zeros(3000, dtype=torch.int32, device=DEVICE)
    pieces = torch.cat((torch.tensor(starts), ends)).to(DEVICE)
    scatter_pieces(pieces, values.to(DEVICE), target)
    assert torch.equal(target.cpu(), wanted)
    scatter_pieces(torch.zeros(1, dtype=torch.int64, device=DEVICE), values[:0].to(DEVICE), target)
    assert torch.equal(target.cpu(), wanted)


def test_copy_rows_of_strided_tensors() -> None:
    host = torch.arange(4 * 3000).view(4, 3000)
    source = host.pin_memory() if CUDA else host
    target = torch.full((4, 5000), -1, device=DEVICE)
    RowCopies()(source[:, :1500], target[:, :1500])
    assert torch.equal(target[:, :1500].cpu(), host[:, :1500])
    assert (target[:, 1500:] == -1).all()

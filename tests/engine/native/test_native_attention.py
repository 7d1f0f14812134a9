"""Attention by the native kernel: what the behaviour suite of all backends does not reach."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import NATIVE_CPU, PAGED_CPU, Case, World, check
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from twostroke.engine.native.attention import FEW_KEYS, FEW_QUERIES, MOST_SHARED, NativeCPUBackend, NativeCPUPlan
from twostroke.engine.native.library import Layer, NativeLibrary, Step, Tokens, load_native
from twostroke.stages.specs import KVCacheGroupSpec

LIBRARY = load_native()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="the native kernels can't be had on this machine")

CASES = st.builds(
    Case,
    requests=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 20)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16]),
    num_kv_heads=st.integers(1, 7),
    group_size=st.integers(1, 5),
    head_size=st.sampled_from([8, 24, 32, 40, 64, 72]),
    window=st.one_of(st.none(), st.integers(1, 400)),
    soft_cap=st.one_of(st.none(), st.sampled_from([1.5, 30.0])),
    padded_reqs=st.integers(0, 2),
    padded_tokens=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)


class Counting(NativeLibrary):
    """Counts calls, so that a test sees who computed."""

    def __init__(self, library: NativeLibrary) -> None:
        self.__dict__.update(library.__dict__)
        self.calls = 0

    def attend(self, layer: Layer, step: Step, tokens: Tokens, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        self.calls += 1
        super().attend(layer, step, tokens, kv_cache, output)


def calls(case: Case) -> int:
    """How often the kernel was called for a case that comes out right."""
    assert LIBRARY is not None, "needs_library skips"
    library = Counting(LIBRARY)
    plan = NativeCPUBackend(library).make_plan(KVCacheGroupSpec(layers=(0,), block_size=case.block_size))
    check(NATIVE_CPU, case, plan)
    return library.calls


@given(CASES)
def test_any_batch_equals_the_dense_loop(case: Case) -> None:
    check(NATIVE_CPU, case)


@needs_library
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 1),
        ({"requests": [(0, FEW_KEYS), (5, 1)]}, 1),
        ({"requests": [(0, FEW_KEYS + 1), (5, 1)]}, 0),
        ({"requests": [(FEW_KEYS, FEW_QUERIES), (5, 1)]}, 1),
        ({"requests": [(FEW_KEYS, FEW_QUERIES + 1), (5, 1)]}, 0),
        ({"num_kv_heads": 1, "group_size": MOST_SHARED}, 1),
        ({"num_kv_heads": 1, "group_size": MOST_SHARED + 1}, 0),
        ({"head_size": 12}, 0),
        ({"dtype": torch.bfloat16}, 0),
        ({"cache_dtype": torch.bfloat16}, 0),
    ],
)
def test_torch_takes_what_does_not_suit_the_kernel(change: dict[str, object], expected: int) -> None:
    assert calls(evolve(Case(requests=[(7, 1), (20, 2)]), **change)) == expected


@needs_library
def test_a_plan_goes_from_kernel_to_torch_and_back() -> None:
    case = Case(requests=[(7, 1), (20, 1)])
    plan = NATIVE_CPU.plan(case)
    assert isinstance(plan, NativeCPUPlan)
    for change in ({}, {"requests": [(0, FEW_KEYS + 7)]}, {"seed": 3}, {"requests": [(0, 90), (3, 1)]}):
        check(NATIVE_CPU, evolve(case, **change), plan)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    world = World(Case(requests=[(300, 1), (20, 5), (0, 1), (77, 1)], head_size=64, num_kv_heads=3))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = NATIVE_CPU.outcome(world)
        torch.set_num_threads(threads)
        assert torch.equal(NATIVE_CPU.outcome(world), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_what_is_no_number_comes_out_where_torch_has_it(bad: float, part: str) -> None:
    """Of one request only: its neighbours stay clean."""
    case = Case(requests=[(30, 1), (9, 1)], head_size=16)
    outputs = []
    for kit in (NATIVE_CPU, PAGED_CPU):
        world = World(case)
        query, key, value = world.inputs()
        {"query": query, "key": key, "value": value}[part][0, 1, 3] = bad
        outputs.append(kit.run(kit.planned(world), world, (query, key, value)))
    native, torchs = outputs
    assert torch.equal(native.isfinite(), torchs.isfinite())
    assert native[1].isfinite().all()
    torch.testing.assert_close(native.nan_to_num(7, 8, 9), torchs.nan_to_num(7, 8, 9), atol=2e-5, rtol=2e-5)


def test_queries_get_gradients() -> None:
    world = World(Case(requests=[(30, 1)], head_size=16))
    query, key, value = world.inputs()
    query.requires_grad_()
    NATIVE_CPU.run(NATIVE_CPU.planned(world), world, (query, key, value)).sum().backward()
    assert query.grad is not None


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    world = World(Case(requests=[(500, 1)], head_size=64))
    query, key, value = world.inputs()
    inputs = (query * 300, key, value)
    given_, expected = (kit.run(kit.planned(world), world, inputs) for kit in (NATIVE_CPU, PAGED_CPU))
    torch.testing.assert_close(given_, expected, atol=1e-4, rtol=1e-4)
    assert given_.isfinite().all()

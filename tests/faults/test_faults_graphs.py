"""Chapter G: graphs and padding change nothing, are used where they can be, and say so where they cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Driver, Served, Wish
from modes import MODES, PARAMS
from twostroke.engine.config import InvalidConfig
from twostroke.engine.model_runner import ModelRunner
from twostroke.stages.forward_context import Model
from twostroke.stages.records import CUDAGraphMode
from twostroke.stages.specs import NULL_BLOCK

MakeRunner = Callable[..., ModelRunner]
ServeEach = Callable[..., dict[str, Served]]
FinishAll = Callable[[Driver], dict[str, Served]]
GRAPHS = ["full", "full_decode_only", "piecewise", "three_ubatches_piecewise"]


@pytest.mark.parametrize("mode", GRAPHS)
def test_G3_padding_leaves_the_last_live_slot_alone(
    make_runner: MakeRunner, serve_each: ServeEach, finish_all: FinishAll, mode: str
) -> None:
    """As an index, -1 is the last slot of the pool: here a request lives in it."""
    runner = make_runner(**MODES[mode])
    wishes = [Wish("last", (1, 2, 3, 4), 5), Wish("a", (5, 6), 5), Wish("b", (7,), 4)]
    driver = Driver(runner)
    last = runner.parts.kv_cache.num_blocks - 1
    driver.free_blocks.remove(last)
    driver.free_blocks.append(last)  # blocks are taken from the end
    driver.add(*wishes)
    driver.step({"last": 4})
    assert driver.requests["last"].blocks[0] == [last]
    before = [layer[:, last].clone() for layer in runner.parts.kv_cache.layers]
    driver.step({"a": 2, "b": 1})
    driver.step({"a": 1, "b": 1, "last": 1})
    for layer, kept in zip(runner.parts.kv_cache.layers, before, strict=True):
        assert torch.equal(layer[:, last], kept)
    alone = serve_each(wishes)
    for req_id, served in finish_all(driver).items():
        served.assert_equals(alone[req_id])


@pytest.mark.parametrize("mode", GRAPHS)
def test_G4_a_smaller_batch_after_a_larger_one(
    make_runner: MakeRunner, serve_each: ServeEach, finish_all: FinishAll, mode: str
) -> None:
    runner = make_runner(**MODES[mode])
    wishes = [Wish(f"r{index}", tuple(range(index, index + 2 + 3 * index)), 6) for index in range(4)]
    driver = Driver(runner)
    driver.add(*wishes)
    for wish in wishes:
        driver.step({wish.req_id: len(wish.prompt)})
    driver.step({f"r{index}": 1 for index in range(4)})
    driver.step({f"r{index}": 1 for index in range(3)})
    driver.step({"r3": 1})
    driver.step({"r2": 1, "r0": 1})
    alone = serve_each(wishes)
    for req_id, served in finish_all(driver).items():
        served.assert_equals(alone[req_id])


@pytest.mark.parametrize(
    ("mode", "grouped"), [("full", False), ("full", True), ("full_and_piecewise", True), ("piecewise", False)]
)
def test_G6_K8_one_graph_serves_contexts_of_any_length(
    make_runner: MakeRunner, serve_each: ServeEach, two_groups: Model, model: Model, mode: str, grouped: bool
) -> None:
    """No length of the captured batch may be baked in: decodes at 2 and at 20 tokens share a graph, in both groups."""
    chosen = two_groups if grouped else model
    runner = make_runner(model=chosen, **MODES[mode], max_num_batched_tokens=24)
    wishes = [Wish("short", (1, 2), 4), Wish("long", tuple(range(20)), 4), Wish("longer", tuple(range(3, 22)), 3)]
    alone = serve_each(wishes, model=chosen, max_num_batched_tokens=24)
    driver = Driver(runner)
    driver.add(*wishes)
    for wish in wishes:
        driver.step({wish.req_id: len(wish.prompt)})
    for req_id in ("short", "long", "short", "longer", "long", "short", "longer", "long"):
        driver.step({req_id: 1})
    for wish in wishes:
        driver.served(wish.req_id).assert_equals(alone[wish.req_id])
    used = {mode for mode, _ in runner.parts.dispatch.counts}
    assert used - {CUDAGraphMode.NONE}


def test_G1_every_captured_graph_is_replayed_by_some_step(make_runner: MakeRunner) -> None:
    """Not only by the table's own word: each is reached through the runner, and fallbacks are counted."""
    runner = make_runner(**MODES["full_and_piecewise"])
    captured = {(key.mode, key.descriptor.num_tokens) for key in runner.parts.graphs.captured}
    seen: set[tuple[CUDAGraphMode, int]] = set()
    dispatch = runner.stages["dispatch"]

    def note(inner: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object) -> object:
            plan = inner(*args)
            seen.add((plan.mode, plan.num_tokens))  # pyright: ignore[reportAttributeAccessIssue]
            return plan

        return noted

    runner.stages.wrap("dispatch", note)
    assert runner.stages["dispatch"] is not dispatch
    assert len(runner.parts.graphs.captured) == len(captured), "wrapping dispatch drops no graph"
    for num_tokens in range(2, 17):
        driver = Driver(runner, num_tokens)
        driver.add(Wish("r", tuple(range(num_tokens)), 3))
        driver.step({"r": num_tokens})
        driver.finish("r")
        driver.step({})
    for num_reqs in range(1, 5):
        driver = Driver(runner, num_reqs)
        driver.add(*(Wish(f"r{index}", (1, 2), 3) for index in range(num_reqs)))
        for index in range(num_reqs):
            driver.step({f"r{index}": 2})
        driver.step({f"r{index}": 1 for index in range(num_reqs)})
        driver.finish(*driver.requests)
        driver.step({})
    assert captured - seen == {(CUDAGraphMode.PIECEWISE, 1)}, "one token is always a uniform decode"
    assert sum(runner.parts.dispatch.counts.values()) == 15 + 10 + 4


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise", "three_ubatches_piecewise"])
def test_G14_warm_up_and_padding_leave_the_null_block_zero(
    make_runner: MakeRunner, wishes: list[Wish], mode: str
) -> None:
    runner = make_runner(**MODES[mode])
    caches = runner.parts.kv_cache.layers
    assert not any(layer.any() for layer in caches), "capture wrote into the cache"
    for num_tokens in (1, 5, 16):
        runner.dummy_run(num_tokens)
    assert not any(layer.any() for layer in caches), "a dummy run wrote into the cache"
    Driver(runner, 2).run_random(wishes[:3])
    assert not any(layer[:, NULL_BLOCK].any() for layer in caches)


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise", "three_ubatches_piecewise"])
def test_G14_what_lies_in_the_null_block_is_never_read(
    make_runner: MakeRunner, wishes: list[Wish], alone: dict[str, Served], mode: str
) -> None:
    runner = make_runner(**MODES[mode])
    for layer in runner.parts.kv_cache.layers:
        layer[:, NULL_BLOCK] = torch.nan
    for req_id, served in Driver(runner, 5).run_random(wishes[3:6]).items():
        served.assert_equals(alone[req_id])


def test_G9_a_cache_without_memory_says_how_much_it_takes(make_runner: MakeRunner) -> None:
    with pytest.raises(InvalidConfig, match=r"10000000000000 blocks of 4 tokens, 10240000000000000 bytes; lower"):
        make_runner(num_kv_blocks=10**13)
    with pytest.raises(InvalidConfig, match="raise kv_cache_memory_bytes"):
        make_runner(num_kv_blocks="auto", kv_cache_memory_bytes=100)


def test_G9_graphs_that_are_held_are_counted(make_runner: MakeRunner) -> None:
    few = make_runner(cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=(4,)).parts.graphs.describe()
    many = make_runner(cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=(4, 8, 16)).parts.graphs.describe()
    assert 0 < few.static_bytes < many.static_bytes


@pytest.mark.parametrize("kind", ["prompt_logprobs", "greedy"])
def test_G11_a_batch_that_a_full_graph_cannot_serve_is_counted_with_its_reason(
    make_runner: MakeRunner, serve_each: ServeEach, finish_all: FinishAll, kind: str
) -> None:
    runner = make_runner(**MODES["full"])
    wish = Wish("r", (1, 2, 3, 4, 5), 3, PARAMS[kind])
    driver = Driver(runner)
    driver.add(wish)
    finish_all(driver)["r"].assert_equals(serve_each([wish])["r"])
    reasons = {reason for mode, reason in runner.parts.dispatch.counts if mode is CUDAGraphMode.NONE}
    assert reasons == ({"needs logits that a FULL graph does not compute"} if kind == "prompt_logprobs" else set())

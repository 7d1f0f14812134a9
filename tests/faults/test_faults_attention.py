"""Chapter K: who sees which keys, in which blocks, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from attrs import evolve
from driver import Driver, Served, Wish
from modes import MODES, PARAMS
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.stages.errors import InvalidSchedulerOutput
from twostroke.stages.forward_context import Model
from twostroke.stages.io import CachedRequestData, NewRequestData, SchedulerOutput

MakeRunner = Callable[..., ModelRunner]
ServeEach = Callable[..., dict[str, Served]]
FinishAll = Callable[[Driver], dict[str, Served]]
WINDOWED: dict[str, dict[str, Any]] = {
    "all layers": {"architecture": "mistral", "sliding_window": 5},
    "one of two layers": {
        "architecture": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("counts", [[0], [2], [99]])
def test_K2_the_count_of_common_blocks_changes_nothing(
    runner: ModelRunner, serve_each: ServeEach, counts: list[int]
) -> None:
    """It is advice for a backend with a prefix pass; one request is still inside the prefix here."""
    wishes = [Wish("a", (1, 2, 3, 4, 5, 6, 7, 8, 9), 4), Wish("b", (1, 2, 3, 4, 5, 6, 7, 8, 7, 7), 4)]
    driver = Driver(runner)
    driver.add(*wishes)
    for step in ({"a": 9}, {"a": 1, "b": 4}, {"a": 1, "b": 6}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1}):
        driver.run(evolve(driver.output(step), num_common_prefix_blocks=counts))
    alone = serve_each(wishes)
    for wish in wishes:
        driver.served(wish.req_id).assert_equals(alone[wish.req_id])


@pytest.mark.parametrize(
    ("layers", "mode"),
    [("all layers", "eager"), ("all layers", "two_ubatches"), ("one of two layers", "full")],
)
def test_K3_windows_belong_to_layers(
    make_runner: MakeRunner, serve_each: ServeEach, wishes: list[Wish], layers: str, mode: str
) -> None:
    model = random_model(tiny_config(**WINDOWED[layers]))
    chosen = wishes[4:7]
    alone = serve_each(chosen, model=model)
    for req_id, served in Driver(make_runner(model=model, **MODES[mode]), 1).run_random(chosen).items():
        served.assert_equals(alone[req_id])


def test_K3_the_layer_without_a_window_sees_the_whole_context(serve_each: ServeEach) -> None:
    model = random_model(tiny_config(**WINDOWED["one of two layers"]))
    tail = (7, 8, 9, 10, 11, 12, 13, 14, 15)
    served = serve_each([Wish("a", (1, *tail), 4), Wish("b", (2, *tail), 4)], model=model)
    assert (served["a"].logprobs[0] != served["b"].logprobs[0]).any()


@pytest.mark.parametrize("block", [0, -1, 40, 2**31])
@pytest.mark.parametrize("is_new", [True, False])
def test_K4_a_block_that_nobody_may_have_is_refused(runner: ModelRunner, block: int, is_new: bool) -> None:
    driver = Driver(runner)
    driver.add(Wish("r", (1, 2, 3, 4), 4))
    driver.step({"r": 4})
    caches = [layer.clone() for layer in runner.parts.kv_cache.layers]
    if is_new:
        data = NewRequestData(req_id="n", prompt_token_ids=[1, 2], block_ids=[[block]])
        step = SchedulerOutput(scheduled_new_reqs=[data], num_scheduled_tokens={"n": 2}, total_num_scheduled_tokens=2)
    else:
        cached = CachedRequestData(req_ids=["r"], num_computed_tokens=[4], new_block_ids=[[[block]]])
        step = SchedulerOutput(
            scheduled_cached_reqs=cached, num_scheduled_tokens={"r": 1}, total_num_scheduled_tokens=1
        )
    with pytest.raises(InvalidSchedulerOutput, match=f"block {block} is not in the pool of 1 … 39"):
        runner.execute_model(step)
    for layer, before in zip(runner.parts.kv_cache.layers, caches, strict=True):
        assert torch.equal(layer, before)


@pytest.mark.parametrize("mode", ["eager", "full_and_piecewise", "two_ubatches"])
def test_K5_every_block_of_the_pool_serves_every_group(
    make_runner: MakeRunner, serve_each: ServeEach, two_groups: Model, wishes: list[Wish], mode: str
) -> None:
    runner = make_runner(model=two_groups, **MODES[mode])
    chosen = wishes[1:5]
    alone = serve_each(chosen, model=two_groups)
    driver = Driver(runner)
    driver.free_blocks.sort()  # taken from the end: the highest ids first
    for req_id, served in driver.run_random(chosen).items():
        served.assert_equals(alone[req_id])


@pytest.mark.parametrize("mode", ["eager", "full", "full_and_piecewise"])
def test_K6_a_whole_pool_of_nan_does_no_harm(
    make_runner: MakeRunner, two_groups: Model, serve_each: ServeEach, finish_all: FinishAll, mode: str
) -> None:
    runner = make_runner(model=two_groups, **MODES[mode])
    wishes = [Wish("a", (1, 2, 3, 4, 5), 5), Wish("b", (6, 7), 4, PARAMS["seeded"]), Wish("c", (8, 9, 10, 11), 5)]
    alone = serve_each(wishes, model=two_groups)
    for layer in runner.parts.kv_cache.layers:
        layer.fill_(torch.nan)
    driver = Driver(runner)
    driver.add(*wishes)
    for req_id, served in finish_all(driver).items():
        served.assert_equals(alone[req_id])


@pytest.mark.parametrize("mode", ["eager", "full", "full_and_piecewise", "two_ubatches"])
def test_K7_decode_tail_and_prompt_in_any_order(make_runner: MakeRunner, serve_each: ServeEach, mode: str) -> None:
    """A prompt's last token looks like a decode; only what is known and computed says what a row is."""
    wishes = [
        Wish("decode", (1, 2, 3), 5),
        Wish("tail", (4, 5, 6), 5, PARAMS["prompt_logprobs"]),
        Wish("prompt", (7,) * 7, 5),
    ]
    alone = serve_each(wishes)
    runner = make_runner(**MODES[mode])
    for order in list(permutations({"decode": 1, "tail": 1, "prompt": 7}.items()))[::2]:
        driver = Driver(runner)
        driver.add(*wishes)
        driver.step({"decode": 3})
        driver.step({"tail": 2, "decode": 1})
        driver.step(dict(order))
        driver.step({req_id: 1 for req_id, _ in order})
        for wish in wishes:
            served, whole = driver.served(wish.req_id), alone[wish.req_id]
            count = len(served.tokens)
            assert count >= 2
            served.assert_equals(Served(whole.tokens[:count], whole.logprobs[:count], whole.prompt_logprobs))
        driver.finish(*driver.requests)
        driver.step({})


@pytest.mark.parametrize(
    ("kind", "dropped"), [("greedy", 1), ("penalised", 2), ("seeded", 3), ("biased", 3), ("min_tokens", 2)]
)
def test_K9_outputs_that_the_scheduler_dropped_are_sampled_again(
    runner: ModelRunner, serve_each: ServeEach, finish_all: FinishAll, kind: str, dropped: int
) -> None:
    """Fewer computed tokens than the runner has: token list, lengths and penalties follow."""
    wish = Wish("r", (5, 6, 5, 7), 7, PARAMS[kind])
    driver = Driver(runner)
    driver.add(wish, Wish("neighbour", (1, 2), 9))
    driver.step({"r": 4, "neighbour": 2})
    for _ in range(3):
        driver.step({"r": 1, "neighbour": 1})
    request = driver.requests["r"]
    del request.tokens[-dropped:], request.logprobs[-dropped:]
    request.computed = len(request.tokens) - 1
    driver.step({"neighbour": 1})
    finish_all(driver)["r"].assert_equals(serve_each([wish])["r"])


def test_K9_keys_that_were_rejected_are_computed_again(
    runner: ModelRunner, serve_each: ServeEach, finish_all: FinishAll
) -> None:
    """A load of cached keys failed: computed tokens go back, into the prompt too, while outputs stay."""
    wish = Wish("r", tuple(range(9)), 6, PARAMS["penalised"])
    driver = Driver(runner)
    driver.add(wish)
    driver.step({"r": 9})
    driver.step({"r": 1})
    for layer in runner.parts.kv_cache.layers:
        layer.fill_(torch.nan)
    driver.requests["r"].computed = 0
    driver.step({"r": 4})
    assert len(driver.requests["r"].outputs) == 2
    finish_all(driver)["r"].assert_equals(serve_each([wish])["r"])

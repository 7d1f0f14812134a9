"""Requests without a seed: an id that comes again draws again, and what was drawn by can be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from twostroke.engine.config import EngineConfig
from twostroke.engine.loop_seeds import SeedsOfReusedIds
from twostroke.engine.model_runner import build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.scheduler_records import RequestRefused
from twostroke.engine.serving_loop import ServingLoop
from twostroke.stages.sampling_params import SamplingParams

RANDOM = SamplingParams(temperature=1.0)


def test_the_first_request_of_an_id_is_left_to_the_runner_and_later_ones_get_seeds_of_their_own() -> None:
    seeds = SeedsOfReusedIds(7)
    assert seeds("a", RANDOM) is RANDOM
    assert seeds("b", RANDOM) is RANDOM
    drawn = [seeds(req_id, RANDOM).seed for req_id in "aabb"]
    assert None not in drawn
    assert len(set(drawn)) == 4
    again = SeedsOfReusedIds(7)
    assert [again(req_id, RANDOM).seed for req_id in "abaabb"][2:] == drawn, (
        "made of the engine's seed and nothing else"
    )
    other = SeedsOfReusedIds(8)
    assert {other(req_id, RANDOM).seed for req_id in "abaabb"}.isdisjoint(drawn)


@pytest.mark.parametrize("params", [evolve(RANDOM, seed=3), SamplingParams(temperature=0)])
def test_seeded_and_greedy_requests_are_left_as_they_are(params: SamplingParams) -> None:
    seeds = SeedsOfReusedIds(0)
    for _ in range(3):
        assert seeds("a", params) is params
    assert seeds("a", RANDOM) is RANDOM, "and are not counted"


def test_an_id_that_was_forgotten_draws_anew_too_and_memory_is_bounded() -> None:
    seeds = SeedsOfReusedIds(0)
    drawn = [seeds("a", RANDOM).seed]
    for generation in range(4):
        for number in range(9000):
            seeds(f"{generation}-{number}", RANDOM)
        drawn.append(seeds("a", RANDOM).seed)
    assert len(set(drawn)) == len(drawn)
    assert len(seeds._latest) + len(seeds._before) <= 8192


def test_a_request_that_is_refused_uses_up_no_seed() -> None:
    """What the first accepted request of an id draws is what it draws alone."""
    model = random_model(tiny_config())
    runner = build_runner(EngineConfig(max_num_seqs=2, max_model_len=64, num_kv_blocks=40), model=model)
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    with ServingLoop(runner) as loop:
        wanted = loop.add([1, 2, 3], params, "other").result(60).outputs[0].token_ids
        loop.pause()
        live = loop.add([1, 2], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), "mine")
        for _ in range(2):
            with pytest.raises(RequestRefused, match="in use"):
                loop.add([1, 2, 3], params, "mine")
        loop.resume()
        live.result(60)
        first = loop.add([1, 2, 3], params, "mine").result(60).outputs[0].token_ids
    runner.shutdown()
    again = build_runner(EngineConfig(max_num_seqs=2, max_model_len=64, num_kv_blocks=40), model=model)
    with ServingLoop(again) as loop:
        assert loop.add([1, 2, 3], params, "mine").result(60).outputs[0].token_ids == first
    again.shutdown()
    assert wanted != first


def test_an_id_used_again_draws_other_tokens_and_a_fresh_loop_the_same() -> None:
    def texts() -> list[Any]:
        runner = build_runner(EngineConfig(max_num_seqs=2, max_model_len=64, num_kv_blocks=40), model=model)
        try:
            with ServingLoop(runner) as loop:
                params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
                return [loop.add([1, 2, 3], params, "same").result(60).outputs[0].token_ids for _ in range(3)]
        finally:
            runner.shutdown()

    model = random_model(tiny_config())
    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_the_scheduler_is_given_the_seed(serve: Callable[..., Any]) -> None:
    bench = serve()
    given: list[int | None] = []
    for _ in range(2):
        bench.loop.add("abc", SamplingParams(temperature=1.0, max_tokens=2), "same").result()
        given.append(bench.runner.params["same"].seed)
    assert given[0] is None
    assert given[1] is not None

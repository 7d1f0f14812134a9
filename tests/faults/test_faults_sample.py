"""Chapter S: tokens and log probabilities, each request by its own parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from driver import Driver, Served, Wish
from modes import MODES, PARAMS
from twostroke.engine.model_runner import ModelRunner
from twostroke.fsm import StageFailed
from twostroke.stages.errors import InvalidSchedulerOutput
from twostroke.stages.records import PreparedInputs, SamplerOutput
from twostroke.stages.sampling_params import SamplingParams

MakeRunner = Callable[..., ModelRunner]
ServeEach = Callable[..., dict[str, Served]]
FinishAll = Callable[[Driver], dict[str, Served]]

MIXED = {
    "greedy": SamplingParams(temperature=0.0, logprobs=1),
    "huge top_k": SamplingParams(temperature=1.0, seed=1, top_k=10**6, logprobs=1),
    "no top_k": SamplingParams(temperature=1.0, seed=2, top_k=0, logprobs=1),
    "top_k -1": SamplingParams(temperature=1.0, seed=3, top_k=-1, top_p=0.5, logprobs=64),
    "top_k 3": SamplingParams(temperature=0.7, seed=4, top_k=3, logprobs=-1),
    "top_k 1": SamplingParams(temperature=5.0, seed=5, top_k=1, logprobs=1),
    "tiny temperature": SamplingParams(temperature=1e-6, seed=6, logprobs=1),
    "hot": SamplingParams(temperature=1e6, seed=7, min_p=1.0, logprobs=1),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.9, logprobs=1),
    "one banned": SamplingParams(temperature=0.7, seed=8, logit_bias={3: -float("inf")}, top_p=1e-9, logprobs=1),
}


@pytest.mark.parametrize("first", range(0, len(MIXED), 3))
def test_S1_S2_S13_parameters_meet_in_one_batch(
    runner: ModelRunner, serve_each: ServeEach, finish_all: FinishAll, first: int
) -> None:
    names = [list(MIXED)[(first + offset) % len(MIXED)] for offset in range(3)]
    wishes = [Wish(name, (5, 5, 9 + index), 5, MIXED[name]) for index, name in enumerate(names)]
    driver = Driver(runner)
    driver.add(*wishes)
    alone = serve_each(wishes)
    for req_id, served in finish_all(driver).items():
        served.assert_equals(alone[req_id])
        if req_id in ("tiny temperature", "top_k 1", "hot"):
            assert (served.logprobs[:, 0] == served.logprobs.max(axis=1)).all(), "not the likeliest token"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_S1_more_logprobs_than_tokens_are_refused_with_the_way_out(runner: ModelRunner, name: str) -> None:
    driver = Driver(runner)
    driver.add(Wish("r", (1, 2), 3, SamplingParams(**{name: 69})), Wish("n", (1, 2), 3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidSchedulerOutput, match=f"{name}: asks for 69 of a vocabulary of 64; use -1") as raised:
        driver.step({"n": 2, "r": 2})
    assert raised.value.req_id == "r"
    assert not runner.parts.table.records


@pytest.mark.parametrize(
    ("mode", "chunks"),
    [
        ("eager", (7,)),
        ("eager", (3, 4)),
        ("eager", (6, 1)),
        ("eager", (1,) * 7),
        ("full", (6, 1)),
        ("full", (1,) * 7),
        ("three_ubatches_piecewise", (2, 5)),
    ],
)
def test_S8_prompt_logprobs_in_any_chunks(
    make_runner: MakeRunner, serve_each: ServeEach, mode: str, chunks: tuple[int, ...]
) -> None:
    wish = Wish("r", (3, 1, 4, 1, 5, 9, 2), 2, SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=2))
    driver = Driver(make_runner(**MODES[mode]))
    driver.add(wish, Wish("plain", (1, 2), 9))
    driver.step({"plain": 2})
    computed = 0
    for count in chunks:
        result = driver.step({"plain": 1, "r": count})
        computed += count
        assert result is not None
        tables = dict(result.prompt_logprobs_dict)
        assert set(tables) <= {"r"}
        if (table := tables.get("r")) is not None:
            assert computed >= 6, "delivered before every row was known"
            assert table.logprob_token_ids[:, 0].tolist() == [1, 4, 1, 5, 9, 2]
    driver.step({"r": 1, "plain": 1})
    assert len(driver.requests["r"].prompt_logprobs) == 1
    driver.served("r").assert_equals(serve_each([wish])["r"])


@pytest.mark.parametrize("preempt_after", [1, 2, 3, 5])
def test_S8_prompt_logprobs_across_preemptions_are_delivered_once(
    runner: ModelRunner, serve_each: ServeEach, finish_all: FinishAll, preempt_after: int
) -> None:
    wish = Wish("r", (3, 1, 4, 1, 5, 9, 2), 3, SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=64))
    driver = Driver(runner)
    driver.add(wish)
    for count in (2, 2, 2, 1, 1)[:preempt_after]:
        driver.step({"r": count})
    driver.step({}, preempted=["r"])
    driver.step({"r": 3})
    driver.step({}, preempted=["r"])
    served = finish_all(driver)["r"]
    served.assert_equals(serve_each([wish])["r"])
    assert served.prompt_logprobs is not None
    assert served.prompt_logprobs.shape == (6, 65)


def test_S8_a_prompt_of_one_token_has_an_empty_table(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(Wish("r", (3,), 2, SamplingParams(prompt_logprobs=3)))
    driver.step({"r": 1})
    driver.step({"r": 1})
    (table,) = driver.requests["r"].prompt_logprobs
    assert len(table.logprobs) == 0


def test_S9_logprobs_are_those_of_the_model_whatever_is_done_to_the_logits(
    runner: ModelRunner, finish_all: FinishAll
) -> None:
    """The same prefix, sampled hot, biased and masked or not at all: the same log probabilities of its tokens."""
    forced = (5, 6, 7)
    edits = SamplingParams(temperature=3.0, seed=1, logit_bias={9: 5.0}, frequency_penalty=2.0, logprobs=-1)
    driver = Driver(runner)
    driver.add(Wish("plain", forced, 1, SamplingParams(temperature=0.0, logprobs=-1)), Wish("edited", forced, 1, edits))
    finished = finish_all(driver)
    by_token = {}
    for req_id in ("plain", "edited"):
        token = finished[req_id].tokens[0]
        by_token[req_id] = (token, finished[req_id].logprobs[0, 0])
    np.testing.assert_allclose(finished["plain"].logprobs[0, 1:], finished["edited"].logprobs[0, 1:], atol=1e-5)
    np.testing.assert_allclose(np.exp(finished["edited"].logprobs[0, 1:]).sum(), 1.0, atol=1e-4)


@pytest.mark.parametrize("bad", [64, 65, -1, -(2**40), 2**40])
def test_S14_an_id_that_no_vocabulary_has_ends_its_request_alone(
    runner: ModelRunner, serve_each: ServeEach, finish_all: FinishAll, bad: int
) -> None:
    neighbour = Wish("b", (3, 4, 5), 4, PARAMS["penalised"])
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2), 4), neighbour)
    with runner.stages.restored():

        def wrap(inner: Callable[..., SamplerOutput]) -> Callable[..., SamplerOutput]:
            def wrong_for_the_first(*args: object) -> SamplerOutput:
                output = inner(*args)
                tokens = output.sampled_token_ids.clone()
                tokens[0] = bad
                return SamplerOutput(tokens, logprobs=output.logprobs, logprobs_reqs=output.logprobs_reqs)

            return wrong_for_the_first

        runner.stages.wrap("sample", wrap)
        result = driver.step({"a": 2, "b": 3})
    assert result is not None
    assert set(result.request_errors) == {"a"}
    assert f"sampled token {bad} is outside the vocabulary of 64" in str(result.request_errors["a"])
    driver.finish("a")
    finish_all(driver)["b"].assert_equals(serve_each([neighbour])["b"])


def test_S14_a_sampler_that_returns_too_few_tokens_is_named(runner: ModelRunner) -> None:
    def lazy(inputs: PreparedInputs) -> SamplerOutput:
        return SamplerOutput(torch.zeros(max(len(inputs.sampling_reqs) - 1, 0), dtype=torch.int64))

    driver = Driver(runner)
    driver.add(Wish("a", (1, 2), 4), Wish("b", (3, 4), 4))
    output = driver.output({"a": 2, "b": 2})
    with runner.stages.restored():
        runner.stages.replace("sample", lazy)
        runner.execute_model(output)
        with pytest.raises(StageFailed, match=r"'commit'.*tokens of shape \(1,\) for 2 requests"):
            runner.sample_tokens()
        runner.rollback()
    driver.run(output)
    assert [len(driver.requests[req_id].outputs) for req_id in "ab"] == [1, 1]

"""One-liners: what counts as a prompt, the order of results, and the packaged model end to end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from twostroke.engine import llm as llm_module
from twostroke.engine.llm import LLM, as_prompts
from twostroke.engine.model_runner import build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.scheduler import RequestRefused
from twostroke.engine.serving_loop import LoopState, ServingLoopDown
from twostroke.fsm import LifeState
from twostroke.stages.errors import InvalidSamplingParams
from twostroke.stages.sampling_params import SamplingParams

CHAT = [{"role": "user", "content": "hi"}]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        pytest.param("text", 1, id="text"),
        pytest.param(["one", "two"], 2, id="texts"),
        pytest.param([1, 2, 3], 1, id="token_ids"),
        pytest.param([[1, 2], [3]], 2, id="lists_of_token_ids"),
        pytest.param(CHAT, 1, id="chat"),
        pytest.param([CHAT, CHAT, CHAT], 3, id="chats"),
        pytest.param({"prompt_token_ids": [1, 2]}, 1, id="dict"),
        pytest.param([{"prompt_token_ids": [1, 2]}, {"prompt": "x"}], 2, id="dicts"),
        pytest.param(["text", [1, 2], CHAT], 3, id="mixed"),
        pytest.param([], 0, id="none"),
    ],
)
def test_one_prompt_or_several(prompts: Any, count: int) -> None:
    chosen = as_prompts(prompts)
    assert len(chosen) == count
    assert chosen == ([prompts] if count == 1 else prompts)


@pytest.fixture(scope="module")
def make_tiny() -> Callable[..., LLM]:
    """Makes an LLM of a random model of two narrow layers, without a tokenizer."""
    model = random_model(tiny_config())

    def make(**overrides: Any) -> LLM:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm_module, "build_runner", partial(build_runner, model=model))
            return LLM("tiny", device="cpu", num_kv_blocks=64, max_num_seqs=4, **overrides)

    return make


@pytest.fixture(scope="module")
def tiny(make_tiny: Callable[[], LLM]) -> Iterator[LLM]:
    """One of them, for all tests."""
    with make_tiny() as llm:
        yield llm
    assert llm.runner.life is LifeState.CLOSED


def token_ids(results: list[Any]) -> list[tuple[int, ...]]:
    return [result.outputs[0].token_ids for result in results]


def test_results_come_in_the_order_of_the_prompts(tiny: LLM) -> None:
    prompts = [[index + 1, 7, 3] for index in range(10)]
    results = tiny.generate(prompts, GREEDY)
    assert [list(result.prompt_token_ids) for result in results] == prompts
    assert token_ids(results) == [token_ids(tiny.generate([prompt], GREEDY))[0] for prompt in prompts]
    assert all(len(ids) == 8 for ids in token_ids(results))


def test_parameters_for_each_prompt(tiny: LLM) -> None:
    lengths = [1, 5, 3]
    results = tiny.generate([[1], [2], [3]], [SamplingParams(max_tokens=length) for length in lengths])
    assert [len(ids) for ids in token_ids(results)] == lengths
    with pytest.raises(InvalidSamplingParams, match="2 were given for 3"):
        tiny.generate([[1], [2], [3]], [GREEDY, GREEDY])


def test_seeds_decide_alone(tiny: LLM) -> None:
    def sample(seed: int, *neighbours: int) -> tuple[int, ...]:
        prompts = [[5, 6], *([number] for number in neighbours)]
        params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=12)] + [GREEDY] * len(neighbours)
        return token_ids(tiny.generate(prompts, params))[0]

    assert sample(1) == sample(1, 8, 9) != sample(2)


def test_several_completions_with_seeds_of_their_own(tiny: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=4, max_tokens=12)
    [result] = tiny.generate([5, 6], params)
    single = [SamplingParams(temperature=1.5, seed=4 + index, max_tokens=12) for index in range(3)]
    assert [output.token_ids for output in result.outputs] == token_ids(tiny.generate([[5, 6]] * 3, single))


def test_no_prompts_no_results(tiny: LLM) -> None:
    assert tiny.generate([]) == []


def test_a_refused_prompt_takes_the_call_with_it(tiny: LLM) -> None:
    with pytest.raises(RequestRefused, match="tokenizer"):
        tiny.generate([[1, 2], "text for a model without a tokenizer"])
    assert tiny.loop.num_live_requests == 0
    assert len(tiny.generate([[1, 2]], GREEDY)) == 1


def test_progress_is_counted_on_stderr(tiny: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.generate([[1], [2]], GREEDY, progress=True)
    captured = capsys.readouterr()
    assert captured.err.endswith("2/2 requests\n")
    assert captured.out == ""


def test_stream(tiny: LLM) -> None:
    with tiny.stream([1, 2, 3], GREEDY) as stream:
        ids = [token for delta in stream for token in delta.outputs[0].token_ids]
    assert tuple(ids) == token_ids(tiny.generate([1, 2, 3], GREEDY))[0]


def test_closing_stops_serving(make_tiny: Callable[[], LLM]) -> None:
    with make_tiny() as llm:
        stream = llm.stream([1], SamplingParams(max_tokens=60))
    assert stream.result(timeout=10).outputs[0].finish_reason in ("abort", "length")
    llm.close()
    with pytest.raises(ServingLoopDown):
        llm.generate([1])


def test_garbage_is_closed(make_tiny: Callable[[], LLM]) -> None:
    llm = make_tiny()
    loop, gone = llm.loop, weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert loop.state is LoopState.STOPPED


def test_settings_reach_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def refuse(config: Any) -> Any:
        seen.append(config)
        raise InterruptedError

    monkeypatch.setattr(llm_module, "build_runner", refuse)
    for overrides in ({}, {"async_scheduling": False}):
        with pytest.raises(InterruptedError):
            LLM("some/folder", block_size=32, **overrides)
    assert [(config.model, config.block_size) for config in seen] == [("some/folder", 32)] * 2
    assert [config.async_scheduling for config in seen] == [True, False]


def test_synchronous_results_are_the_same(make_tiny: Callable[..., LLM], tiny: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    with make_tiny(async_scheduling=False) as llm:
        assert (llm.loop.depth, tiny.loop.depth) == (1, 2)
        prompts = [[index + 1, 7] for index in range(8)]
        assert token_ids(llm.generate(prompts, params)) == token_ids(tiny.generate(prompts, params))


@pytest.mark.model
def test_the_packaged_model_end_to_end() -> None:
    few = SamplingParams(temperature=0, max_tokens=4)
    with LLM("smollm2", device="cpu", max_num_seqs=8, kv_cache_memory_bytes=2**26) as llm:
        prompts: list[Any] = ["The capital of France is", CHAT]
        plain, chat = llm.generate(prompts, few)
        assert plain.text.startswith(" Paris")
        assert chat.prompt is not None
        assert chat.prompt.endswith("<|im_start|>assistant\n")
        assert chat.text
        [stopped] = llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=4, stop=" Paris"))
        assert (stopped.text, stopped.outputs[0].stop_reason) == ("", " Paris")
        assert llm.chat(CHAT, few)[0].text == chat.text
        banned = SamplingParams(temperature=0, max_tokens=4, bad_words=["Paris"])
        assert "Paris" not in llm.generate(prompts[0], banned)[0].text

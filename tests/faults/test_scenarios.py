"""What happens to people: edges of lengths and pools, prefixes that are cached whole, emoji in stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from driver import Driver, Served, Wish, serve_alone
from modes import MODES, PARAMS
from twostroke.engine.loop_text import StoppableText
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.scheduler import FinishReason, RequestUpdate, Scheduler, SchedulerConfig
from twostroke.engine.serving_loop import ServingLoop
from twostroke.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from twostroke.stages.io import GrammarOutput
from twostroke.stages.sampling_params import SamplingParams

MakeRunner = Callable[..., ModelRunner]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


class Server:
    """The reference scheduler and a runner, one step at a time."""

    def __init__(self, runner: ModelRunner, **limits: Any) -> None:
        config = runner.config
        assert isinstance(config.max_model_len, int)
        assert isinstance(config.num_kv_blocks, int)
        defaults: dict[str, Any] = {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": config.max_model_len,
            "num_kv_blocks": config.num_kv_blocks,
            "block_sizes": tuple(group.block_size for group in runner.kv_groups),
        }
        self.runner = runner
        self.scheduler = Scheduler(SchedulerConfig(**defaults | limits))
        self.updates: dict[str, list[RequestUpdate]] = {}

    def step(self) -> Mapping[str, int]:
        """One step; what it scheduled."""
        scheduled = self.scheduler.schedule()
        if self.runner.execute_model(scheduled) is None:
            output = self.runner.sample_tokens().get_output()
            for update in self.scheduler.update_from_output(scheduled, output):
                self.updates.setdefault(update.req_id, []).append(update)
        return scheduled.num_scheduled_tokens

    def serve(self, req_id: str, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> tuple[int, ...]:
        """Add a request and go on until nothing is left to do; its tokens."""
        self.scheduler.add_request(req_id, prompt, params)
        self.finish()
        return self.tokens(req_id)

    def finish(self) -> None:
        """Until nothing is left to do."""
        while self.scheduler.has_work():
            self.step()

    def tokens(self, req_id: str) -> tuple[int, ...]:
        """What a request got."""
        return tuple(token for update in self.updates[req_id] for token in update.new_token_ids)

    def last(self, req_id: str) -> RequestUpdate:
        """How a request ended."""
        return self.updates[req_id][-1]


@pytest.mark.parametrize(
    ("block_size", "mode"), [(1, "eager"), (2, "full_and_piecewise"), (4, "two_ubatches"), (5, "eager")]
)
def test_prompts_that_are_cached_whole(make_runner: MakeRunner, block_size: int, mode: str) -> None:
    """Lengths at a block border, before and after it: the last token is always computed, results are the same."""
    server = Server(make_runner(**{**MODES[mode], "block_size": block_size}))
    for length in (block_size, 3 * block_size, 3 * block_size + 1, max(3 * block_size - 1, 1)):
        prompt = tuple(range(length))
        first = server.serve(f"{length} first", prompt)
        again = server.serve(f"{length} again", prompt)
        assert first == again
        assert server.last(f"{length} again").num_cached_tokens == (length - 1) // block_size * block_size
        beside = [f"{length} beside {index}" for index in range(2)]
        for req_id in beside:
            server.scheduler.add_request(req_id, prompt, GREEDY)
        server.finish()
        assert [server.tokens(req_id) for req_id in beside] == [first] * 2


@pytest.mark.parametrize("kind", ["prompt_logprobs", "greedy", "seeded"])
def test_prompt_logprobs_beside_a_warm_prefix_cache(make_runner: MakeRunner, kind: str) -> None:
    prompt = tuple(range(12))
    wish = Wish("r", prompt, 4, evolve(PARAMS[kind], prompt_logprobs=3))
    server = Server(make_runner())
    server.serve("warm", prompt)
    server.serve("r", prompt, evolve(wish.params, max_tokens=4))
    (table,) = [update.prompt_logprobs for update in server.updates["r"] if update.prompt_logprobs is not None]
    alone = serve_alone(make_runner(), wish)
    assert server.tokens("r") == alone.tokens
    assert alone.prompt_logprobs is not None
    np.testing.assert_allclose(table.logprobs, alone.prompt_logprobs, atol=1e-4)
    assert server.last("r").num_cached_tokens == 0
    assert server.serve("after", prompt) == server.tokens("warm")
    assert server.last("after").num_cached_tokens == 8


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_pool_with_room_for_a_single_block(make_runner: MakeRunner, block_size: int) -> None:
    num_blocks = 3 if block_size == 1 else 2
    runner = make_runner(
        num_kv_blocks=num_blocks,
        block_size=block_size,
        max_model_len="auto",
        max_num_seqs=1 if block_size < 3 else 3,
        max_num_batched_tokens=3,
    )
    length = (num_blocks - 1) * block_size
    assert runner.config.max_model_len == length
    with ServingLoop(runner) as loop:
        params = SamplingParams(max_tokens=None, temperature=0.0)
        handles = [loop.add([token], params) for token in (5, 6, 5, 7, 5)]
        results = [handle.result(timeout=30).outputs[0] for handle in handles]
    assert {len(result.token_ids) for result in results} == {length - 1}
    assert results[0].token_ids == results[2].token_ids == results[4].token_ids


@pytest.mark.parametrize("steps_before", [0, 1, 3, 5])
def test_aborts_in_the_middle_of_a_prompt(make_runner: MakeRunner, steps_before: int) -> None:
    """Whatever was computed of it, its blocks are free, its prefix is sound, its neighbours do not notice."""
    runner = make_runner()
    server = Server(runner, max_num_batched_tokens=4)
    text = tuple(range(20))
    server.scheduler.add_request("neighbour", (1, 2), GREEDY)
    server.scheduler.add_request("doomed", text, GREEDY)
    for _ in range(steps_before):
        server.step()
    assert server.scheduler.finish_requests(["doomed"]) == ["doomed"]
    assert server.serve("heir", text, PARAMS["seeded"]) is not None
    assert server.scheduler.stats().kv_cache_usage == 0
    assert not runner.parts.table.records
    reference = make_runner(max_num_batched_tokens=24)
    assert server.tokens("neighbour") == serve_alone(reference, Wish("neighbour", (1, 2), 4)).tokens
    heir = Wish("heir", text, 4, PARAMS["seeded"])
    assert server.tokens("heir")[:4] == serve_alone(reference, heir).tokens


def test_a_long_queue_behind_one_long_prompt(make_runner: MakeRunner) -> None:
    """First come, first served, and everyone is served: the long one is not starved, nor are the short ones."""
    server = Server(make_runner(max_num_seqs=2, num_kv_blocks=13))
    server.scheduler.add_request("long", range(23), SamplingParams(max_tokens=None, temperature=0.0))
    for index in range(20):
        server.scheduler.add_request(f"r{index}", [index, 1, 2], GREEDY)
    server.finish()
    assert {len(server.tokens(f"r{index}")) for index in range(20)} == {4}
    assert server.last("long").finish_reason is FinishReason.LENGTH


TEXTS = [
    "🎉🎉🎊",
    "a🎉b",
    "👩‍👩‍👧‍👦 family",
    "naïve café",
    "日本語のテキスト",
    "tab\tand\nline",
    "🏳️‍🌈",
    "x" * 40 + "🎉",
]
STOPS = ["🎉", "🎊", "👧", "\u200d", "é", "本", "\n", "語の", "xx", "🏳️‍🌈", "b"]


@pytest.mark.model
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_of_any_characters(smollm2_tokenizer: Tokenizer, include: bool) -> None:
    """A character of several tokens is matched when it is whole, and nothing of a stop string is shown before."""
    for text in TEXTS:
        token_ids = smollm2_tokenizer.encode(text, add_special_tokens=False)
        for stop in STOPS:
            params = SamplingParams(stop=stop, include_stop_str_in_output=include)
            output = StoppableText(IncrementalDetokenizer(smollm2_tokenizer), params)
            shown = ""
            for index, token_id in enumerate(token_ids):
                is_last = index == len(token_ids) - 1
                piece, _ = output.extend([token_id], ends_with_stop_token=False, is_last=is_last)
                shown += piece
                assert text.startswith(shown), "half a character was shown"
                if output.matched is not None:
                    break
            start = text.find(stop)
            end = len(text) if start < 0 else start + len(stop) * include
            assert (shown, output.matched) == (text[:end], stop if start >= 0 else None)


def test_every_logprob_of_a_large_vocabulary(make_runner: MakeRunner) -> None:
    vocab = 49_152
    runner = make_runner(model=random_model(tiny_config(vocab_size=vocab)), num_kv_blocks=10)
    driver = Driver(runner)
    params = SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=-1)
    driver.add(Wish("all", (1, 40_000, 3), 2, params), Wish("none", (4, 49_151), 2, SamplingParams(temperature=0.0)))
    driver.step({"all": 3, "none": 2})
    driver.step({"all": 1, "none": 1})
    request = driver.requests["all"]
    for table in (*request.logprobs, *request.prompt_logprobs):
        assert table.logprobs.shape[1] == vocab + 1
        for ids, values in zip(table.logprob_token_ids, table.logprobs, strict=True):
            assert np.array_equal(np.sort(ids[1:]), np.arange(vocab))
            assert (np.diff(values[1:]) <= 0).all()
            assert abs(np.exp(values[1:].astype(np.float64)).sum() - 1) < 1e-4
    assert request.prompt_logprobs[0].logprob_token_ids[:, 0].tolist() == [40_000, 3]
    assert not any(len(table.logprobs) for table in driver.requests["none"].logprobs)


@pytest.mark.parametrize("vocab", [31, 32, 33, 65])
def test_grammars_of_vocabularies_that_fill_no_words(make_runner: MakeRunner, vocab: int) -> None:
    runner = make_runner(model=random_model(tiny_config(vocab_size=vocab)))
    words = -(-vocab // 32)
    for token in (0, vocab - 1):
        mask = np.zeros((1, words), dtype=np.uint32)
        mask[0, token // 32] = np.uint32(1 << token % 32)
        driver = Driver(runner)
        driver.add(Wish("free", (1, 2), 2), Wish("bound", (3, 4), 2, SamplingParams(temperature=1.0, seed=1)))
        grammar = GrammarOutput(structured_output_request_ids=["bound"], grammar_bitmask=mask.view(np.int32))
        driver.step({"free": 2, "bound": 2}, grammar=grammar)
        assert driver.requests["bound"].outputs == [token]
        driver.finish("free", "bound")
        driver.step({})


@pytest.mark.parametrize(("dtype", "mode"), [("bfloat16", "eager"), ("float16", "full_and_piecewise")])
def test_half_precision_in_any_mode(make_runner: MakeRunner, wishes: list[Wish], dtype: str, mode: str) -> None:
    """The cache is half, the model of this test is not: nothing may depend on the two being equal."""
    served = Driver(make_runner(dtype=dtype, **MODES[mode]), 1).run_random(wishes[:4])
    for wish in wishes[:4]:
        assert len(served[wish.req_id].tokens) == wish.max_tokens
        assert np.isfinite(served[wish.req_id].logprobs[:, 0]).all()


def test_one_runner_for_thousands_of_short_lives(
    runner: ModelRunner, wishes: list[Wish], alone: dict[str, Served]
) -> None:
    """Ids, rows and blocks go round many times; the last generation gets what the first got."""
    for generation in range(6):
        got = Driver(runner, generation).run_random(wishes[:3], preempt=0.1)
        if generation in (0, 5):
            for req_id, served in got.items():
                served.assert_equals(alone[req_id])
    assert not runner.parts.table.records
    assert sorted(runner.parts.table._free_rows) == list(range(1, runner.parts.table.num_rows))


@pytest.mark.model
def test_a_character_that_is_never_finished_can_be_a_stop_string(smollm2_tokenizer: Tokenizer) -> None:
    *begun, _ = smollm2_tokenizer.encode("ab🎊", add_special_tokens=False)
    output = StoppableText(IncrementalDetokenizer(smollm2_tokenizer), SamplingParams(stop="\N{REPLACEMENT CHARACTER}"))
    shown, _ = output.extend(begun, ends_with_stop_token=False, is_last=True)
    assert (shown, output.matched) == ("ab", "\N{REPLACEMENT CHARACTER}")

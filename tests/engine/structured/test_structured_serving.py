"""A random model that has to follow grammars: whole texts, at any depth, preempted, retried, several at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve
from lazy_device import LazyDevice
from twostroke.engine.config import EngineConfig
from twostroke.engine.llm import LLM
from twostroke.engine.loop_grammar import NoGrammar
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models import random_model, tiny_config
from twostroke.engine.outputs import RequestOutput
from twostroke.engine.scheduler import RequestRefused
from twostroke.engine.serving_loop import ServingLoop
from twostroke.engine.structured import GrammarBook, GrammarSpec, InvalidGrammar
from twostroke.engine.tokenizer import Tokenizer
from twostroke.stages.errors import InvalidSamplingParams, RequestFailed
from twostroke.stages.io import GrammarOutput, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

pytest.importorskip("xgrammar")

EOS, VOCAB_SIZE = 256, 260
WARM = SamplingParams(temperature=2.0, max_tokens=300, eos_token_ids=[EOS], logit_bias={32: -6.0, 10: -6.0})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
}
CHOICE = ("yes", "no", "née")


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert 1 <= len(person["name"]) <= 6
    assert 0 <= person["age"] <= 120
    assert len(person["tags"]) <= 2
    assert set(person["tags"]) <= {"red", "green"}


def check_nested(text: str) -> None:
    assert re.fullmatch(r"\(+x\)+", text)
    assert text.count("(") == text.count(")")


CASES: list[tuple[GrammarSpec, Callable[[str], Any]]] = [
    (GrammarSpec(json_schema=SCHEMA), check_person),
    (GrammarSpec(regex=r"[a-f]{3,9}-[0-9]{2}"), lambda text: re.fullmatch(r"[a-f]{3,9}-[0-9]{2}", text) or 1 / 0),
    (GrammarSpec(choice=CHOICE), CHOICE.index),
    (GrammarSpec(grammar='root ::= "(" ("x" | root) ")"'), check_nested),
]


@pytest.fixture(scope="module")
def make_runner() -> Iterator[Callable[..., ModelRunner]]:
    model = random_model(tiny_config(vocab_size=VOCAB_SIZE, max_position_embeddings=512))
    made: list[ModelRunner] = []

    def make(**changes: Any) -> ModelRunner:
        limits: dict[str, Any] = {
            "device": "cpu",
            "block_size": 4,
            "num_kv_blocks": 400,
            "max_model_len": 320,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 8,
        }
        made.append(build_runner(EngineConfig(**limits | changes), model=model, device=LazyDevice()))
        return made[-1]

    yield make
    for runner in made:
        assert not runner.parts.table.records
        runner.shutdown()


def serve(
    runner: ModelRunner, tokenizer: Tokenizer, depth: int | None = None, *, n: int = 1, rounds: int = 3
) -> tuple[list[RequestOutput], int]:
    """Every case ``rounds`` times, with prompts of several chunks and free requests between; preemptions too."""
    book = GrammarBook(tokenizer, VOCAB_SIZE, (EOS,))
    with ServingLoop(runner, tokenizer=tokenizer, depth=depth, grammar=book) as loop:
        handles = []
        for index in range(rounds * len(CASES)):
            prompt = [65 + index, *range(1 + index * 7 % 40)]
            params = evolve(WARM, n=n)
            handles.append(loop.add(prompt, params, grammar=CASES[index % len(CASES)][0]))
            loop.add(prompt, SamplingParams(max_tokens=5), f"free{index}")
        results = [handle.result(timeout=120) for handle in handles]
        while loop.num_live_requests:
            loop.between_steps(lambda: None)
        preemptions = loop.scheduler.stats().num_preemptions
    assert not book._followers, "followers are left over"  # pyright: ignore[reportPrivateUsage]
    return results, preemptions


def check_all(results: list[RequestOutput]) -> None:
    for index, result in enumerate(results):
        for output in result.outputs:
            CASES[index % len(CASES)][1](output.text)
            assert output.finish_reason == "stop"
            assert output.stop_reason is None
            assert output.token_ids[-1] == EOS


def texts_of(results: list[RequestOutput]) -> list[list[str]]:
    return [[output.text for output in result.outputs] for result in results]


@pytest.fixture(scope="module")
def expected(make_runner: Callable[..., ModelRunner], letters: Tokenizer) -> list[list[str]]:
    results, _ = serve(make_runner(async_scheduling=False), letters)
    check_all(results)
    return texts_of(results)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_text_is_valid_and_the_same_at_any_depth(
    make_runner: Callable[..., ModelRunner], letters: Tokenizer, expected: list[list[str]], depth: int
) -> None:
    results, _ = serve(make_runner(), letters, depth)
    check_all(results)
    assert texts_of(results) == expected


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_preempted_requests_keep_their_place(
    make_runner: Callable[..., ModelRunner], letters: Tokenizer, expected: list[list[str]], is_async: bool
) -> None:
    runner = make_runner(num_kv_blocks=34, max_model_len=128, async_scheduling=is_async)
    results, preemptions = serve(runner, letters)
    assert preemptions > 0, "the pool was large enough for everyone"
    check_all(results)
    assert texts_of(results) == expected


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_each_of_n_follows_the_grammar_on_its_own(
    make_runner: Callable[..., ModelRunner], letters: Tokenizer, is_async: bool
) -> None:
    results, _ = serve(make_runner(async_scheduling=is_async), letters, n=3, rounds=1)
    check_all(results)
    assert [len(result.outputs) for result in results] == [3] * len(CASES)
    assert len(set(texts_of(results)[0])) == 3


def test_steps_that_fail_and_are_run_again_or_in_parts(
    make_runner: Callable[..., ModelRunner], letters: Tokenizer, expected: list[list[str]]
) -> None:
    runner = make_runner()
    met: list[int] = []

    def break_sometimes(stage: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(10**6))

        def run(*args: Any) -> Any:
            if (number := next(calls)) % 7 in (3, 4):
                met.append(number)
                raise ArithmeticError("sometimes")
            return stage(*args)

        return run

    runner.stages.wrap("sample", break_sometimes)
    results, _ = serve(runner, letters)
    assert len(met) > 10
    check_all(results)
    assert texts_of(results) == expected


def test_masks_are_asked_for_after_the_forward_is_launched(
    make_runner: Callable[..., ModelRunner], letters: Tokenizer
) -> None:
    runner, log = make_runner(), list[str]()

    class Logged(GrammarBook):
        def grammar_output(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
            log.append("masks")
            return super().grammar_output(scheduled)

    book, execute = Logged(letters, VOCAB_SIZE, (EOS,)), runner.execute_model
    runner.execute_model = lambda step: (log.append("execute"), execute(step))[1]  # pyright: ignore[reportAttributeAccessIssue]
    with ServingLoop(runner, tokenizer=letters, depth=2, grammar=book) as loop:
        loop.add([1, 2], WARM, grammar=GrammarSpec(choice=["abc"])).result(timeout=60)
    assert log[:8] == ["execute", "masks"] * 4


def test_a_cut_text_is_a_beginning(make_runner: Callable[..., ModelRunner], letters: Tokenizer) -> None:
    book = GrammarBook(letters, VOCAB_SIZE, (EOS,))
    with ServingLoop(make_runner(), tokenizer=letters, grammar=book) as loop:
        short = SamplingParams(max_tokens=4, eos_token_ids=[EOS])
        output = loop.add([1], short, grammar=GrammarSpec(choice=["abcdefg"])).result(timeout=60).outputs[0]
        assert (output.text, output.finish_reason) == ("abcd", "length")
        stopped = SamplingParams(max_tokens=9, stop="cd", eos_token_ids=[EOS])
        output = loop.add([1], stopped, grammar=GrammarSpec(choice=["abcdefg"])).result(timeout=60).outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "cd")


def test_ids_are_free_again_with_another_grammar(make_runner: Callable[..., ModelRunner], letters: Tokenizer) -> None:
    book = GrammarBook(letters, VOCAB_SIZE, (EOS,))
    with ServingLoop(make_runner(), tokenizer=letters, grammar=book) as loop:
        for index in range(20):
            word = f"word-{index}"
            first = loop.add([1, 2], WARM, "r", grammar=GrammarSpec(regex="[a-z]{40}"))
            loop.pause()
            loop.abort("r")
            second = loop.add([1, 2], WARM, "r", grammar=book.compile(GrammarSpec(choice=[word])))
            with pytest.raises(RequestRefused, match="in use"):
                loop.add([1, 2], WARM, "r", grammar=GrammarSpec(choice=["other"]))
            loop.resume()
            assert second.result(timeout=60).outputs[0].text == word
            assert first.result(timeout=0).outputs[0].finish_reason == "abort"
        free = loop.add([1, 2], SamplingParams(max_tokens=30, temperature=2.0), "r").result(timeout=60)
        assert len(free.outputs[0].token_ids) == 30


def test_a_dead_end_fails_its_request_alone(make_runner: Callable[..., ModelRunner], letters: Tokenizer) -> None:
    book = GrammarBook(letters, VOCAB_SIZE, (EOS,))
    with ServingLoop(make_runner(), tokenizer=letters, grammar=book) as loop:
        stuck = loop.add([1], WARM, "stuck", grammar=GrammarSpec(grammar="root ::= root"))
        fine = loop.add([1], WARM, grammar=GrammarSpec(choice=["ab"]))
        with pytest.raises(RequestFailed, match="'stuck'"):
            stuck.result(timeout=60)
        assert fine.result(timeout=60).outputs[0].text == "ab"
        assert loop.healthy


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"ignore_eos": True}, InvalidSamplingParams, "ignore_eos"),
        ({"eos_token_ids": [5]}, InvalidSamplingParams, r"eos_token_ids.*leaves out \(256,\)"),
        ({"max_tokens": 10**6, "temperature": -1}, InvalidSamplingParams, "temperature"),
    ],
)
def test_parameters_that_do_not_go_with_a_grammar(
    make_runner: Callable[..., ModelRunner], letters: Tokenizer, changes: dict[str, Any], error: type, words: str
) -> None:
    book, fields = GrammarBook(letters, VOCAB_SIZE, (EOS,)), {"eos_token_ids": [EOS], **changes}
    with ServingLoop(make_runner(), tokenizer=letters, grammar=book) as loop:
        with pytest.raises(error, match=words):
            loop.add([1], SamplingParams(**fields), grammar=GrammarSpec(regex="a"))
        params = SamplingParams(ignore_eos=True, stop_token_ids=[EOS], max_tokens=9)
        output = loop.add([1], params, grammar=GrammarSpec(regex="a")).result(timeout=60).outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", EOS)
        with pytest.raises(InvalidGrammar, match="Unclosed"):
            loop.add([1], WARM, grammar=GrammarSpec(regex="[a"))
        with pytest.raises(RequestRefused):
            loop.add([1] * 1000, WARM, grammar=GrammarSpec(regex="a"))
        assert not book._followers  # pyright: ignore[reportPrivateUsage]


def test_a_loop_that_can_compile_nothing_says_so(make_runner: Callable[..., ModelRunner], letters: Tokenizer) -> None:
    with (
        ServingLoop(make_runner(), tokenizer=letters, grammar=NoGrammar()) as loop,
        pytest.raises(RequestRefused, match="give ServingLoop a GrammarBook"),
    ):
        loop.add([1], WARM, grammar=GrammarSpec(regex="a"))


def test_without_a_provider_a_loop_has_a_book(make_runner: Callable[..., ModelRunner], letters: Tokenizer) -> None:
    assert isinstance(ServingLoop(make_runner(), tokenizer=letters).grammar, GrammarBook)
    assert isinstance(ServingLoop(make_runner()).grammar, NoGrammar)


@pytest.mark.model
def test_the_packaged_model_answers_in_json() -> None:
    properties = {"city": {"type": "string"}, "people": {"type": "integer"}}
    city = GrammarSpec(json_schema={"type": "object", "properties": properties, "required": list(properties)})
    specs = [city, GrammarSpec(choice=CHOICE), None]
    with LLM("smollm2", device="cpu", num_kv_blocks=64, max_model_len=256) as llm:
        prompts = [[{"role": "user", "content": "Describe Paris as JSON with city and people."}]] * 3
        greedy = SamplingParams(temperature=0, max_tokens=64)
        results = llm.chat(prompts, greedy, grammar=specs)
        described = json.loads(results[0].text)
        assert isinstance(described["city"], str)
        assert isinstance(described["people"], int)
        assert results[1].text in CHOICE
        assert [result.outputs[0].finish_reason for result in results[:2]] == ["stop", "stop"]
        assert len(results[2].outputs[0].token_ids) > 5
        with pytest.raises(InvalidGrammar, match="2 were given for 3 prompts"):
            llm.chat(prompts, greedy, grammar=specs[:2])

"""Constrained requests: masks that depend on the last token, while steps are in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from lazy_device import LazyDevice
from twostroke.engine.config import EngineConfig
from twostroke.engine.loop_grammar import GrammarFailed
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models import random_model, tiny_config
from twostroke.engine.serving_loop import ServingLoop
from twostroke.fsm import StageFailed
from twostroke.stages.errors import RequestFailed
from twostroke.stages.io import GrammarOutput, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

VOCAB_SIZE = 64
END = 0
WORDS = [(5, 6, 7), (5, 6, 8, 9), (5, 10), (11, 12, 13, 14, 15), (11, 12, 16)]
WARM = SamplingParams(temperature=1.5, max_tokens=12, stop_token_ids=[END], ignore_eos=True)


class WordList:
    """Lets requests say one of :data:`WORDS`, then the end."""

    def __init__(self) -> None:
        self.said: dict[str, list[int]] = {}
        self.log: list[str] = []

    def add(self, req_id: str) -> str:
        """Constrain a request that will be added."""
        self.said[req_id] = []
        return req_id

    def constrained(self, scheduled: SchedulerOutput) -> Collection[str]:
        return scheduled.num_scheduled_tokens.keys() & self.said.keys()

    def grammar_output(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
        req_ids = sorted(self.constrained(scheduled))
        self.log.append("masks")
        masks = np.zeros((len(req_ids), VOCAB_SIZE // 32), np.uint32)
        for row, req_id in enumerate(req_ids):
            for token in self._next(self.said[req_id]):
                masks[row, token // 32] |= np.uint32(1 << token % 32)
        return GrammarOutput(structured_output_request_ids=req_ids, grammar_bitmask=masks.view(np.int32))

    def accept(self, req_id: str, token_ids: Sequence[int]) -> None:
        self.log.append("accept")
        if req_id in self.said:
            self.said[req_id] += token_ids

    def release(self, req_id: str) -> None:
        self.said.pop(req_id, None)

    def _next(self, said: list[int]) -> set[int]:
        count = len(said)
        words = [(*word, END) for word in WORDS]
        return {word[count] for word in words if len(word) > count and word[:count] == tuple(said)}


@pytest.fixture(scope="module")
def make_runner() -> Iterator[Callable[..., ModelRunner]]:
    model = random_model(tiny_config(vocab_size=VOCAB_SIZE))
    made: list[ModelRunner] = []

    def make(**changes: Any) -> ModelRunner:
        limits: dict[str, Any] = {
            "device": "cpu",
            "block_size": 4,
            "num_kv_blocks": 40,
            "max_model_len": 32,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 6,
        }
        made.append(build_runner(EngineConfig(**limits | changes), model=model, device=LazyDevice()))
        return made[-1]

    yield make
    for runner in made:
        assert not runner.parts.table.records
        runner.shutdown()


def serve_all(runner: ModelRunner, depth: int) -> list[tuple[int, ...]]:
    """Ten requests, every other one constrained; the provider is told of every end."""
    words = WordList()
    with ServingLoop(runner, depth=depth, grammar=words) as loop:
        handles = [
            loop.add([1 + index, 2, 3, 4][: 1 + index % 4], WARM, words.add(f"w{index}") if index % 2 else f"f{index}")
            for index in range(10)
        ]
        tokens = [handle.result(timeout=60).outputs[0].token_ids for handle in handles]
    assert not words.said
    return tokens


@pytest.fixture(scope="module")
def expected(make_runner: Callable[..., ModelRunner]) -> list[tuple[int, ...]]:
    return serve_all(make_runner(async_scheduling=False), 1)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_masks_follow_the_tokens_at_any_depth(
    make_runner: Callable[..., ModelRunner], expected: list[tuple[int, ...]], depth: int
) -> None:
    tokens = serve_all(make_runner(), depth)
    assert tokens == expected
    said = {ids[:-1] for ids in tokens[1::2]}
    assert said <= set(WORDS)
    assert len(said) > 1
    assert {ids[-1] for ids in tokens[1::2]} == {END}


def test_sampling_waits_and_the_forward_does_not(make_runner: Callable[..., ModelRunner]) -> None:
    runner, words = make_runner(), WordList()
    execute = runner.execute_model

    def logged(scheduled: SchedulerOutput) -> Any:
        if scheduled.num_scheduled_tokens:
            words.log.append("execute")
        return execute(scheduled)

    runner.execute_model = logged  # pyright: ignore[reportAttributeAccessIssue]
    with ServingLoop(runner, depth=2, grammar=words) as loop:
        said = loop.add([1, 2], WARM, words.add("w")).result(timeout=60).outputs[0].token_ids
        one_by_one = ["execute", "accept", "masks"] * len(said)
        assert words.log == ["execute", "masks", *one_by_one[:-1]]
        words.log.clear()
        loop.add([1, 2], WARM, "free").result(timeout=60)
    assert words.log[:3] == ["execute", "execute", "accept"], "a request without a grammar waited"


def test_aborted_while_its_step_waits_for_a_mask(make_runner: Callable[..., ModelRunner]) -> None:
    words = WordList()
    with ServingLoop(make_runner(), grammar=words) as loop:
        for _ in range(20):
            first = loop.add([1, 2], WARM, words.add("w"))
            loop.abort("w")
            second = loop.add([1, 2], WARM, words.add("w"))
            assert second.result(timeout=60).outputs[0].token_ids[:-1] in WORDS
            assert first.result(timeout=0).outputs[0].finish_reason == "abort"


def test_a_step_that_is_retried_asks_for_its_masks_again(make_runner: Callable[..., ModelRunner]) -> None:
    runner, words, left = make_runner(), WordList(), [2, 5, 6, 9]

    def break_sometimes(stage: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(1000))

        def run(*args: Any) -> Any:
            if next(calls) in left:
                raise ArithmeticError("sometimes")
            return stage(*args)

        return run

    runner.stages.wrap("sample", break_sometimes)
    with ServingLoop(runner, grammar=words) as loop:
        handles = [loop.add([1, index], WARM, words.add(f"w{index}")) for index in range(4)]
        assert all(handle.result(timeout=60).outputs[0].token_ids[:-1] in WORDS for handle in handles)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_provider_raises_fails_the_request_it_is_about(
    make_runner: Callable[..., ModelRunner], depth: int
) -> None:
    class Picky(WordList):
        def grammar_output(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
            if "mute" in scheduled.num_scheduled_tokens:
                raise LookupError("no such grammar")
            return super().grammar_output(scheduled)

        def accept(self, req_id: str, token_ids: Sequence[int]) -> None:
            if req_id == "deaf":
                raise LookupError("not a word")
            super().accept(req_id, token_ids)

    words = Picky()
    with ServingLoop(make_runner(), depth=depth, grammar=words) as loop:
        handles = [loop.add([1, 2, 3], WARM, words.add(req_id)) for req_id in ("fine", "mute", "deaf", "well")]
        fine, mute, deaf, well = handles
        for handle in (fine, well):
            assert handle.result(timeout=60).outputs[0].token_ids[:-1] in WORDS
        with pytest.raises(RequestFailed, match="no such grammar") as caught:
            mute.result(timeout=60)
        assert isinstance(caught.value.__cause__, GrammarFailed)
        assert isinstance(caught.value.__cause__.__cause__, LookupError)
        with pytest.raises(RequestFailed, match="not a word") as caught:
            deaf.result(timeout=60)
        assert isinstance(caught.value.__cause__, LookupError)
        assert loop.healthy


def test_a_wrong_mask_fails_its_requests(make_runner: Callable[..., ModelRunner]) -> None:
    class Narrow(WordList):
        def grammar_output(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
            output = super().grammar_output(scheduled)
            assert output is not None
            masks = output.grammar_bitmask[:, :1]
            return GrammarOutput(
                structured_output_request_ids=output.structured_output_request_ids, grammar_bitmask=masks
            )

    words = Narrow()
    with ServingLoop(make_runner(), grammar=words) as loop:
        wrong = loop.add([1, 2, 3], WARM, words.add("w"))
        free = loop.add([1, 2, 3], WARM, "free")
        assert free.result(timeout=60).outputs[0].token_ids
        with pytest.raises(RequestFailed, match="grammar_bitmask has shape") as caught:
            wrong.result(timeout=60)
        assert not isinstance(caught.value.__cause__, StageFailed)

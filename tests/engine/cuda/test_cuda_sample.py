"""Sampling by kernels gives what the torch stage gives, on every step of real schedules and for any parameters."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from driver import Driver, Wish
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import LIMITS, PARAMS
from sampling_world import SamplingWorld, assert_sampled_alike, some_grammar, some_logits, some_params
from twostroke.engine.config import EngineConfig
from twostroke.engine.cuda.sample import CudaSample
from twostroke.engine.kernels import logit_edits, logits_rows, logprobs, sampling, truncation
from twostroke.engine.kernels.launching import Kernel
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.stages.io import GrammarOutput
from twostroke.stages.records import (
    NOTHING_LEFT,
    Batch,
    BatchExecutionDescriptor,
    ExecuteModelState,
    PreparedInputs,
    SamplerOutput,
)
from twostroke.stages.sample import Sample
from twostroke.stages.sampling_params import SamplingParams

DRAWN: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy_too": SamplingParams(temperature=0.0, seed=1),
    "tempered": SamplingParams(temperature=0.6),
    "seeded": SamplingParams(temperature=1.3, seed=-(2**40) + 5),
    "seeded_too": SamplingParams(temperature=1.0, seed=77),
}


class Compared:
    """Samples with both stages, and checks that they agree."""

    def __init__(self, runner: ModelRunner) -> None:
        parts = runner.parts
        self.general = Sample(parts.columns, parts.table)
        self.fused = CudaSample(parts.columns, parts.table, torch.device("cpu"))
        self.outputs: list[SamplerOutput] = []
        self.num_partial = 0
        self.spoil: Callable[[torch.Tensor], None] = lambda logits: None

    def __call__(
        self,
        batch: Batch,
        inputs: PreparedInputs,
        execution: BatchExecutionDescriptor,
        state: ExecuteModelState,
        grammar: GrammarOutput | None,
    ) -> SamplerOutput:
        """What the kernels gave."""
        self.spoil(state.logits)
        before = state.logits.clone()
        wanted = self.general(batch, inputs, state, grammar)
        got = self.fused(batch, inputs, execution, state, grammar)
        assert torch.equal(state.logits.nan_to_num(7), before.nan_to_num(7)), "logits were written"
        assert_sampled_alike(got, wanted)
        self.outputs.append(got)
        self.num_partial += 0 < len(inputs.sampling_reqs) < batch.num_reqs
        return got


@pytest.fixture
def compared(interpreted: None) -> tuple[ModelRunner, Compared]:
    """A runner whose sample stage compares the two."""
    runner = build_runner(EngineConfig(**LIMITS), model=random_model(tiny_config()))
    stage = Compared(runner)
    runner.stages.replace("sample", stage)
    return runner, stage


def wishes(kinds: dict[str, SamplingParams], times: int = 1) -> list[Wish]:
    chooser = random.Random(3)
    return [
        Wish(f"{name}{turn}", tuple(chooser.choices(range(60), k=chooser.randint(1, 9))), 4, params)
        for turn in range(times)
        for name, params in kinds.items()
    ]


def test_greedy_and_tempered_requests(compared: tuple[ModelRunner, Compared]) -> None:
    """Chunked prompts, decodes and preemptions: batches of which all sample, some, and none."""
    runner, stage = compared
    served = Driver(runner, 2).run_random(wishes(DRAWN, times=2))
    assert all(len(got.tokens) == 4 for got in served.values())
    assert stage.num_partial > 1
    sampled = [len(output.sampled_token_ids) for output in stage.outputs]
    assert 0 in sampled
    assert max(sampled) > 2


def test_requests_of_every_kind_in_one_batch(compared: tuple[ModelRunner, Compared]) -> None:
    """Also of those that are preempted, and whose rows others take over."""
    runner, stage = compared
    served = Driver(runner, 6).run_random(wishes(PARAMS))
    assert all(len(got.tokens) == 4 for got in served.values())
    assert len(served) == len(PARAMS)
    assert any(output.prompt_logprobs for output in stage.outputs)
    assert any(output.logprobs is not None for output in stage.outputs)


def test_a_grammar_decides(compared: tuple[ModelRunner, Compared]) -> None:
    runner, _ = compared
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2), 3, DRAWN["greedy"]))
    mask = np.zeros((1, 2), dtype=np.int32)
    for token in (9, 40):
        mask[:] = 0
        mask[0, token // 32] = 1 << token % 32
        scheduled = 2 if token == 9 else 1
        driver.stepped({"a": scheduled}, GrammarOutput(structured_output_request_ids=["a"], grammar_bitmask=mask))
    assert driver.requests["a"].outputs == [9, 40]


@pytest.mark.parametrize("kind", ["tempered", "truncated", "edited"])
def test_health_of_rows_without_a_choice(compared: tuple[ModelRunner, Compared], kind: str) -> None:
    runner, stage = compared
    driver = Driver(runner)
    changes = {"tempered": {}, "truncated": {"top_k": 3}, "edited": {"allowed_token_ids": range(60)}}[kind]
    params = evolve(DRAWN["tempered"], **changes)
    driver.add(*(Wish(name, (1, 2), 3, params) for name in "abc"))
    driver.stepped({"a": 2, "b": 2, "c": 2})

    def spoil(logits: torch.Tensor) -> None:
        logits[0, [3, 60]] = torch.nan
        logits[2] = -torch.inf

    stage.spoil = spoil
    result = driver.stepped({"a": 1, "b": 1, "c": 1})
    health = stage.outputs[-1].health
    assert health is not None
    assert health.tolist() == [2, 0, NOTHING_LEFT]
    assert set(result.request_errors) == {"a", "c"}


def test_requests_that_draw_otherwise_are_noticed(compared: tuple[ModelRunner, Compared]) -> None:
    """A row that another request takes over draws with that one's temperature, seed, limits and lists."""
    runner, stage = compared
    driver = Driver(runner)
    for turn in range(3):
        limits = {"top_k": turn + 1, "logit_bias": {turn: 20.0}} if turn else {}
        params = SamplingParams(temperature=0.5 + turn, seed=turn, **limits)
        driver.add(Wish(f"r{turn}", (5, 6, 7), 3, params))
        driver.step({f"r{turn}": 3})
        driver.step({f"r{turn}": 1})
        driver.finish(f"r{turn}")
    assert [len(output.sampled_token_ids) for output in stage.outputs] == [1] * 6


@pytest.mark.usefixtures("interpreted")
@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([2, 31, 64, 97, 300]), num_reqs=st.integers(1, 3))
@settings(max_examples=6)
def test_any_parameters(seed: int, vocab: int, num_reqs: int) -> None:
    """Two steps, so that lists are used again; the second samples some of the requests only."""
    chooser = random.Random(seed)
    world = SamplingWorld([some_params(chooser, vocab) for _ in range(num_reqs)], vocab, seed=seed)
    for reqs in (None, chooser.sample(range(num_reqs), chooser.randint(1, num_reqs))):
        logits = some_logits(chooser, num_reqs, vocab)
        got = world.compare(logits, some_grammar(chooser, vocab, world.batch.req_ids), reqs)
        assert len(got.sampled_token_ids) == len(world.rows if reqs is None else reqs)
        if reqs is None:
            world.append(got.sampled_token_ids.tolist())


class Launches:
    """Stands for a kernel, and notes for what constants and types of arguments it would be compiled."""

    def __init__(self, kernel: Kernel, name: str, seen: set[tuple[Any, ...]]) -> None:
        self.kernel, self.name, self.seen = kernel, name, seen

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., object]:
        """A launch that is noted."""

        def launch(*arguments: Any, **constants: Any) -> object:
            kinds = tuple(getattr(argument, "dtype", type(argument)) for argument in arguments)
            self.seen.add((self.name, kinds, tuple(sorted(constants.items()))))
            return self.kernel[grid](*arguments, **constants)

        return launch


@pytest.mark.usefixtures("interpreted")
def test_no_request_waits_for_a_kernel_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[Any, ...]] = set()
    for module in (logits_rows, sampling, truncation, logit_edits, logprobs):
        for name in re.findall(r"^def (_\w+_kernel)\(", inspect.getsource(module), re.MULTILINE):
            monkeypatch.setattr(module, name, Launches(getattr(module, name), name, seen))
    plain, drawn = SamplingParams(temperature=0.0), SamplingParams(top_k=3, logprobs=1)
    edited, counted = evolve(drawn, logit_bias={3: 1.0}), evolve(plain, frequency_penalty=1.0)
    for params in ([plain] * 2, [counted, drawn], [edited, plain]):
        world = SamplingWorld(params, 33)
        seen.clear()
        world.fused.warm_up()
        warmed = seen.copy()
        masks = GrammarOutput(structured_output_request_ids=["r1"], grammar_bitmask=np.full((1, 2), -1, np.int32))
        for grammar, reqs in ((None, None), (None, [1]), (masks, None)):
            world.compare(some_logits(random.Random(1), 2, 33), grammar, reqs)
        assert seen == warmed


@pytest.mark.usefixtures("interpreted")
def test_a_failed_launch_leaves_no_counts_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SamplingWorld([SamplingParams(temperature=0.0, frequency_penalty=2.0)] * 2, 50)
    logits = some_logits(random.Random(0), 2, 50)
    world.compare(logits)

    class Failing:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            raise RuntimeError("launch")

    with monkeypatch.context() as patch:
        patch.setattr("twostroke.engine.kernels.logit_edits._penalty_kernel", Failing())
        with pytest.raises(RuntimeError, match="launch"):
            world.compare(logits)
    world.compare(logits)

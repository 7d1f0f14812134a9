"""Sampling in one pass gives what the general stage gives, on every step of real schedules."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from attrs import evolve
from driver import Driver, Wish
from modes import LIMITS, PARAMS
from twostroke.engine.config import EngineConfig
from twostroke.engine.cuda import sample as cuda_sample
from twostroke.engine.cuda.sample import CudaSample
from twostroke.engine.kernels.sampling import DrawParams, choose_tokens
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.stages.io import GrammarOutput
from twostroke.stages.records import (
    NOTHING_LEFT,
    Batch,
    BatchExecutionDescriptor,
    ExecuteModelState,
    LogprobsTensors,
    PreparedInputs,
    SamplerOutput,
)
from twostroke.stages.sample import Sample
from twostroke.stages.sampling_params import SamplingParams

FUSED: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, logprobs=0),
    "greedy_too": SamplingParams(temperature=0.0, logprobs=3),
    "tempered": SamplingParams(temperature=0.6, logprobs=0),
    "seeded": SamplingParams(temperature=1.3, seed=-(2**40) + 5, logprobs=1),
    "seeded_too": SamplingParams(temperature=1.0, seed=77, logprobs=2),
}
WITHOUT_LOGPROBS = {name: evolve(params, logprobs=None) for name, params in FUSED.items()}
OTHERS = {name: params for name, params in PARAMS.items() if name not in ("greedy", "seeded")}


class Compared:
    """Samples with both stages, and checks that they agree. ``passes`` are the rows of each single pass."""

    def __init__(self, runner: ModelRunner) -> None:
        parts = runner.parts
        self.general = Sample(parts.columns, parts.table)
        self.fused = CudaSample(parts.columns, parts.table, torch.device("cpu"))
        self.passes: list[int] = []
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
        """What the one pass gave."""
        self.spoil(state.logits)
        before = state.logits.clone()
        wanted = self.general(batch, inputs, state, grammar)
        got = self.fused(batch, inputs, execution, state, grammar)
        assert torch.equal(state.logits.nan_to_num(7), before.nan_to_num(7)), "logits were written"
        check_same(got, wanted)
        self.outputs.append(got)
        self.num_partial += 0 < len(inputs.sampling_reqs) < batch.num_reqs
        return got


def check_same(got: SamplerOutput, wanted: SamplerOutput) -> None:
    assert got.sampled_token_ids.tolist() == wanted.sampled_token_ids.tolist()
    well = torch.zeros_like(wanted.sampled_token_ids)
    assert torch.equal(well if got.health is None else got.health, well if wanted.health is None else wanted.health)
    for name in ("logprobs_reqs", "num_logprobs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
    tables: list[tuple[LogprobsTensors | None, LogprobsTensors | None]] = [(got.logprobs, wanted.logprobs)]
    tables += zip(got.prompt_logprobs, wanted.prompt_logprobs, strict=True)
    for mine, other in tables:
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine.logprobs, other.logprobs)
            assert torch.equal(mine.token_ids, other.token_ids)
            assert torch.equal(mine.ranks, other.ranks)


@pytest.fixture
def compared(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, Compared]:
    """A runner whose sample stage compares the two."""
    runner = build_runner(EngineConfig(**LIMITS), model=random_model(tiny_config()))
    stage = Compared(runner)

    def counted(
        logits: torch.Tensor, params: DrawParams, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stage.passes.append(params.temperatures.shape[0])
        return choose_tokens(logits, params, rows)

    monkeypatch.setattr(cuda_sample, "choose_tokens", counted)
    runner.stages.replace("sample", stage)
    return runner, stage


def wishes(kinds: dict[str, SamplingParams], times: int = 1) -> list[Wish]:
    chooser = random.Random(3)
    return [
        Wish(f"{name}{turn}", tuple(chooser.choices(range(60), k=chooser.randint(1, 9))), 4, params)
        for turn in range(times)
        for name, params in kinds.items()
    ]


@pytest.mark.parametrize("kinds", [FUSED, WITHOUT_LOGPROBS], ids=["logprobs", "no_logprobs"])
def test_one_pass_serves_greedy_and_tempered_requests(
    compared: tuple[ModelRunner, Compared], kinds: dict[str, SamplingParams]
) -> None:
    """Chunked prompts, decodes and preemptions: batches of which all sample, some, and none."""
    runner, stage = compared
    served = Driver(runner, 2).run_random(wishes(kinds, times=3))
    assert all(len(got.tokens) == 4 for got in served.values())
    assert stage.num_partial > 5
    assert sum(stage.passes) >= sum(len(got.tokens) for got in served.values())
    assert 1 in stage.passes
    assert max(stage.passes) > 2


@pytest.mark.parametrize("name", OTHERS)
def test_all_other_requests_get_the_general_stage(compared: tuple[ModelRunner, Compared], name: str) -> None:
    runner, stage = compared
    (served,) = Driver(runner, 1).run_random(wishes({name: OTHERS[name]})).values()
    assert len(served.tokens) == 4
    # Prompt log probabilities are owed in steps over the prompt only.
    assert bool(stage.passes) == (name == "prompt_logprobs")


def test_requests_of_both_kinds_in_one_batch(compared: tuple[ModelRunner, Compared]) -> None:
    runner, stage = compared
    served = Driver(runner, 6).run_random(wishes(FUSED | OTHERS))
    assert len(served) == len(FUSED | OTHERS)
    assert 0 < len(stage.passes) < len(stage.outputs)


def test_a_grammar_takes_the_general_stage(compared: tuple[ModelRunner, Compared]) -> None:
    runner, stage = compared
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2), 3, FUSED["greedy"]))
    mask = np.zeros((1, 2), dtype=np.int32)
    mask[0, 0] = 1 << 9
    driver.stepped({"a": 2}, GrammarOutput(structured_output_request_ids=["a"], grammar_bitmask=mask))
    assert driver.requests["a"].outputs == [9]
    assert not stage.passes


def test_health_of_rows_without_a_choice(compared: tuple[ModelRunner, Compared]) -> None:
    runner, stage = compared
    driver = Driver(runner)
    driver.add(*(Wish(name, (1, 2), 3, WITHOUT_LOGPROBS["tempered"]) for name in "abc"))
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
    assert stage.passes == [3, 3]


def test_requests_that_draw_otherwise_are_noticed(compared: tuple[ModelRunner, Compared]) -> None:
    """A row that another request takes over draws with that one's temperature and seed."""
    runner, stage = compared
    driver = Driver(runner)
    for turn in range(3):
        params = SamplingParams(temperature=0.5 + turn, seed=turn)
        driver.add(Wish(f"r{turn}", (5, 6, 7), 3, params))
        driver.step({f"r{turn}": 3})
        driver.step({f"r{turn}": 1})
        driver.finish(f"r{turn}")
    assert stage.passes == [1] * 6

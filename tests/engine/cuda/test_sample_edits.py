"""Edited logits against the torch reference: rows of several tiles, long histories, and every kind of list."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from sampling_world import SamplingWorld, some_grammar, some_logits, some_params
from twostroke.engine.cuda.sample_edits import LogitEdits
from twostroke.engine.kernels.logits_rows import LogitsRows
from twostroke.stages.io import GrammarOutput
from twostroke.stages.sampling.edits import edit_logits
from twostroke.stages.sampling.grammar import match_grammar
from twostroke.stages.sampling.step import SamplingStep
from twostroke.stages.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("interpreted")

VOCAB = 9001
KINDS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {0: 1.5, 4095: -math.inf, 4096: 1e39, 9000: -2.0}},
    "bad_words": {"bad_words_token_ids": [[9000], [9000], [0, 1, 4096], [2, 3], [5, 4097], [1, 3], [0, 2]]},
    "end_ids": {"min_tokens": 5000, "max_tokens": 6000, "stop_token_ids": [4, 8999], "eos_token_ids": [4, 9900]},
    "ended": {"min_tokens": 1, "stop_token_ids": [4, 8999], "logit_bias": {4: 1.0}},
    "allowed": {"allowed_token_ids": [3, 3, 5000, 9000], "logit_bias": {3: 1.0, 4: 1.0}},
    "repetition": {"repetition_penalty": 1.7},
    "penalties": {"repetition_penalty": 0.4, "frequency_penalty": 0.01, "presence_penalty": -0.7},
    "all_on_one_token": {
        "logit_bias": {1: 3.0},
        "bad_words_token_ids": [[7, 1], [2]],
        "frequency_penalty": 1.1,
        "min_tokens": 5000,
        "max_tokens": 6000,
        "stop_token_ids": [2],
    },
}


def check(
    world: SamplingWorld, edits: LogitEdits, logits: torch.Tensor, grammar: GrammarOutput | None = None
) -> torch.Tensor:
    """Both on one step; which rows were edited."""
    inputs = world.inputs()
    matched = match_grammar(grammar, world.batch, inputs, world.vocab)
    step = SamplingStep.gather(world.columns, world.history, world.rows)
    wanted = edit_logits(logits, step, world.columns, world.history, matched)
    edited = edits.edit(LogitsRows(logits), inputs.seq_lens, step, matched)
    if edited is None:
        assert wanted is logits
        return torch.zeros(len(logits), dtype=torch.bool)
    is_edited = edited.slots >= 0
    limited = logits.clamp(max=torch.finfo(torch.float32).max)
    got = torch.where(is_edited[:, None], edited.logits[edited.slots.long()], limited)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    nan = logits.isnan().sum(1)[is_edited]
    assert torch.equal(edited.num_nan.sum(1)[edited.slots[is_edited].long()], nan)
    return is_edited


def edits_of(world: SamplingWorld) -> LogitEdits:
    return LogitEdits(world.columns, world.device_history, world.device)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_in_rows_of_several_tiles(kind: str) -> None:
    plain = SamplingParams(temperature=0.0)
    world = SamplingWorld([plain, evolve(plain, **KINDS[kind]), plain], VOCAB, seed=4, longest=2600)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits[1, [2, 3, 4096]] = torch.tensor([torch.nan, torch.inf, torch.inf])
    edits = edits_of(world)
    for _ in range(2):
        assert check(world, edits, logits).tolist() == [False, True, False]
        world.append([1, 3, 7])


def test_all_kinds_in_one_batch_with_and_without_a_grammar() -> None:
    params = [evolve(SamplingParams(temperature=0.0), **KINDS[kind]) for kind in KINDS]
    world = SamplingWorld(params, VOCAB, seed=5, longest=300)
    edits, chooser = edits_of(world), random.Random(2)
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (2, -(-VOCAB // 32)), dtype=np.int32)
    grammar = GrammarOutput(structured_output_request_ids=["r6", "r0"], grammar_bitmask=masks)
    for masked in (None, grammar, None):
        check(world, edits, some_logits(chooser, len(params), VOCAB), masked)
        world.append(chooser.choices(range(6), k=len(params)))


def test_any_lists() -> None:
    for seed in range(12):
        chooser = random.Random(seed)
        vocab = chooser.choice([2, 33, 64, 300])
        world = SamplingWorld([some_params(chooser, vocab) for _ in range(3)], vocab, seed=seed)
        edits = edits_of(world)
        for _ in range(2):
            check(world, edits, some_logits(chooser, 3, vocab), some_grammar(chooser, vocab, world.batch.req_ids))
            world.append(chooser.choices(range(min(vocab, 6)), k=3))


def test_reached_minimum_lengths_cost_nothing() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[3])
    world = SamplingWorld([params], 50)
    row = int(world.rows[0])
    world.history.num_prompt_tokens[row] = world.history.num_tokens[row]
    edits, logits = edits_of(world), torch.zeros(1, 50)
    edited: list[bool] = []
    for _ in range(4):
        edited += check(world, edits, logits).tolist()
        world.append([1])
    assert edited == [True, True, False, False]

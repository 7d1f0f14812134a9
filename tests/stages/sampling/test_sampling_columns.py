"""Parameters by row: nothing of a request is left in a row that another one gets."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import frozen
from twostroke.stages.sampling.columns import DEFAULT_ROW, ROW_DTYPE, Feature, SamplingColumns
from twostroke.stages.sampling_params import SamplingParams

VOCAB = 50
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    presence_penalty=1.0,
    frequency_penalty=0.5,
    repetition_penalty=1.5,
    min_tokens=3,
    eos_token_ids=(2, 49, 50, 1000),
    stop_token_ids=(7,),
    logprobs=4,
    prompt_logprobs=-1,
    logit_bias={3: 1.0, 4: -np.inf, 5: 1e300},
    allowed_token_ids=(1, 2, 3),
    bad_words_token_ids=((1, 2, 3), (4,)),
)
PLAIN = SamplingParams(temperature=0.0)


@frozen
class Request:
    sampling_params: SamplingParams
    seed: int = 0


def test_everything_reaches_its_row():
    columns = SamplingColumns(4, VOCAB)
    columns.add(2, Request(EVERYTHING, seed=2**64 - 1))
    row = dict(zip(ROW_DTYPE.names or (), columns.rows[2].tolist(), strict=True))
    assert row.pop("flags") == sum(Feature)
    assert {name: pytest.approx(value) for name, value in row.items()} == {
        "temperature": 0.7,
        "min_p": 0.1,
        "top_k": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": 1.0,
        "min_tokens": 3,
        "num_logprobs": 4,
        "num_prompt_logprobs": VOCAB,
        "seed": 2**64 - 1,
    }
    lists = columns.lists[2]
    assert lists.allowed_ids.tolist() == [1, 2, 3]
    assert lists.bad_words.tolist() == [[1, 2, 3], [-1, -1, 4]]
    assert lists.end_ids.tolist() == [2, 49, 7]
    assert lists.bias_ids.tolist() == [3, 4, 5]
    assert lists.biases.tolist() == [1.0, -np.inf, float(np.finfo(np.float32).max)]


def test_U2_dropped_row_is_default_in_every_field():
    columns = SamplingColumns(4, VOCAB)
    columns.add(2, Request(EVERYTHING, seed=5))
    assert all(columns.rows[2][name] != DEFAULT_ROW[name] for name in ROW_DTYPE.names or ())
    assert not columns.is_default(2)
    columns.drop(2)
    columns.drop(2)
    columns.flush()
    assert all(columns.rows[2][name] == DEFAULT_ROW[name] for name in ROW_DTYPE.names or ())
    assert not columns.lists
    assert all(columns.is_default(row) for row in range(4))


@pytest.mark.parametrize("is_dropped", [True, False], ids=["dropped", "never dropped"])
def test_U2_recycled_row_is_clean(is_dropped: bool):
    reused, fresh = SamplingColumns(4, VOCAB), SamplingColumns(4, VOCAB)
    reused.add(1, Request(EVERYTHING, seed=5))
    if is_dropped:
        reused.drop(1)
    for columns in (reused, fresh):
        columns.add(1, Request(PLAIN))
    assert (reused.rows == fresh.rows).all()
    assert reused.rows[1]["flags"] == 0
    assert not reused.lists


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        (PLAIN, Feature(0)),
        (SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.1), Feature(0)),
        (SamplingParams(), Feature.RANDOM),
        (SamplingParams(top_k=-1), Feature.RANDOM),
        (SamplingParams(top_k=3), Feature.RANDOM | Feature.TOP_K),
        (SamplingParams(temperature=0.0, min_tokens=3), Feature(0)),
        (SamplingParams(temperature=0.0, min_tokens=3, eos_token_ids=(2,)), Feature.MIN_TOKENS),
        (SamplingParams(temperature=0.0, eos_token_ids=(2,), stop_token_ids=(3,)), Feature(0)),
        (SamplingParams(temperature=0.0, logit_bias={}), Feature(0)),
        (SamplingParams(temperature=0.0, logprobs=0), Feature.LOGPROBS),
        (SamplingParams(temperature=0.0, prompt_logprobs=0), Feature(0)),
        (SamplingParams(temperature=0.0, presence_penalty=-0.1), Feature.PENALTIES),
    ],
)
def test_flags_say_what_a_row_uses(params: SamplingParams, flags: Feature):
    columns = SamplingColumns(2, VOCAB)
    columns.add(1, Request(params))
    assert columns.rows[1]["flags"] == int(flags)


@pytest.mark.parametrize(
    ("asked", "count"), [(None, -1), (0, 0), (7, 7), (-1, VOCAB), (VOCAB, VOCAB), (VOCAB + 5, VOCAB)]
)
def test_S1_counts_of_logprobs_are_clamped(asked: int | None, count: int):
    columns = SamplingColumns(2, VOCAB)
    columns.add(1, Request(SamplingParams(logprobs=asked, prompt_logprobs=asked)))
    assert columns.rows[1]["num_logprobs"] == columns.rows[1]["num_prompt_logprobs"] == count


@pytest.mark.parametrize(("seed", "stored"), [(-1, 2**64 - 1), (2**63, 2**63), (0, 0), (-(2**63), 2**63)])
def test_seeds_are_64_bits(seed: int, stored: int):
    columns = SamplingColumns(2, VOCAB)
    columns.add(1, Request(SamplingParams(), seed=seed))
    assert int(columns.rows[1]["seed"]) == stored


def test_tiny_repetition_penalty_does_not_become_zero():
    columns = SamplingColumns(2, VOCAB)
    columns.add(1, Request(SamplingParams(repetition_penalty=1e-60)))
    assert columns.rows[1]["repetition_penalty"] > 0

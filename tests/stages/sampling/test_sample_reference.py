"""The stage against a reference that handles one request at a time in plain Python and float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attrs import define, field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twostroke.stages.io import GrammarOutput
from twostroke.stages.sampling_params import SamplingParams

INF = math.inf
MASK = 2**32 - 1
CLOSE = 1e-4


def mixed(word: int) -> int:
    word = (word ^ word >> 16) * 0x7FEB352D & MASK
    word = (word ^ word >> 15) * 0x846CA68B & MASK
    return word ^ word >> 16


def gumbel(seed: int, position: int, token: int) -> float:
    keys = []
    for key in (0x243F6A88, 0x85A308D3):
        for part in (seed & MASK, seed >> 32 & MASK, position, 1):
            key = mixed(key ^ part)
        keys.append(key)
    word = mixed(mixed(token ^ keys[0]) + keys[1] & MASK)
    uniform = ((word & 0x7FFFFFFF) + 0.5) * 2.0**-31
    return -math.log(-math.log1p(-min(uniform, 1 - 2.0**-24)))


@define
class Case:
    """One request with its logits."""

    params: SamplingParams
    seed: int
    prompt: list[int]
    outputs: list[int]
    logits: list[float]
    allowed_by_grammar: list[int] | None = None
    decisions: list[float] = field(factory=list)
    """How far each comparison was from going the other way."""

    def edited(self) -> list[float]:
        params, logits, outputs = self.params, list(self.logits), self.outputs
        for token in range(len(logits)):
            by_grammar = self.allowed_by_grammar is None or token in self.allowed_by_grammar
            by_list = params.allowed_token_ids is None or token in params.allowed_token_ids
            ends = token in params.end_token_ids and len(outputs) < params.min_tokens
            if not by_grammar or not by_list or ends or self.completes_bad_word(token):
                logits[token] = -INF
            logits[token] += (params.logit_bias or {}).get(token, 0.0)
            if token in self.prompt + outputs:
                logits[token] *= params.repetition_penalty ** (-1 if logits[token] > 0 else 1)
            logits[token] -= params.frequency_penalty * outputs.count(token)
            logits[token] -= params.presence_penalty * (token in outputs)
        return logits

    def completes_bad_word(self, token: int) -> bool:
        return any(
            word[-1] == token and list(word[:-1]) == self.outputs[len(self.outputs) - len(word) + 1 :]
            for word in self.params.bad_words_token_ids
            if len(word) <= len(self.outputs) + 1
        )

    def token(self) -> int | None:
        logits = self.edited()
        if max(logits) == -INF:
            return None
        if self.params.is_greedy:
            return self.best(logits)
        params, peak = self.params, max(logits)
        scaled = [(logit - peak) / params.temperature for logit in logits]
        if params.min_p > 0:
            self.decisions += [abs(value - math.log(params.min_p)) for value in scaled if -INF < value < 0]
            scaled = [value if value >= math.log(params.min_p) else -INF for value in scaled]
        if params.top_k > 0:
            least = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
            self.decisions += [abs(value - least) for value in scaled if value not in (least, -INF)]
            scaled = [value if value >= least else -INF for value in scaled]
        if params.top_p < 1:
            scaled = self.nucleus(scaled)
        position = len(self.prompt) + len(self.outputs)
        return self.best([value + gumbel(self.seed, position, token) for token, value in enumerate(scaled)])

    def nucleus(self, scaled: list[float]) -> list[float]:
        total = sum(math.exp(value) for value in scaled)
        kept = []
        for value in scaled:
            likelier = sum(math.exp(other) for other in scaled if other > value) / total
            self.decisions.append(abs(likelier - self.params.top_p) if likelier else INF)
            kept.append(value if likelier < self.params.top_p else -INF)
        return kept

    def best(self, values: list[float]) -> int:
        ordered = sorted(values, reverse=True)
        self.decisions.append(ordered[0] - ordered[1] if ordered[1] > -INF else INF)
        return values.index(ordered[0])

    @property
    def is_clear(self) -> bool:
        """Whether no comparison could go the other way in float32."""
        return min(self.decisions, default=INF) > CLOSE


def check(SamplingKit, packed_bitmask, cases: Sequence[Case], vocab: int) -> None:
    """Solo equals batch equals the reference, in tokens and in log probabilities."""
    kit = SamplingKit(vocab)
    for index, case in enumerate(cases):
        kit.add(str(index), case.params, case.prompt, case.outputs, row=len(cases) - index)
        kit.columns.rows[len(cases) - index]["seed"] = case.seed % 2**64
    logits = torch.tensor([case.logits for case in cases], dtype=torch.float32)
    constrained = [index for index, case in enumerate(cases) if case.allowed_by_grammar is not None][::-1]
    grammar = GrammarOutput(
        structured_output_request_ids=[str(index) for index in constrained],
        grammar_bitmask=packed_bitmask([cases[index].allowed_by_grammar or [] for index in constrained], vocab),
    )
    batch = kit.sample(logits, grammar=grammar)
    asked = [] if batch.logprobs_reqs is None else batch.logprobs_reqs.tolist()
    for index, case in enumerate(cases):
        mask = [case.allowed_by_grammar or []]
        own = GrammarOutput(
            structured_output_request_ids=[str(index)] * (index in constrained),
            grammar_bitmask=packed_bitmask(mask[: index in constrained], vocab),
        )
        solo = kit.sample(logits[index : index + 1], [str(index)], own)
        expected = case.token()
        assert (0 in solo.errors) == (index in batch.errors) == (expected is None)
        if expected is None:
            continue
        token = int(batch.token_ids[index])
        assert int(solo.token_ids[0]) == token
        assert token == expected or not case.is_clear
        assert (index in asked) == (case.params.logprobs is not None)
        if index in asked:
            ours, alone = batch.logprobs, solo.logprobs
            width, row = alone.logprobs.shape[1], asked.index(index)
            np.testing.assert_array_equal(ours.logprob_token_ids[row, :width], alone.logprob_token_ids[0])
            np.testing.assert_array_equal(ours.logprobs[row, :width], alone.logprobs[0])
            assert (ours.logprob_token_ids[row, width:] == -1).all()
            raw = logits[index].double().log_softmax(0)
            np.testing.assert_allclose(alone.logprobs[0], raw[alone.logprob_token_ids[0]], atol=1e-4)


SINGLE_PARAMETERS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.3},
    "top_k 1": {"top_k": 1},
    "top_k 4": {"top_k": 4},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_k -1": {"top_k": -1},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.2},
    "min_p 1": {"min_p": 1.0},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "inverse repetition": {"temperature": 0.0, "repetition_penalty": 0.3},
    "presence": {"temperature": 0.0, "presence_penalty": 1.9},
    "frequency": {"temperature": 0.0, "frequency_penalty": -1.5},
    "bias": {"temperature": 0.0, "logit_bias": {3: 5.0, 0: -INF}},
    "allowed": {"temperature": 0.0, "allowed_token_ids": (1, 6, 20)},
    "bad words": {"temperature": 0.0, "bad_words_token_ids": ((0,), (1, 3), (4, 2, 5), (2, 2))},
    "min_tokens": {"temperature": 0.0, "min_tokens": 3, "eos_token_ids": (2, 4), "stop_token_ids": (7, 9)},
}


@pytest.mark.parametrize("name", SINGLE_PARAMETERS)
def test_each_parameter_alone(name: str, SamplingKit, packed_bitmask):
    random = np.random.default_rng(7)
    params = SamplingParams(**SINGLE_PARAMETERS[name])
    cases = [
        Case(
            params,
            seed=int(random.integers(2**63)),
            prompt=random.integers(0, 23, 3).tolist(),
            outputs=random.integers(0, 6, index % 6).tolist(),
            logits=(random.standard_normal(23) * 2).astype(np.float32).tolist(),
        )
        for index in range(12)
    ]
    check(SamplingKit, packed_bitmask, cases, 23)
    assert sum(case.is_clear for case in cases) > 8


def maybe(strategy: st.SearchStrategy, otherwise: object) -> st.SearchStrategy:
    return st.one_of(st.just(otherwise), strategy)


@st.composite
def cases_of(draw: st.DrawFn, vocab: int) -> Case:
    token = st.integers(0, vocab - 1)
    few = st.lists(token, min_size=1, max_size=4).map(tuple)
    min_tokens = draw(st.integers(0, 3))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.2, 0.7, 1.0, 2.5])),
        top_k=draw(maybe(st.integers(-1, vocab + 9), 0)),
        top_p=draw(maybe(st.floats(0.05, 0.99), 1.0)),
        min_p=draw(maybe(st.floats(0.01, 1.0), 0.0)),
        presence_penalty=draw(maybe(st.floats(-2, 2), 0.0)),
        frequency_penalty=draw(maybe(st.floats(-2, 2), 0.0)),
        repetition_penalty=draw(maybe(st.floats(0.5, 2), 1.0)),
        min_tokens=min_tokens,
        stop_token_ids=draw(maybe(few, ())),
        eos_token_ids=draw(maybe(few, ())),
        logprobs=draw(st.sampled_from([None, None, 0, 1, 4, -1])),
        logit_bias=draw(maybe(st.dictionaries(token, st.sampled_from([-INF, -3.0, 2.5]), max_size=3), None)),
        allowed_token_ids=draw(maybe(few, None)),
        bad_words_token_ids=draw(maybe(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4), ())),
    )
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Case(
        params,
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        prompt=draw(st.lists(token, min_size=1, max_size=5)),
        outputs=draw(st.lists(st.integers(0, 3), max_size=6)),
        logits=(numbers.standard_normal(vocab) * draw(st.sampled_from([0.5, 3.0]))).astype(np.float32).tolist(),
        allowed_by_grammar=draw(maybe(st.lists(token, min_size=1, max_size=vocab), None)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_parameters_in_a_batch(data: st.DataObject, SamplingKit, packed_bitmask):
    vocab = data.draw(st.sampled_from([4, 31, 32, 33, 50]))
    cases = data.draw(st.lists(cases_of(vocab), min_size=1, max_size=6))
    check(SamplingKit, packed_bitmask, cases, vocab)

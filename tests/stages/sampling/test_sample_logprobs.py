"""Log probabilities out of the sample stage: raw, by request, and of prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from twostroke.stages.records import PromptSpan
from twostroke.stages.sampling_params import SamplingParams

VOCAB = 40
GREEDY = SamplingParams(temperature=0.0)


def greedy(**parameters) -> SamplingParams:
    return SamplingParams(temperature=0.0, **parameters)


@pytest.fixture
def kit(SamplingKit):
    return SamplingKit(VOCAB)


def logits_for(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_S9_raw_whatever_is_done_to_the_logits(kit):
    edits = {"repetition_penalty": 1.5, "logit_bias": {3: 4.0}, "top_k": 2}
    kit.add("a", SamplingParams(temperature=0.5, logprobs=1, **edits))
    kit.add("plain", GREEDY)
    kit.add("c", greedy(logprobs=3, allowed_token_ids=(1, 2)))
    logits = logits_for(3)
    output = kit.sample(logits)
    assert output.logprobs_reqs.tolist() == [0, 2]
    raw = logits.double().log_softmax(1)
    for index, (row, k) in enumerate([(0, 1), (2, 3)]):
        token = int(output.token_ids[row])
        ids = output.logprobs.logprob_token_ids[index]
        assert ids[0] == token
        assert ids[1 : k + 1].tolist() == raw[row].topk(k).indices.tolist()
        assert (ids[k + 1 :] == -1).all()
        np.testing.assert_allclose(output.logprobs.logprobs[index, : k + 1], raw[row, ids[: k + 1]], atol=1e-5)
        assert output.logprobs.sampled_token_ranks[index] == 1 + int((raw[row] > raw[row, token]).sum())


def test_zero_one_and_all(kit):
    for name, count in (("none", None), ("zero", 0), ("one", 1), ("all", -1), ("vocabulary", VOCAB)):
        kit.add(name, greedy(logprobs=count))
    output = kit.sample(logits_for(5))
    assert output.logprobs_reqs.tolist() == [1, 2, 3, 4]
    assert output.logprobs.logprob_token_ids.shape == (4, 1 + VOCAB)
    assert (output.logprobs.logprob_token_ids >= 0).sum(axis=1).tolist() == [1, 2, 1 + VOCAB, 1 + VOCAB]
    assert sorted(output.logprobs.logprob_token_ids[2, 1:].tolist()) == list(range(VOCAB))
    assert output.logprobs.sampled_token_ranks.tolist() == [1] * 4


@pytest.mark.parametrize("chunks", [[6], [3, 3], [5, 1], [1] * 6])
def test_S8_prompt_logprobs_score_the_next_prompt_token(kit, chunks):
    prompt = [4, 9, 9, 0, 31, 2, 7]
    kit.add("neighbour", GREEDY)
    kit.add("a", greedy(prompt_logprobs=2), prompt=prompt)
    logits = logits_for(6, seed=5)
    raw, position, rows = logits.log_softmax(1), 0, []
    for count in chunks:
        part = torch.cat([logits_for(1), logits[position : position + count]])
        output = kit.sample(part, sampling=[(0, 0)], spans=[PromptSpan(1, 1, count, position)])
        rows.append(output.prompt_logprobs[0])
        position += count
    ids = np.concatenate([table.logprob_token_ids for table in rows])
    assert ids[:, 0].tolist() == prompt[1:]
    assert ids[:, 1:].tolist() == raw.topk(2).indices.tolist()
    values = np.concatenate([table.logprobs for table in rows])
    np.testing.assert_allclose(values, raw.gather(1, torch.from_numpy(ids)), atol=1e-6)
    ranks = np.concatenate([table.sampled_token_ranks for table in rows])
    assert ranks.tolist() == [1 + int((row > row[token]).sum()) for row, token in zip(raw, prompt[1:], strict=True)]


@pytest.mark.parametrize(("asked", "width"), [(0, 1), (VOCAB, 1 + VOCAB), (-1, 1 + VOCAB)])
def test_widths_of_prompt_logprobs(kit, asked, width):
    kit.add("a", greedy(prompt_logprobs=asked), prompt=[1, 2, 3])
    spans = [PromptSpan(0, 0, 2, 0), PromptSpan(0, 3, 0, 2)]
    output = kit.sample(logits_for(3), sampling=[(0, 2)], spans=spans)
    assert output.prompt_logprobs[0].logprob_token_ids.shape == (2, width)
    assert output.prompt_logprobs[1].logprob_token_ids.shape == (0, width)

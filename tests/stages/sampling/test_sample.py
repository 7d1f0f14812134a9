"""The sample stage on hand-made rows: order of operations, isolation of requests, grammar."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from twostroke.stages.errors import InvalidGrammarOutput, RequestFailed
from twostroke.stages.io import GrammarOutput
from twostroke.stages.sampling.edits import edit_logits
from twostroke.stages.sampling.step import SamplingStep
from twostroke.stages.sampling_params import SamplingParams

VOCAB = 40
INF = math.inf
GREEDY = SamplingParams(temperature=0.0)


def greedy(**parameters) -> SamplingParams:
    return SamplingParams(temperature=0.0, **parameters)


@pytest.fixture
def kit(SamplingKit):
    return SamplingKit(VOCAB)


def logits_for(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


class TestGreedy:
    def test_argmax(self, kit):
        for name in "abc":
            kit.add(name, GREEDY)
        logits = logits_for(3)
        assert kit.tokens(logits) == logits.argmax(1).tolist()

    @pytest.mark.parametrize(
        ("params", "outputs", "is_copied"),
        [
            (GREEDY, [], False),
            (SamplingParams(top_k=3, top_p=0.5, min_p=0.1, logprobs=2), [], False),
            (greedy(min_tokens=2, stop_token_ids=(3,)), [1], True),
            (greedy(min_tokens=2, stop_token_ids=(3,)), [1, 1], False),
            (greedy(logit_bias={1: 1.0}), [], True),
        ],
    )
    def test_logits_are_copied_only_when_something_edits_them(self, kit, params, outputs, is_copied):
        kit.add("a", params, outputs=outputs)
        logits = logits_for(1)
        step = SamplingStep.gather(kit.columns, kit.history, np.array([1]))
        assert (edit_logits(logits, step, kit.columns, kit.history, None) is not logits) == is_copied

    def test_S2_greedy_rows_in_a_mixed_batch(self, kit):
        parameters = [GREEDY, SamplingParams(temperature=0.7, top_k=2), SamplingParams(temperature=1e-6, top_p=0.1)]
        logits = logits_for(3)
        logits[:, 5] = -INF
        alone = []
        for name, params in zip("abc", parameters, strict=True):
            kit.add(name, params)
            alone += kit.tokens(logits[len(alone) :][:1], [name])
        assert kit.tokens(logits) == alone
        assert (alone[0], alone[2]) == (int(logits[0].argmax()), int(logits[2].argmax()))

    def test_nothing_to_sample(self, kit):
        kit.add("a", greedy(logprobs=2))
        output = kit.sample(torch.empty(0, VOCAB), sampling=[])
        assert output.token_ids.tolist() == []
        assert output.token_ids.dtype == np.int64
        assert output.logprobs is None
        assert not output.errors

    def test_logits_rows_are_found_by_index(self, kit):
        for name in "abc":
            kit.add(name, GREEDY)
        logits = logits_for(6)
        output = kit.sample(logits, sampling=[(0, 4), (2, 1)])
        assert output.token_ids.tolist() == logits[[4, 1]].argmax(1).tolist()

    def test_padding_rows_of_logits_are_ignored(self, kit):
        kit.add("a", GREEDY)
        logits = logits_for(4)
        logits[1:] = math.nan
        output = kit.sample(logits, ["a"])
        assert output.token_ids.tolist() == [int(logits[0].argmax())]
        assert not output.errors


class TestEdits:
    def test_U1_U2_masks_stay_with_their_row(self, kit):
        kit.add("a", greedy(allowed_token_ids=(7,)), row=3)
        kit.add("b", greedy(allowed_token_ids=(5, 6)), row=1)
        logits = torch.zeros(2, VOCAB)
        logits[:, 20], logits[:, 6] = 9, 1
        assert kit.tokens(logits, ["a", "b"]) == [7, 6]
        assert kit.tokens(logits, ["b", "a"]) == [6, 7]
        kit.columns.drop(3)
        kit.add("c", GREEDY, row=3)
        assert kit.tokens(logits, ["c", "b"]) == [20, 6]

    def test_U12_plain_and_constrained_in_any_order(self, kit):
        kit.add("plain", GREEDY)
        kit.add("also plain", GREEDY)
        kit.add("banned", greedy(bad_words_token_ids=((20,),)))
        kit.add("penalised", greedy(presence_penalty=2.0), prompt=[1], outputs=[20])
        logits = torch.zeros(4, VOCAB)
        logits[:, 20], logits[:, 4] = 1.5, 1
        expected = {"plain": 20, "also plain": 20, "banned": 4, "penalised": 4}
        for order in (list(expected), list(expected)[::-1], ["banned", "plain", "penalised", "also plain"]):
            assert kit.tokens(logits, order) == [expected[name] for name in order]

    def test_bias_does_not_revive_a_masked_token(self, kit):
        kit.add("a", greedy(allowed_token_ids=(1, 2), logit_bias={3: 100.0, 2: 5.0}))
        assert kit.tokens(torch.zeros(1, VOCAB)) == [2]

    def test_end_ids_are_masked_until_min_tokens(self, kit):
        kit.add("a", greedy(min_tokens=2, eos_token_ids=(5, 1000), stop_token_ids=(6,), ignore_eos=True))
        logits = torch.zeros(1, VOCAB)
        logits[0, [5, 6, 7]] = torch.tensor([3.0, 2.0, 1.0])
        sampled = []
        for _ in range(3):
            sampled += kit.tokens(logits)
            kit.append("a", sampled[-1])
        assert sampled == [7, 7, 5]

    def test_bad_words_look_at_the_output_only(self, kit):
        params = greedy(bad_words_token_ids=((1, 2),))
        kit.add("in the prompt", params, prompt=[1])
        kit.add("in the output", params, prompt=[1], outputs=[1])
        kit.add(
            "across the border", greedy(bad_words_token_ids=((1, 1, 2), (1, 1, 1, 1, 1, 2))), prompt=[1], outputs=[1]
        )
        logits = torch.zeros(3, VOCAB)
        logits[:, 2], logits[:, 3] = 2, 1
        assert kit.tokens(logits) == [2, 3, 2]

    def test_penalties_come_after_bias(self, kit):
        kit.add("a", greedy(repetition_penalty=2.0, logit_bias={5: 4.0}), prompt=[5, 5], outputs=[6])
        logits = torch.zeros(1, VOCAB)
        logits[0, 8] = 2.5
        assert kit.tokens(logits) == [8]
        logits[0, 8] = 1.5
        assert kit.tokens(logits) == [5]

    def test_infinite_logits_win_whatever_is_added(self, kit):
        for name, params in (
            ("a", GREEDY),
            ("b", greedy(logit_bias={4: -INF, 5: 100.0})),
            ("c", SamplingParams(top_p=0.5, min_p=0.1)),
            ("d", SamplingParams(repetition_penalty=1.5, seed=3)),
        ):
            kit.add(name, params, prompt=[4])
        logits = torch.zeros(4, VOCAB)
        logits[:, [4, 7]] = INF
        tokens = kit.tokens(logits)
        assert tokens[:2] == [4, 7]
        assert set(tokens[2:]) <= {4, 7}


class TestSeeds:
    def drawn(self, kit, logits: torch.Tensor, steps: int = 12) -> list[int]:
        tokens = []
        for _ in range(steps):
            tokens += kit.tokens(logits, ["a"])
            kit.append("a", tokens[-1])
        return tokens

    def test_P1_P2_seed_and_position_decide(self, SamplingKit):
        logits = torch.zeros(1, VOCAB)
        tokens = []
        for row, outputs in ((1, []), (9, [])):
            kit = SamplingKit(VOCAB)
            kit.add("a", SamplingParams(seed=1), row=row, outputs=outputs)
            tokens.append(self.drawn(kit, logits))
        assert tokens[0] == tokens[1]
        assert len(set(tokens[0])) > 3

        resumed = SamplingKit(VOCAB)
        resumed.add("a", SamplingParams(seed=1), row=4, outputs=tokens[0][:5])
        assert self.drawn(resumed, logits, 7) == tokens[0][5:]

    def test_other_seeds_draw_other_tokens(self, SamplingKit):
        streams = []
        for seed in (1, 2, 1 + 2**32, -1):
            kit = SamplingKit(VOCAB)
            kit.add("a", SamplingParams(seed=seed))
            streams.append(tuple(self.drawn(kit, torch.zeros(1, VOCAB))))
        assert len(set(streams)) == 4

    def test_sampling_again_gives_the_same(self, kit):
        kit.add("a", SamplingParams(seed=7))
        logits = logits_for(1)
        assert len({kit.tokens(logits)[0] for _ in range(5)}) == 1


class TestFailures:
    def test_nan_fails_its_request_only(self, kit):
        kit.add("a", GREEDY)
        kit.add("nan", SamplingParams(top_p=0.9, top_k=3, min_p=0.1, logprobs=2))
        kit.add("masked nan", greedy(allowed_token_ids=(1, 2)))
        kit.add("d", SamplingParams(seed=3, top_p=0.9, logprobs=1))
        logits = logits_for(4)
        clean = kit.sample(logits)
        logits[1, [3, 8]] = math.nan
        logits[2, 30] = math.nan
        output = kit.sample(logits)
        assert output.num_nans == {1: 2, 2: 1}
        assert list(output.errors) == [1, 2]
        assert isinstance(output.errors[1], RequestFailed)
        assert "'nan'" in str(output.errors[1])
        assert "2 NaN" in str(output.errors[1])
        assert output.token_ids[[0, 3]].tolist() == clean.token_ids[[0, 3]].tolist()
        assert output.logprobs_reqs.tolist() == [1, 3]
        np.testing.assert_array_equal(output.logprobs.logprobs[1], clean.logprobs.logprobs[1])
        assert ((output.token_ids >= 0) & (output.token_ids < VOCAB)).all()

    @pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_k=2, top_p=0.5)])
    def test_a_row_without_any_token_fails_alone(self, kit, params):
        kit.add("a", GREEDY)
        kit.add("stuck", params)
        kit.add("c", SamplingParams(seed=4))
        logits = logits_for(3)
        clean = kit.tokens(logits)
        logits[1] = -INF
        output = kit.sample(logits)
        assert list(output.errors) == [1]
        assert "no token is left" in str(output.errors[1])
        assert not output.num_nans
        assert [output.token_ids[0], output.token_ids[2]] == [clean[0], clean[2]]

    def test_masks_that_contradict_each_other_fail_their_request(self, kit):
        kit.add("a", greedy(allowed_token_ids=(5,), min_tokens=1, stop_token_ids=(5,)))
        assert list(kit.sample(logits_for(1)).errors) == [0]


class TestGrammar:
    def test_S3_rows_are_matched_by_id(self, kit, packed_bitmask):
        for name in ("plain", "A", "also plain", "B", "chunk"):
            kit.add(name, GREEDY)
        logits = logits_for(4)
        logits[:, 33] += 50
        req_ids = ["B", "gone", "A", "chunk"]
        grammar = GrammarOutput(
            structured_output_request_ids=req_ids, grammar_bitmask=packed_bitmask([[2], [], [1, 39], []], VOCAB)
        )
        sampling = [(0, 0), (1, 1), (2, 2), (3, 3)]
        output = kit.sample(logits, grammar=grammar, sampling=sampling)
        assert not output.errors
        best_of_a = 1 if logits[1, 1] > logits[1, 39] else 39
        assert output.token_ids.tolist() == [33, best_of_a, 33, 2]

    def test_draws_obey_the_grammar(self, kit, packed_bitmask):
        for index in range(10):
            kit.add(str(index), SamplingParams(seed=index, top_p=0.99))
        names = list(kit.rows)
        masks = packed_bitmask([[3, 37]] * 10, VOCAB)
        grammar = GrammarOutput(structured_output_request_ids=names, grammar_bitmask=masks)
        assert set(kit.sample(torch.zeros(10, VOCAB), grammar=grammar).token_ids.tolist()) == {3, 37}

    def test_a_mask_that_allows_nothing_fails_its_request(self, kit, packed_bitmask):
        kit.add("a", GREEDY)
        kit.add("b", GREEDY)
        grammar = GrammarOutput(structured_output_request_ids=["b"], grammar_bitmask=packed_bitmask([[]], VOCAB))
        output = kit.sample(logits_for(2), grammar=grammar)
        assert list(output.errors) == [1]
        assert "grammar" in str(output.errors[1])

    @pytest.mark.parametrize(
        ("ids", "bitmask", "message"),
        [
            (["a"], np.zeros((1, 1), np.int32), r"shape \(1, 1\); expected \(1, 2\)"),
            (["a"], np.zeros((1, 3), np.int32), r"shape \(1, 3\)"),
            (["a", "b"], np.zeros((1, 2), np.int32), r"expected \(2, 2\)"),
            (["a"], np.zeros(2, np.int32), r"shape \(2,\)"),
            (["a"], np.zeros((1, 2), np.int64), "int64; expected int32"),
            (["a"], np.zeros((1, 2), np.uint32), "uint32; expected int32"),
            (["a"], torch.zeros(1, 2, dtype=torch.int32), "Tensor; pass a numpy"),
            (["a", "b", "a"], np.zeros((3, 2), np.int32), "'a' has more than one row"),
            (["gone"], np.zeros((1, 1), np.int32), "shape"),
        ],
    )
    def test_misfits_are_refused(self, kit, ids, bitmask, message):
        kit.add("a", GREEDY)
        kit.add("b", GREEDY)
        grammar = GrammarOutput(structured_output_request_ids=ids, grammar_bitmask=bitmask)
        with pytest.raises(InvalidGrammarOutput, match=message):
            kit.sample(logits_for(2), grammar=grammar)

    def test_no_rows_means_no_constraint(self, kit):
        kit.add("a", GREEDY)
        grammar = GrammarOutput(structured_output_request_ids=[], grammar_bitmask=np.zeros((0, 0), np.int32))
        logits = logits_for(1)
        assert kit.sample(logits, grammar=grammar).token_ids.tolist() == [int(logits.argmax())]

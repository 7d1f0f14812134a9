"""Operations on logits against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from twostroke.stages.device import HostDevice
from twostroke.stages.records import SamplerOutput
from twostroke.stages.sampling.logprobs import gather_logprobs, top_tokens
from twostroke.stages.sampling.masks import (
    add_logit_bias,
    apply_allowed_token_ids,
    apply_bad_words,
    apply_grammar_bitmask,
    mask_token_ids,
)
from twostroke.stages.sampling.penalties import History, Penalties, apply_penalties
from twostroke.stages.sampling.truncation import min_p_floor, top_k_floor, top_p_floor
from twostroke.stages.step_output import SampledDownload

INF = math.inf


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def penalised(logits: Sequence[float], history: History, repetition: float, frequency: float, presence: float):
    tensor = torch.tensor([list(logits)])
    apply_penalties(tensor, ints(0), history, Penalties(floats(repetition), floats(frequency), floats(presence)))
    return tensor[0].tolist()


class TestPenalties:
    """Prompt [5, 5], output [6]; what lies behind the known tokens is garbage."""

    history = History(torch.tensor([[5, 5, 6, 2**30, -7]]), ints(3), ints(2))
    logits = (1.0, 1.0, 1.0, 1.0, 1.0, 4.0, -2.0, 3.0)

    def test_S7_repetition_counts_prompt_and_output_once(self):
        expected = [1, 1, 1, 1, 1, 2.0, -4.0, 3]
        assert penalised(self.logits, self.history, 2.0, 0.0, 0.0) == expected

    def test_S7_presence_counts_the_output_only(self):
        assert penalised(self.logits, self.history, 1.0, 0.0, 0.5) == [1, 1, 1, 1, 1, 4.0, -2.5, 3]

    def test_S7_frequency_multiplies_by_the_count_of_outputs(self):
        history = History(torch.tensor([[5, 5, 6, 5, 6, 6]]), ints(6), ints(2))
        assert penalised(self.logits, history, 1.0, 0.5, 0.0) == [1, 1, 1, 1, 1, 3.5, -3.5, 3]

    def test_repetition_comes_before_frequency_and_presence(self):
        history = History(torch.tensor([[5, 5, 6, 5, 6, 6]]), ints(6), ints(2))
        assert penalised(self.logits, history, 2.0, 0.25, 1.0) == [1, 1, 1, 1, 1, 0.75, -5.75, 3]

    def test_masked_tokens_stay_masked(self):
        assert penalised([-INF] * 8, self.history, 0.5, -2.0, -2.0) == [-INF] * 8

    def test_other_rows_are_left_alone(self):
        logits = torch.ones(3, 8)
        apply_penalties(logits, ints(2), self.history, Penalties(floats(2), floats(0), floats(0)))
        assert torch.equal(logits[:2], torch.ones(2, 8))
        assert logits[2].tolist() == [1, 1, 1, 1, 1, 0.5, 0.5, 1]


class TestMasks:
    def test_grammar_bits_are_little_endian_in_each_word(self):
        logits = torch.zeros(2, 40)
        words = np.array([[1 | 1 << 31, 0b10000000]], dtype=np.uint32).view(np.int32)
        apply_grammar_bitmask(logits, ints(1), torch.from_numpy(words))
        assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == [0, 31, 39]
        assert torch.equal(logits[0], torch.zeros(40))

    def test_grammar_bits_beyond_the_vocabulary_do_not_matter(self):
        logits = torch.zeros(1, 33)
        apply_grammar_bitmask(logits, ints(0), torch.tensor([[0, -2]], dtype=torch.int32))
        assert torch.isneginf(logits).all()

    def test_S5_allowed_ids_restrict_their_row_only(self):
        logits = torch.arange(10.0).view(2, 5)
        apply_allowed_token_ids(logits, ints(1), ints(1, 1, 1), ints(4, 0, 4))
        assert logits.tolist() == [[0, 1, 2, 3, 4], [5, -INF, -INF, -INF, 9]]

    def test_masked_ids(self):
        logits = torch.zeros(2, 3)
        mask_token_ids(logits, ints(0, 1, 1), ints(2, 0, 0))
        assert logits.tolist() == [[0, 0, -INF], [-INF, 0, 0]]

    def test_bias_adds_and_forbids(self):
        logits = torch.tensor([[1.0, -INF, 2.0]])
        add_logit_bias(logits, ints(0, 0, 0), ints(0, 1, 2), floats(0.5, 100.0, -INF))
        assert logits.tolist() == [[1.5, -INF, -INF]]

    def test_bad_words_need_their_whole_beginning(self):
        logits = torch.zeros(2, 6)
        words = torch.tensor([[-1, -1, 3], [-1, 1, 4], [2, 1, 5], [1, 1, 5], [0, 2, 5]])
        recent = torch.tensor([[2, 1], [2, 1], [2, 1], [2, 1], [-1, 2]])
        apply_bad_words(logits, ints(0, 0, 0, 0, 1), words, recent)
        assert torch.isneginf(logits[0]).nonzero()[:, 0].tolist() == [3, 4, 5]
        assert torch.isfinite(logits[1]).all()

    def test_bad_words_of_one_token(self):
        logits = torch.zeros(1, 3)
        apply_bad_words(logits, ints(0, 0), torch.tensor([[2], [2]]), torch.empty(2, 0, dtype=torch.int64))
        assert logits.tolist() == [[0, 0, -INF]]


class TestTruncation:
    probabilities = floats(0.4, 0.1, 0.3, 0.15, 0.05)

    def kept(self, floor: torch.Tensor) -> list[int]:
        return (self.probabilities.log() >= floor[0]).nonzero()[:, 0].tolist()

    @pytest.mark.parametrize(("min_p", "kept"), [(0.0, 5), (0.2, 4), (0.3, 3), (0.7, 2), (1.0, 1)])
    def test_min_p_is_relative_to_the_largest(self, min_p: float, kept: int):
        assert len(self.kept(min_p_floor(self.probabilities.log()[None], floats(min_p)))) == kept

    @pytest.mark.parametrize(("top_k", "kept"), [(0, [0, 1, 2, 3, 4]), (1, [0]), (3, [0, 2, 3]), (5, [0, 1, 2, 3, 4])])
    def test_S1_top_k_by_row_with_off_as_zero(self, top_k: int, kept: list[int]):
        logits = self.probabilities.log().expand(2, -1)
        assert self.kept(top_k_floor(logits, ints(top_k, 5), 5)[:1]) == kept
        assert self.kept(top_k_floor(logits, ints(top_k, 1), max(top_k, 1))[:1]) == kept

    @pytest.mark.parametrize(
        ("top_p", "kept"),
        [(1e-6, [0]), (0.39, [0]), (0.41, [0, 2]), (0.72, [0, 2, 3]), (0.96, [0, 1, 2, 3, 4]), (1.0, [0, 1, 2, 3, 4])],
    )
    def test_top_p_keeps_the_smallest_set_that_holds_it(self, top_p: float, kept: list[int]):
        assert self.kept(top_p_floor(self.probabilities.log()[None], floats(top_p))) == kept

    def test_top_p_takes_shares_of_what_other_truncations_left(self):
        floor = floats(math.log(0.29))
        assert self.kept(top_p_floor(self.probabilities.log()[None], floats(0.56), floor)) == [0]
        assert self.kept(top_p_floor(self.probabilities.log()[None], floats(0.6), floor)) == [0, 2]
        assert self.kept(top_p_floor(self.probabilities.log()[None], floats(1.0), floor)) == [0, 2]

    def test_tokens_equal_to_the_last_kept_are_kept(self):
        logits = floats(2, 1, 1, 1, 0)[None]
        assert top_k_floor(logits, ints(2), 2).item() == 1
        assert top_p_floor(logits, floats(0.5)).item() == 1

    @pytest.mark.parametrize("vocab", [255, 256, 257, 9000])
    @pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
    def test_top_p_equals_a_whole_sort(self, vocab: int, spread: float):
        logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
        top_p = floats(0.5, 0.95, 0.999, 1.0)
        floors = top_p_floor(logits, top_p)
        for row in range(3):
            ordered = logits[row].double().sort(descending=True)
            before = ordered.values.softmax(0).cumsum(0) - ordered.values.softmax(0)
            sure = (before - top_p[row].double()).abs() > 1e-6
            assert torch.equal((before < top_p[row])[sure], (ordered.values >= floors[row])[sure])
        assert floors[3] == -INF

    def test_rows_of_nan_end_the_search(self):
        logits = torch.tensor([[math.nan, 0.0, 1.0], [0.0, 1.0, 2.0]]).repeat(1, 200)
        assert torch.equal(top_p_floor(logits, floats(0.5, 0.5))[1:], top_p_floor(logits[1:], floats(0.5)))


class TestLogprobs:
    def test_values_ranks_and_order(self):
        logits = floats(0.5, 0.1, 0.25, 0.15).log().expand(2, -1).contiguous()
        tensors = gather_logprobs(logits + 3, ints(2, 0), 3)
        assert tensors.token_ids.tolist() == [[2, 0, 2, 3], [0, 0, 2, 3]]
        assert tensors.ranks.tolist() == [2, 1]
        torch.testing.assert_close(
            tensors.logprobs.exp(), torch.tensor([[0.25, 0.5, 0.25, 0.15], [0.5, 0.5, 0.25, 0.15]])
        )

    @pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 8])
    def test_equal_values_are_ordered_by_id_for_every_k(self, k: int):
        values = torch.tensor([[0.0, 2, 1, 2, -0.0, 1, 2, -INF], [-1.0, -3, -2, -1, -INF, -INF, -1, -3]])
        assert top_tokens(values, k).tolist() == [[1, 3, 6, 2, 5, 0, 4, 7][:k], [0, 3, 6, 2, 1, 7, 4, 5][:k]]

    def test_many_rows_are_scored_in_blocks(self):
        logits = torch.randn(150, 11, generator=torch.Generator().manual_seed(1))
        tensors = gather_logprobs(logits, torch.arange(150) % 11, 2)
        logprobs = logits.log_softmax(1)
        torch.testing.assert_close(tensors.logprobs[:, 1:], logprobs.topk(2).values)
        torch.testing.assert_close(tensors.logprobs, logprobs.gather(1, tensors.token_ids))

    def test_infinite_logits_share_the_probability(self):
        tensors = gather_logprobs(floats(INF, 0.0, INF)[None], ints(1), 2)
        assert tensors.token_ids.tolist() == [[1, 0, 2]]
        torch.testing.assert_close(tensors.logprobs.exp(), torch.tensor([[0.0, 0.5, 0.5]]))

    def test_columns_that_a_row_did_not_ask_for_are_empty(self):
        logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
        output = SamplerOutput(
            ints(0, 1, 2),
            logprobs=gather_logprobs(logits, ints(0, 1, 2), 6),
            logprobs_reqs=np.arange(3),
            num_logprobs=np.array([0, 6, 2]),
        )
        lists = SampledDownload.launch(output, HostDevice()).wait(["a", "b", "c"], 6).logprobs
        assert lists is not None
        assert (lists.logprob_token_ids >= 0).sum(axis=1).tolist() == [1, 7, 3]
        assert np.isneginf(lists.logprobs).sum(axis=1).tolist() == [6, 0, 4]
        assert (lists.logprob_token_ids.dtype, lists.logprobs.dtype, lists.sampled_token_ranks.dtype) == (
            np.int64,
            np.float32,
            np.int64,
        )

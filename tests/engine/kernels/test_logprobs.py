"""Log probabilities, ranks and likeliest tokens by chunks against the torch reference."""

from __future__ import annotations

import pytest
import torch
from twostroke.engine.kernels.logits_rows import LogitsRows
from twostroke.engine.kernels.logprobs import MOST_TOP_TOKENS, score_tokens
from twostroke.stages.records import LogprobsTensors
from twostroke.stages.sampling.logprobs import gather_logprobs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(logits: torch.Tensor, tokens: torch.Tensor, num_top: int, rows: list[int] | None = None) -> LogprobsTensors:
    index = None if rows is None else torch.tensor(rows)
    source = LogitsRows(logits.to(DEVICE), None if index is None else index.to(DEVICE))
    got = LogprobsTensors(*(part.cpu() for part in score_tokens(source, tokens.to(DEVICE), num_top)))
    wanted = gather_logprobs(logits[: len(tokens)] if index is None else logits[index], tokens, num_top)
    assert torch.equal(got.token_ids, wanted.token_ids)
    assert torch.equal(got.ranks, wanted.ranks)
    torch.testing.assert_close(got.logprobs, wanted.logprobs, atol=1e-5, rtol=1e-5)
    return got


@pytest.mark.parametrize(("vocab", "num_top"), [(3, 3), (65, 0), (1000, 1), (5001, 5), (4200, MOST_TOP_TOKENS)])
def test_random_logits(vocab: int, num_top: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    tokens = torch.tensor([vocab - 1, int(logits[1].argmax()), int(logits[2].argmin())])
    ranks = check(logits, tokens, num_top).ranks.tolist()
    assert ranks[1:] == [1, vocab]


def test_more_tokens_than_the_kernel_looks_for() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    check(logits, torch.tensor([4, 5]), 100)
    check(logits, torch.tensor([4]), MOST_TOP_TOKENS + 1, [1])


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    logits = torch.randn(2, 6000, generator=torch.Generator().manual_seed(2)).round()
    logits[1] = 0.5
    got = check(logits, torch.tensor([7, 5999]), 4)
    check(logits, torch.tensor([7, 5999]), MOST_TOP_TOKENS)
    assert got.token_ids[1].tolist() == [5999, 0, 1, 2, 3]
    assert got.ranks[1].item() == 1


def test_some_rows_with_infinite_and_forbidden_logits() -> None:
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(3))
    logits[1, [3, 150]] = torch.inf
    logits[2, 5:] = -torch.inf
    logits[3] *= 1e30
    check(logits, torch.tensor([3, 199, 9]), 3, [1, 2, 3])
    check(logits, torch.tensor([10]), 8, [2])


def test_no_rows() -> None:
    got = score_tokens(LogitsRows(torch.randn(2, 30, device=DEVICE)), torch.zeros(0, dtype=torch.int64), 2)
    assert [tuple(part.shape) for part in got] == [(0, 3), (0, 3), (0,)]

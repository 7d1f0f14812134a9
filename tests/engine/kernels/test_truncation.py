"""Floors out of chunks and bisection keep exactly the tokens that the torch sampler keeps."""

from __future__ import annotations

import random

import pytest
import torch
from twostroke.engine.kernels.logits_rows import CHUNK, LogitsRows, summarise_chunks
from twostroke.engine.kernels.truncation import SearchSizes, Truncation, find_floors
from twostroke.stages.sampling.choose import scale_logits
from twostroke.stages.sampling.truncation import min_p_floor, top_k_floor, top_p_floor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = SearchSizes(block_chunks=4, capacity=300)
"""So that rows of a few hundred tokens are searched as those of large vocabularies are."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(
    logits: torch.Tensor, temperatures: torch.Tensor, limits: list[tuple[int, float, float]], sizes: SearchSizes | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens the kernels keep, and which the torch sampler does; ``limits`` are top_k, top_p and min_p by row."""
    top_k, top_p, min_p = (torch.tensor(values) for values in zip(*limits, strict=True))
    ones = torch.ones(len(limits), dtype=torch.int32)
    truncation = Truncation(*(part.to(DEVICE) for part in (top_k.int(), top_p, min_p.log(), ones)))
    floors = find_floors(LogitsRows(logits.to(DEVICE)), temperatures.to(DEVICE), truncation, sizes)
    peaks = logits.amax(1)
    scaled = scale_logits(logits, peaks, temperatures)
    floor = min_p_floor(scaled, min_p)
    if top_k.any():
        floor = floor.maximum(top_k_floor(scaled, top_k, int(top_k.max())))
    wanted = scaled >= top_p_floor(scaled, top_p, floor)[:, None]
    got_floors = floors.floors.cpu()
    assert torch.equal(floors.peaks.cpu()[got_floors > -torch.inf], peaks[got_floors > -torch.inf])
    return scaled >= got_floors[:, None], wanted


CASES = {
    "tiny": (7, 1.0, [(1, 1.0, 0.0), (5, 0.9, 0.0), (0, 0.9, 0.2), (7, 0.7, 0.0)]),
    "top_k": (600, 0.3, [(1, 1.0, 0.0), (5, 1.0, 0.0)]),
    "top_p": (600, 0.3, [(0, 0.9, 0.0), (0, 1e-6, 0.0)]),
    "top_p_of_few": (577, 4.0, [(0, 0.9, 0.0), (0, 0.9999, 0.0)]),
    "min_p": (577, 4.0, [(0, 1.0, 0.2), (0, 1.0, 1.0)]),
    "all": (577, 0.3, [(40, 0.8, 0.01), (3, 0.99, 0.3)]),
    "as_many_as_there_are": (400, 1.0, [(400, 1.0, 0.0), (400, 0.7, 0.0)]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_are_kept(case: str) -> None:
    vocab, spread, limits = CASES[case]
    logits = randn(len(limits), vocab, seed=vocab) * spread
    temperatures = torch.tensor([0.7, 1.9, 1.0, 0.4])[: len(limits)]
    got, wanted = kept(logits, temperatures, limits, SMALL if vocab > 7 else None)
    assert torch.equal(got, wanted)
    assert wanted.any(1).all()


def test_equal_logits_are_kept_or_cut_off_together() -> None:
    rounded = (randn(1, 320, seed=1) * 2).round()
    limits = [(40, 1.0, 0.0), (0, 0.6, 0.0), (0, 0.5, 0.1)]
    logits = torch.cat([rounded, rounded, torch.zeros(1, 320)])
    got, wanted = kept(logits, torch.ones(3), limits, SMALL)
    assert torch.equal(got, wanted)
    assert wanted[2].all()
    assert wanted[0].sum() > 40


def test_infinite_and_forbidden_logits() -> None:
    logits = randn(3, 300, seed=2) * 2
    logits[0, [3, 99, 200]] = torch.inf
    logits[1, 4:] = -torch.inf
    logits[2] *= 1e30
    got, wanted = kept(logits, torch.tensor([1.0, 0.8, 2.0]), [(2, 0.9, 0.0), (4, 0.9999, 0.0), (0, 0.9, 0.0)], SMALL)
    assert torch.equal(got, wanted)
    got, wanted = kept(logits, torch.tensor([1.0, 0.8, 2.0]), [(2, 0.9, 0.0), (9, 1.0, 0.0), (0, 0.9, 0.0)], SMALL)
    assert torch.equal(got, wanted)
    assert wanted.sum(1).tolist() == [3, 300, 1]


def test_the_search_takes_what_is_found_anywhere_in_a_row() -> None:
    chooser = random.Random(5)
    logits = randn(2, 1200, seed=3)
    for row in logits:
        row[chooser.sample(range(1200), 90)] += 3
    got, wanted = kept(logits, torch.ones(2), [(100, 1.0, 0.0), (0, 0.7, 0.0)], SearchSizes(8, 600))
    assert torch.equal(got, wanted)


def test_rows_without_limits_have_no_floor() -> None:
    nothing = torch.tensor([0, 0], dtype=torch.int32, device=DEVICE)
    ones = torch.ones(2, device=DEVICE)
    truncation = Truncation(nothing + 3, ones, ones.log(), torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
    floors = find_floors(LogitsRows(randn(2, 90).to(DEVICE)), torch.tensor([1.0, 0.0], device=DEVICE), truncation)
    assert floors.floors.tolist() == [-torch.inf, -torch.inf]


def test_chunks_know_their_maximum_and_mass() -> None:
    logits = randn(3, 130, seed=4)
    logits[0, 64:128] = -torch.inf
    logits[1, 100] = torch.nan
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    rows = torch.tensor([2, 0, 1])
    source = LogitsRows(logits.to(DEVICE), rows.to(DEVICE))
    wanted = torch.ones(3, dtype=torch.int32, device=DEVICE)
    summary = summarise_chunks(source, 3, temperatures.to(DEVICE), wanted)
    padded = torch.full((3, 3 * CHUNK), -torch.inf)
    padded[:, :130] = logits[rows]
    chunks = padded.view(3, 3, CHUNK)
    maxima = chunks.nan_to_num(torch.inf, neginf=-torch.inf).amax(2)
    assert torch.equal(summary.maxima.cpu(), maxima)
    masses = ((chunks - maxima[:, :, None]) / temperatures[:, None, None]).exp().sum(2)
    is_finite = maxima.isfinite()
    torch.testing.assert_close(summary.masses.cpu()[is_finite], masses[is_finite])
    assert summary.masses[1, 1].item() == 0

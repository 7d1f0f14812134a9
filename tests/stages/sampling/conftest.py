"""A sample stage on hand-made rows: columns, token history and batches without a request table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sampling_world import History, Request
from twostroke.stages.device import HostDevice
from twostroke.stages.io import GrammarOutput
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs, PromptSpan
from twostroke.stages.sample import Sample
from twostroke.stages.sampling.columns import SamplingColumns
from twostroke.stages.sampling_params import SamplingParams
from twostroke.stages.step_output import SampledDownload, SampledOnHost


class SamplingKit:
    """A stage with its columns and history; requests are added by id, in rows counted from 1 or given."""

    def __init__(self, vocab_size: int, num_rows: int = 16, length: int = 48) -> None:
        self.vocab_size = vocab_size
        self.columns = SamplingColumns(num_rows, vocab_size)
        counts = np.zeros(num_rows, dtype=np.int64)
        self.history = History(torch.full((num_rows, length), 2**30, dtype=torch.int32), counts, counts.copy())
        self.stage = Sample(self.columns, self.history)
        self.rows: dict[str, int] = {}

    def add(
        self,
        req_id: str,
        params: SamplingParams,
        prompt: Sequence[int] = (1,),
        outputs: Sequence[int] = (),
        row: int | None = None,
    ) -> None:
        row = len(self.rows) + 1 if row is None else row
        self.rows[req_id] = row
        self.columns.add(row, Request(params.checked_for(self.vocab_size), params.seed or 0))
        tokens = [*prompt, *outputs]
        self.history.token_ids[row] = 2**30
        self.history.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.history.num_tokens[row], self.history.num_prompt_tokens[row] = len(tokens), len(prompt)

    def append(self, req_id: str, token: int) -> None:
        row = self.rows[req_id]
        self.history.token_ids[row, self.history.num_tokens[row]] = token
        self.history.num_tokens[row] += 1

    def sample(
        self,
        logits: torch.Tensor,
        req_ids: Sequence[str] | None = None,
        grammar: GrammarOutput | None = None,
        sampling: Sequence[tuple[int, int]] | None = None,
        spans: Sequence[PromptSpan] = (),
    ) -> SampledOnHost:
        """Sample a batch and wait for it; ``sampling`` lists (batch index, logits row), by default all in order."""
        req_ids = list(self.rows) if req_ids is None else req_ids
        sampling = [(index, index) for index in range(len(req_ids))] if sampling is None else sampling
        rows = np.array([self.rows[req_id] for req_id in req_ids], dtype=np.int64)
        ones = np.ones(len(rows), dtype=np.int64)
        batch = Batch(req_ids, rows, ones, self.history.num_tokens[rows] - 1, len(rows))
        before = logits.clone()
        pairs = np.array(sampling, dtype=np.int64).reshape(-1, 2)
        output = self.stage(batch, _inputs(pairs[:, 0], pairs[:, 1], spans), ExecuteModelState(logits), grammar)
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "input logits were written"
        ids = [req_ids[int(index)] for index in pairs[:, 0]]
        return SampledDownload.launch(output, HostDevice()).wait(ids, self.vocab_size)

    def tokens(self, logits: torch.Tensor, req_ids: Sequence[str] | None = None) -> list[int]:
        """What a batch samples, when nothing fails."""
        output = self.sample(logits, req_ids)
        assert not output.errors
        return output.token_ids.tolist()


def _inputs(sampling_reqs: np.ndarray, sampling_logits: np.ndarray, spans: Sequence[PromptSpan]) -> PreparedInputs:
    unused, unused_host = torch.empty(0), np.empty(0, dtype=np.int64)
    return PreparedInputs(
        input_ids=unused,
        positions=unused,
        query_start_loc=unused,
        seq_lens=unused,
        logits_indices=unused,
        query_start_loc_host=unused_host.astype(np.int32),
        seq_lens_host=unused_host.astype(np.int32),
        token_rows=unused_host,
        logits_indices_host=unused_host,
        sampling_reqs=sampling_reqs,
        sampling_logits=sampling_logits,
        prompt_spans=tuple(spans),
        max_query_len=1,
        max_seq_len=1,
        is_uniform_decode=True,
    )


def packed_bitmask(allowed: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Masks as xgrammar packs them: little-endian bits in int32 words."""
    words = np.zeros((len(allowed), -(-vocab_size // 32)), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


@pytest.fixture(name="SamplingKit")
def _sampling_kit() -> type[SamplingKit]:
    return SamplingKit


@pytest.fixture(name="packed_bitmask")
def _packed_bitmask():
    return packed_bitmask

"""prepare_inputs: ids, positions, offsets, lengths, and which tokens get logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twostroke.fsm import Transaction
from twostroke.stages.commit import Commit
from twostroke.stages.device import HostDevice
from twostroke.stages.input_buffers import InputBuffers
from twostroke.stages.io import LogprobsLists
from twostroke.stages.prepare_inputs import PrepareInputs
from twostroke.stages.records import Batch, LogprobsTensors, PromptSpan, SamplerOutput
from twostroke.stages.request_table import RequestTable
from twostroke.stages.sampling_params import SamplingParams
from twostroke.stages.specs import NULL_ROW


def fail(error: BaseException) -> None:
    """Nothing may go wrong late here."""
    raise AssertionError("an output could not be collected") from error


def buffers_for(table: RequestTable, max_tokens: int = 32) -> InputBuffers:
    return InputBuffers(
        max_tokens=max_tokens,
        max_reqs=table.max_num_seqs,
        block_tables=table.block_tables,
        device=HostDevice(),
    )


@pytest.fixture
def buffers(kit: Any) -> InputBuffers:
    return buffers_for(kit.table)


def test_mixed_batch(kit: Any, build: Any, buffers: InputBuffers) -> None:
    kit.step(build.output({"a": 3}, [build.new("a", [10, 11, 12])]), {"a": 13})
    chunk, whole = build.new("b", [20, 21, 22, 23], [5], computed=1), build.new("c", [30, 31], [6])
    batch = kit.step(build.output({"a": 1, "b": 2, "c": 2}, [chunk, whole], build.cached("a", [3])))
    inputs = PrepareInputs(kit.table, buffers)(batch)
    assert inputs.input_ids.tolist() == [13, 21, 22, 30, 31]
    assert inputs.positions.tolist() == [3, 1, 2, 0, 1]
    assert inputs.query_start_loc.tolist() == [0, 1, 3, 5]
    assert inputs.seq_lens.tolist() == [4, 3, 2]
    assert inputs.sampling_reqs.tolist() == [0, 2], "b's chunk is not its prompt's last"
    assert inputs.logits_indices.tolist() == [0, 4]
    assert inputs.sampling_logits.tolist() == [0, 1]
    assert not inputs.is_uniform_decode
    assert (inputs.max_query_len, inputs.max_seq_len) == (2, 4)


def test_one_token_prompt_tail_is_classified_by_state_not_by_count(kit: Any, build: Any, buffers: InputBuffers) -> None:
    batch = kit.step(build.output({"a": 1, "b": 1}, [build.new("a", [1, 2, 3], computed=1), build.new("b", [4], [5])]))
    inputs = PrepareInputs(kit.table, buffers)(batch)
    assert inputs.sampling_reqs.tolist() == [1]
    assert inputs.is_uniform_decode


def test_tails_are_reset_to_capacity(kit: Any, build: Any, buffers: InputBuffers) -> None:
    buffers.input_ids.fill_(10**6)
    for buffer in (buffers.tokens, buffers.requests):
        buffer.array[:] = 10**6
    batch = kit.step(build.output({"a": 2}, [build.new("a", [1, 2])]))
    PrepareInputs(kit.table, buffers)(batch)
    assert buffers.input_ids.tolist() == [1, 2] + [0] * 30
    assert buffers.positions.tolist() == [0, 1] + [0] * 30
    assert buffers.query_start_loc.tolist() == [0, 2, 2, 2, 2]
    assert buffers.seq_lens.tolist() == [2, 0, 0, 0, 0]


def test_null_rows_of_a_dummy_run(kit: Any, buffers: InputBuffers) -> None:
    zeros = np.zeros(2, dtype=np.int64)
    batch = Batch(["", ""], zeros + NULL_ROW, zeros + 3, zeros, 6)
    inputs = PrepareInputs(kit.table, buffers)(batch)
    assert inputs.input_ids.tolist() == [0] * 6
    assert inputs.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert inputs.logits_indices.tolist() == [2, 5], "the last token of each gets logits, as in a real step"


def logprob_rows(tokens: list[int]) -> LogprobsTensors:
    ids = torch.tensor([[token, 0] for token in tokens], dtype=torch.int64).reshape(-1, 2)
    return LogprobsTensors(ids, -ids.float(), ids[:, 0] + 1)


@pytest.mark.parametrize("chunks", [[7], [3, 4], [6, 1], [1] * 7, [2, 4, 1]])
def test_S8_prompt_logprobs_cover_every_position_once(
    kit: Any, build: Any, buffers: InputBuffers, chunks: list[int]
) -> None:
    prompt = [10, 11, 12, 13, 14, 15, 16]
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    prepare, commit = PrepareInputs(kit.table, buffers), Commit(kit.table, 50, fail)
    computed, delivered, sampled = 0, list[LogprobsLists](), list[list[int]]()
    for count in chunks:
        if computed == 0:
            step = build.output({"a": count}, [build.new("a", prompt, params=params)])
        else:
            step = build.output({"a": count}, cached=build.cached("a", [computed]))
        transaction = Transaction(1)
        batch = kit.update_states(step, transaction)
        inputs = prepare(batch)
        spans = inputs.prompt_spans
        scored = [prompt[span.position + 1 : span.position + 1 + span.num_positions] for span in spans]
        for span in spans:
            tokens = inputs.logits_indices_host[span.first_logit : span.first_logit + span.num_positions]
            assert (
                inputs.positions.numpy()[tokens] == np.arange(span.position, span.position + span.num_positions)
            ).all()
        result = SamplerOutput(
            torch.full((len(inputs.sampling_reqs),), 9),
            prompt_logprobs=tuple(logprob_rows(tokens) for tokens in scored),
        )
        output = commit(result, batch, inputs, transaction).get_output()
        transaction.commit()
        delivered += [table for table in output.prompt_logprobs_dict.values() if table is not None]
        sampled = [list(tokens) for tokens in output.sampled_token_ids]
        computed += count
    assert len(delivered) == 1
    assert delivered[0].logprob_token_ids[:, 0].tolist() == prompt[1:]
    assert sampled == [[9]]
    assert not kit.table.owes_prompt_logprobs.any()


def test_prompt_of_one_token_delivers_an_empty_table(kit: Any, build: Any, buffers: InputBuffers) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    transaction = Transaction(1)
    batch = kit.update_states(build.output({"a": 1}, [build.new("a", [3], params=params)]), transaction)
    inputs = PrepareInputs(kit.table, buffers)(batch)
    assert inputs.prompt_spans == (PromptSpan(0, 0, 0, 0),)
    result = SamplerOutput(torch.tensor([9]), prompt_logprobs=(logprob_rows([]),))
    output = Commit(kit.table, 50, fail)(result, batch, inputs, transaction).get_output()
    empty = output.prompt_logprobs_dict["a"]
    assert empty is not None
    assert len(empty.logprobs) == 0


@settings(max_examples=60)
@given(data=st.data())
def test_equals_a_loop_over_requests_and_tokens(data: st.DataObject) -> None:
    table = RequestTable(max_num_seqs=5, max_model_len=12, groups=())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    table.token_ids_host[:] = rng.integers(0, 99, table.token_ids_host.shape)
    rows = rng.permutation(np.arange(1, table.num_rows))[: data.draw(st.integers(1, 5))]
    known = rng.integers(1, 13, len(rows))
    computed = rng.integers(0, known)
    scheduled = rng.integers(1, known - computed + 1)
    table.num_tokens[rows] = known
    batch = Batch([str(row) for row in rows], rows, scheduled, computed, int(scheduled.sum()))
    inputs = PrepareInputs(table, buffers_for(table, 64))(batch)
    ids, positions, logits = [], [], []
    for row, first, count, total in zip(rows, computed, scheduled, known, strict=True):
        for position in range(first, first + count):
            ids.append(int(table.token_ids_host[row, position]))
            positions.append(position)
            if position == total - 1:
                logits.append(len(ids) - 1)
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.logits_indices.tolist() == logits
    assert inputs.seq_lens.tolist() == (computed + scheduled).tolist()

"""What a runner holds, as values: to compare before and after, and to hold against a test's own books."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from books import Books, Ticket
from driver import PENDING
from twostroke.engine.model_runner import ModelRunner
from twostroke.stages.request_table import RequestRecord, RequestTable
from twostroke.stages.sampling.columns import SamplingColumns
from twostroke.stages.specs import NULL_BLOCK, NULL_ROW


def logical_state(runner: ModelRunner) -> dict[str, Any]:
    """Everything that a step may change and an undone step must not: rows as far as they are used, and records."""
    table, columns = runner.parts.table, runner.parts.columns
    state: dict[str, Any] = {
        "state": runner.state,
        "life": runner.life,
        "steps": runner.num_steps,
        "rows": dict(table.rows),
        "free rows": sorted(table._free_rows),
    }
    for req_id, record in table.records.items():
        collected = record.prompt_logprobs
        state[f"{req_id}: record"] = (id(record), record.row, record.seed, record.sampling_params)
        state[f"{req_id}: prompt"] = record.prompt_token_ids.tolist()
        state[f"{req_id}: saved"] = None if record.saved_tokens is None else len(record.saved_tokens)
        state[f"{req_id}: scored"] = None if collected is None else (collected.num_done, collected.is_delivered)
        if (row := record.row) is not None:
            state[f"{req_id}: tokens"] = device_tokens(table, row)
            state[f"{req_id}: counts"] = [
                int(array[row])
                for array in (
                    table.num_prompt_tokens,
                    table.num_computed_tokens,
                    table.owes_prompt_logprobs,
                )
            ]
            state[f"{req_id}: blocks"] = held_blocks(table, row)
            state[f"{req_id}: column"] = (columns.rows[row].item(), id(columns.lists.get(row)))
    return state


def device_tokens(table: RequestTable, row: int) -> list[int]:
    """A row's known tokens on the device, once the writes that wait for the next flush are made."""
    tokens = table.token_ids[row].clone()
    for other, start, values in table._uploads:
        if other == row:
            tokens[start : start + len(values)] = torch.from_numpy(values)
    return tokens[: table.num_tokens[row]].tolist()


def host_tokens(table: RequestTable, record: RequestRecord) -> list[int]:
    """A request's known tokens on the host, once what has arrived is taken in."""
    row = record.row
    if row is None:
        assert record.saved_tokens is not None
        tokens = record.saved_tokens.copy()
    else:
        tokens = table.token_ids_host[row, : table.num_tokens[row]].copy()
    for late, values in table._late:
        for index, other in enumerate(late.records):
            position = int(late.positions[index])
            if other is record and position < len(tokens):
                tokens[position] = values[index]
    return tokens.tolist()


def held_blocks(table: RequestTable, row: int) -> list[list[int]]:
    """A row's block ids, by group."""
    return [blocks.blocks[row, : blocks.counts[row]].tolist() for blocks in table.block_tables]


def check_against_books(runner: ModelRunner, books: Books) -> None:
    """The runner's tables are those that the books describe."""
    table = runner.parts.table
    known = {req_id: ticket for req_id, ticket in books.tickets.items() if ticket.status != "new"}
    assert known.keys() <= table.records.keys() <= known.keys() | books.unsaid
    for req_id, ticket in known.items():
        if req_id not in books.unsaid:
            _check_request(runner, ticket, table.records[req_id])
    bound = sorted(table.rows.values())
    assert sorted([*table._free_rows, *bound]) == list(range(NULL_ROW + 1, table.num_rows))
    for req_id, row in table.rows.items():
        assert table.records[req_id].row == row
    for row in table._free_rows:
        assert runner.parts.columns.is_default(row)
        assert not any(blocks.counts[row] for blocks in table.block_tables)
        assert not table.num_tokens[row]
        assert not table.owes_prompt_logprobs[row]
    for layer in runner.parts.kv_cache.layers:
        assert not layer[:, NULL_BLOCK].any(), "the null block was written"
    assert runner.observers.failures == 0


def _check_request(runner: ModelRunner, ticket: Ticket, record: RequestRecord) -> None:
    table, wish = runner.parts.table, ticket.wish
    assert record.prompt_token_ids.tolist() == list(wish.prompt)
    assert record.sampling_params == wish.params
    assert (record.row is not None) == (ticket.status == "running") == (wish.req_id in table.rows)
    if ticket.is_spoilt:
        return
    host = host_tokens(table, record)
    assert len(host) == len(ticket.tokens)
    known = [PENDING if token == PENDING else value for value, token in zip(host, ticket.tokens, strict=True)]
    assert known == ticket.tokens, f"{wish.req_id}: host tokens {known}, expected {ticket.tokens}"
    if (collected := record.prompt_logprobs) is not None:
        assert (collected.num_done, collected.is_delivered) == (ticket.num_scored, not ticket.is_table_due)
    if (row := record.row) is None:
        return
    assert device_tokens(table, row) == ticket.truth
    assert held_blocks(table, row) == ticket.blocks
    assert table.num_prompt_tokens[row] == len(wish.prompt)
    assert table.num_computed_tokens[row] == ticket.last_start
    assert table.owes_prompt_logprobs[row] == (record.prompt_logprobs is not None and ticket.is_table_due)
    _check_columns(runner.parts.columns, row, record)


def _check_columns(columns: SamplingColumns, row: int, record: RequestRecord) -> None:
    """The row of the sampling columns is what a fresh one would hold."""
    fresh = SamplingColumns(1, columns.vocab_size)
    fresh.add(0, record)
    assert columns.rows[row] == fresh.rows[0]
    assert (row in columns.lists) == (0 in fresh.lists)
    if row in columns.lists:
        held, expected = columns.lists[row], fresh.lists[0]
        for name in ("allowed_ids", "bad_words", "end_ids", "bias_ids", "biases"):
            assert torch.equal(getattr(held, name), getattr(expected, name)), name


def check_nothing_is_left(runner: ModelRunner) -> None:
    """All requests are finished and the runner was told: every table, map and queue is empty or default."""
    table, parts = runner.parts.table, runner.parts
    table.apply_late_tokens()
    assert not table.records
    assert not table.rows
    assert sorted(table._free_rows) == list(range(NULL_ROW + 1, table.num_rows))
    assert not parts.columns.lists
    for row in range(table.num_rows):
        assert parts.columns.is_default(row)
        assert not any(blocks.counts[row] for blocks in table.block_tables)
    for array in (table.num_tokens, table.num_prompt_tokens, table.num_computed_tokens, table.owes_prompt_logprobs):
        assert not np.any(array)
    assert not table._uploads
    assert not table._late
    for layer in parts.kv_cache.layers:
        assert not layer[:, NULL_BLOCK].any(), "the null block was written"


def assert_same(state: dict[str, Any], before: dict[str, Any]) -> None:
    """Two logical states are equal."""
    names = state.keys() | before.keys()
    changed = {name: (before.get(name), state.get(name)) for name in names if before.get(name) != state.get(name)}
    assert not changed, f"changed: {changed}"

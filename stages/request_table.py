"""Per-request state. A request keeps one row from being scheduled until it finishes or is preempted.

Rows never move, so nothing that is indexed by row has to be swapped or condensed. What a request is (prompt,
parameters, seed) lies in its :class:`RequestRecord`, which outlives preemption; what a step computes with lies in
the row.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, frozen

from ..fsm import Transaction
from .block_table import BlockTable
from .columns import Column, ColumnRefused, check_extra, readers_of_extra
from .device import Device, HostDevice
from .io import BlockIds
from .prompt_logprobs import PromptLogprobs
from .sampling_params import SamplingParams
from .specs import NULL_ROW, KVCacheGroupSpec

if TYPE_CHECKING:
    from .step_output import StepOutput

TokenArray = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]


@define(eq=False)
class RequestRecord:
    """What stays true of a request while it comes and goes.

    ``row`` is None while it is preempted; ``saved_tokens`` then holds every known token. ``prompt_logprobs`` collects
    the prompt's log probabilities across chunks and preemptions, for requests that asked.
    """

    req_id: str
    prompt_token_ids: TokenArray
    sampling_params: SamplingParams
    seed: int
    row: int | None = None
    saved_tokens: TokenArray | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def take_token(self, position: int, token: int, host_tokens: TokenArray) -> None:
        """A token sampled in a row that this request has left: it belongs where its tokens are now."""
        tokens = self.saved_tokens if self.row is None else host_tokens[self.row]
        if tokens is not None and position < len(tokens):
            tokens[position] = token


def seed_of(req_id: str, params: SamplingParams, engine_seed: int) -> int:
    """The request's 64-bit seed: its own, or a hash of the engine's seed and its id, so that arrival order is moot.

    An id that comes again draws the same: the serving loop gives such a request a seed of its own.
    """
    if params.seed is not None:
        return params.seed % 2**64
    digest = hashlib.blake2b(req_id.encode(), digest_size=8, key=engine_seed.to_bytes(16, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")


@frozen(eq=False)
class LateTokens:
    """Tokens that were sampled on the device and whose values the host learns later.

    Parallel: the request, the row it had, that row's generation, and the token's position int64 ``[n]``.
    """

    records: Sequence[RequestRecord]
    rows: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


class RequestTable:
    """Rows of live requests, the records behind them, and the columns that features add.

    Capacity is twice ``max_num_seqs`` plus the null row: a row freed by a step is given out again only after that step
    committed. ``token_ids`` int32 ``[num_rows, max_model_len + 1]``, on the device, is the truth (the extra place takes
    the token sampled at the very last position); ``token_ids_host`` has the same values, those sampled as late as they
    arrive. ``num_tokens`` counts known tokens, ``num_prompt_tokens`` those of the prompt, ``num_computed_tokens`` those
    computed before this step, ``generations`` how often a row changed hands, each int64 ``[num_rows]``.
    ``owes_prompt_logprobs`` marks rows whose table of prompt log probabilities is not delivered yet. ``latest_output``
    is the last step's output; waiting for it waits for all before it. ``epoch`` grows whenever a request gets, loses or
    changes its row: what was read of rows and records for some ids holds as long as it stays.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        groups: Sequence[KVCacheGroupSpec],
        columns: Sequence[Column] = (),
        device: Device | None = None,
    ) -> None:
        self.device = device or HostDevice()
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.num_rows = 2 * max_num_seqs + 1
        shape = (self.num_rows, max_model_len + 1)
        self.token_ids = torch.zeros(shape, dtype=torch.int32, device=self.device.torch_device)
        shared = self.device.shares_host_memory
        self.token_ids_host: TokenArray = self.token_ids.numpy() if shared else np.zeros(shape, dtype=np.int32)
        self.num_tokens, self.num_prompt_tokens, self.num_computed_tokens, self.generations = (
            np.zeros(self.num_rows, dtype=np.int64) for _ in range(4)
        )
        self.owes_prompt_logprobs = np.zeros(self.num_rows, dtype=np.bool_)
        self.block_tables = tuple(BlockTable(self.num_rows, max_model_len, group) for group in groups)
        self.columns = tuple(columns)
        self._readers_of_extra = readers_of_extra(columns)
        self.records: dict[str, RequestRecord] = {}
        self.rows: dict[str, int] = {}
        self.epoch = 0
        self._records_of: tuple[IntArray, list[RequestRecord]] | None = None
        self.latest_output: StepOutput | None = None
        self._free_rows = [row for row in range(self.num_rows - 1, -1, -1) if row != NULL_ROW]
        self._uploads: list[tuple[int, int, TokenArray]] = []
        self._late: deque[tuple[LateTokens, IntArray]] = deque()

    def add_column(self, column: Column) -> None:
        """One more column, told of every request from now on.

        Raises:
            ColumnRefused: a request is live, or another column reads a parameter of the same name.
        """
        self._set_columns((*self.columns, column))

    def remove_column(self, column: Column) -> None:
        """Without ``column``.

        Raises:
            ColumnRefused: a request is live, or the column is not there.
        """
        if not any(other is column for other in self.columns):
            raise ColumnRefused(f"the column {column!r} is not in the request table")
        self._set_columns(tuple(other for other in self.columns if other is not column))

    def _set_columns(self, columns: tuple[Column, ...]) -> None:
        if self.records:
            first = next(iter(self.records))
            raise ColumnRefused(
                f"{len(self.records)} requests are live ({first!r} is one), which a new column would know nothing of; "
                "add and remove columns before the first request, or once all are finished"
            )
        readers = readers_of_extra(columns)
        self.columns, self._readers_of_extra = columns, readers

    def checked_extra(self, params: SamplingParams) -> SamplingParams:
        """``params`` themselves, if columns read and accept all of ``extra``. From any thread.

        Raises:
            InvalidSamplingParams: naming the key of ``extra``.
        """
        check_extra(params, self._readers_of_extra)
        return params

    def _changed(self) -> None:
        """A request gets, loses or changes its row, or that is undone."""
        self.epoch += 1
        self._records_of = None

    def records_of(self, req_ids: Sequence[str], rows: IntArray) -> list[RequestRecord]:
        """The records of a batch; steps with the same ``rows`` object share one look-up, and nothing outlives it."""
        known = self._records_of
        if known is None or known[0] is not rows:
            known = self._records_of = rows, [self.records[req_id] for req_id in req_ids]
        return known[1]

    def add(self, record: RequestRecord, tokens: TokenArray, transaction: Transaction) -> None:
        """Take in a new request and bind it to a row."""
        transaction.on_undo(self.records.pop, record.req_id, None)
        self.records[record.req_id] = record
        self.bind(record, tokens, transaction)

    def bind(self, record: RequestRecord, tokens: TokenArray, transaction: Transaction) -> None:
        """Give a request a clean row that holds ``tokens``."""
        row = self._free_rows[-1]
        transaction.on_undo(self._unbind, record, row, record.saved_tokens)
        self._free_rows.pop()
        self.generations[row] += 1
        self._write(row, 0, tokens)
        self.num_tokens[row] = len(tokens)
        self.num_prompt_tokens[row] = len(record.prompt_token_ids)
        self.owes_prompt_logprobs[row] = record.prompt_logprobs is not None and not record.prompt_logprobs.is_delivered
        for column in self.columns:
            column.add(row, record)
        record.row, record.saved_tokens = row, None
        self.rows[record.req_id] = row
        self._changed()

    def _unbind(self, record: RequestRecord, row: int, saved_tokens: TokenArray | None) -> None:
        self._changed()
        record.row, record.saved_tokens = None, saved_tokens
        self.rows.pop(record.req_id, None)
        if row not in self._free_rows:
            self._release_row(row)

    def preempt(self, record: RequestRecord, transaction: Transaction) -> None:
        """Take a request's row away and keep its tokens on the record."""
        row = record.row
        if row is None:
            return
        transaction.on_undo(self._rebind, record, row)
        self._changed()
        record.saved_tokens = self.token_ids_host[row, : self.num_tokens[row]].copy()
        record.row = None
        self.generations[row] += 1
        self.rows.pop(record.req_id, None)
        transaction.on_commit(self._release_row, row)

    def finish(self, record: RequestRecord, transaction: Transaction) -> None:
        """Forget a request."""
        row = record.row
        transaction.on_undo(self._rebind, record, row)
        self._changed()
        self.records.pop(record.req_id, None)
        if row is not None:
            self.rows.pop(record.req_id, None)
            record.row = None
            transaction.on_commit(self._release_row, row)

    def _rebind(self, record: RequestRecord, row: int | None) -> None:
        self._changed()
        self.records[record.req_id] = record
        if row is not None:
            record.row, record.saved_tokens = row, None
            self.rows[record.req_id] = row

    def _release_row(self, row: int) -> None:
        self.num_tokens[row] = self.num_prompt_tokens[row] = self.num_computed_tokens[row] = 0
        self.owes_prompt_logprobs[row] = False
        for table in self.block_tables:
            table.clear(row)
        for column in self.columns:
            column.drop(row)
        self._free_rows.append(row)

    def recover_rows(self) -> None:
        """Free the rows that an interrupt kept from being freed when their step ended. Called while no step is open."""
        if len(self._free_rows) + len(self.rows) < self.num_rows - 1:
            for row in {*range(self.num_rows)} - {NULL_ROW, *self._free_rows, *self.rows.values()}:
                self._release_row(row)

    def set_tokens(self, row: int, start: int, tokens: TokenArray, transaction: Transaction) -> None:
        """Write ``tokens`` at ``start`` and make them the last known ones."""
        stop = start + len(tokens)
        before = self.token_ids_host[row, start : max(stop, int(self.num_tokens[row]))].copy()
        transaction.on_undo(self._restore_tokens, row, start, before, int(self.num_tokens[row]))
        self._write(row, start, tokens)
        self.num_tokens[row] = stop

    def _restore_tokens(self, row: int, start: int, tokens: TokenArray, count: int) -> None:
        self._write(row, start, tokens)
        self.num_tokens[row] = count

    def _write(self, row: int, start: int, tokens: TokenArray) -> None:
        self.token_ids_host[row, start : start + len(tokens)] = tokens
        if len(tokens) and not self.device.shares_host_memory:
            self._uploads.append((row, start, tokens.copy()))

    def flush(self) -> None:
        """Launch the copies of all host edits, and let the columns do the same."""
        if self._uploads:
            width = self.token_ids.shape[1]
            starts = [row * width + start for row, start, _ in self._uploads]
            self.device.scatter([tokens for _, _, tokens in self._uploads], starts, self.token_ids.view(-1))
            self._uploads.clear()
        for column in self.columns:
            column.flush()

    def settle_tokens(self, late: LateTokens, tokens: IntArray, vocab_size: int) -> None:
        """Tokens have arrived. From any thread: they are queued, kept inside the vocabulary as they are on the device.

        A token that failed counts as known all the same: the runner may learn of it before the scheduler, which counts
        on it in steps that it has scheduled ahead. The scheduler ends the request, or rewinds it.
        """
        if not self.device.shares_host_memory:
            self._late.append((late, np.clip(tokens, 0, vocab_size - 1)))

    def apply_late_tokens(self) -> None:
        """Take in what has arrived since the last step. Requests that moved on are found by record, not by row."""
        while self._late:
            late, tokens = self._late[0]
            in_place = self.generations[late.rows] == late.generations
            rows, positions = late.rows[in_place], late.positions[in_place]
            self.token_ids_host[rows, positions] = tokens[in_place]
            for index in np.flatnonzero(~in_place).tolist():
                late.records[index].take_token(int(late.positions[index]), int(tokens[index]), self.token_ids_host)
            self._late.popleft()  # last: an interrupt before it only makes the same values be written again

    def wait_for_tokens(self) -> None:
        """Wait until every sampled token is known on the host."""
        if self.latest_output is not None:
            self.latest_output.get_output()
            self.apply_late_tokens()

    def append_blocks(self, row: int, block_ids: BlockIds, transaction: Transaction) -> None:
        """Add blocks of every group to a row's tables."""
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            if len(ids):
                transaction.on_undo(table.restore_count, row, int(table.counts[row]))
                table.append(row, ids)

    def append_one_block(self, rows: IntArray, block_ids: IntArray, transaction: Transaction) -> None:
        """Add a block of every group to each of these rows, all distinct; ``block_ids`` ``[len(rows), num_groups]``."""
        for group, table in enumerate(self.block_tables):
            transaction.on_undo(table.restore_count, rows, table.counts[rows])
            table.append_one(rows, block_ids[:, group])

    def set_computed(self, rows: IntArray, counts: IntArray, transaction: Transaction) -> None:
        """Set how many tokens of each row were computed before this step."""
        transaction.on_undo(_put, self.num_computed_tokens, rows, self.num_computed_tokens[rows])
        self.num_computed_tokens[rows] = counts

    @property
    def num_live(self) -> int:
        """Requests that hold a row."""
        return len(self.rows)

    @property
    def num_free_rows(self) -> int:
        """Rows that can be given out."""
        return len(self._free_rows)


def _put(array: IntArray, index: IntArray, values: IntArray) -> None:
    array[index] = values

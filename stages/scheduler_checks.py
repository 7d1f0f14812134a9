"""Reads a scheduler output against what the runner knows and says what is to change, or refuses it whole.

Nothing here changes anything: a refusal leaves the step as if it had never been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np
import numpy.typing as npt

from .errors import InvalidSamplingParams, InvalidSchedulerOutput
from .io import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from .prompt_logprobs import PromptLogprobs
from .records import IntArray
from .request_table import RequestRecord, RequestTable, TokenArray, seed_of
from .step_changes import Binding, Continuation, StepChanges, StepLimits
from .step_reading import WrittenBlocks, check_blocks, check_new, read_integers, read_tokens


class SchedulerOutputCheck:
    """Checks one scheduler output; ``changes`` is the result.

    Raises:
        InvalidSchedulerOutput: naming the request and the reason.
    """

    def __init__(self, output: SchedulerOutput, table: RequestTable, limits: StepLimits) -> None:
        self._output = output
        self._table = table
        self._limits = limits
        self._finished = set(output.finished_req_ids)
        self._preempted = set(output.preempted_req_ids or ()) - self._finished
        self._written = WrittenBlocks()
        cached = output.scheduled_cached_reqs
        self._check_shape(cached)
        resumed_ids = cached.resumed_req_ids
        bindings = [self._resumed(cached, i) for i, req_id in enumerate(cached.req_ids) if req_id in resumed_ids]
        bindings += [self._new(data) for data in output.scheduled_new_reqs]
        for binding in bindings:
            self._check_binding(binding)
        continued = self._continued(cached)
        self._check_rows(bindings)
        known = table.records
        self.changes = StepChanges(
            finished=[known[req_id] for req_id in self._finished if req_id in known],
            preempted=[known[req_id] for req_id in self._preempted if req_id in known],
            bindings=bindings,
            continued=continued,
        )

    def _check_shape(self, cached: CachedRequestData) -> None:
        output, limits = self._output, self._limits
        num_reqs = len(cached.req_ids) + len(output.scheduled_new_reqs)
        counts = output.num_scheduled_tokens
        ids = {*cached.req_ids, *(data.req_id for data in output.scheduled_new_reqs)}
        if len(ids) != num_reqs:
            raise InvalidSchedulerOutput("a request is listed twice among the new and continued requests")
        if ids != counts.keys():
            self._refuse_ids(ids, counts.keys())
        total = sum(counts.values())
        if not isinstance(total, int | np.integer):
            raise InvalidSchedulerOutput(f"num_scheduled_tokens must be integers, they sum to {total!r}")
        if total != output.total_num_scheduled_tokens:
            raise InvalidSchedulerOutput(
                f"total_num_scheduled_tokens is {output.total_num_scheduled_tokens}, the tokens sum to {total}"
            )
        if total > limits.max_num_batched_tokens:
            raise InvalidSchedulerOutput(
                f"{total} tokens exceed max_num_batched_tokens {limits.max_num_batched_tokens}"
            )
        if num_reqs > limits.max_num_seqs:
            raise InvalidSchedulerOutput(f"{num_reqs} requests exceed max_num_seqs {limits.max_num_seqs}")
        for name in ("new_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"):
            values = getattr(cached, name)
            if len(values) != len(cached.req_ids) and (len(values) or name == "num_computed_tokens"):
                raise InvalidSchedulerOutput(
                    f"scheduled_cached_reqs.{name} has {len(values)} entries for {len(cached.req_ids)} requests"
                )
        if cached.num_output_tokens and (fewest := min(cached.num_output_tokens)) < 0:
            raise InvalidSchedulerOutput(
                f"num_output_tokens is {fewest}", req_id=cached.req_ids[list(cached.num_output_tokens).index(fewest)]
            )
        if cached.resumed_req_ids and (stray := cached.resumed_req_ids - ids):
            raise InvalidSchedulerOutput("is in resumed_req_ids but not scheduled", req_id=min(stray))
        for name in ("scheduled_spec_decode_tokens", "scheduled_encoder_inputs"):
            for req_id, values in getattr(output, name).items():
                if len(values):
                    raise InvalidSchedulerOutput(f"{name} need a stage that this runner does not have", req_id=req_id)
        if output.kv_connector_metadata is not None:
            raise InvalidSchedulerOutput("kv_connector_metadata needs a connector that this runner does not have")

    def _refuse_ids(self, listed: Set[str], counted: Set[str]) -> None:
        if extra := counted - listed:
            raise InvalidSchedulerOutput("has scheduled tokens but is in neither list of requests", req_id=min(extra))
        missing = min(listed - counted)
        raise InvalidSchedulerOutput("has no entry in num_scheduled_tokens; leave it out of the step", req_id=missing)

    def _new(self, data: NewRequestData) -> Binding:
        req_id, limits = data.req_id, self._limits
        check_new(data)
        prompt = self._tokens(req_id, "prompt_token_ids", data.prompt_token_ids)
        if not len(prompt):
            raise InvalidSchedulerOutput("has an empty prompt", req_id=req_id)
        try:
            params = self._table.checked_extra(data.sampling_params.checked_for(limits.vocab_size))
        except InvalidSamplingParams as error:
            raise InvalidSchedulerOutput(str(error), req_id=req_id) from error
        tokens = prompt
        if data.prefill_token_ids is not None:
            tokens = self._all_tokens(req_id, "prefill_token_ids", data.prefill_token_ids, prompt)
        record = self._table.records.get(req_id)
        if record is not None and req_id not in self._finished:
            if record.row is not None and req_id not in self._preempted:
                raise InvalidSchedulerOutput(
                    "is sent as new while it is live; finish or preempt it in this step or before", req_id=req_id
                )
            if np.array_equal(record.prompt_token_ids, prompt) and record.sampling_params == params:
                return Binding(record, tokens, data.block_ids, data.num_computed_tokens, is_new=False)
            self._finished.add(req_id)
            self._preempted.discard(req_id)
        record = RequestRecord(
            req_id=req_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            seed=seed_of(req_id, params, limits.engine_seed),
            prompt_logprobs=PromptLogprobs.wanted_by(params, len(prompt), limits.vocab_size),
        )
        return Binding(record, tokens, data.block_ids, data.num_computed_tokens, is_new=True)

    def _resumed(self, cached: CachedRequestData, index: int) -> Binding:
        req_id = cached.req_ids[index]
        record = self._known(req_id)
        if req_id in cached.all_token_ids:
            tokens = self._all_tokens(req_id, "all_token_ids", cached.all_token_ids[req_id], record.prompt_token_ids)
        elif record.row is None:
            self._table.wait_for_tokens()
            assert record.saved_tokens is not None, f"preempted request {req_id!r} lost its tokens"
            tokens = record.saved_tokens
        else:
            self._table.wait_for_tokens()
            tokens = self._table.token_ids_host[record.row, : self._table.num_tokens[record.row]].copy()
        if cached.num_output_tokens:
            counted = len(record.prompt_token_ids) + cached.num_output_tokens[index]
            if counted > len(tokens):
                raise InvalidSchedulerOutput(_OTHER_COUNT.format(counted, len(tokens)), req_id=req_id)
            tokens = tokens[:counted]
        block_ids = cached.new_block_ids[index] if cached.new_block_ids else None
        if block_ids is None:
            raise InvalidSchedulerOutput("is resumed without block ids", req_id=req_id)
        if record.row is not None:
            self._preempted.add(req_id)
        return Binding(record, tokens, block_ids, cached.num_computed_tokens[index], is_new=False)

    def _check_binding(self, binding: Binding) -> None:
        record, computed = binding.record, binding.num_computed_tokens
        req_id = record.req_id
        num_scheduled = self._output.num_scheduled_tokens[req_id]
        if num_scheduled < 1:
            raise InvalidSchedulerOutput(_NO_TOKENS.format(num_scheduled), req_id=req_id)
        if computed < 0 or not isinstance(computed, int | np.integer):
            raise InvalidSchedulerOutput(f"num_computed_tokens is {computed}", req_id=req_id)
        if len(binding.tokens) > self._limits.max_model_len:
            raise InvalidSchedulerOutput(
                f"{len(binding.tokens)} tokens exceed max_model_len {self._limits.max_model_len}", req_id=req_id
            )
        if computed + num_scheduled > len(binding.tokens):
            raise InvalidSchedulerOutput(
                _BEYOND_KNOWN.format(computed, num_scheduled, len(binding.tokens)), req_id=req_id
            )
        wanted = record.prompt_logprobs
        if wanted is not None and wanted.num_left and computed > wanted.num_done:
            raise InvalidSchedulerOutput(
                f"asks for prompt_logprobs, but positions up to {computed} would never be computed; "
                f"schedule its prompt from position {wanted.num_done} (no prefix-cache hit)",
                req_id=req_id,
            )
        check_blocks(binding.block_ids, len(self._table.block_tables), self._limits.num_blocks, req_id)
        for group, (table, ids) in enumerate(zip(self._table.block_tables, binding.block_ids, strict=True)):
            self._written.add(req_id, group, ids[computed // table.block_size :])
            self._check_block_count(req_id, len(ids), computed + num_scheduled, table.block_size)
            if len(ids) > table.max_blocks:
                raise InvalidSchedulerOutput(_TOO_MANY_BLOCKS.format(len(ids), table.max_blocks), req_id=req_id)

    def _continued(self, cached: CachedRequestData) -> Continuation:
        resumed = cached.resumed_req_ids
        kept: slice | list[int] = slice(None)
        ids, new_block_ids = list(cached.req_ids), cached.new_block_ids  # the scheduler may go on writing in its own
        if resumed:
            kept = [index for index, req_id in enumerate(ids) if req_id not in resumed]
            ids = [cached.req_ids[index] for index in kept]
            new_block_ids = [new_block_ids[index] for index in kept] if new_block_ids else ()
        rows = self._rows(ids)
        counts = self._output.num_scheduled_tokens
        scheduled = np.array([counts[req_id] for req_id in ids], dtype=np.int64)
        computed = read_integers("num_computed_tokens", cached.num_computed_tokens)[kept]
        tokens, known = self._token_changes(cached, kept, rows)
        end = computed + scheduled
        # Most steps are right: one comparison of each kind, and only a wrong one is looked at closely.
        if (end > np.minimum(known, self._limits.max_model_len)).any() or (
            np.minimum(scheduled - 1, computed) < 0
        ).any():
            self._refuse_counts(ids, scheduled, computed, known)
        blocks = [(index, new_ids) for index, new_ids in enumerate(new_block_ids) if new_ids is not None]
        self._check_new_blocks(ids, rows, end, blocks)
        appended = [(int(rows[index]), new_ids) for index, new_ids in blocks]
        return Continuation(ids, rows, scheduled, computed, appended, tokens)

    def _refuse_counts(self, ids: Sequence[str], scheduled: IntArray, computed: IntArray, known: IntArray) -> None:
        end, limit = computed + scheduled, self._limits.max_model_len
        self._refuse(ids, scheduled < 1, lambda i: _NO_TOKENS.format(scheduled[i]))
        self._refuse(ids, computed < 0, lambda i: f"num_computed_tokens is {computed[i]}")
        self._refuse(ids, end > known, lambda i: _BEYOND_KNOWN.format(computed[i], scheduled[i], known[i]))
        self._refuse(ids, end > limit, lambda i: f"position {end[i]} is beyond max_model_len {limit}")

    def _check_new_blocks(
        self, ids: Sequence[str], rows: IntArray, end: IntArray, blocks: Sequence[tuple[int, BlockIds]]
    ) -> None:
        for index, new_ids in blocks:
            check_blocks(new_ids, len(self._table.block_tables), self._limits.num_blocks, ids[index])
        for group, table in enumerate(self._table.block_tables):
            held, size, width = table.counts[rows], table.block_size, table.max_blocks
            for index, new_ids in blocks:
                self._written.add(ids[index], group, new_ids[group])
                held[index] += len(new_ids[group])
                if held[index] > width:
                    raise InvalidSchedulerOutput(_TOO_MANY_BLOCKS.format(held[index], width), req_id=ids[index])
            self._refuse(ids, held * size < end, lambda i: _TOO_FEW_BLOCKS.format(held[i], size, end[i]))  # noqa: B023

    def _rows(self, ids: Sequence[str]) -> IntArray:
        rows = list(map(self._table.rows.get, ids))
        gone = self._finished | self._preempted
        if None in rows or (gone and not gone.isdisjoint(ids)):
            for req_id, row in zip(ids, rows, strict=True):
                self._known(req_id)
                if row is None or req_id in gone:
                    raise InvalidSchedulerOutput(
                        "was preempted; list it in resumed_req_ids with all its blocks", req_id=req_id
                    )
        return np.array(rows, dtype=np.int64)

    def _token_changes(
        self, cached: CachedRequestData, kept: slice | list[int], rows: IntArray
    ) -> tuple[list[tuple[int, int, TokenArray]], IntArray]:
        """Writes (row, start, tokens) for rewound or corrected requests, and every request's known count after."""
        table = self._table
        expected = known = table.num_tokens[rows]
        changes: list[tuple[int, int, TokenArray]] = []
        if cached.num_output_tokens:
            expected = (
                table.num_prompt_tokens[rows] + read_integers("num_output_tokens", cached.num_output_tokens)[kept]
            )
        is_told = bool(cached.new_token_ids or cached.all_token_ids)
        if is_told or (expected != known).any():
            table.wait_for_tokens()  # an undo puts back what is dropped or written over, so it must be known
        if cached.num_output_tokens and (expected != known).any():
            for position in np.flatnonzero(expected < known).tolist():
                changes.append((int(rows[position]), int(expected[position]), _NO_TOKEN_IDS))
                known[position] = expected[position]
            self._check_outputs(cached, kept, expected, known)
        if is_told:
            for position, index in enumerate(range(len(rows)) if isinstance(kept, slice) else kept):
                change = self._token_change(cached, index, int(rows[position]), int(known[position]))
                if change is not None:
                    changes.append(change)
                    known[position] = change[1] + len(change[2])
        return changes, known

    def _token_change(
        self, cached: CachedRequestData, index: int, row: int, known: int
    ) -> tuple[int, int, TokenArray] | None:
        """The write that ``new_token_ids`` or ``all_token_ids`` asks for, with the known tokens behind it."""
        req_id = cached.req_ids[index]
        name, start, tokens = "all_token_ids", 0, cached.all_token_ids.get(req_id, ())
        if cached.new_token_ids and len(cached.new_token_ids[index]):
            name, start, tokens = "new_token_ids", cached.num_computed_tokens[index], cached.new_token_ids[index]
        if not len(tokens):
            return None
        array = self._tokens(req_id, name, tokens)
        if not 0 <= start <= known or start + len(array) > self._limits.max_model_len:
            raise InvalidSchedulerOutput(f"{name} at {start} leave a gap or exceed max_model_len", req_id=req_id)
        in_prompt = array[: max(int(self._table.num_prompt_tokens[row]) - start, 0)]
        if not np.array_equal(in_prompt, self._table.token_ids_host[row, start : start + len(in_prompt)]):
            raise InvalidSchedulerOutput(f"{name} at {start} differ from its prompt", req_id=req_id)
        behind = self._table.token_ids_host[row, start + len(array) : max(start + len(array), known)]
        return row, start, np.concatenate([array, behind])

    def _check_outputs(
        self, cached: CachedRequestData, kept: slice | list[int], expected: IntArray, known: IntArray
    ) -> None:
        for position in np.flatnonzero(expected > known).tolist():
            index = position if isinstance(kept, slice) else kept[position]
            if (cached.new_token_ids and len(cached.new_token_ids[index])) or cached.req_ids[
                index
            ] in cached.all_token_ids:
                continue
            raise InvalidSchedulerOutput(
                _OTHER_COUNT.format(expected[position], known[position]), req_id=cached.req_ids[int(index)]
            )

    def _known(self, req_id: str) -> RequestRecord:
        record = self._table.records.get(req_id)
        if record is None:
            raise InvalidSchedulerOutput("is scheduled but unknown; send it in scheduled_new_reqs first", req_id=req_id)
        if req_id in self._finished:
            raise InvalidSchedulerOutput("is scheduled in the very step that finishes it", req_id=req_id)
        return record

    def _tokens(self, req_id: str, name: str, tokens: Sequence[int]) -> TokenArray:
        return read_tokens(name, tokens, self._limits.vocab_size, req_id)

    def _all_tokens(self, req_id: str, name: str, tokens: Sequence[int], prompt: TokenArray) -> TokenArray:
        array = self._tokens(req_id, name, tokens)
        if not np.array_equal(array[: len(prompt)], prompt):
            raise InvalidSchedulerOutput(f"{name} does not start with its prompt", req_id=req_id)
        return array

    def _check_block_count(self, req_id: str, held: int, end: int, size: int) -> None:
        if held * size < end:
            raise InvalidSchedulerOutput(_TOO_FEW_BLOCKS.format(held, size, end), req_id=req_id)

    def _refuse(self, ids: Sequence[str], bad: npt.NDArray[np.bool_], reason: Callable[[int], str]) -> None:
        if bad.any():
            index = int(np.argmax(bad))
            raise InvalidSchedulerOutput(reason(index), req_id=ids[index])

    def _check_rows(self, bindings: Iterable[Binding]) -> None:
        rows = self._table.rows
        leaving = sum(req_id in rows for req_id in self._finished | self._preempted)
        live = len(rows) - leaving + sum(1 for _ in bindings)
        if live > self._limits.max_num_seqs:
            raise InvalidSchedulerOutput(
                f"{live} live requests exceed max_num_seqs {self._limits.max_num_seqs}; finish or preempt some first"
            )


_NO_TOKEN_IDS: TokenArray = np.empty(0, dtype=np.int32)
_NO_TOKENS = "schedules {} tokens; schedule at least one or leave it out of the step"
_BEYOND_KNOWN = "schedules tokens beyond what is known: {} computed + {} scheduled, {} known"
_TOO_FEW_BLOCKS = "{} blocks of {} tokens are too few for {} tokens"
_OTHER_COUNT = "the scheduler counts {} tokens, the runner knows {}"
_TOO_MANY_BLOCKS = "{} blocks are more than the {} that max_model_len needs"

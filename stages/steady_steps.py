"""Recognises the step that most steps are: the requests of the step before, one token more for each."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, error

import numpy as np

from .errors import InvalidSchedulerOutput
from .io import BlockIds, CachedRequestData, SchedulerOutput
from .records import DecodeRun, IntArray
from .request_table import RequestTable
from .step_changes import Continuation, StepLimits
from .step_reading import read_integers, read_one_block_each


class SteadySteps:
    """Reads a scheduler output that goes on with the batch it remembers, in a few comparisons of whole lists.

    The first such step begins a :class:`DecodeRun`. The next ones are in it as long as every number that the scheduler
    sends, and what the table knows, is what the step before leads to; any other step begins a run of its own.

    It never refuses. Whatever is not plainly such a step, or not plainly right, is left to
    :class:`~twostroke.stages.scheduler_checks.SchedulerOutputCheck`, which says what is wrong with it.
    """

    def __init__(self, table: RequestTable, limits: StepLimits) -> None:
        self._table = table
        self._limits = limits
        self._ones: IntArray = np.ones(limits.max_num_seqs, dtype=np.int64)
        self._one = np.ones((), dtype=np.int64)  # numpy takes as long to make it of an integer as to add it
        self._epoch = -1
        self._req_ids: list[str] = []
        self._rows = self._scheduled = self._prompts = self._ones[:0]
        self._pack = Struct("").pack
        self._run: DecodeRun | None = None
        self._longest = 0
        self._steps_in_blocks = 0
        self._block_versions: list[int] = []

    def remember(self, req_ids: Sequence[str], rows: IntArray) -> None:
        """The batch of this step, by requests that are known to be distinct. Its arrays are shared by those to come."""
        self._epoch = -1  # an interrupt leaves nothing that could be taken for whole
        self._run = None
        self._req_ids = list(req_ids)
        self._pack = Struct(f"{len(rows)}q").pack
        self._rows, self._scheduled = rows, self._ones[: len(rows)]
        self._prompts = self._table.num_prompt_tokens[rows]
        self._epoch = self._table.epoch

    def read(self, output: SchedulerOutput) -> Continuation | None:
        """What the step continues, or None if it has to be looked at closely."""
        cached = output.scheduled_cached_reqs
        if self._epoch != self._table.epoch or self._does_more(output, cached) or not self._decodes(output, cached):
            return None
        run, self._run = self._run, None  # as above
        if run is None or not self._go_on(run, cached):
            self._steps_in_blocks = 0
            computed = self._counts(cached)
            if computed is None:
                return None
            known = computed + 1
            is_whole = np.logical_and.reduce(known == self._table.num_tokens[self._rows])
            run = DecodeRun(self._rows, self._scheduled, computed, known) if is_whole else None
        else:
            computed = run.num_computed_tokens
        continued = self._with_blocks(cached.new_block_ids, computed, run)
        self._run = None if continued is None else run
        return continued

    def _go_on(self, run: DecodeRun, cached: CachedRequestData) -> bool:
        """Go to the next step of a run, if that is what is counted, whatever blocks come with it."""
        computed, outputs = run.num_known_tokens, cached.num_output_tokens
        known = np.add(computed, self._one)
        self._longest += 1
        if (
            self._longest >= self._limits.max_model_len
            or not self._are(cached.num_computed_tokens, computed)
            or self._table.num_tokens[run.rows].tobytes() != known.tobytes()
            or (len(outputs) and not self._are(outputs, known - self._prompts))
        ):
            return False
        run.num_computed_tokens, run.num_known_tokens = computed, known
        run.num_steps_before += 1
        return True

    def _are(self, values: Sequence[int], expected: IntArray) -> bool:
        """Whether these are as many integers as there are requests, and the expected ones."""
        try:  # by far faster than an array that is compared
            return self._pack(*values) == expected.tobytes()
        except (error, TypeError):
            return False

    def _counts(self, cached: CachedRequestData) -> IntArray | None:
        """How many tokens of each request are computed, if all that is counted is right."""
        try:
            computed = read_integers("num_computed_tokens", cached.num_computed_tokens)
            outputs = read_integers("num_output_tokens", cached.num_output_tokens)
        except InvalidSchedulerOutput:
            return None
        rows, known = self._rows, self._table.num_tokens[self._rows]
        if len(computed) != len(rows) or np.logical_or.reduce(computed >= known) or np.minimum.reduce(computed) < 0:
            return None
        self._longest = int(np.maximum.reduce(computed))
        if self._longest >= self._limits.max_model_len:
            return None
        if len(outputs) != len(rows):
            return None if len(outputs) else computed
        return None if np.logical_or.reduce(self._prompts + outputs != known) else computed

    def _does_more(self, output: SchedulerOutput, cached: CachedRequestData) -> bool:
        """Whether the step says anything that a decode of the same requests does not."""
        return bool(
            output.scheduled_new_reqs
            or output.finished_req_ids
            or output.preempted_req_ids
            or output.scheduled_spec_decode_tokens
            or output.scheduled_encoder_inputs
            or output.kv_connector_metadata is not None
            or cached.resumed_req_ids
            or cached.all_token_ids
            or len(cached.new_token_ids)
        )

    def _decodes(self, output: SchedulerOutput, cached: CachedRequestData) -> bool:
        """Whether exactly the requests remembered are scheduled, in their order, with one token each."""
        counts, expected = output.num_scheduled_tokens, self._req_ids
        num_reqs, values = len(expected), list(counts.values())
        return (
            len(values) == num_reqs > 0
            and output.total_num_scheduled_tokens == num_reqs
            and values.count(1) == num_reqs
            and type(sum(values)) is int
            and list(cached.req_ids) == expected
            and list(counts) == expected
        )

    def _with_blocks(
        self, new_block_ids: Sequence[BlockIds | None], computed: IntArray, run: DecodeRun | None
    ) -> Continuation | None:
        """The step with the blocks that it brings; None where they are not plainly right, or too few."""
        rows, num_new = self._rows, len(new_block_ids)
        is_blank = not num_new or list(new_block_ids).count(None) == num_new == len(rows)
        if is_blank:
            if not self._has_room(computed, None):
                return None
            return Continuation(self._req_ids, rows, self._scheduled, computed, (), (), run=run)
        if num_new != len(rows):
            return None
        some = [(position, new) for position, new in enumerate(new_block_ids) if new is not None]
        ids = read_one_block_each([new for _, new in some], len(self._table.block_tables), self._limits.num_blocks)
        index = np.array([position for position, _ in some])
        if ids is None or not self._has_room(computed, index):
            return None
        return Continuation(self._req_ids, rows, self._scheduled, computed, (), (), rows[index], ids, run)

    def _has_room(self, computed: IntArray, index: IntArray | None) -> bool:
        """Whether every request has a place for its token; those of ``index`` get a block more of each group."""
        tables = self._table.block_tables
        versions = [table.version for table in tables]
        if index is None and self._steps_in_blocks and versions == self._block_versions:
            self._steps_in_blocks -= 1
            return True
        rooms: list[int] = []
        for table in tables:
            held = table.counts[self._rows]
            if index is not None:
                held[index] += 1
                if int(held.max()) > table.max_blocks:
                    return False
            rooms.append(int(np.minimum.reduce(held * table.block_size - computed)) - 1)
        # As good as known for steps to come, unless blocks come now: the tables are changed then.
        self._steps_in_blocks = min(rooms, default=0) if index is None else 0
        self._block_versions = versions
        return min(rooms, default=0) >= 0

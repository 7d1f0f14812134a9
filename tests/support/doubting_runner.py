"""A stand-in for a model runner that believes nothing it is told by a scheduler.

It keeps its own block tables and a fingerprint of the history behind every slot of the cache, so a block that is shared
too early, handed out twice, written over or not computed shows up as a wrong fingerprint. No model, no torch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from copy import deepcopy

from attrs import define, evolve, field
from twostroke.engine.scheduler import FinishReason, RequestUpdate, Scheduler, SchedulerConfig
from twostroke.stages.io import ModelRunnerOutput, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

VOCAB_SIZE = 11
Slot = tuple[int, int, int]


def next_token(token_ids: Sequence[int]) -> int:
    return (sum(token_ids) * 7 + len(token_ids) * 3 + token_ids[-1]) % VOCAB_SIZE


def solo(prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What a request gives when it is alone, without blocks, chunks or steps."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        outputs = tokens[len(prompt) :]
        if len(outputs) >= params.min_tokens and outputs[-1] in params.stop_token_ids:
            return outputs, FinishReason.STOP
        if len(outputs) == params.max_tokens or len(tokens) == max_model_len:
            return outputs, FinishReason.LENGTH


@define
class Row:
    """What the runner knows of a request."""

    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    tables: list[list[int]] = field(factory=list)
    num_computed_tokens: int = 0


@define
class DoubtingRunner:
    """Executes scheduler outputs on fingerprints, and checks each against what it knows."""

    config: SchedulerConfig
    rows: dict[str, Row] = field(factory=dict)
    preempted: dict[str, Row] = field(factory=dict)
    slots: dict[Slot, int] = field(factory=dict)

    def snapshot(self) -> tuple[dict[str, Row], dict[str, Row]]:
        """All that undoing a step brings back: not what was written to the slots."""
        return deepcopy((self.rows, self.preempted))

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._take_over(output)
        counts = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(counts.values()) <= self.config.max_num_batched_tokens
        assert len(self.rows) <= self.config.max_num_seqs
        for req_id, count in counts.items():
            self._write(self.rows[req_id], count)
        self._check_sharing(output)
        sampled = [self._sample(self.rows[req_id]) for req_id in counts]
        index = {req_id: position for position, req_id in enumerate(counts)}
        return ModelRunnerOutput(req_ids=list(counts), req_id_to_index=index, sampled_token_ids=sampled)

    def _take_over(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            self.rows.pop(req_id, None)
            self.preempted.pop(req_id, None)
        for req_id in output.preempted_req_ids or ():
            self.preempted[req_id] = self.rows.pop(req_id)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.rows
            assert new.req_id not in self.preempted
            prompt, limit = list(new.prompt_token_ids), new.sampling_params.max_tokens
            tables = [list(ids) for ids in new.block_ids]
            self.rows[new.req_id] = Row(prompt, len(prompt), limit or 0, tables, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        lists = (cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens)
        for req_id, block_ids, computed, outputs in zip(cached.req_ids, *lists, strict=True):
            if req_id in cached.resumed_req_ids:
                row = self.rows[req_id] = self.preempted.pop(req_id)
                assert cached.all_token_ids[req_id] == row.tokens
                assert block_ids is not None
                row.tables = [list(ids) for ids in block_ids]
                row.num_computed_tokens = computed
            row = self.rows[req_id]
            assert row.num_computed_tokens == computed
            assert len(row.tokens) - row.num_prompt_tokens == outputs
            if req_id not in cached.resumed_req_ids and block_ids is not None:
                assert any(block_ids)
                for table, ids in zip(row.tables, block_ids, strict=True):
                    table.extend(ids)
        assert set(cached.all_token_ids) == set(cached.resumed_req_ids) <= set(cached.req_ids)
        assert {*cached.req_ids, *(new.req_id for new in output.scheduled_new_reqs)} == set(output.num_scheduled_tokens)

    def _write(self, row: Row, count: int) -> None:
        end = row.num_computed_tokens + count
        assert count >= 1
        assert end <= len(row.tokens)
        for group, (table, size) in enumerate(zip(row.tables, self.config.block_sizes, strict=True)):
            assert len(table) == -(-end // size)
            fingerprint = group
            for position in range(end):
                fingerprint = hash((fingerprint, row.tokens[position]))
                slot = (group, table[position // size], position % size)
                if position >= row.num_computed_tokens:
                    self.slots[slot] = fingerprint
                assert self.slots[slot] == fingerprint
        row.num_computed_tokens = end

    def _check_sharing(self, output: SchedulerOutput) -> None:
        holders = Counter(block for row in self.rows.values() for table in row.tables for block in table)
        assert all(0 < block < self.config.num_kv_blocks for block in holders)
        for row in self.rows.values():
            assert sum(map(len, row.tables)) == len({block for table in row.tables for block in table})
            for table, size in zip(row.tables, self.config.block_sizes, strict=True):
                assert all(holders[block] == 1 for block in table[row.num_computed_tokens // size :])
        for group, count in enumerate(output.num_common_prefix_blocks):
            assert len({tuple(row.tables[group][:count]) for row in self.rows.values()}) <= 1

    def _sample(self, row: Row) -> list[int]:
        if row.num_computed_tokens < len(row.tokens):
            return []
        row.tokens.append(next_token(row.tokens))
        assert len(row.tokens) <= min(row.num_prompt_tokens + row.max_tokens, self.config.max_model_len)
        return [row.tokens[-1]]


class LateLoop:
    """A scheduler and a runner that is told of each step at once; what it gave arrives when the test says so."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.runner = DoubtingRunner(config)
        self.flights: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, list[int]] = {}

    def add(
        self, req_id: str, prompt: Sequence[int], max_tokens: int = 8, stop_token_ids: tuple[int, ...] = ()
    ) -> None:
        """Queue a request."""
        self.scheduler.add_request(req_id, prompt, SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids))
        self.outputs[req_id] = []

    def launch(self) -> SchedulerOutput:
        """Schedule a step and let the runner execute it."""
        output = self.scheduler.schedule()
        result = self.runner.execute(output)
        if output.num_scheduled_tokens:
            self.flights.append((output, result))
        return output

    def land(self, **errors: Exception) -> dict[str, RequestUpdate]:
        """Update the scheduler with the oldest step, and with errors of requests; its updates by request."""
        output, result = self.flights.popleft()
        result = evolve(result, request_errors=errors)
        updates = {update.req_id: update for update in self.scheduler.update_from_output(output, result)}
        for req_id, update in updates.items():
            self.outputs[req_id].extend(update.new_token_ids)
        return updates

    def run(self, depth: int) -> list[SchedulerOutput]:
        """To the end, with up to ``depth`` steps in flight."""
        launched: list[SchedulerOutput] = []
        while self.scheduler.has_work():
            num_in_flight = len(self.flights)
            if num_in_flight < depth:
                launched.append(self.launch())
            if len(self.flights) in (num_in_flight, depth) and self.flights:
                self.land()
        assert not self.flights
        assert self.scheduler.stats().kv_cache_usage == 0.0
        assert self.runner.rows == self.runner.preempted == {}
        return launched

    @property
    def num_held_blocks(self) -> int:
        """How many blocks requests hold."""
        return round(self.scheduler.stats().kv_cache_usage * (self.config.num_kv_blocks - 1))

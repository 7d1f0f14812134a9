"""Random histories of the scheduler against a runner that believes nothing it is told.

The runner keeps its own block tables and a fingerprint of the history behind every slot of the cache, so a block that
is shared too early, handed out twice or not computed shows up as a wrong fingerprint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import define, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
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
    tables: list[list[int]] = field(factory=list)
    num_computed_tokens: int = 0


@define
class DoubtingRunner:
    """Executes scheduler outputs on fingerprints, and checks each against what it knows."""

    config: SchedulerConfig
    rows: dict[str, Row] = field(factory=dict)
    preempted: dict[str, Row] = field(factory=dict)
    slots: dict[Slot, int] = field(factory=dict)

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
            row = Row(list(new.prompt_token_ids), len(new.prompt_token_ids), [list(ids) for ids in new.block_ids])
            row.num_computed_tokens = new.num_computed_tokens
            self.rows[new.req_id] = row
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
        return [row.tokens[-1]]


@define
class Expected:
    """A live request of the test, and what it has given so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    outputs: list[int] = field(factory=list)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(2, 12),
    min_tokens=st.integers(0, 2),
    stop_token_ids=st.sampled_from([(), (0,), (3, 4)]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, failed steps and failing requests in any order."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 12),
        num_blocks=st.integers(12, 30),
        block_sizes=st.sampled_from([(2,), (4,), (2, 4), (3, 2)]),
        caching=st.booleans(),
        threshold=st.sampled_from([0, 1, 3]),
    )
    def start(
        self,
        max_num_seqs: int,
        budget: int,
        num_blocks: int,
        block_sizes: tuple[int, ...],
        caching: bool,
        threshold: int,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=16,
            num_kv_blocks=num_blocks + 8 * len(block_sizes) - 8,
            block_sizes=block_sizes,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=min(threshold, budget),
        )
        self.scheduler = Scheduler(self.config)
        self.runner = DoubtingRunner(self.config)
        self.live: dict[str, Expected] = {}

    @rule(name=st.sampled_from("abcdef"), kind=st.integers(0, 2), length=st.integers(1, 12), params=PARAMS)
    def add(self, name: str, kind: int, length: int, params: SamplingParams) -> None:
        if name not in self.live:
            prompt = tuple((position * 5 + kind * (position > 5)) % VOCAB_SIZE for position in range(length))
            self.scheduler.add_request(name, prompt, params)
            self.live[name] = Expected(prompt, params)

    @rule(names=st.sets(st.sampled_from("abcdef"), max_size=2))
    def abort(self, names: set[str]) -> None:
        assert set(self.scheduler.finish_requests(names)) == names & self.live.keys()
        for name in names:
            self.live.pop(name, None)

    @rule()
    def step(self) -> None:
        output = self.scheduler.schedule()
        self._settle(output, self.runner.execute(output))

    @rule(data=st.data())
    def step_that_is_undone_first(self, data: st.DataObject) -> None:
        first = self.scheduler.schedule()
        self.scheduler.rollback(first)
        again = self.scheduler.schedule()
        assert again == first
        if data.draw(st.booleans()):
            self._settle(again, self.runner.execute(again))
        else:
            self.abort(data.draw(st.sets(st.sampled_from("abcdef"), max_size=2)))
            self.scheduler.rollback(again)

    @rule(names=st.sets(st.sampled_from("abcdef"), min_size=1, max_size=2), readd=st.booleans(), params=PARAMS)
    def abort_in_flight(self, names: set[str], readd: bool, params: SamplingParams) -> None:
        output = self.scheduler.schedule()
        result = self.runner.execute(output)
        self.abort(names)
        if readd:
            self.add(min(names), 1, 5, params)
        self._settle(output, result)

    @rule(name=st.sampled_from("abcdef"))
    def step_with_a_failing_request(self, name: str) -> None:
        output = self.scheduler.schedule()
        result = self.runner.execute(output)
        if name in output.num_scheduled_tokens:
            error = ValueError("not a number")
            failed = ModelRunnerOutput(
                req_ids=result.req_ids,
                req_id_to_index=result.req_id_to_index,
                sampled_token_ids=[
                    [] if req_id == name else tokens
                    for req_id, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True)
                ],
                request_errors={name: error},
            )
            updates = self._settle(output, failed)
            assert [(update.req_id, update.error) for update in updates if update.error] == [(name, error)]
        else:
            self._settle(output, result)

    def _settle(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestUpdate]:
        updates = self.scheduler.update_from_output(output, result)
        for update in updates:
            expected = self.live[update.req_id]
            expected.outputs.extend(update.new_token_ids)
            tokens, reason = solo(expected.prompt, expected.params, self.config.max_model_len)
            if update.finish_reason is not None:
                del self.live[update.req_id]
            if update.finish_reason is FinishReason.ERROR:
                continue
            assert expected.outputs == tokens[: len(expected.outputs)]
            assert update.finish_reason == (reason if len(expected.outputs) == len(tokens) else None)
        return updates

    @invariant()
    def references_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool = self.scheduler._pool
        requests = self.scheduler._requests.values()
        held = Counter(block for request in requests for ids in request.block_ids for block in ids)
        if self.scheduler._step is None:
            assert [pool.ref_count(block) for block in range(pool.num_blocks)] == [
                held[block] for block in range(pool.num_blocks)
            ]
            assert pool.num_free == pool.num_blocks - 1 - len(held)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.num_running <= self.config.max_num_seqs

    def teardown(self) -> None:
        """Everyone gets to the end, in a bounded number of steps, and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        bound = 2 + sum(len(expected.prompt) + (expected.params.max_tokens or 0) for expected in self.live.values())
        for _ in range(bound):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work()
        assert not self.live
        assert not self.scheduler.has_unfinished_requests()
        assert self.runner.rows == self.runner.preempted == {}
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert not self.scheduler._finished_req_ids
        assert self.scheduler.stats().kv_cache_usage == 0.0


SchedulerMachine.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
TestRandomHistories = SchedulerMachine.TestCase

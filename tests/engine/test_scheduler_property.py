"""Random histories of the scheduler against a runner that believes nothing it is told.

Up to three steps are in flight: the runner has executed them, and the scheduler does not know yet what they gave.
"""

from __future__ import annotations

from collections import Counter, deque

import pytest
from attrs import define, field
from doubting_runner import VOCAB_SIZE, DoubtingRunner, solo
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from twostroke.engine.scheduler import FinishReason, RequestUpdate, Scheduler, SchedulerConfig
from twostroke.fsm.errors import StepStateError
from twostroke.stages.io import ModelRunnerOutput, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams


@define
class Expected:
    """A live request of the test, and what it has given so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    outputs: list[int] = field(factory=list)


@define
class Flight:
    """A step that ran and was not settled: what it was made for, what it gives, and the blocks that it used."""

    output: SchedulerOutput
    result: ModelRunnerOutput
    expected: dict[str, Expected]
    blocks: set[int]


def with_error(result: ModelRunnerOutput, name: str | None) -> ModelRunnerOutput:
    """The same in another order, with an error for one of its requests, which is not listed otherwise."""
    if name is None or name not in result.req_id_to_index:
        return result
    others = [req_id for req_id in reversed(result.req_ids) if req_id != name]
    return ModelRunnerOutput(
        req_ids=others,
        req_id_to_index={req_id: index for index, req_id in enumerate(others)},
        sampled_token_ids=[result.sampled_token_ids[result.req_id_to_index[req_id]] for req_id in others],
        request_errors={name: ValueError("not a number")},
    )


NAMES = st.sampled_from("abcdef")
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(2, 14),
    min_tokens=st.integers(0, 2),
    stop_token_ids=st.sampled_from([(), (), (0,), (3, 4)]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)
CONFIGS = st.builds(
    lambda num_spare_blocks, block_sizes, threshold, **limits: SchedulerConfig(
        max_model_len=16,
        num_kv_blocks=1 + num_spare_blocks + sum(-(-15 // size) for size in block_sizes),
        block_sizes=block_sizes,
        long_prefill_token_threshold=min(threshold, limits["max_num_batched_tokens"]),
        **limits,
    ),
    max_num_seqs=st.integers(2, 4),
    max_num_batched_tokens=st.integers(1, 12),
    num_spare_blocks=st.integers(0, 8),
    block_sizes=st.sampled_from([(2,), (4,), (2, 4), (3, 2)]),
    enable_prefix_caching=st.booleans(),
    threshold=st.sampled_from([0, 1, 3]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, failing requests and undone steps in any order, with steps in flight."""

    @initialize(config=CONFIGS, depth=st.integers(1, 3))
    def start(self, config: SchedulerConfig, depth: int) -> None:
        self.config, self.depth = config, depth
        self.scheduler = Scheduler(config)
        self.runner = DoubtingRunner(config)
        self.live: dict[str, Expected] = {}
        self.flights: deque[Flight] = deque()

    @rule(name=NAMES, kind=st.integers(0, 2), length=st.integers(1, 12), params=PARAMS)
    def add(self, name: str, kind: int, length: int, params: SamplingParams) -> None:
        if name not in self.live:
            prompt = tuple((position * 5 + kind * (position > 5)) % VOCAB_SIZE for position in range(length))
            self.scheduler.add_request(name, prompt, params)
            self.live[name] = Expected(prompt, params)

    @rule(length=st.integers(1, 12), params=PARAMS)
    def add_a_crowd(self, length: int, params: SamplingParams) -> None:
        for kind, name in enumerate("abcd"):
            self.add(name, kind % 3, length, params)

    @rule(names=st.sets(NAMES, max_size=2))
    def abort(self, names: set[str]) -> None:
        assert set(self.scheduler.finish_requests(names)) == names & self.live.keys()
        for name in names:
            self.live.pop(name, None)

    @rule(name=NAMES, params=PARAMS)
    def abort_and_add(self, name: str, params: SamplingParams) -> None:
        self.abort({name})
        self.add(name, 1, 5, params)

    @rule(times=st.integers(1, 5), failing=st.none() | NAMES)
    def launch(self, times: int, failing: str | None) -> None:
        for _ in range(times):
            while len(self.flights) >= self.depth:
                self.land()
            self._launch(self.scheduler.schedule(), failing)

    @rule()
    def land(self) -> None:
        """The oldest step in flight is settled."""
        if not self.flights:
            return
        flight = self.flights.popleft()
        updates = self.scheduler.update_from_output(flight.output, flight.result)
        told = {update.req_id for update in updates}
        assert len(told) == len(updates)
        for name, tokens in zip(flight.result.req_ids, flight.result.sampled_token_ids, strict=True):
            still_live = self.live.get(name) is flight.expected[name]
            assert (name in told) == (still_live and bool(tokens))
        for name, error in flight.result.request_errors.items():
            if self.live.get(name) is flight.expected[name]:
                assert next(update for update in updates if update.req_id == name).error is error
        for update in updates:
            self._check(update)

    @rule(data=st.data(), executed=st.booleans())
    def undo_a_preemption(self, data: st.DataObject, executed: bool) -> None:
        """Goes on, one step at a time, until the next one would preempt."""
        while self.flights:
            self.land()
        for _ in range(10):
            output = self.scheduler.schedule()
            self.scheduler.rollback(output)
            if output.preempted_req_ids:
                self.undo(data, 1, executed)
                return
            self.launch(1, None)
            self.land()

    @rule(data=st.data(), count=st.integers(1, 2), executed=st.booleans())
    def undo(self, data: st.DataObject, count: int, executed: bool) -> None:
        """Steps that fail, or are never sent, while earlier ones are in flight and anything may happen meanwhile."""
        before = self.runner.snapshot()
        outputs = [self.scheduler.schedule() for _ in range(count)]
        if not outputs[0].num_scheduled_tokens:  # settled by the next one, unless it comes after a step in flight
            self._launch(outputs.pop(0))
            before = self.runner.snapshot()
        if executed:
            for output in outputs:
                self.runner.execute(output)
            self.runner.rows, self.runner.preempted = before
        if count == 2 and all(output.num_scheduled_tokens for output in outputs):
            with pytest.raises(StepStateError, match="its turn has not come"):
                self.scheduler.rollback(outputs[0])
            with pytest.raises(StepStateError):
                self.scheduler.update_from_output(outputs[1], ModelRunnerOutput())
        meanwhile = data.draw(st.lists(st.sampled_from([self.land, self.abort, self.abort_and_add]), max_size=3))
        for action in meanwhile:
            if action == self.land:
                self.land()
            elif action == self.abort:
                self.abort({data.draw(NAMES)})
            else:
                self.abort_and_add(data.draw(NAMES), data.draw(PARAMS))
            self.references_add_up()
        for output in reversed(outputs):
            self.scheduler.rollback(output, executed=executed)
        if outputs and not meanwhile and not executed:
            again = self.scheduler.schedule()
            assert again == outputs[0]
            self._launch(again)

    def _launch(self, output: SchedulerOutput, failing: str | None = None) -> None:
        result = self.runner.execute(output)
        if not output.num_scheduled_tokens:
            # Nothing to compute: everyone waits for a step in flight, or there is nobody.
            assert self.scheduler.num_in_flight or not self.live
            return
        blocks = {
            block for name in output.num_scheduled_tokens for table in self.runner.rows[name].tables for block in table
        }
        expected = {name: self.live[name] for name in output.num_scheduled_tokens}
        self.flights.append(Flight(output, with_error(result, failing), expected, blocks))
        assert self.scheduler.num_in_flight == len(self.flights)

    def _check(self, update: RequestUpdate) -> None:
        expected = self.live[update.req_id]
        expected.outputs.extend(update.new_token_ids)
        tokens, reason = solo(expected.prompt, expected.params, self.config.max_model_len)
        if update.finish_reason is not None:
            del self.live[update.req_id]
        if update.finish_reason is not FinishReason.ERROR:
            assert expected.outputs == tokens[: len(expected.outputs)]
            assert update.finish_reason == (reason if len(expected.outputs) == len(tokens) else None)

    @invariant()
    def references_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool, queues = self.scheduler._pool, self.scheduler._queues
        holders = [*self.scheduler._requests.values(), *queues.leaving]
        held = Counter(block for request in holders for ids in request.block_ids for block in ids)
        assert [pool.ref_count(block) for block in range(pool.num_blocks)] == [
            held[block] for block in range(pool.num_blocks)
        ]
        assert pool.num_free == pool.num_blocks - 1 - len(held)
        assert all(flight.blocks <= held.keys() for flight in self.flights)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.num_running <= self.config.max_num_seqs

    def teardown(self) -> None:
        """Everyone gets to the end, in a bounded number of steps, and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        bound = 2 + sum(len(expected.prompt) + (expected.params.max_tokens or 0) for expected in self.live.values())
        for _ in range(self.depth * bound + len(self.flights)):
            if not self.scheduler.has_work():
                break
            num_in_flight = len(self.flights)
            if num_in_flight < self.depth:
                self._launch(self.scheduler.schedule())
            if len(self.flights) in (num_in_flight, self.depth):
                self.land()
            self.references_add_up()
        assert not self.scheduler.has_work()
        assert not self.live
        assert not self.flights
        assert not self.scheduler.has_unfinished_requests()
        assert self.runner.rows == self.runner.preempted == {}
        assert (self.scheduler.num_running, self.scheduler.num_waiting, self.scheduler.num_in_flight) == (0, 0, 0)
        assert not self.scheduler._finished_req_ids
        assert not self.scheduler._queues.leaving
        assert self.scheduler.stats().kv_cache_usage == 0.0


SchedulerMachine.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
TestRandomHistories = SchedulerMachine.TestCase

"""A scheduler in the hands of a test: it decides every count, chunk, preemption and order, and keeps its own books."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field, frozen
from twostroke.engine.model_runner import ModelRunner
from twostroke.stages.io import (
    AsyncModelRunnerOutput,
    CachedRequestData,
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from twostroke.stages.sampling_params import SamplingParams

PENDING = -1
GREEDY = SamplingParams(temperature=0.0, logprobs=2)


@frozen
class Wish:
    """A request that a test wants served."""

    req_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = GREEDY


@define
class Tracked:
    """What the driver knows of a request."""

    wish: Wish
    tokens: list[int]
    computed: int = 0
    blocks: list[list[int]] = field(factory=list)
    status: str = "new"
    logprobs: list[LogprobsLists] = field(factory=list)
    prompt_logprobs: list[LogprobsLists] = field(factory=list)

    @property
    def outputs(self) -> list[int]:
        """Sampled tokens so far; :data:`PENDING` where the value has not arrived."""
        return self.tokens[len(self.wish.prompt) :]

    @property
    def num_pending(self) -> int:
        """Sampled tokens whose value has not arrived."""
        return self.tokens.count(PENDING)

    @property
    def left(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.computed


@define(eq=False)
class InFlight:
    """A launched step: where its tokens go, and blocks that are free once it is done."""

    output: SchedulerOutput
    late: ModelRunnerOutput | AsyncModelRunnerOutput
    positions: dict[str, tuple[Tracked, int]] = field(factory=dict)
    blocks: list[int] = field(factory=list)


@frozen
class Served:
    """What a request got: comparable between runs."""

    tokens: tuple[int, ...]
    logprobs: np.ndarray
    prompt_logprobs: np.ndarray | None

    def assert_equals(self, other: Served, tolerance: float = 1e-4) -> None:
        """Same tokens, same log probabilities within a tolerance."""
        assert self.tokens == other.tokens
        np.testing.assert_allclose(self.logprobs, other.logprobs, atol=tolerance)
        assert (self.prompt_logprobs is None) == (other.prompt_logprobs is None)
        if self.prompt_logprobs is not None and other.prompt_logprobs is not None:
            np.testing.assert_allclose(self.prompt_logprobs, other.prompt_logprobs, atol=tolerance)


class Driver:
    """Feeds a runner. Block ids are drawn from a shuffled pool so that tables are never in order."""

    def __init__(self, runner: ModelRunner, seed: int = 0, depth: int = 1) -> None:
        """``depth`` steps may be in flight; with 1, each is waited for at once."""
        self.runner = runner
        self.depth = depth
        self.in_flight: deque[InFlight] = deque()
        self.random = random.Random(seed)
        config = runner.config
        assert isinstance(config.num_kv_blocks, int)
        self.block_size = config.block_size
        self.free_blocks = list(range(1, config.num_kv_blocks))
        self.random.shuffle(self.free_blocks)
        self.requests: dict[str, Tracked] = {}
        self.finished: list[str] = []

    def add(self, *wishes: Wish) -> None:
        """Take in requests; they are sent when they are first scheduled."""
        for wish in wishes:
            self.requests[wish.req_id] = Tracked(wish, list(wish.prompt))

    def finish(self, *req_ids: str) -> None:
        """Finish requests with the next step; their blocks are free when the steps that use them are done."""
        for req_id in req_ids:
            self._free(self.requests.pop(req_id))
            self.finished.append(req_id)

    def _free(self, request: Tracked) -> None:
        freed = [block for blocks in request.blocks for block in blocks]
        request.blocks = []
        if self.in_flight:
            self.in_flight[-1].blocks += freed
        else:
            self.free_blocks += freed

    def _grow(self, request: Tracked, end: int) -> list[list[int]]:
        num_groups = len(self.runner.kv_groups)
        request.blocks = request.blocks or [[] for _ in range(num_groups)]
        need = -(-end // self.block_size) - len(request.blocks[0])
        added = [[self.free_blocks.pop() for _ in range(need)] for _ in range(num_groups)]
        for held, more in zip(request.blocks, added, strict=True):
            held += more
        return added

    def output(
        self, counts: Mapping[str, int], preempted: Iterable[str] = (), shuffle: bool = False
    ) -> SchedulerOutput:
        """The scheduler output that computes ``counts[req_id]`` more tokens of each request."""
        preempted = set(preempted)
        for req_id in preempted:
            self._free(self.requests[req_id])
            self.requests[req_id].status = "preempted"
            self.requests[req_id].computed = 0
        order = list(counts)
        if shuffle:
            self.random.shuffle(order)
        news: list[NewRequestData] = []
        old: list[tuple[str, Any]] = []
        for req_id in order:
            request = self.requests[req_id]
            fresh = request.status in ("new", "preempted")
            added = self._grow(request, request.computed + counts[req_id])
            if request.status == "new":
                news.append(
                    NewRequestData(
                        req_id=req_id,
                        prompt_token_ids=request.wish.prompt,
                        block_ids=[list(blocks) for blocks in request.blocks],
                        num_computed_tokens=request.computed,
                        sampling_params=request.wish.params,
                    )
                )
            else:
                old.append((req_id, added if fresh or any(added) else None))
        resumed = {req_id for req_id, _ in old if self.requests[req_id].status == "preempted"}
        scheduled = dict(sorted(counts.items())) if shuffle else dict(counts)
        finished, self.finished = frozenset(self.finished), []
        return SchedulerOutput(
            scheduled_new_reqs=news,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[req_id for req_id, _ in old],
                resumed_req_ids=resumed,
                all_token_ids={
                    req_id: list(self.requests[req_id].tokens)
                    for req_id in resumed
                    if not self.requests[req_id].num_pending
                },
                new_block_ids=[blocks for _, blocks in old],
                num_computed_tokens=[self.requests[req_id].computed for req_id, _ in old],
                num_output_tokens=[len(self.requests[req_id].outputs) for req_id, _ in old],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(counts.values()),
            finished_req_ids=finished,
            preempted_req_ids=frozenset(preempted),
        )

    def step(
        self,
        counts: Mapping[str, int],
        preempted: Iterable[str] = (),
        shuffle: bool = False,
        grammar: GrammarOutput | None = None,
    ) -> ModelRunnerOutput | None:
        """One step; returns the output that was collected (the oldest in flight), if ``depth`` asked for that."""
        return self.run(self.output(counts, preempted, shuffle), grammar)

    def stepped(self, counts: Mapping[str, int], grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """One step that is waited for at once."""
        output = self.step(counts, grammar=grammar)
        assert output is not None, "stepped() needs depth 1"
        return output

    def run(self, output: SchedulerOutput, grammar: GrammarOutput | None = None) -> ModelRunnerOutput | None:
        """Execute and sample a scheduler output."""
        result = self.runner.execute_model(output)
        if result is not None:
            return result
        return self.launched(output, self.runner.sample_tokens(grammar))

    def launched(
        self, output: SchedulerOutput, late: ModelRunnerOutput | AsyncModelRunnerOutput
    ) -> ModelRunnerOutput | None:
        """Book a step whose output is on its way; collect the oldest if too many are."""
        step = InFlight(output, late)
        for req_id, count in output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            request.status = "running"
            request.computed += count
            if request.left == 0:
                step.positions[req_id] = (request, len(request.tokens))
                request.tokens.append(PENDING)
        self.in_flight.append(step)
        return self.collect() if len(self.in_flight) >= self.depth else None

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step in flight, checking that exactly those requests sampled that should."""
        step = self.in_flight.popleft()
        result = step.late.get_output()
        self.free_blocks += step.blocks
        assert set(result.req_ids) == set(step.output.num_scheduled_tokens)
        for index, req_id in enumerate(result.req_ids):
            sampled = list(result.sampled_token_ids[index])
            request, position = step.positions.get(req_id, (None, -1))
            should = request is not None and req_id not in result.request_errors
            assert len(sampled) == should, f"{req_id} sampled {sampled}"
            if request is None:
                request = self.requests.get(req_id)
            elif sampled:
                request.tokens[position] = sampled[0]
            else:
                del request.tokens[position:]
            if request is None:
                continue
            if result.logprobs is not None and sampled:
                request.logprobs.append(result.logprobs.for_request(index))
            if (table := result.prompt_logprobs_dict.get(req_id)) is not None:
                request.prompt_logprobs.append(table)
        return result

    def collect_all(self) -> None:
        """Wait for everything in flight."""
        while self.in_flight:
            self.collect()

    def served(self, req_id: str) -> Served:
        """What a request has got so far."""
        request = self.requests[req_id]
        assert len(request.prompt_logprobs) == (request.wish.params.prompt_logprobs is not None)
        rows = [lists.logprobs[0] for lists in request.logprobs]
        return Served(
            tuple(request.outputs),
            np.array(rows, dtype=np.float32),
            request.prompt_logprobs[0].logprobs if request.prompt_logprobs else None,
        )

    def run_random(self, wishes: Sequence[Wish], *, shuffle: bool = True, preempt: float = 0.15) -> dict[str, Served]:
        """Serve the wishes to their ends under a random schedule: chunks, pauses, preemptions, late arrivals."""
        config, rng = self.runner.config, self.random
        waiting, done = list(wishes), dict[str, Served]()
        while waiting or self.requests:
            while waiting and len(self.requests) < config.max_num_seqs and rng.random() < 0.7:
                self.add(waiting.pop())
            running = [req_id for req_id, request in self.requests.items() if request.status == "running"]
            preempted = [req_id for req_id in running if rng.random() < preempt]
            counts, budget = dict[str, int](), config.max_num_batched_tokens
            for req_id, request in self.requests.items():
                if req_id not in preempted and rng.random() < 0.8 and budget > 0:
                    counts[req_id] = rng.randint(1, min(request.left, budget))
                    budget -= counts[req_id]
            self.step(counts, preempted, shuffle)
            for req_id, request in list(self.requests.items()):
                if len(request.outputs) >= request.wish.max_tokens:
                    self.collect_all()
                    done[req_id] = self.served(req_id)
                    self.finish(req_id)
        self.collect_all()
        if self.finished:
            self.step({})
        return done


def serve_alone(runner: ModelRunner, wish: Wish) -> Served:
    """The reference: the request by itself, unchunked."""
    driver = Driver(runner)
    driver.add(wish)
    driver.step({wish.req_id: len(wish.prompt)})
    while len(driver.requests[wish.req_id].outputs) < wish.max_tokens:
        driver.step({wish.req_id: 1})
    served = driver.served(wish.req_id)
    driver.finish(wish.req_id)
    driver.step({})
    return served

"""Many random steps of runner and reference scheduler with faults in them, and what is counted on the way."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from driver import Served
from faults import Fault, When
from lazy_device import LazyDevice
from modes import LIMITS
from reference import KINDS, MAX_OUTPUTS, References
from twostroke.engine.config import EngineConfig
from twostroke.engine.loop_recovery import merged
from twostroke.engine.model_runner import build_runner
from twostroke.engine.scheduler import FinishReason, RequestUpdate, Scheduler
from twostroke.engine.serving_loop import scheduler_for
from twostroke.fsm import StageFailed, StepState
from twostroke.stages.device import HostDevice
from twostroke.stages.io import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs

IDS = tuple(f"r{number}" for number in range(6))
LENGTHS = (1, 2, 5, 9, 13)
NUM_BLOCKS = 15
SEGMENT = 200
WARM_UP = 0.1
NEVER = (
    "tokens lost",
    "tokens doubled",
    "tokens wrong",
    "tables lost",
    "tables wrong",
    "wrong ends",
    "errors that nobody made",
    "requests left",
)
StepOutput = ModelRunnerOutput | AsyncModelRunnerOutput


class Outage(OSError):
    """What a faulty stage raises."""


@define(eq=False)
class Customer:
    """A live request: what it must get, and what it has got."""

    expected: Served
    tokens: tuple[int, ...]
    reason: FinishReason
    got: list[int] = field(factory=list)
    has_table: bool = False
    is_spoilt: bool = False


@frozen(kw_only=True)
class Report:
    """What a soak has counted. ``growth`` names tables and maps that are larger than after warm-up, and by how much."""

    steps: int
    counts: Counter[str]
    resident_bytes: tuple[int, int]
    growth: dict[str, int]

    @property
    def wrong(self) -> dict[str, int]:
        """Counts of what must never happen, where it did."""
        return {name: self.counts[name] for name in NEVER if self.counts[name]}

    @property
    def resident_growth(self) -> float:
        """Resident memory at the end over that after warm-up, less one."""
        before, after = self.resident_bytes
        return after / before - 1

    def __str__(self) -> str:
        shown = ("requests", "tokens checked", "tables checked", "faults injected", *NEVER)
        lines = [f"{'steps':24}{self.steps:>12,}"]
        lines += [f"{name:24}{self.counts[name]:>12,}" for name in shown]
        rest = sorted(self.counts.keys() - set(shown))
        lines += [f"  {name:22}{self.counts[name]:>12,}" for name in rest]
        before, after = (size / 2**20 for size in self.resident_bytes)
        lines.append(f"{'resident memory':24}{before:>8.1f} MiB after warm-up, {after:.1f} MiB at the end")
        lines.append(f"{'growth of memory':24}{self.resident_growth:>12.2%}")
        lines.append(f"{'growth of tables, maps':24}{sum(self.growth.values()):>12,}  {self.growth or ''}")
        return "\n".join(lines)


class Rig:
    """One runner and its scheduler, stepped as a serving loop does it: launch, then collect what has waited enough."""

    def __init__(self, references: References, chooser: random.Random, counts: Counter[str], *, depth: int) -> None:
        self.references, self.chooser, self.counts, self.depth = references, chooser, counts, depth
        config = EngineConfig(**{**LIMITS, "num_kv_blocks": NUM_BLOCKS, "async_scheduling": depth > 1})
        device = LazyDevice() if depth > 1 else HostDevice()
        self.runner = build_runner(config, model=references.model, device=device)
        self.scheduler: Scheduler = scheduler_for(self.runner)
        self.customers: dict[str, Customer] = {}
        self.in_flight: deque[tuple[SchedulerOutput, StepOutput]] = deque()
        self.to_spoil = ""
        self.runner.stages.insert(self._spoil, after="forward", name="spoiler")

    def _spoil(self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState) -> ExecuteModelState:
        """Logits of one request that are not numbers."""
        if self.to_spoil not in batch.req_ids:
            return state
        logits = state.logits.clone()
        for row, index in zip(inputs.sampling_logits.tolist(), inputs.sampling_reqs.tolist(), strict=True):
            if batch.req_ids[index] == self.to_spoil:
                logits[row] = torch.nan
                self.customers[self.to_spoil].is_spoilt = True
        return ExecuteModelState(logits, state.hidden_states)

    # ---- requests

    def add(self) -> None:
        """A new request, under an id that is free."""
        free = [req_id for req_id in IDS if req_id not in self.customers]
        if not free:
            return
        req_id, kind = self.chooser.choice(free), self.chooser.choice(list(KINDS))
        prompt = prompt_of(self.chooser.randrange(2), self.chooser.choice(LENGTHS))
        expected = self.references.serve(req_id, kind, prompt)
        if expected is None:
            return
        params = evolve(KINDS[kind], max_tokens=max(self.chooser.randint(1, MAX_OUTPUTS), KINDS[kind].min_tokens))
        tokens, reason = expected.tokens[: params.max_tokens], FinishReason.LENGTH
        for count, token in enumerate(tokens, 1):
            if token in params.stop_token_ids and count >= params.min_tokens:
                tokens, reason = tokens[:count], FinishReason.STOP
                break
        self.scheduler.add_request(req_id, prompt, params)
        self.customers[req_id] = Customer(expected, tokens, reason)
        self.counts["requests"] += 1

    def abort(self) -> None:
        """Any request ends."""
        if self.customers:
            req_id = self.chooser.choice(list(self.customers))
            self.scheduler.finish_requests([req_id])
            del self.customers[req_id]
            self.counts["aborts"] += 1

    # ---- steps

    def step(self, fault: bool) -> None:
        """One turn of the loop."""
        scheduled = self.scheduler.schedule()
        is_blank = not (scheduled.num_scheduled_tokens or scheduled.finished_req_ids or scheduled.preempted_req_ids)
        if not is_blank:
            output = self._with_fault(scheduled) if fault else self._run(scheduled)
            if output is not None and scheduled.num_scheduled_tokens:
                self.in_flight.append((scheduled, output))
                self.counts["steps in flight"] += len(self.in_flight) > 1
        if self.in_flight and (is_blank or len(self.in_flight) >= self.depth):
            self._collect()

    def _run(self, scheduled: SchedulerOutput) -> StepOutput:
        output = self.runner.execute_model(scheduled)
        return self.runner.sample_tokens() if output is None else output

    def _with_fault(self, scheduled: SchedulerOutput) -> StepOutput | None:
        """Run a step in which something breaks; None if it was undone and forgotten."""
        name = self.chooser.choice(self.runner.stages.names)
        error = self.chooser.choice([Outage, KeyboardInterrupt])()
        when, place = self.chooser.choice(list(When)), self.chooser.randint(1, 20)
        fault = Fault(error, self.runner.stages[name], when, place)
        raised: BaseException | None = None
        try:
            with fault.armed():
                return self._run(scheduled)
        except (StageFailed, KeyboardInterrupt) as failure:
            raised = failure
        if error not in (raised, raised.__cause__):
            raise raised
        self.counts["faults injected"] += 1
        self.counts[f"faults {when} a stage"] += 1
        return self._recover(scheduled)

    def _recover(self, scheduled: SchedulerOutput) -> StepOutput | None:
        if self.runner.state is StepState.FORWARDED:
            if self.chooser.random() < 0.5:
                self.counts["sampled again"] += 1
                return self.runner.sample_tokens()
            self.runner.rollback()
        way = self.chooser.choice(["sent again", "rolled back", "in parts"])
        self.counts[way] += 1
        if way == "sent again":
            return self._run(scheduled)
        if way == "rolled back":
            self.scheduler.rollback(scheduled, executed=True)
            return None
        ids = list(scheduled.num_scheduled_tokens)
        cut = self.chooser.randint(0, len(ids))
        parts = [self._run(scheduled.restricted_to(ids[:cut]))]
        if ids[cut:]:
            parts.append(self._run(scheduled.restricted_to(ids[cut:], is_first=False)))
        return merged([part.get_output() for part in parts], {})

    def _collect(self) -> None:
        scheduled, output = self.in_flight.popleft()
        for update in self.scheduler.update_from_output(scheduled, output.get_output()):
            self._take(update)

    def _take(self, update: RequestUpdate) -> None:
        customer, counts = self.customers[update.req_id], self.counts
        for index, token in enumerate(update.new_token_ids):
            position = len(customer.got)
            customer.got.append(token)
            is_right = position < len(customer.tokens) and token == customer.tokens[position]
            if is_right and update.logprobs is not None:
                expected = customer.expected.logprobs[position]
                is_right = np.allclose(update.logprobs.logprobs[index], expected, atol=1e-4)
            counts["tokens wrong"] += not is_right
            counts["tokens checked"] += 1
        if update.prompt_logprobs is not None:
            counts["tables checked"] += 1
            expected = customer.expected.prompt_logprobs
            is_right = expected is not None and np.allclose(update.prompt_logprobs.logprobs, expected, atol=1e-4)
            counts["tables wrong"] += not is_right or customer.has_table
            customer.has_table = True
        if update.finish_reason is not None:
            del self.customers[update.req_id]
            if update.finish_reason is FinishReason.ERROR:
                counts["requests spoilt"] += 1
                counts["errors that nobody made"] += not customer.is_spoilt
                return
            counts["tokens lost"] += max(len(customer.tokens) - len(customer.got), 0)
            counts["tokens doubled"] += max(len(customer.got) - len(customer.tokens), 0)
            counts["wrong ends"] += update.finish_reason is not customer.reason
            counts["tables lost"] += (customer.expected.prompt_logprobs is not None) and not customer.has_table

    def drain(self) -> None:
        """Serve everybody to the end, and tell the runner."""
        while self.scheduler.has_work():
            self.step(fault=False)
        self.runner.settle()
        self.counts["requests left"] += len(self.customers)

    def forget_cache(self) -> None:
        """The cache is put to sleep and wakes empty."""
        while self.in_flight:
            self._collect()
        self.runner.sleep(1)
        self.runner.wake_up()
        self.scheduler.reset_prefix_cache(preempt_running=True)
        self.counts["sleeps"] += 1


class Soak:
    """Two rigs, one that waits for each step and one with steps in flight, in turns of :data:`SEGMENT` steps."""

    def __init__(self, references: References, seed: int, fault_rate: float) -> None:
        self.chooser = random.Random(seed)
        self.counts = Counter[str]()
        self.fault_rate = fault_rate
        self.num_faults_due = 0
        self.rigs = tuple(Rig(references, self.chooser, self.counts, depth=depth) for depth in (1, 2))

    def run(self, num_steps: int) -> Report:
        """Warm up, measure, go on, measure again."""
        warm_up = max(int(num_steps * WARM_UP), 1)
        self._steps(warm_up)
        sizes, resident = self._measure()
        self._steps(num_steps - warm_up)
        sizes_after, resident_after = self._measure()
        growth = {name: size - sizes.get(name, 0) for name, size in sizes_after.items() if size > sizes.get(name, 0)}
        return Report(steps=num_steps, counts=self.counts, resident_bytes=(resident, resident_after), growth=growth)

    def _steps(self, count: int) -> None:
        for number in range(count):
            rig, chance = self.rigs[number // SEGMENT % 2], self.chooser.random
            if chance() < 0.35:
                rig.add()
            if chance() < 0.02:
                rig.abort()
            if chance() < 0.001:
                rig.forget_cache()
            rig.to_spoil = self.chooser.choice(IDS) if chance() < 0.002 else ""
            self.num_faults_due += chance() < self.fault_rate
            rig.step(fault=self.counts["faults injected"] < self.num_faults_due)  # not every attempt meets its place
            rig.to_spoil = ""

    def _measure(self) -> tuple[dict[str, int], int]:
        """Sizes of everything with all requests served, and resident memory."""
        sizes: dict[str, int] = {}
        for index, rig in enumerate(self.rigs):
            rig.drain()
            rig.scheduler.reset_prefix_cache()
            sizes |= dict(container_sizes(rig.runner, f"runner {index}"))
            sizes |= dict(container_sizes(rig.scheduler, f"scheduler {index}"))
        gc.collect()
        return sizes, resident_bytes()


def prompt_of(family: int, length: int) -> tuple[int, ...]:
    """Prompts of a family begin alike."""
    return tuple((family * 17 + 5 * j + j * j) % 60 for j in range(length))


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def container_sizes(root: Any, name: str) -> Iterator[tuple[str, int]]:
    """The lengths of all lists, dicts, sets and queues that an object of the engine holds, by path.

    Left out are the last step's output, which is as large as that step was, and the fences of the lazy test device.
    """
    seen: set[int] = set()
    waiting = [(name, root)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | dict | set | deque):
            yield path, len(value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{path}[{key}]", item) for key, item in items if _is_ours(item)]
        elif isinstance(value, tuple):
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        elif _is_ours(value):
            names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
            waiting += [
                (f"{path}.{attribute}", getattr(value, attribute))
                for attribute in names
                if hasattr(value, attribute) and attribute not in ("latest_output", "_fences")
            ]


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(("twostroke", "lazy_device")) or isinstance(value, tuple)

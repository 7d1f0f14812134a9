"""A runner with its books, and how a step is planned, executed and checked in it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from attrs import frozen
from books import Blocks, Books, Plan, Ticket
from driver import Wish
from lazy_device import LazyDevice
from modes import LIMITS, MODES
from planning import Habits, Planner
from reference import KINDS, MAX_OUTPUTS, References
from snapshot import check_against_books, check_nothing_is_left, logical_state
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models import Decoder
from twostroke.fsm import LifeState, StepState
from twostroke.stages.device import HostDevice
from twostroke.stages.io import EMPTY_MODEL_RUNNER_OUTPUT, SchedulerOutput
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs

IDS = tuple("abcdef")


@frozen(kw_only=True)
class Setting:
    """How a world's runner is built: a key of ``MODES``, where it computes, and how many steps may be in flight."""

    mode: str
    is_lazy: bool
    is_async: bool
    depth: int


class Ground:
    """One runner, its books, and a random chooser that decides everything.

    ``happened`` counts what happened, by name; ``tell`` hears of each happening.
    """

    def __init__(
        self,
        references: References,
        setting: Setting,
        chooser: random.Random,
        happened: Counter[str],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.references = references
        self.setting = setting
        self.chooser = chooser
        self.happened = happened
        self.tell = tell
        assert isinstance(references.model, Decoder)
        self.model = references.model
        config = EngineConfig(**{**LIMITS, **MODES[setting.mode], "async_scheduling": setting.is_async})
        device = LazyDevice() if setting.is_lazy else HostDevice()
        self.runner: ModelRunner = build_runner(config, model=self.model, device=device)
        num_blocks = self.runner.parts.kv_cache.num_blocks
        self.books = Books(Blocks(num_blocks, chooser, self._poison))
        self.planner = Planner(self.runner.config, len(self.runner.kv_groups), self.books, happened)
        self.edits = ExitStack()
        self.num_edits = 0
        self.to_spoil: frozenset[str] = frozenset()
        self.visitor: Callable[[], None] | None = None
        self.runner.stages.insert(self._gate, after="prepare_inputs", name="gate")
        self.runner.stages.insert(self._spoil, after="forward", name="spoiler")
        self.runner.capture_model()
        self.num_sampled = 0
        self.seen = Counter[str]()

    # ---- stages of our own

    def _gate(self, batch: Batch) -> None:
        """A visitor may come in while a step is being executed."""
        if self.visitor is not None:
            visitor, self.visitor = self.visitor, None
            visitor()

    def _spoil(self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState) -> ExecuteModelState:
        """Logits that are not numbers, for some requests."""
        if not self.to_spoil:
            return state
        logits = state.logits.clone()
        for row, index in zip(inputs.sampling_logits.tolist(), inputs.sampling_reqs.tolist(), strict=True):
            if batch.req_ids[index] in self.to_spoil:
                logits[row, 3] = torch.nan
        return ExecuteModelState(logits, state.hidden_states)

    def _poison(self, blocks: list[int]) -> None:
        """Nobody may read a free block."""
        if self.runner.life is LifeState.READY:
            for layer in self.runner.parts.kv_cache.layers:
                layer[:, blocks] = torch.nan

    # ---- requests

    @property
    def free_ids(self) -> list[str]:
        """Ids that no live request has."""
        return [req_id for req_id in IDS if req_id not in self.books.tickets]

    def _add(self, req_id: str) -> None:
        while True:
            kind = self.chooser.choice(list(KINDS))
            family, length = self.chooser.randrange(2), self.chooser.choice([1, 2, 5, 9, 13])
            prompt = tuple((family * 17 + 5 * j + j * j) % 60 for j in range(length))
            expected = self.references.serve(req_id, kind, prompt)
            if expected is not None:
                break
        wish = Wish(req_id, prompt, self.chooser.randint(1, MAX_OUTPUTS), KINDS[kind])
        self.books.tickets[req_id] = Ticket(wish, expected, list(prompt))
        self.tell(f"add {req_id}: {kind}, {length} tokens, {wish.max_tokens} wanted")

    def finish(self) -> None:
        """Requests that have everything end."""
        for ticket in list(self.books.tickets.values()):
            if ticket.is_complete and (ticket.is_settled or self.chooser.random() < 0.5):
                self.happened["finish in flight"] += not ticket.is_settled
                self.books.drop(ticket)

    # ---- steps

    def plan(self, habits: Habits) -> Plan:
        """A step, told."""
        if len(self.books.blocks.free) < 30:
            self.books.forget_donors()
            self._collect_all()
        plan = self.planner.plan(self.chooser, habits)
        what = ", ".join(
            f"{e.req_id}[{e.start}:{e.start + e.count}] of {e.known} {e.how if e.how != 'continued' else ''}".rstrip()
            for e in plan.entries
        )
        out = [ticket.wish.req_id for ticket in plan.preempted]
        self.tell(f"step {what or 'of nothing'}; preempted {out}, finished {sorted(plan.output.finished_req_ids)}")
        return plan

    def run(self, plan: Plan) -> None:
        """Execute, sample, book."""
        if self.execute(plan.output):
            self.sample(plan)
        else:
            self.books.book(plan, None)

    def execute(self, output: SchedulerOutput) -> bool:
        """The first stroke; whether there is a second."""
        state = self.runner.state
        result = self.runner.execute_model(output)
        if output.num_scheduled_tokens:
            assert result is None
            assert self.runner.state is StepState.FORWARDED
            return True
        assert result is EMPTY_MODEL_RUNNER_OUTPUT
        assert self.runner.state is state
        return False

    def sample(self, plan: Plan) -> None:
        """The second stroke."""
        late = self.runner.sample_tokens()
        spoilt = self.to_spoil & {entry.req_id for entry in plan.entries if entry.samples}
        self.books.book(plan, late, frozenset(spoilt))
        self.num_sampled += 1
        assert self.runner.state is StepState.SAMPLED
        while len(self.books.in_flight) >= self.setting.depth:
            self._land()

    def _land(self) -> None:
        for ticket in self.books.land():
            self.books.drop(ticket)

    def _collect_all(self) -> None:
        while self.books.in_flight:
            self._land()

    # ---- checks

    def stage(self, name: str) -> Any:
        """The stage itself, inside a wrapper where it has one."""
        stage = self.runner.stages[name]
        return getattr(stage, "inner", stage)

    def state(self) -> dict[str, Any]:
        """What the runner holds."""
        return logical_state(self.runner)

    def check(self) -> None:
        """The runner is what the books say."""
        assert self.runner.num_steps == self.num_sampled
        check_against_books(self.runner, self.books)

    def close(self) -> None:
        """Serve everybody to the end, finish all, and look for what is left."""
        self.edits.close()
        for _ in range(200):
            if all(ticket.is_complete for ticket in self.books.tickets.values()):
                break
            self.run(self.plan(Habits(pick=1.0, whole=1.0, preempt=0.0, rewind=0.0)))
            self._collect_all()
            self.finish()
        self._collect_all()
        for ticket in list(self.books.tickets.values()):
            assert ticket.is_complete
            assert ticket.tokens == ticket.truth
            self.books.drop(ticket)
        self.run(self.plan(Habits(pick=-1.0)))
        check_nothing_is_left(self.runner)
        self.books.forget_donors()
        assert sorted(self.books.blocks.free) == list(range(1, self.runner.parts.kv_cache.num_blocks))
        self.happened["tokens checked"] += self.books.num_checked
        self.happened["replayed"] += sum(
            count for (mode, _), count in self.runner.parts.dispatch.counts.items() if mode.name != "NONE"
        )
        self.runner.shutdown()

"""Everything that may happen to a runner, one method a happening; each is checked against independent books."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
from books import Plan
from faults import Fault, When
from ground import Ground
from mistakes import INSIDE_A_CALL, MISTAKES, illegal_calls
from planning import Habits, shuffled
from snapshot import assert_same
from twostroke.fsm import LifeState, StageFailed, StepState, StepStateError
from twostroke.stages.errors import InvalidSchedulerOutput
from twostroke.stages.forward import Forward
from twostroke.stages.records import Batch

EXECUTE_STAGES = ("update_states", "prepare_inputs", "dispatch", "ubatch_slice", "build_attn", "preprocess", "forward")
SAMPLE_STAGES = ("sample", "commit")
REPLACEABLE = (*EXECUTE_STAGES, *SAMPLE_STAGES)
RULES = (
    "add",
    "mixed_step",
    "decode",
    "preempt",
    "resume",
    "rewind",
    "empty_step",
    "finish",
    "abort",
    "reuse",
    "collect",
    "settle",
    "roll_back",
    "fault",
    "refused",
    "illegal",
    "intruders",
    "swap_stage",
    "restore_stages",
    "spoil",
    "sleep_and_wake",
    "update_weights",
    "dummy_run",
    "capture",
)
"""Names of the methods of :class:`World` that make something happen."""


class Boom(OSError):
    """What a faulty stage raises."""


class World(Ground):
    """The rules of a game with a runner."""

    def is_possible(self, rule: str) -> bool:
        """Whether there is anything for a rule to happen to."""
        tickets, running = self.books.tickets.values(), self.books.running
        waiting = [ticket for ticket in tickets if not (ticket.is_complete or ticket.is_spoilt)]
        match rule:
            case "add":
                return bool(self.free_ids)
            case "mixed_step" | "roll_back" | "fault" | "refused" | "intruders" | "spoil":
                return bool(waiting)
            case "decode":
                return any(ticket.status == "running" and ticket.left == 1 for ticket in waiting)
            case "resume":
                return any(ticket.status == "preempted" for ticket in waiting)
            case "preempt" | "rewind" | "reuse":
                return bool(running)
            case "finish":
                return any(ticket.is_complete for ticket in tickets)
            case "abort":
                return bool(tickets)
            case "collect":
                return bool(self.books.in_flight)
            case "restore_stages":
                return self.num_edits > 0
            case _:
                return True

    def happen(self, rule: str) -> None:
        """Let a rule happen, then check."""
        self.happened[rule] += 1
        self.seen[rule] += 1
        getattr(self, rule)()
        self.check()

    # ---- requests

    def add(self) -> None:
        """New requests; many share the beginning of their prompts."""
        for _ in range(self.chooser.randint(1, 4)):
            if self.free_ids:
                self._add(self.chooser.choice(self.free_ids))

    def abort(self) -> None:
        """Any request ends, wherever it is."""
        if self.books.tickets:
            ticket = self.chooser.choice(list(self.books.tickets.values()))
            self.happened["abort in flight"] += not ticket.is_settled
            self.tell(f"abort {ticket.wish.req_id}")
            self.books.drop(ticket)

    def reuse(self) -> None:
        """A request ends and its id is used again before the runner has heard of it."""
        if running := self.books.running:
            ticket = self.chooser.choice(running)
            self.books.drop(ticket)
            self._add(ticket.wish.req_id)

    # ---- steps

    def mixed_step(self) -> None:
        """Prompts, chunks of them and decodes; sometimes something happens between the strokes."""
        plan = self.plan(Habits())
        if not self.execute(plan.output):
            self.books.book(plan, None)
            return
        twist = self.chooser.choice(["", "abort", "collect", "illegal"])
        self.happened[f"{twist} between the strokes"] += bool(twist)
        if twist == "abort":
            self.abort()
        elif twist == "collect" and self.books.in_flight:
            self.chooser.choice(list(self.books.in_flight)).late.get_output()
        elif twist == "illegal":
            self._refuse_calls()
        self.sample(plan)

    def decode(self) -> None:
        """One token each."""
        for _ in range(self.chooser.randint(1, 3)):
            self.run(self.plan(Habits(pick=0.9, whole=1.0, preempt=0.0, rewind=0.0, only="decode")))

    def preempt(self) -> None:
        """A step in which many give way."""
        self.run(self.plan(Habits(preempt=0.5)))

    def resume(self) -> None:
        """A step of those that gave way."""
        self.run(self.plan(Habits(pick=1.0, preempt=0.1, rewind=0.2, only="resume")))

    def rewind(self) -> None:
        """A step in which some are set back."""
        self.run(self.plan(Habits(rewind=0.7)))

    def empty_step(self) -> None:
        """A step without tokens tells who has ended or gives way."""
        self.run(self.plan(Habits(pick=-1.0, preempt=0.2)))

    def spoil(self) -> None:
        """A step in which the logits of one request are not numbers."""
        plan = self.plan(Habits())
        sampling = [entry.req_id for entry in plan.entries if entry.samples]
        self.to_spoil = frozenset(sampling[:1])
        self.happened["spoilt"] += len(self.to_spoil)
        self.run(plan)
        self.to_spoil = frozenset()

    def collect(self) -> None:
        """The oldest step lands."""
        if self.books.in_flight:
            self._land()

    def settle(self) -> None:
        """The runner waits for all outputs; they stay readable."""
        self.runner.settle()
        assert self.runner.state is StepState.IDLE
        assert all(flight.late.ready() for flight in self.books.in_flight)

    # ---- what must change nothing

    def roll_back(self) -> None:
        """A step is undone between its strokes, then sent again, cut in two, or dropped."""
        plan = self.plan(Habits(preempt=0.2, rewind=0.2))
        before = self.state()
        if not self.execute(plan.output):
            self.books.book(plan, None)
            return
        self.happened["rollback in flight"] += bool(self.books.in_flight)
        self._roll_back(before)
        self._go_on(plan)

    def _roll_back(self, before: dict[str, Any]) -> None:
        self.runner.rollback()
        assert_same(self.state(), {**before, "state": StepState.IDLE})

    def _go_on(self, plan: Plan) -> None:
        """After a failure."""
        way = self.chooser.choice(["sent again", "dropped", "in parts"])
        self.happened[way] += 1
        self.tell(way)
        if way == "sent again":
            self.run(plan)
        elif way == "dropped":
            self.books.cancel(plan)
        else:
            ids = [entry.req_id for entry in plan.entries]
            cut = self.chooser.randint(0, len(ids))
            for part, is_first in ((ids[:cut], True), (ids[cut:], False)):
                if part or is_first:
                    self.run(plan.part(part, is_first=is_first))

    def fault(self) -> None:
        """A stage raises before, during or after its work."""
        error = self.chooser.choice([Boom, KeyboardInterrupt])("a fault")
        place = self.chooser.choice([1, 2, 3, 5, 8, 13, 21, 40, 80])
        stage, when = self.chooser.choice(REPLACEABLE), self.chooser.choice(list(When))
        self.fail(self.plan(Habits(preempt=0.2, rewind=0.1)), stage, Fault(error, self.stage(stage), when, place))

    def fail(self, plan: Plan, stage: str, fault: Fault) -> None:
        """Execute a plan with a fault in a stage: nothing is changed, and it can be sent again."""
        self.tell(f"{type(fault.error).__name__} {fault.when} {stage}; {len(self.books.in_flight)} in flight")
        before = self.state()
        if stage not in SAMPLE_STAGES:
            failed = self._fails(fault, stage, lambda: self.run(plan))
            if failed:
                assert_same(self.state(), before)
        elif self.execute(plan.output):
            between = self.state()
            failed = self._fails(fault, stage, lambda: self.sample(plan))
            if failed and self.chooser.random() < 0.5:
                assert_same(self.state(), between)
                self.happened["sampled again"] += 1
                self.sample(plan)
                failed = False
            elif failed:
                self._roll_back(before)
        else:
            self.books.book(plan, None)
            failed = False
        if failed:
            self._go_on(plan)
        if fault.raised:
            self.happened[f"{type(fault.error).__name__} {fault.when} {stage}"] += 1
            self.happened["fault in flight"] += bool(self.books.in_flight)

    def _fails(self, fault: Fault, stage: str, call: Callable[[], None]) -> bool:
        """Whether the fault was met (a place may lie beyond the end of a stage)."""
        error: BaseException | None = None
        try:
            with fault.armed():
                call()
        except (StageFailed, KeyboardInterrupt) as raised:
            error = raised
        if isinstance(error, StageFailed):
            assert error.__cause__ is fault.error
            assert error.stage in (stage, "idle_dispatch")
        elif error is not None:
            assert error is fault.error
        assert fault.raised == (error is not None)
        return fault.raised

    def refused(self) -> None:
        """Scheduler outputs with a mistake in them are refused whole; without the mistake, the step is executed."""
        plan = self.plan(Habits(preempt=0.2))
        mistakes = shuffled(self.chooser, MISTAKES) if plan.entries else []
        before, num_refused = self.state(), 0
        for mistake in mistakes:
            wrong = mistake(self.chooser, plan.output, self.runner)
            if wrong is None or num_refused == 3:
                continue
            self.tell(mistake.__name__)
            with pytest.raises(InvalidSchedulerOutput):
                self.runner.execute_model(wrong)
            assert_same(self.state(), before)
            self.happened[f"refused: {mistake.__name__}"] += 1
            num_refused += 1
        self.run(plan)

    def illegal(self) -> None:
        """Every call that is not legal between two steps, from this thread or from another."""
        self._refuse_calls()

    def _refuse_calls(self, *, is_asleep: bool = False) -> None:
        before = self.state()
        calls = illegal_calls(self.runner.state, is_asleep=is_asleep)
        threaded = self.chooser.random() < 0.3
        name = self.chooser.choice(list(calls))
        self.happened[f"illegal {name} in {self.runner.state.name}"] += 1
        errors: list[BaseException] = []

        def call() -> None:
            try:
                calls[name](self.runner)
            except StepStateError as error:
                errors.append(error)

        _in_thread(call) if threaded else call()
        assert len(errors) == 1, f"{name} was not refused in {self.runner.state.name}"
        assert_same(self.state(), before)

    def intruders(self) -> None:
        """Calls from inside a stage and from another thread while a step is being executed."""
        names = self.chooser.sample(list(INSIDE_A_CALL), 3)
        refused: list[str] = []

        def intrude() -> None:
            for name in names:
                try:
                    INSIDE_A_CALL[name](self.runner)
                except StepStateError:
                    refused.append(name)

        from_thread = self.chooser.random() < 0.5
        self.visitor = (lambda: _in_thread(intrude)) if from_thread else intrude
        plan = self.plan(Habits())
        self.run(plan)
        self.visitor = None
        assert refused == (names if plan.entries else [])
        self.happened[f"intruders from {'a thread' if from_thread else 'a stage'}"] += bool(plan.entries)

    # ---- between steps

    def swap_stage(self) -> None:
        """A stage is wrapped, replaced by an equal one, or gets a probe next to it."""
        self.edits.enter_context(self.runner.stages.restored())
        self.num_edits += 1
        name = self.chooser.choice(REPLACEABLE)
        way = self.chooser.choice(["wrap", "replace", "probe"])
        self.happened[way] += 1
        if way == "wrap":
            self.runner.stages.wrap(name, _Wrapper)
        elif way == "replace":
            self.runner.stages.replace(name, copy.copy(self.stage(name)))
        else:
            seen = f"probe {len(self.runner.stages.names)}"
            self.runner.stages.insert(self._probe, after=name, name=seen)

    def _probe(self, batch: Batch) -> None:
        assert batch.num_tokens == batch.num_scheduled_tokens.sum()
        self.happened["probed"] += 1

    def restore_stages(self) -> None:
        """All edits are taken back."""
        self.edits.close()
        self.num_edits = 0
        assert [name for name in self.runner.stages.names if name not in REPLACEABLE] == ["gate", "spoiler"]

    def sleep_and_wake(self) -> None:
        """The cache is given back, and with it every block; live requests are preempted."""
        self.happened["sleep in flight"] += bool(self.books.in_flight)
        for _ in range(self.chooser.randint(1, 2)):
            self.runner.sleep(1)
        self._refuse_calls(is_asleep=True)
        for ticket in self.books.running:
            if ticket.wish.req_id in self.runner.parts.table.records:
                self.books.preempt(ticket)
        self.books.forget_donors()
        self._collect_all()
        for _ in range(self.chooser.randint(1, 2)):
            self.runner.wake_up(self.chooser.choice([None, ["kv_cache"], ["weights", "kv_cache"]]))
        assert self.runner.life is LifeState.READY
        assert self.runner.state is StepState.IDLE

    def update_weights(self) -> None:
        """The same weights again."""
        self.runner.update_weights([(name, tensor.clone()) for name, tensor in self.model.parameters.items()])

    def dummy_run(self) -> None:
        """A forward pass of padding."""
        before = self.state()
        self.runner.dummy_run(self.chooser.randint(1, self.runner.config.max_num_batched_tokens))
        assert_same(self.state(), before)

    def capture(self) -> None:
        """Graphs that an edit has dropped are captured again."""
        if isinstance(self.runner.stages["forward"], Forward):
            before = self.state()
            self.happened["captured"] += self.runner.capture_model() > 0
            assert_same(self.state(), before)


class _Wrapper:
    """A stage around a stage."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = getattr(inner, "inner", inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

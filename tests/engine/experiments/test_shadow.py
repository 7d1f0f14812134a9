"""A candidate beside a stage: what is counted and kept, and that the step never notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from driver import Driver, Served, Wish
from modes import MODES, PARAMS
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.shadow import Shadow, shadow
from twostroke.engine.shadow_compare import within
from twostroke.fsm import StageFailed, StepStateError, Transaction, WiringError
from twostroke.stages.build_attn import BuildAttn
from twostroke.stages.graphs import PlanCache
from twostroke.stages.io import GrammarOutput, SchedulerOutput
from twostroke.stages.records import (
    AttentionMetadata,
    Batch,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    ExecuteModelState,
    PreparedInputs,
    SamplerOutput,
    UBatchSlices,
)
from twostroke.stages.sample import Sample

WISHES = [Wish(name, tuple(range(3 + index)), 4, PARAMS[name]) for index, name in enumerate(("greedy", "seeded"))]


@pytest.fixture
def runner(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner()


def serve(runner: ModelRunner, seed: int = 0) -> dict[str, Served]:
    return Driver(runner, seed).run_random(WISHES, preempt=0.2)


def assert_same(got: dict[str, Served], expected: dict[str, Served]) -> None:
    for req_id, served in expected.items():
        got[req_id].assert_equals(served, tolerance=0.0)


def same_sample(runner: ModelRunner) -> Sample:
    return Sample(runner.parts.columns, runner.parts.table)


def test_a_twin_agrees_in_every_step(runner: ModelRunner) -> None:
    expected = serve(runner)
    watch = shadow("sample", same_sample(runner))
    with watch.beside(runner.stages):
        assert_same(serve(runner), expected)
    assert watch.num_agreed == watch.num_steps > 4
    assert watch.first is None
    assert watch.seconds > 0
    assert watch.candidate_seconds > 0
    assert "agreed, 0 diverged, 0 failed" in watch.summary()
    steps = watch.num_steps
    serve(runner)
    assert watch.num_steps == steps, "the stages were restored"


@pytest.mark.parametrize(
    "stage", ["update_states", "prepare_inputs", "dispatch", "ubatch_slice", "preprocess", "commit"]
)
def test_each_stage_can_have_its_own_twin(runner: ModelRunner, stage: str) -> None:
    """Even those that change the table: the candidate's changes are undone before the stage runs."""
    expected = serve(runner)
    watch = shadow(stage, runner.stages[stage])
    with watch.beside(runner.stages):
        assert_same(serve(runner), expected)
    assert not watch.num_failed, watch.summary()
    assert not watch.num_diverged, watch.summary()
    table = runner.parts.table
    assert not table.records
    assert sorted(table._free_rows) == list(range(1, table.num_rows))


class Spoiler:
    """Writes into everything that it is given, leaves an undo, and then gives a wrong answer or raises."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.undone: list[int] = []
        self.transactions: list[Transaction] = []

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState, transaction: Transaction
    ) -> SamplerOutput:
        self.transactions.append(transaction)
        transaction.on_undo(self.undone.append, transaction.step)
        state.logits.fill_(torch.nan)
        for array in (batch.rows, batch.num_scheduled_tokens, inputs.sampling_reqs, inputs.sampling_logits):
            array.fill(0)
        torch.rand(3)
        if self.fails:
            raise OSError("the candidate is on fire")
        return SamplerOutput(torch.full((len(inputs.sampling_reqs),), 63))


@pytest.mark.parametrize("fails", [False, True])
def test_a_candidate_that_spoils_all_it_gets_changes_nothing(runner: ModelRunner, fails: bool) -> None:
    expected, spoiler = serve(runner), Spoiler(fails=fails)
    watch = shadow("sample", spoiler)
    generator = torch.get_rng_state()
    with watch.beside(runner.stages):
        assert_same(serve(runner), expected)
    assert torch.equal(torch.get_rng_state(), generator)
    assert (watch.num_failed if fails else watch.num_diverged) > 4
    assert len(spoiler.undone) == watch.num_steps
    assert all(transaction.closed for transaction in spoiler.transactions)
    assert watch.first is not None
    assert isinstance(watch.first.error, OSError) == fails


def test_the_first_divergence_is_kept_with_copies_of_its_records(runner: ModelRunner) -> None:
    class WrongInStepTwo(Sample):
        def __call__(
            self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState, grammar: GrammarOutput | None
        ) -> SamplerOutput:
            output = super().__call__(batch, inputs, state, grammar)
            if batch.num_scheduled_tokens.max() > 1:
                return output
            return evolve(output, sampled_token_ids=output.sampled_token_ids + 1)

    watch = shadow("sample", WrongInStepTwo(runner.parts.columns, runner.parts.table))
    driver = Driver(runner)
    driver.add(*WISHES)
    seen: list[torch.Tensor] = []
    with watch.beside(runner.stages):
        runner.stages.insert(lambda_probe(seen), after="forward", name="probe")
        driver.step({"greedy": 3, "seeded": 4})
        for _ in range(3):
            driver.step({"greedy": 1, "seeded": 1})
    first = watch.first
    assert first is not None
    assert (watch.num_agreed, watch.num_diverged) == (1, 3)
    assert first.step == 2
    assert set(first.request_ids) == {"greedy", "seeded"}
    assert first.difference.startswith("SamplerOutput.sampled_token_ids: 2 of 2 differ, by 1 at most")
    assert torch.equal(first.inputs[ExecuteModelState].logits, seen[1])
    assert torch.equal(first.real.sampled_token_ids + 1, first.candidate.sampled_token_ids)
    assert Transaction not in first.inputs
    assert "first in step 2 (greedy, seeded)" in watch.summary()


def lambda_probe(seen: list[torch.Tensor]) -> Callable[..., None]:
    def probe(state: ExecuteModelState) -> None:
        seen.append(state.logits.clone())

    return probe


def test_tolerance_and_own_comparisons(runner: ModelRunner) -> None:
    real = runner.stages["forward"]

    def nearly(*records: Any) -> ExecuteModelState:
        state = real(*records)
        return evolve(state, logits=state.logits + 1e-4)

    exactly = shadow("forward", nearly)
    loosely = shadow("forward", nearly, compare=within(absolute=1e-3))
    own = shadow("forward", nearly, compare=lambda one, two: "no" if len(one.logits) == 1 else None)
    faulty = shadow("forward", nearly, compare=lambda one, two: one.no_such_field)
    for watch in (exactly, loosely, own, faulty):
        with watch.beside(runner.stages):
            serve(runner)
    assert exactly.num_diverged > 4
    assert exactly.num_diverged + exactly.num_agreed == exactly.num_steps, "prompt chunks have no logits, and agree"
    assert loosely.num_agreed == loosely.num_steps > 4
    assert own.num_diverged
    assert own.num_agreed
    assert faulty.first is not None
    assert "compare raised AttributeError" in faulty.first.difference


def test_another_backend_is_compared_by_what_its_plans_compute(runner: ModelRunner) -> None:
    from twostroke.engine.attention.invariant_cpu import InvariantCPUBackend

    parts, layer = runner.parts, runner.spec.attention_layers[0]

    def compare(one: AttentionMetadata, two: AttentionMetadata) -> str | None:
        noise, num_tokens = torch.Generator().manual_seed(0), len(one.slot_mapping[0])
        counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        q, k, v = (torch.randn(num_tokens, count, layer.head_size, generator=noise) for count in counts)
        cache = parts.kv_cache.layers[0]
        return within(absolute=1e-5)(*(each.plans[0][0].run(q, k, v, cache.clone(), layer) for each in (one, two)))

    expected = serve(runner)
    candidate = BuildAttn(parts.table, parts.buffers, PlanCache(InvariantCPUBackend(), parts.groups))
    watch, by_class = shadow("build_attn", candidate, compare=compare), shadow("build_attn", candidate)
    for each in (watch, by_class):
        with each.beside(runner.stages):
            assert_same(serve(runner), expected)
    assert watch.num_agreed == watch.num_steps > 0, watch.summary()
    assert by_class.first is not None
    assert by_class.first.difference.endswith("CPUPlan and InvariantCPUPlan")


def test_a_candidate_takes_what_its_own_annotations_say(runner: ModelRunner) -> None:
    taken: list[tuple[object, ...]] = []

    def by_batch(
        batch: Batch, scheduled: SchedulerOutput, *, grammar: GrammarOutput | None = None, limit: UBatchSlices | int = 3
    ) -> BatchExecutionDescriptor: ...

    def plan(batch: Batch, scheduled: SchedulerOutput, grammar: GrammarOutput | None) -> BatchExecutionDescriptor:
        taken.append((batch, scheduled, grammar))
        return BatchExecutionDescriptor(
            mode=CUDAGraphMode.NONE, num_tokens=batch.num_tokens, num_reqs=batch.num_reqs, reason="graphs are off"
        )

    with pytest.raises(WiringError, match="limit"), shadow("dispatch", by_batch).beside(runner.stages):
        pass
    watch = shadow("dispatch", plan)
    with watch.beside(runner.stages):
        serve(runner)
    assert watch.num_agreed == watch.num_steps == len(taken) > 0
    assert all(isinstance(scheduled, SchedulerOutput) and grammar is None for _, scheduled, grammar in taken)


def test_a_candidate_that_gives_something_else_is_refused(runner: ModelRunner) -> None:
    def wrong(batch: Batch) -> PreparedInputs: ...  # pyright: ignore[reportReturnType]

    before = runner.stages["dispatch"]
    with pytest.raises(WiringError, match=r"'dispatch' gives PreparedInputs, the stage gives BatchExecutionDescriptor"):
        runner.stages.wrap("dispatch", shadow("dispatch", wrong))
    assert runner.stages["dispatch"] is before


def test_a_failure_of_the_stage_itself_passes_through(runner: ModelRunner) -> None:
    runner.stages.replace("sample", failing_sample)
    watch = shadow("sample", same_sample(runner))
    driver = Driver(runner)
    driver.add(WISHES[0])
    runner.stages.wrap("sample", watch)
    runner.execute_model(driver.output({"greedy": 3}))
    with pytest.raises(StageFailed, match="really"):
        runner.sample_tokens()
    assert watch.num_steps == 0
    runner.rollback()


def failing_sample(state: ExecuteModelState) -> SamplerOutput:
    raise OSError("really")


def test_an_interrupt_is_not_swallowed_and_leaves_no_open_transaction(runner: ModelRunner) -> None:
    opened: list[Transaction] = []

    def interrupted(state: ExecuteModelState, transaction: Transaction) -> SamplerOutput:
        opened.append(transaction)
        raise KeyboardInterrupt

    watch = shadow("sample", interrupted)
    driver = Driver(runner)
    driver.add(WISHES[0])
    output = driver.output({"greedy": 3})
    with watch.beside(runner.stages):
        runner.execute_model(output)
        with pytest.raises(KeyboardInterrupt):
            runner.sample_tokens()
        assert opened[0].closed
        runner.rollback()


def test_an_undo_that_fails_counts_as_a_failure(runner: ModelRunner) -> None:
    def careless(inputs: PreparedInputs, state: ExecuteModelState, transaction: Transaction) -> SamplerOutput:
        transaction.on_undo([].pop)
        return SamplerOutput(torch.zeros(len(inputs.sampling_reqs), dtype=torch.int64))

    expected, watch = serve(runner), shadow("sample", careless)
    with watch.beside(runner.stages):
        assert_same(serve(runner), expected)
    assert watch.num_failed == watch.num_steps > 0
    assert watch.first is not None
    assert "TransactionFailed" in watch.first.difference


def test_dummy_runs_are_not_counted_and_graphs_can_be_captured_with_a_shadow(
    make_runner: Callable[..., ModelRunner],
) -> None:
    runner = make_runner(**MODES["full_and_piecewise"])
    expected = serve(runner)
    watch = shadow("preprocess", runner.stages["preprocess"])
    with watch.beside(runner.stages):
        assert not len(runner.parts.graphs.captured)
        assert runner.capture_model() > 0
        runner.dummy_run(4)
        assert watch.num_steps == 0
        assert_same(serve(runner), expected)
    assert watch.num_agreed == watch.num_steps > 0, watch.summary()


def test_it_is_attached_between_steps_only(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(WISHES[0])
    output = driver.output({"greedy": 3})
    runner.execute_model(output)
    watch: Shadow = shadow("sample", same_sample(runner))
    with pytest.raises(StepStateError), watch.beside(runner.stages):
        pass
    runner.rollback()

"""Building and running pipelines."""

from collections.abc import Callable
from typing import Any

import pytest
from twostroke.fsm import InputRefused, Pipeline, StageFailed, StepStateError, Transaction, WiringError, stage


class Plan: ...


class Batch:
    def __init__(self, size: int = 0) -> None:
        self.size = size


class Inputs:
    def __init__(self, size: int = 0) -> None:
        self.size = size


class Slices: ...


class Output:
    def __init__(self, size: int = 0) -> None:
        self.size = size


def update_states(plan: Plan, tx: Transaction) -> Batch:
    return Batch(3)


def prepare_inputs(batch: Batch) -> Inputs:
    return Inputs(batch.size)


def ubatch_slice(batch: Batch) -> Slices:
    return Slices()


def forward(inputs: Inputs, slices: Slices) -> Output:
    return Output(inputs.size)


STAGES = [
    ("update_states", update_states),
    ("prepare_inputs", prepare_inputs),
    ("ubatch_slice", ubatch_slice),
    ("forward", forward),
]


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(STAGES, given=(Plan,))


def start() -> dict[type, Any]:
    return {Plan: Plan(), Transaction: Transaction(7, ["r0", "r1"])}


def test_run_fills_and_returns_the_records(pipeline: Pipeline) -> None:
    records = start()
    assert pipeline.run(records) is records
    assert records[Output].size == 3
    assert set(records) == {Plan, Transaction, Batch, Inputs, Slices, Output}


def test_names_provides_and_items(pipeline: Pipeline) -> None:
    assert pipeline.names == ("update_states", "prepare_inputs", "ubatch_slice", "forward")
    assert pipeline.provides == {Plan, Batch, Inputs, Slices, Output}
    assert pipeline["forward"] is forward
    assert repr(pipeline) == "Pipeline(update_states ▸ prepare_inputs ▸ ubatch_slice ▸ forward)"
    with pytest.raises(WiringError, match=r"no stage 'dispatch'.*update_states, prepare_inputs, ubatch_slice, forward"):
        pipeline["dispatch"]


def test_describe_lists_what_each_stage_takes_and_gives(pipeline: Pipeline) -> None:
    lines = pipeline.describe().splitlines()
    assert [line.split() for line in lines] == [
        ["update_states", "Plan,", "Transaction", "→", "Batch"],
        ["prepare_inputs", "Batch", "→", "Inputs"],
        ["ubatch_slice", "Batch", "→", "Slices"],
        ["forward", "Inputs,", "Slices", "→", "Output"],
    ]
    assert Pipeline([]).describe() == ""


def test_a_pipeline_that_follows_starts_from_every_record(pipeline: Pipeline) -> None:
    class Grammar: ...

    def maybe(batch: Batch) -> Grammar | None:
        return None

    def sample(output: Output, plan: Plan, grammar: Grammar | None = None) -> None: ...

    first = pipeline.insert(maybe, after="forward")
    assert Grammar not in first.provides
    assert first.leaves == (Plan, Batch, Inputs, Slices, Output, Grammar | None)
    Pipeline([("sample", sample)], given=first.leaves).run(first.run(start()))


def test_missing_record_names_stage_record_order_and_cure() -> None:
    with pytest.raises(WiringError) as caught:
        Pipeline([STAGES[0], STAGES[1], STAGES[3]], given=(Plan,))
    text = str(caught.value)
    assert text.startswith(
        "stage 'forward' needs Slices, which no earlier stage returns; order: update_states ▸ prepare_inputs ▸"
    )
    assert "insert a stage that returns it before 'forward'" in text
    assert "Slices | None" in text


def test_wrong_order_says_what_to_move() -> None:
    with pytest.raises(WiringError, match="stage 'forward' returns it: move it before 'update_states'"):
        Pipeline([("update_states", stage(print, takes=[Output])), *STAGES[1:]], given=(Batch,))


def test_a_class_that_was_defined_twice_is_recognised() -> None:
    twin = type("Batch", (), {"__module__": "notebook"})
    with pytest.raises(
        WiringError, match=r"another class of that name.*beside notebook\.Batch: was a .*cell run twice"
    ):
        Pipeline([STAGES[0], ("probe", stage(print, takes=[twin]))], given=(Plan,))


def test_one_writer_a_record() -> None:
    with pytest.raises(WiringError, match="stage 'again' returns Batch, which stage 'update_states' returns already"):
        Pipeline([STAGES[0], ("again", stage(Batch, gives=Batch))], given=(Plan,))
    with pytest.raises(WiringError, match="stage 'again' returns Plan, which is given before the first stage already"):
        Pipeline([("again", stage(Plan, gives=Plan))], given=(Plan,))


def test_duplicate_names() -> None:
    with pytest.raises(WiringError, match=r"two stages called 'update_states'.*order: update_states"):
        Pipeline([STAGES[0], STAGES[0]], given=(Plan,))


def test_an_optional_record_must_be_taken_as_optional() -> None:
    def maybe(plan: Plan) -> Batch | None:
        return None

    with pytest.raises(
        WiringError, match=r"'prepare_inputs' needs Batch, which stage 'maybe' returns only as Batch \| None"
    ):
        Pipeline([("maybe", maybe), STAGES[1]], given=(Plan,))
    with pytest.raises(WiringError, match=r"needs Batch, which is given only as Batch \| None"):
        Pipeline([STAGES[1]], given=(Batch | None,))
    seen: list[object] = []
    probe = stage(seen.append, takes=[Batch | None])
    Pipeline([("maybe", maybe), ("probe", probe)], given=(Plan,)).run(start())
    assert seen == [None]


def test_a_stage_that_takes_and_returns_a_record_rebinds_it(pipeline: Pipeline) -> None:
    def double(inputs: Inputs) -> Inputs:
        return Inputs(inputs.size * 2)

    assert pipeline.insert(double, after="prepare_inputs").run(start())[Output].size == 6


def test_a_rebinding_stage_may_leave_the_record_as_it_is(pipeline: Pipeline) -> None:
    def leave(inputs: Inputs) -> Inputs | None:
        return None

    edited = pipeline.insert(leave, after="prepare_inputs")
    assert edited.run(start())[Output].size == 3
    assert Inputs in edited.provides


def test_a_missing_given_record_stops_the_run_before_the_first_stage(pipeline: Pipeline) -> None:
    with pytest.raises(WiringError, match=r"run\(\) was not handed Plan, Transaction; order: update_states"):
        pipeline.run({})


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(batch: Batch) -> Inputs:
        raise error

    return fail


@pytest.mark.parametrize("error", [ValueError("boom"), StepStateError("no", state="IDLE", call="x")])
def test_F1_a_failing_stage_keeps_the_original_error(pipeline: Pipeline, error: Exception) -> None:
    records = start()
    with pytest.raises(StageFailed) as caught:
        pipeline.replace("prepare_inputs", failing(error)).run(records)
    failed = caught.value
    assert (failed.stage, failed.step, failed.request_ids) == ("prepare_inputs", 7, ("r0", "r1"))
    assert failed.__cause__ is error
    assert str(error) in str(failed)
    assert "step 7 (requests: r0, r1)" in str(failed)
    assert Inputs not in records


def test_request_ids_are_those_that_the_step_had_found() -> None:
    def update(tx: Transaction) -> Batch:
        tx.request_ids = ["late"]
        raise ValueError("boom")

    with pytest.raises(StageFailed) as caught:
        Pipeline([("update", update)]).run({Transaction: Transaction(2)})
    assert caught.value.request_ids == ("late",)


def test_a_failure_outside_a_step_has_no_step() -> None:
    with pytest.raises(StageFailed, match="stage 'fail' failed outside a step: ValueError: boom") as caught:
        Pipeline([("fail", failing(ValueError("boom")))], given=(Batch,)).run({Batch: Batch()})
    assert caught.value.step is None


@pytest.mark.parametrize("error", [InputRefused("request 'a': too long"), KeyboardInterrupt(), SystemExit(2)])
def test_refusals_and_interrupts_pass_through(pipeline: Pipeline, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        pipeline.replace("prepare_inputs", failing(error)).run(start())
    assert caught.value is error


@pytest.mark.parametrize(
    ("gives", "returned", "words"),
    [
        (Inputs, Batch(), "gives Inputs, and returned Batch"),
        (Inputs, None, "gives Inputs, and returned NoneType"),
        (Inputs | None, Batch(), r"gives Inputs \| None, and returned Batch"),
        (None, Batch(), "gives None, and returned Batch"),
    ],
)
def test_a_result_of_another_type_names_stage_and_types(gives, returned, words: str) -> None:
    wrong = stage(lambda: returned, gives=gives)
    records: dict[type, Any] = {}
    with pytest.raises(StageFailed, match=f"stage 'wrong' declares that it {words}") as caught:
        Pipeline([("wrong", wrong)]).run(records)
    assert isinstance(caught.value.__cause__, WiringError)
    assert records == {}

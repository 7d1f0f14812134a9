"""Edits of a pipeline: each returns a new one, and each is checked."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from twostroke.fsm import Pipeline, Transaction, WiringError, stage


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


def test_edits_return_new_pipelines_and_leave_the_old_one(pipeline: Pipeline) -> None:
    def bigger(batch: Batch) -> Inputs:
        return Inputs(100)

    def probe(batch: Batch) -> None: ...

    edited = pipeline.replace("prepare_inputs", bigger).insert(probe, before="forward")
    assert edited.run(start())[Output].size == 100
    assert edited.names == ("update_states", "prepare_inputs", "ubatch_slice", "probe", "forward")
    assert edited.remove("probe").names == pipeline.names
    assert pipeline.run(start())[Output].size == 3
    with pytest.raises(AttributeError):
        pipeline.names = ()  # type: ignore[misc]


def test_inserted_stages_are_called_what_they_are_called(pipeline: Pipeline) -> None:
    class CountTokens:
        def __call__(self, batch: Batch) -> None: ...

    def probe(batch: Batch) -> None: ...

    edited = (
        pipeline.insert(CountTokens(), after="update_states")
        .insert(probe, before="forward")
        .insert(functools.partial(probe), before="forward", name="second")
        .insert(stage(lambda: None, name="declared"), before="update_states")
        .insert(stage(probe, takes=[Batch]), after="forward", name="last")
    )
    assert edited.names == (
        "declared",
        "update_states",
        "count_tokens",
        "prepare_inputs",
        "ubatch_slice",
        "probe",
        "second",
        "forward",
        "last",
    )
    with pytest.raises(WiringError, match="pass name="):
        pipeline.insert(stage(lambda: None), after="forward")
    with pytest.raises(WiringError, match="two stages called 'probe'"):
        edited.insert(probe, after="forward")


@pytest.mark.parametrize("where", [{}, {"before": "forward", "after": "forward"}])
def test_insert_wants_one_place(pipeline: Pipeline, where: dict[str, str]) -> None:
    with pytest.raises(WiringError, match="either before= or after="):
        pipeline.insert(update_states, **where)


def test_unknown_names_list_the_existing_ones(pipeline: Pipeline) -> None:
    edits: list[Callable[[], object]] = [
        lambda: pipeline.replace("sample", forward),
        lambda: pipeline.insert(forward, after="sample"),
        lambda: pipeline.wrap("sample", lambda inner: inner),
        lambda: pipeline.remove("sample"),
    ]
    for edit in edits:
        with pytest.raises(WiringError, match=r"no stage 'sample'; there are: update_states, prepare_inputs"):
            edit()


def test_edits_are_checked(pipeline: Pipeline) -> None:
    with pytest.raises(WiringError, match="'forward' needs Slices"):
        pipeline.remove("ubatch_slice")
    with pytest.raises(WiringError, match="'forward' needs Inputs"):
        pipeline.replace("prepare_inputs", stage(lambda batch: None, takes=[Batch]))
    with pytest.raises(WiringError, match="'early' needs Output"):
        pipeline.insert(stage(print, takes=[Output]), before="forward", name="early")


def test_wrap_keeps_the_wiring_of_the_inner_stage(pipeline: Pipeline) -> None:
    calls: list[str] = []

    def bare(inner):
        def call(*args, **kwargs):
            calls.append("bare")
            return inner(*args, **kwargs)

        return call

    def typed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append("typed")
            return inner(*args, **kwargs)

        return call

    def polite(inner):
        @functools.wraps(inner)
        def call(*args, **kwargs):
            calls.append("polite")
            return inner(*args, **kwargs)

        return call

    def unannotated(inner):
        def call(inputs, slices):
            calls.append("unannotated")
            return inner(inputs, slices)

        return call

    for wrapper in (bare, typed, polite, unannotated):
        pipeline = pipeline.wrap("forward", wrapper)
    assert pipeline.run(start())[Output].size == 3
    assert calls == ["unannotated", "polite", "typed", "bare"]


def test_wrap_keeps_keywords_and_declared_wiring() -> None:
    def keyword(*, batch: Batch) -> Inputs:
        return Inputs(batch.size)

    def wrapper(inner):
        @functools.wraps(inner)
        def call(*args, **kwargs):
            return inner(*args, **kwargs)

        return call

    pipeline = Pipeline(
        [("keyword", keyword), ("declared", stage(lambda inputs: Output(inputs.size), takes=[Inputs], gives=Output))],
        given=(Batch,),
    )
    edited = pipeline.wrap("keyword", wrapper).wrap("declared", wrapper)
    assert edited.run({Batch: Batch(5)})[Output].size == 5


def test_wrap_with_annotations_of_its_own(pipeline: Pipeline) -> None:
    def wrapper(inner):
        def with_batch(inputs: Inputs, slices: Slices, batch: Batch) -> Output:
            return Output(inner(inputs, slices).size + batch.size)

        return with_batch

    assert pipeline.wrap("forward", wrapper).run(start())[Output].size == 6
    alone = pipeline.wrap("forward", lambda inner: stage(Output, gives=Output))
    assert alone.run(start())[Output].size == 0

    def constant(inner):
        def without_parameters() -> Output:
            return Output(9)

        return without_parameters

    assert pipeline.wrap("forward", constant).run(start())[Output].size == 9


def test_wrap_that_returns_nothing(pipeline: Pipeline) -> None:
    with pytest.raises(WiringError, match="wrapper of stage 'forward' returned a NoneType"):
        pipeline.wrap("forward", lambda inner: None)  # type: ignore[arg-type,return-value]


def test_a_wrapped_object_is_handed_to_the_wrapper_as_it_is(pipeline: Pipeline) -> None:
    class Forward:
        def __call__(self, inputs: Inputs, slices: Slices) -> Output:
            return Output(1)

    inner = Forward()
    seen: list[object] = []

    def wrapper(fn):
        seen.append(fn)
        return fn

    edited = pipeline.replace("forward", inner).wrap("forward", wrapper)
    assert seen == [inner]
    assert edited["forward"] is inner

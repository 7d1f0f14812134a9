"""Columns and parameters of plug-ins: who may add them and when, and which requests are refused for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from driver import Driver, Wish
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.serving_loop import ServingLoop
from twostroke.fsm import StepStateError
from twostroke.stages.columns import ColumnRefused, NumberColumn
from twostroke.stages.errors import InvalidSamplingParams, InvalidSchedulerOutput
from twostroke.stages.request_table import RequestRecord
from twostroke.stages.sampling_params import SamplingParams


@pytest.fixture
def runner(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner()


def wish(req_id: str = "r", **extra: Any) -> Wish:
    return Wish(req_id, (1, 2, 3), 3, SamplingParams(temperature=0, extra=extra))


def serve(runner: ModelRunner, *wishes: Wish) -> None:
    """One step of every wish; then they are finished."""
    driver = Driver(runner)
    driver.add(*wishes)
    driver.step({each.req_id: 3 for each in wishes})
    driver.finish(*(each.req_id for each in wishes))
    driver.step({})


def test_a_column_sees_each_request_with_its_row(runner: ModelRunner) -> None:
    column = NumberColumn("min_k", runner.parts.table.num_rows, default=2, low=0)
    runner.add_column(column)
    driver = Driver(runner)
    driver.add(wish("a", min_k=8), wish("b"), wish("c", min_k=np.int64(5)))
    driver.step(dict.fromkeys("abc", 3))
    rows = runner.parts.table.rows
    assert [column.values[rows[req_id]] for req_id in "abc"] == [8, 2, 5]
    driver.finish(*"abc")
    driver.step({})
    assert (column.values == 2).all()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_k": 3}, r"extra\['max_k'\].*known: min_k"),
        ({"min_k": -1}, r"extra\['min_k'\]: must be between 0"),
        ({"min_k": 1.5}, r"extra\['min_k'\]: must be an integer"),
        ({"min_k": True}, r"extra\['min_k'\]: must be an integer"),
    ],
)
def test_the_runner_refuses_what_no_column_accepts(runner: ModelRunner, extra: dict[str, Any], message: str) -> None:
    runner.add_column(NumberColumn("min_k", runner.parts.table.num_rows, default=0, low=0))
    driver = Driver(runner)
    driver.add(wish("good", min_k=3), wish("bad", **extra))
    with pytest.raises(InvalidSchedulerOutput, match=message) as raised:
        driver.step({"good": 3, "bad": 3})
    assert raised.value.req_id == "bad"
    assert isinstance(raised.value.__cause__, InvalidSamplingParams)
    assert not runner.parts.table.records


def test_without_columns_every_extra_is_refused(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(wish(min_k=3))
    with pytest.raises(InvalidSchedulerOutput, match=r"'min_k'.*known: none.*add_column"):
        driver.step({"r": 3})


def test_a_serving_loop_refuses_when_the_request_is_added(runner: ModelRunner) -> None:
    runner.add_column(NumberColumn("nudge", runner.parts.table.num_rows, default=0.0, high=1))
    with ServingLoop(runner) as loop:
        for extra in ({"nudge": 2.0}, {"nudge": float("nan")}, {"min_k": 1}):
            with pytest.raises(InvalidSamplingParams, match="extra"):
                loop.add([1, 2, 3], SamplingParams(extra=extra))
        assert not loop.num_live_requests
        result = loop.add([1, 2, 3], SamplingParams(max_tokens=2, extra={"nudge": 1})).result()
    assert len(result.outputs[0].token_ids) == 2


@pytest.mark.parametrize("extra", [3, [("min_k", 1)], {1: 2}])
def test_extra_must_map_names(extra: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="extra: must map names"):
        SamplingParams(extra=extra)


def test_columns_change_only_while_no_request_is_live(runner: ModelRunner) -> None:
    column = NumberColumn("min_k", runner.parts.table.num_rows, default=0)
    driver = Driver(runner)
    driver.add(wish())
    output = driver.output({"r": 3})
    runner.execute_model(output)
    with pytest.raises(StepStateError):
        runner.add_column(column)
    driver.launched(output, runner.sample_tokens())
    with pytest.raises(ColumnRefused, match="'r' is one"):
        runner.add_column(column)
    driver.step({}, preempted=["r"])
    with pytest.raises(ColumnRefused, match="1 requests are live"):
        runner.add_column(column)
    driver.finish("r")
    driver.step({})
    runner.add_column(column)
    serve(runner, wish(min_k=3))
    runner.remove_column(column)
    with pytest.raises(ColumnRefused, match="is not in the request table"):
        runner.remove_column(column)
    with pytest.raises(InvalidSchedulerOutput, match="min_k"):
        serve(runner, wish(min_k=3))


def test_two_columns_cannot_read_one_parameter(runner: ModelRunner) -> None:
    rows = runner.parts.table.num_rows
    runner.add_column(NumberColumn("min_k", rows, default=0))
    before = runner.parts.table.columns
    with pytest.raises(ColumnRefused, match="'min_k'"):
        runner.add_column(NumberColumn("min_k", rows, default=1))
    assert runner.parts.table.columns == before


class Picky(NumberColumn):
    """Its check has a fault of its own."""

    def check(self, name: str, value: Any) -> None:
        raise KeyError("a bug")


def test_a_fault_in_a_check_is_no_refusal(runner: ModelRunner) -> None:
    runner.add_column(Picky("min_k", runner.parts.table.num_rows, default=0))
    with pytest.raises(KeyError, match="a bug"):
        runner.check_params(SamplingParams(extra={"min_k": 1}))


class Counter:
    """A column whose state is to outlive preemption: how often each request got a row."""

    def __init__(self) -> None:
        self.counts = WeakKeyDictionary[RequestRecord, int]()

    def add(self, row: int, request: RequestRecord) -> None:
        self.counts[request] = self.counts.get(request, 0) + 1

    def drop(self, row: int) -> None: ...

    def flush(self) -> None: ...


def test_state_by_request_outlives_preemption_and_ends_with_the_request(runner: ModelRunner) -> None:
    column = Counter()
    runner.add_column(column)
    driver = Driver(runner)
    driver.add(wish())
    driver.step({"r": 3})
    driver.step({}, preempted=["r"])
    driver.step({"r": 4})
    assert list(column.counts.values()) == [2]
    driver.finish("r")
    driver.step({})
    driver.requests.clear()
    driver.add(wish("s"))
    driver.step({"s": 3})
    assert list(column.counts.values()) == [1]

"""What an undone or interrupted step must put back: tokens on the device, late corrections, rows."""

from __future__ import annotations

from types import CodeType
from typing import Any

import pytest
import torch
from attrs import evolve
from driver import Driver, Served, Wish
from faults import Fault, When
from lazy_device import LazyDevice
from modes import LIMITS
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.fsm import LifeState, StepState
from twostroke.stages.forward_context import Model
from twostroke.stages.io import SchedulerOutput
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs


@pytest.fixture
def runner(model: Model) -> ModelRunner:
    """Steps may be in flight, on a device whose copies are late."""
    return build_runner(EngineConfig(**{**LIMITS, "async_scheduling": True}), model=model, device=LazyDevice())


@pytest.fixture
def driver(runner: ModelRunner, wishes: list[Wish]) -> Driver:
    """Two steps are in flight: the prompts of the first two wishes, and one decode."""
    driver = Driver(runner, depth=3)
    first, second = wishes[:2]
    driver.add(first, second)
    driver.step({first.req_id: len(first.prompt), second.req_id: len(second.prompt)})
    driver.step({first.req_id: 1})
    return driver


def with_cached(output: SchedulerOutput, **changes: Any) -> SchedulerOutput:
    return evolve(output, scheduled_cached_reqs=evolve(output.scheduled_cached_reqs, **changes))


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, call: int = 1) -> None:
    """An interrupt right before the ``call``-th call of a method does its work."""
    work, calls = getattr(owner, name), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


def serve_to_the_end(driver: Driver, alone: dict[str, Served]) -> None:
    """Everybody goes on, and gets what it gets alone."""
    for req_id, request in driver.requests.items():
        while len(request.outputs) < request.wish.max_tokens:
            driver.step({req_id: request.left})
        driver.collect_all()
        driver.served(req_id).assert_equals(alone[req_id])


def test_a_rewind_that_is_undone_keeps_tokens_that_had_not_arrived(
    runner: ModelRunner, driver: Driver, wishes: list[Wish], alone: dict[str, Served]
) -> None:
    req_id, table = wishes[0].req_id, runner.parts.table
    row = table.rows[req_id]
    known = int(table.num_tokens[row])
    before = table.token_ids[row, :known].tolist()
    output = driver.output({req_id: 1})
    rewound = with_cached(
        output, num_computed_tokens=[known - 3], num_output_tokens=[known - 2 - len(wishes[0].prompt)]
    )
    runner.execute_model(rewound)
    assert table.num_tokens[row] == known - 2
    runner.rollback()
    runner.execute_model(output)  # its flush takes what the undo staged to the device
    assert table.num_tokens[row] == known
    assert table.token_ids[row, :known].tolist() == before
    driver.launched(output, runner.sample_tokens())
    serve_to_the_end(driver, alone)


def test_a_correction_that_was_flushed_is_undone_on_the_device(
    runner: ModelRunner, driver: Driver, wishes: list[Wish], alone: dict[str, Served]
) -> None:
    req_id, table = wishes[0].req_id, runner.parts.table
    row = table.rows[req_id]
    known = int(table.num_tokens[row])
    before = table.token_ids[row, :known].tolist()
    output = driver.output({req_id: 1})
    start = output.scheduled_cached_reqs.num_computed_tokens[0]
    runner.execute_model(with_cached(output, new_token_ids=[[(before[start] + 1) % 60]]))
    assert table.token_ids[row, :known].tolist() != before
    runner.rollback()
    runner.execute_model(output)
    assert table.token_ids[row, :known].tolist() == before
    driver.launched(output, runner.sample_tokens())
    serve_to_the_end(driver, alone)


def spoil(runner: ModelRunner, req_id: str) -> None:
    """The next logits of a request are not numbers."""
    armed = [True]

    def spoiler(batch: Batch, inputs: PreparedInputs, state: ExecuteModelState) -> ExecuteModelState:
        index = list(batch.req_ids).index(req_id) if req_id in batch.req_ids else -1
        if not armed or index not in inputs.sampling_reqs:
            return state
        armed.clear()
        logits = state.logits.clone()
        logits[inputs.sampling_logits[list(inputs.sampling_reqs).index(index)]] = torch.nan
        return ExecuteModelState(logits, state.hidden_states)

    runner.stages.insert(spoiler, after="forward", name="spoiler")


@pytest.mark.parametrize("undone", [False, True])
def test_a_step_that_counts_on_a_token_that_fails_is_executed(
    runner: ModelRunner, driver: Driver, wishes: list[Wish], alone: dict[str, Served], undone: bool
) -> None:
    """The runner learns of the failure in the middle of a step that was scheduled before; its neighbours go on."""
    well, sick = wishes[0].req_id, wishes[1].req_id
    driver.collect_all()
    spoil(runner, sick)
    driver.step({sick: 1})
    output = driver.output({well: 1, sick: 1})
    told = [driver.requests[well].tokens[-1:] if i == well else [] for i in output.scheduled_cached_reqs.req_ids]
    output = with_cached(output, new_token_ids=told)  # which makes the runner wait for what is in flight
    runner.execute_model(output)
    if undone:
        runner.rollback()
        runner.execute_model(output)
    failed = driver.in_flight[0].late.get_output()
    assert set(failed.request_errors) == {sick}
    result = runner.sample_tokens().get_output()
    assert result.sampled_token_ids[result.req_id_to_index[well]] == [alone[well].tokens[2]]


def test_a_request_whose_token_failed_can_be_rewound_and_goes_on(
    runner: ModelRunner, driver: Driver, wishes: list[Wish], alone: dict[str, Served]
) -> None:
    """Its failure arrives while another step is open, which is undone."""
    well, sick = wishes[0].req_id, wishes[1].req_id
    driver.collect_all()
    spoil(runner, sick)
    driver.step({sick: 1})
    output = driver.output({well: 1})
    runner.execute_model(output)
    assert set(driver.in_flight[0].late.get_output().request_errors) == {sick}
    runner.rollback()
    runner.execute_model(output)
    driver.launched(output, runner.sample_tokens())
    driver.collect_all()
    driver.requests[sick].computed -= 1  # its last token is computed, and sampled from, once more
    serve_to_the_end(driver, alone)


def test_an_interrupt_while_late_tokens_are_taken_in_loses_none(
    runner: ModelRunner, driver: Driver, wishes: list[Wish], alone: dict[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = wishes[0].req_id, wishes[1].req_id
    driver.step({second: 1}, preempted=[first])
    driver.collect_all()
    raise_once(monkeypatch, runner.parts.table.records[first].__class__, "take_token")
    output = driver.output({first: driver.requests[first].left})
    output = with_cached(output, all_token_ids={})
    with pytest.raises(KeyboardInterrupt):
        runner.execute_model(output)
    runner.execute_model(output)
    driver.launched(output, runner.sample_tokens())
    serve_to_the_end(driver, alone)


def test_an_interrupt_while_a_row_is_freed_loses_no_row(
    runner: ModelRunner, driver: Driver, wishes: list[Wish], alone: dict[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = runner.parts.table
    output = driver.output({wishes[1].req_id: 1}, preempted=[wishes[0].req_id])
    raise_once(monkeypatch, table, "_release_row")
    runner.execute_model(output)
    steps = runner.num_steps
    with pytest.raises(KeyboardInterrupt):
        runner.sample_tokens()
    assert runner.state is StepState.SAMPLED
    assert runner.num_steps == steps + 1
    assert table.latest_output is not None
    driver.launched(output, table.latest_output)
    driver.step({wishes[1].req_id: 1})
    assert table.num_free_rows + table.num_live == table.num_rows - 1
    serve_to_the_end(driver, alone)


def test_an_interrupted_sleep_changes_nothing(
    runner: ModelRunner, driver: Driver, wishes: list[Wish], alone: dict[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dict(runner.parts.table.rows)
    raise_once(monkeypatch, runner.parts.table, "preempt", call=2)
    with pytest.raises(KeyboardInterrupt):
        runner.sleep()
    assert runner.life is LifeState.READY
    assert runner.parts.table.rows == rows
    serve_to_the_end(driver, alone)


def test_an_interrupt_at_the_very_end_of_a_step_counts_it_once(
    runner: ModelRunner, driver: Driver, wishes: list[Wish]
) -> None:
    """The guard then runs the end of the step again."""
    commit = next(
        code
        for code in ModelRunner.sample_tokens.__code__.co_consts
        if isinstance(code, CodeType) and code.co_name == "commit"
    )
    runner.execute_model(driver.output({wishes[0].req_id: 1}))
    steps = runner.num_steps
    fault = Fault(KeyboardInterrupt(), commit, When.AFTER)
    with pytest.raises(KeyboardInterrupt), fault.armed():
        runner.sample_tokens()
    assert fault.raised
    assert runner.state is StepState.SAMPLED
    assert runner.num_steps == steps + 1

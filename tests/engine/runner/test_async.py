"""Steps that start before the last one's tokens arrive: same tokens, nothing read early, nothing written late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, Served, Wish, serve_alone
from lazy_device import BufferRewritten, LazyDevice
from modes import LIMITS, MODES, PARAMS
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.fsm import LifeState, RunnerFaulted, StepState, StepStateError
from twostroke.stages.device import Device, HostDevice
from twostroke.stages.forward_context import Model
from twostroke.stages.io import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs

DEVICES: dict[str, Callable[[], Device]] = {"host": HostDevice, "lazy": LazyDevice}


@pytest.fixture
def make_async(model: Model) -> Callable[..., ModelRunner]:
    """An asynchronous runner on a given device."""

    def make(device: Device | None = None, **changes: Any) -> ModelRunner:
        config = EngineConfig(**{**LIMITS, "async_scheduling": True, **changes})
        return build_runner(config, model=model, device=device or LazyDevice())

    return make


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_changes_nothing(
    make_async: Callable[..., ModelRunner],
    wishes: list[Wish],
    alone: dict[str, Served],
    depth: int,
    device: str,
) -> None:
    for seed in range(4):
        runner = make_async(DEVICES[device]())
        got = Driver(runner, seed, depth).run_random(wishes, preempt=0.2)
        assert got.keys() == alone.keys()
        for req_id, served in got.items():
            served.assert_equals(alone[req_id])


@pytest.mark.parametrize("mode", MODES)
def test_modes_change_nothing_with_steps_in_flight(
    make_async: Callable[..., ModelRunner], wishes: list[Wish], alone: dict[str, Served], mode: str
) -> None:
    runner = make_async(LazyDevice(), **MODES[mode])
    for req_id, served in Driver(runner, 1, depth=2).run_random(wishes).items():
        served.assert_equals(alone[req_id])


def test_the_next_step_starts_before_the_tokens_arrive(make_async: Callable[..., ModelRunner]) -> None:
    device = LazyDevice()
    driver = Driver(make_async(device), depth=3)
    driver.add(Wish("a", (1, 2, 3), 6))
    driver.step({"a": 3})
    waits = device.num_waits
    driver.step({"a": 1})
    assert device.num_waits == waits, "the second step waited for the first one's token"
    assert not driver.in_flight[0].late.ready()
    driver.step({"a": 1})
    assert driver.requests["a"].num_pending == 2
    driver.collect_all()
    assert driver.requests["a"].num_pending == 0


@pytest.mark.parametrize("params", PARAMS)
def test_A3_what_looks_at_history_sees_real_ids(
    make_async: Callable[..., ModelRunner], make_runner: Callable[..., ModelRunner], params: str
) -> None:
    wish = Wish(params, (5, 6, 5, 7), 7, PARAMS[params])
    driver = Driver(make_async(), depth=3)
    driver.add(wish)
    driver.step({params: 4})
    while len(driver.requests[params].outputs) < 7:
        driver.step({params: 1})
    driver.collect_all()
    driver.served(params).assert_equals(serve_alone(make_runner(), wish))


def test_A4_host_buffers_are_not_rewritten_while_a_copy_may_read_them(
    make_async: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The double really catches a missing fence: without begin_step every step would write the same arrays."""
    runner = make_async()
    driver = Driver(runner, depth=2)
    driver.add(Wish("a", (1, 2, 3), 8))
    driver.step({"a": 3})
    driver.step({"a": 1})
    monkeypatch.setattr(runner.parts.buffers, "begin_step", lambda: None)

    def three_steps() -> None:
        for _ in range(3):
            driver.step({"a": 1})

    with pytest.raises(BufferRewritten):
        three_steps()


def test_U4_preempted_in_flight_and_resumed_without_tokens(
    make_async: Callable[..., ModelRunner], wishes: list[Wish], alone: dict[str, Served]
) -> None:
    wish = wishes[1]
    driver = Driver(make_async(), depth=3)
    driver.add(wish)
    driver.step({wish.req_id: len(wish.prompt)})
    driver.step({wish.req_id: 1})
    driver.step({}, preempted=[wish.req_id])
    assert driver.requests[wish.req_id].num_pending
    driver.step({wish.req_id: driver.requests[wish.req_id].left})
    while len(driver.requests[wish.req_id].outputs) < wish.max_tokens:
        driver.step({wish.req_id: 1})
    driver.collect_all()
    driver.served(wish.req_id).assert_equals(alone[wish.req_id])


def test_U8_finished_in_flight_and_its_id_used_again_at_once(
    make_async: Callable[..., ModelRunner], wishes: list[Wish], alone: dict[str, Served]
) -> None:
    first, again = Wish("x", (9, 8, 7), 9), Wish("x", wishes[0].prompt, wishes[0].max_tokens, wishes[0].params)
    driver = Driver(make_async(), depth=3)
    driver.add(first)
    driver.step({"x": 3})
    driver.step({"x": 1})
    driver.finish("x")
    driver.add(again)
    driver.step({"x": len(again.prompt)})
    while len(driver.requests["x"].outputs) < again.max_tokens:
        driver.step({"x": 1})
    driver.collect_all()
    driver.served("x").assert_equals(alone[wishes[0].req_id])


def test_A8_a_late_token_follows_its_request_not_its_row(make_async: Callable[..., ModelRunner]) -> None:
    runner = make_async(max_num_seqs=1)
    driver = Driver(runner, depth=4)
    driver.add(Wish("a", (1, 2), 3))
    driver.step({"a": 2})
    driver.finish("a")
    driver.add(Wish("b", (3, 4), 3))
    driver.step({"b": 2})
    driver.finish("b")
    driver.add(Wish("c", (5, 6, 7, 8), 3))
    driver.step({"c": 2})
    driver.collect_all()
    driver.step({"c": 2})
    row = runner.parts.table.rows["c"]
    assert runner.parts.table.token_ids_host[row, :4].tolist() == [5, 6, 7, 8]
    assert runner.parts.table.token_ids[row, :4].tolist() == [5, 6, 7, 8]


def test_settle_waits_and_outputs_stay_readable(make_async: Callable[..., ModelRunner]) -> None:
    runner = make_async()
    driver = Driver(runner, depth=3)
    driver.add(Wish("a", (1, 2, 3), 6))
    driver.step({"a": 3})
    driver.step({"a": 1})
    assert runner.state is StepState.SAMPLED
    runner.settle()
    assert runner.state is StepState.IDLE
    assert all(step.late.ready() for step in driver.in_flight)
    late = driver.in_flight[0].late
    assert late.get_output() is late.get_output()
    driver.collect_all()


def test_outputs_may_be_read_in_any_order_and_from_any_thread(make_async: Callable[..., ModelRunner]) -> None:
    runner = make_async()
    driver = Driver(runner, depth=4)
    driver.add(Wish("a", (1, 2, 3), 6, PARAMS["prompt_logprobs"]))
    driver.step({"a": 1})
    driver.step({"a": 2})
    driver.step({"a": 1})
    outputs: list[ModelRunnerOutput] = []
    threads = [
        threading.Thread(target=lambda late=step.late: outputs.append(late.get_output()))
        for step in reversed(driver.in_flight)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 3
    assert sum("a" in output.prompt_logprobs_dict for output in outputs) == 1
    driver.collect_all()


def test_reading_an_output_while_a_step_is_open(make_async: Callable[..., ModelRunner]) -> None:
    runner = make_async()
    driver = Driver(runner, depth=4)
    driver.add(Wish("a", (1, 2, 3), 6), Wish("b", (4, 5), 6))
    driver.step({"a": 3})
    output = driver.output({"a": 1, "b": 2})
    runner.execute_model(output)
    before = runner.parts.table.token_ids_host.copy()
    token = driver.in_flight[0].late.get_output().sampled_token_ids[0][0]
    assert (runner.parts.table.token_ids_host == before).all(), "host state was written while a step is open"
    driver.launched(output, runner.sample_tokens())
    driver.step({"a": 1})
    row = runner.parts.table.rows["a"]
    assert runner.parts.table.token_ids_host[row, 3] == token


def test_rollback_with_a_step_in_flight(
    make_async: Callable[..., ModelRunner], wishes: list[Wish], alone: dict[str, Served]
) -> None:
    runner = make_async()
    driver = Driver(runner, depth=3)
    first, second = wishes[0], wishes[2]
    driver.add(first, second)
    driver.step({first.req_id: len(first.prompt), second.req_id: 1})
    output = driver.output({first.req_id: 1}, preempted=[second.req_id])
    runner.execute_model(output)
    runner.rollback()
    assert runner.state is StepState.IDLE
    runner.execute_model(output)
    driver.launched(output, runner.sample_tokens())
    for wish in (first, second):
        while len(driver.requests[wish.req_id].outputs) < wish.max_tokens:
            driver.step({wish.req_id: driver.requests[wish.req_id].left})
        driver.collect_all()
        driver.served(wish.req_id).assert_equals(alone[wish.req_id])


def test_nan_in_flight_ends_only_its_request(make_async: Callable[..., ModelRunner]) -> None:
    runner = make_async()

    def spoil(batch: Batch, inputs: PreparedInputs, state: ExecuteModelState) -> ExecuteModelState:
        logits = state.logits.clone()
        for row, index in zip(inputs.sampling_logits.tolist(), inputs.sampling_reqs.tolist(), strict=True):
            if batch.req_ids[index] == "sick" and batch.num_computed_tokens[index] == 0:
                logits[row, 3] = torch.nan
        return ExecuteModelState(logits, state.hidden_states)

    runner.stages.insert(spoil, after="forward", name="spoil")
    driver = Driver(runner, depth=2)
    driver.add(Wish("sick", (1, 2), 4), Wish("well", (1, 2), 4))
    first = driver.output({"sick": 2, "well": 2})
    driver.run(first)
    second = driver.output({"sick": 1, "well": 1})
    runner.execute_model(second)
    late = runner.sample_tokens()
    failed = driver.in_flight[0].late.get_output()
    assert set(failed.request_errors) == {"sick"}
    assert failed.num_nans_in_logits == {"sick": 1}
    assert isinstance(late.get_output(), ModelRunnerOutput)
    after = SchedulerOutput(finished_req_ids={"sick"})
    runner.execute_model(after)
    assert set(runner.parts.table.rows) == {"well"}


class Broken(LazyDevice):
    """Fails when somebody waits for it."""

    def finish(self, uploads: list[Any]) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def test_an_error_that_surfaces_late_faults_the_runner(model: Model) -> None:
    device = Broken()
    runner = build_runner(EngineConfig(**{**LIMITS, "async_scheduling": True}), model=model, device=device)
    driver = Driver(runner, depth=3)
    driver.add(Wish("a", (1, 2, 3), 6))
    driver.step({"a": 3})
    driver.step({"a": 1})
    late = driver.in_flight[1].late
    assert isinstance(late, AsyncModelRunnerOutput)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            late.get_output()
    assert runner.life is LifeState.FAULTED
    assert "illegal memory access" in runner.fault_reason
    with pytest.raises(RunnerFaulted, match="illegal memory access") as raised:
        runner.execute_model(driver.output({"a": 1}))
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert isinstance(raised.value, StepStateError)
    runner.shutdown()
    assert runner.life is LifeState.CLOSED


def test_sync_and_async_are_one_code_path(make_async: Callable[..., ModelRunner]) -> None:
    outputs = []
    for is_async in (False, True):
        runner = make_async(HostDevice(), async_scheduling=is_async)
        driver = Driver(runner)
        driver.add(Wish("a", (1, 2, 3), 6, PARAMS["penalised"]))
        runner.execute_model(driver.output({"a": 3}))
        late = runner.sample_tokens()
        assert isinstance(late, AsyncModelRunnerOutput) == is_async
        outputs.append(late.get_output())
    assert outputs[0].sampled_token_ids == outputs[1].sampled_token_ids
    assert outputs[0].logprobs is not None
    assert outputs[1].logprobs is not None
    np.testing.assert_array_equal(outputs[0].logprobs.logprobs, outputs[1].logprobs.logprobs)

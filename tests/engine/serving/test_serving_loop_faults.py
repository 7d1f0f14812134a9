"""Whose error is it: of a request, of a step, or of the loop; and that nobody is left waiting."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from twostroke.engine.serving_loop import LoopState, ServingLoopDown
from twostroke.fsm import LifeState, StageFailed
from twostroke.stages.errors import InvalidSchedulerOutput, RequestFailed
from twostroke.stages.io import SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

Serve = Callable[..., Any]
TEN = SamplingParams(max_tokens=10)


@pytest.mark.parametrize("where", ["execute", "sample"])
def test_F1_L3_a_failing_step_fails_the_guilty_alone(serve: Serve, failing: Any, where: str) -> None:
    bench = serve(step_seconds=0.001)
    original = ZeroDivisionError("in a kernel")
    bench.runner.faults[where] = failing(original, "ab", "cd")
    *doomed, fine = bench.step_together(["ab", "cd", "ef"], TEN)
    for handle in doomed:
        with pytest.raises(RequestFailed, match="in a kernel") as caught:
            handle.result(timeout=10)
        assert caught.value.req_id == handle.request_id
        assert isinstance(caught.value.__cause__, StageFailed)
        assert caught.value.__cause__.__cause__ is original
    assert fine.result(timeout=10).text == "ef" * 5
    bench.runner.faults.clear()
    assert bench.loop.add("ab", TEN, request_id="ab").result(timeout=10).text == "ab" * 5
    assert bench.loop.healthy


@pytest.mark.parametrize("where", ["execute", "sample"])
def test_a_fault_that_passes_costs_nobody_a_token(serve: Serve, failing: Any, where: str) -> None:
    bench = serve(max_num_seqs=2)
    bench.runner.faults[where] = failing(ValueError("once"), "ab", "cd", times=1)
    handles = bench.step_together(["ab", "cd", "ef"], TEN)
    assert [handle.result(timeout=10).text for handle in handles] == ["ab" * 5, "cd" * 5, "ef" * 5]
    assert bench.runner.faults[where].met == 1


@pytest.mark.parametrize("where", ["execute", "sample"])
def test_a_request_alone_in_its_step_is_tried_again_too(serve: Serve, failing: Any, where: str) -> None:
    bench = serve()
    bench.runner.faults[where] = failing(ValueError("once"), times=1)
    assert bench.loop.add("ab", TEN).result(timeout=10).text == "ab" * 5


def test_what_came_before_an_error_is_read_first(serve: Serve, failing: Any) -> None:
    bench = serve()
    handle = bench.loop.add("ab", SamplingParams(max_tokens=100))
    first = next(handle)
    bench.runner.faults["sample"] = failing(ValueError("late"))
    texts = [first.text]
    with pytest.raises(RequestFailed, match="late"):
        texts.extend(delta.text for delta in handle)
    text = "".join(texts)
    assert len(text) == bench.runner.num_steps, "a token of a step before the failing one was lost"
    assert text == ("ab" * 50)[: len(text)]
    assert handle.finished


def test_an_error_of_one_request_spares_its_neighbours(serve: Serve) -> None:
    bench = serve()
    error = RequestFailed("cd", "its logits are not numbers")
    bench.runner.request_errors["cd"] = error
    fine, broken = bench.step_together(["ab", "cd"], TEN)
    assert fine.result(timeout=10).text == "ab" * 5
    with pytest.raises(RequestFailed, match="not numbers"):
        broken.result(timeout=10)


def test_an_error_of_one_completion_ends_its_siblings(serve: Serve) -> None:
    bench = serve()
    bench.runner.request_errors["x#1"] = RequestFailed("x#1", "nothing is allowed")
    handle = bench.loop.add("ab", SamplingParams(n=3, max_tokens=100), request_id="x")
    with pytest.raises(RequestFailed, match="nothing is allowed"):
        handle.result(timeout=10)
    assert bench.loop.num_live_requests == 0
    bench.settle()


def test_a_refused_step_takes_only_the_request_that_it_names(serve: Serve) -> None:
    bench = serve()
    refusals: list[int] = []

    def refuse(scheduled: SchedulerOutput) -> None:
        if "cd" in scheduled.num_scheduled_tokens:
            refusals.append(len(scheduled.num_scheduled_tokens))
            raise InvalidSchedulerOutput("its block ids are outside the pool", req_id="cd")

    bench.runner.faults["execute"] = refuse
    fine, refused = bench.step_together(["ab", "cd"], TEN)
    assert fine.result(timeout=10).text == "ab" * 5
    with pytest.raises(RequestFailed, match="outside the pool") as caught:
        refused.result(timeout=10)
    assert isinstance(caught.value.__cause__, InvalidSchedulerOutput)
    assert len(refusals) == 1


def test_aborted_during_a_step_that_fails(serve: Serve, failing: Any) -> None:
    bench = serve()
    bench.runner.faults["sample"] = failing(ValueError("late"), times=2)
    bench.hold_step()
    handle = bench.loop.add("ab", TEN, request_id="x")
    bench.wait_inside()
    bench.loop.abort("x")
    again = bench.loop.add("cd", TEN, request_id="x")
    bench.release()
    assert handle.result(timeout=10).outputs[0].finish_reason == "abort"
    assert again.result(timeout=10).text == "cd" * 5


def test_when_everybody_fails_the_runner_still_hears_who_has_ended(serve: Serve, failing: Any) -> None:
    bench = serve()
    *_, aborted = bench.step_together(["ab", "cd"], SamplingParams(max_tokens=100))
    next(aborted)
    bench.hold_step()
    bench.wait_inside()
    bench.loop.abort("cd")
    bench.runner.faults["execute"] = failing(ValueError("always"))
    bench.release()
    bench.settle()
    assert bench.loop.healthy


def died(bench: Any, handles: list[Any], cause: BaseException) -> None:
    for handle in handles:
        with pytest.raises(ServingLoopDown) as caught:
            handle.result(timeout=10)
        assert caught.value.__cause__ is cause
    assert not bench.loop.healthy
    assert bench.loop.state is LoopState.DEAD
    with pytest.raises(ServingLoopDown, match="died") as caught:
        bench.loop.add("late")
    assert caught.value.__cause__ is cause
    assert bench.loop.num_live_requests == 0
    bench.loop.stop()


@pytest.mark.parametrize("where", ["execute", "sample"])
def test_L3_the_unexpected_ends_the_loop_and_everyone_hears_of_it(
    serve: Serve, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    bench = serve(max_num_seqs=1)
    bug = KeyError("a bug")

    def fault(scheduled: SchedulerOutput) -> None:
        if "ab" in scheduled.num_scheduled_tokens:
            raise bug

    bench.runner.faults[where] = fault
    died(bench, bench.step_together(["ab", "cd"], TEN), bug)
    assert any(record.levelno >= logging.ERROR for record in caplog.records)


def test_a_faulted_runner_ends_the_loop(serve: Serve, failing: Any) -> None:
    bench = serve(max_num_seqs=1)
    fail = failing(OSError("the device is gone"), "ab")

    def fault(scheduled: SchedulerOutput) -> None:
        if "ab" in scheduled.num_scheduled_tokens:
            bench.runner.life = LifeState.FAULTED
        fail(scheduled)

    bench.runner.faults["execute"] = fault
    handles = bench.step_together(["ab", "cd"], TEN)
    with pytest.raises(ServingLoopDown, match="device is gone") as caught:
        handles[0].result(timeout=10)
    cause = caught.value.__cause__
    assert isinstance(cause, StageFailed)
    died(bench, handles, cause)


def test_an_error_that_arrives_with_the_tokens_ends_the_loop(serve: Serve) -> None:
    bench = serve()
    error = RuntimeError("an illegal memory access was encountered")

    def fault(scheduled: SchedulerOutput) -> None:
        if "ab" in scheduled.num_scheduled_tokens:
            raise error

    bench.runner.faults["arrive"] = fault
    died(bench, bench.step_together(["ab", "cd"], TEN), error)


def test_a_scheduler_that_breaks_ends_the_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = serve()
    bug = RuntimeError("no such block")

    def broken(*args: object) -> None:
        raise bug

    monkeypatch.setattr(bench.loop.scheduler, "update_from_output", broken)
    died(bench, [bench.loop.add("ab")], bug)


def test_a_scheduler_that_never_gets_on_ends_the_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = serve()
    monkeypatch.setattr(bench.loop.scheduler, "schedule", SchedulerOutput.make_empty)
    with pytest.raises(ServingLoopDown, match="scheduled nothing"):
        bench.loop.add("ab").result(timeout=10)


def test_L10_stopping_ends_every_stream(serve: Serve) -> None:
    bench = serve(step_seconds=0.002, max_num_seqs=2)
    long = SamplingParams(max_tokens=100)
    handles = [bench.loop.add("ab", long) for _ in range(4)]
    reasons: list[str | None] = []

    def read(handle: Any) -> None:
        *_, last = handle
        reasons.append(last.outputs[0].finish_reason)

    async def read_async(handle: Any) -> None:
        reasons.append([delta async for delta in handle][-1].outputs[0].finish_reason)

    threads = [threading.Thread(target=read, args=(handle,)) for handle in handles[:3]]
    threads.append(threading.Thread(target=lambda: asyncio.run(read_async(handles[3]))))
    for thread in threads:
        thread.start()
    bench.loop.stop()
    for thread in threads:
        thread.join(timeout=10)
    assert reasons == ["abort"] * 4
    assert not bench.runner.tokens


def test_streams_end_before_the_step_in_flight_does(serve: Serve) -> None:
    bench = serve()
    bench.hold_step()
    handle = bench.loop.add("ab", TEN)
    bench.wait_inside()
    stopper = threading.Thread(target=bench.loop.stop)
    stopper.start()
    assert handle.result(timeout=10).outputs[0].finish_reason == "abort"
    bench.release()
    stopper.join(timeout=10)
    assert not stopper.is_alive()


def test_stopping_from_the_loops_own_thread_does_not_wait_for_itself(serve: Serve) -> None:
    bench = serve()
    bench.runner.faults["execute"] = lambda scheduled: bench.loop.stop()
    assert bench.loop.add("ab", TEN).result(timeout=10).outputs[0].finish_reason == "abort"
    bench.loop.stop()
    assert bench.loop.state is LoopState.STOPPED

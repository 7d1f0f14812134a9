"""Pausing with requests in flight, and work between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from twostroke.engine.serving_loop import LoopThreadError, ServingLoopDown
from twostroke.fsm import InputRefused, LifeState, StepState
from twostroke.stages.errors import RequestFailed
from twostroke.stages.sampling_params import SamplingParams

Serve = Callable[..., Any]
LONG = SamplingParams(max_tokens=100)


def assert_frozen(bench: Any) -> None:
    """No step is made, and none is in flight."""
    steps = bench.runner.num_steps
    threading.Event().wait(0.02)
    assert bench.runner.num_steps == steps
    assert bench.loop.scheduler.num_in_flight == 0
    assert bench.runner.state is not StepState.FORWARDED


def test_keep_freezes_requests_and_loses_no_token(serve: Serve) -> None:
    bench = serve(step_seconds=0.0005)
    handles = [bench.loop.add(prompt, LONG) for prompt in ("ab", "cde")]
    for _ in range(3):
        next(handles[0])
        for _ in range(2):
            bench.loop.pause()
        assert_frozen(bench)
        assert bench.loop.is_paused
        bench.loop.resume()
    assert [handle.result(timeout=10).text for handle in handles] == ["ab" * 50, ("cde" * 34)[:100]]
    assert not bench.loop.is_paused


def test_keep_and_sleep_goes_on_from_the_tokens(serve: Serve) -> None:
    bench = serve(step_seconds=0.0005)
    handles = [bench.loop.add(prompt, LONG, request_id=prompt) for prompt in ("ab", "cde")]
    next(handles[0])
    bench.loop.pause("keep")
    bench.runner.sleep()
    assert bench.loop.add("f", SamplingParams(max_tokens=3)) is not None
    bench.runner.wake_up()
    bench.loop.resume()
    assert [handle.result(timeout=10).text for handle in handles] == ["ab" * 50, ("cde" * 34)[:100]]
    resumed = [step.scheduled_cached_reqs.resumed_req_ids for step in bench.runner.steps]
    assert set().union(*resumed) == {"ab", "cde"}


def test_cached_prefixes_are_forgotten_with_the_cache(serve: Serve) -> None:
    bench = serve()
    bench.loop.add("a" * 10, SamplingParams(max_tokens=1)).result(timeout=10)
    assert bench.loop.add("a" * 10, SamplingParams(max_tokens=1)).result(timeout=10).num_cached_tokens == 8
    bench.loop.between_steps(bench.runner.sleep)
    bench.loop.between_steps(bench.runner.wake_up)
    assert bench.loop.add("a" * 10, SamplingParams(max_tokens=1)).result(timeout=10).num_cached_tokens == 0


def test_no_step_starts_while_the_runner_sleeps(serve: Serve) -> None:
    bench = serve(step_seconds=0.0005)
    running = bench.loop.add("ab", LONG)
    next(running)
    bench.loop.between_steps(bench.runner.sleep)
    added = bench.loop.add("cd", SamplingParams(max_tokens=4))
    assert_frozen(bench)
    assert bench.loop.healthy
    bench.loop.between_steps(bench.runner.wake_up)
    assert running.result(timeout=10).text == "ab" * 50
    assert added.result(timeout=10).text == "cdcd"


def test_abort_ends_everyone_and_takes_in_the_next(serve: Serve) -> None:
    bench = serve(step_seconds=0.0005, max_num_seqs=2)
    handles = [bench.loop.add("ab", LONG) for _ in range(4)]
    next(handles[0])
    for _ in range(2):
        bench.loop.pause("abort")
    assert [handle.result(timeout=0).outputs[0].finish_reason for handle in handles] == ["abort"] * 4
    assert not bench.runner.tokens, "the pause took effect before the runner heard of the aborts"
    queued = bench.loop.add("cd", SamplingParams(max_tokens=4))
    assert_frozen(bench)
    bench.loop.resume()
    assert queued.result(timeout=10).text == "cdcd"


def test_wait_lets_those_finish_that_have_begun(serve: Serve) -> None:
    bench = serve(step_seconds=0.0005, max_num_seqs=2)
    begun = [bench.loop.add("ab", LONG), bench.loop.add("cd", LONG)]
    waiting = bench.loop.add("ef", LONG)
    for handle in begun:
        next(handle)
    with ThreadPoolExecutor() as pool:
        pauses = [pool.submit(bench.loop.pause, "wait") for _ in range(3)]
        queued = bench.loop.add("gh", SamplingParams(max_tokens=4))
        for pause in pauses:
            pause.result(timeout=10)
    assert [handle.result(timeout=0).text for handle in begun] == ["ab" * 50, "cd" * 50]
    assert not waiting.finished
    assert_frozen(bench)
    bench.loop.resume()
    assert waiting.result(timeout=10).text == "ef" * 50
    assert queued.result(timeout=10).text == "ghgh"


def test_wait_does_not_forget_those_that_had_to_give_way(serve: Serve) -> None:
    bench = serve(num_kv_blocks=28, step_seconds=0.0005)
    handles = [bench.loop.add(prompt, SamplingParams(max_tokens=60)) for prompt in ("ab", "cd", "ef")]
    for handle in handles:
        next(handle)
    bench.loop.pause("wait")
    assert [handle.result(timeout=0).text for handle in handles] == ["ab" * 30, "cd" * 30, "ef" * 30]
    assert bench.loop.scheduler.stats().num_preemptions > 0


def test_another_mode_takes_the_place_of_the_one_before(serve: Serve) -> None:
    bench = serve(step_seconds=0.0005)
    handle = bench.loop.add("ab", LONG)
    next(handle)
    bench.loop.pause("keep")
    bench.loop.pause("wait")
    assert handle.result(timeout=0).text == "ab" * 50
    other = bench.loop.add("cd", LONG)
    bench.loop.pause("abort")
    assert other.result(timeout=0).outputs[0].finish_reason == "abort"


def test_a_resume_ends_a_pause_that_still_waits(serve: Serve) -> None:
    bench = serve()
    bench.hold_step()
    handle = bench.loop.add("ab", SamplingParams(max_tokens=10))
    bench.wait_inside()
    with ThreadPoolExecutor() as pool:
        pause = pool.submit(bench.loop.pause, "wait")
        while bench.loop._pause is None:
            threading.Event().wait(0.001)
        bench.loop.resume()
        pause.result(timeout=10)
        bench.release()
    assert handle.result(timeout=10).text == "ab" * 5


def test_aborting_and_stopping_while_paused(serve: Serve) -> None:
    bench = serve(step_seconds=0.0005)
    kept, aborted = bench.loop.add("ab", LONG), bench.loop.add("cd", LONG)
    for handle in (kept, aborted):
        next(handle)
    bench.loop.pause()
    assert bench.loop.abort(aborted.request_id)
    assert aborted.result(timeout=0).outputs[0].finish_reason == "abort"
    bench.loop.stop()
    assert kept.result(timeout=0).outputs[0].finish_reason == "abort"
    for call in (bench.loop.pause, lambda: bench.loop.between_steps(print)):
        with pytest.raises(ServingLoopDown, match="stopped"):
            call()


def test_between_steps_nothing_is_open_and_nothing_in_flight(serve: Serve) -> None:
    bench = serve(step_seconds=0.0005)
    handles = [bench.loop.add(prompt, LONG) for prompt in ("ab", "cd")]
    seen: list[tuple[StepState, int, str]] = []

    def look() -> int:
        scheduler = bench.loop.scheduler
        seen.append((bench.runner.state, scheduler.num_in_flight, threading.current_thread().name))
        return len(seen)

    with ThreadPoolExecutor(4) as pool:
        counts = [job.result(timeout=10) for job in [pool.submit(bench.loop.between_steps, look) for _ in range(20)]]
    assert sorted(counts) == list(range(1, 21))
    assert {in_flight for _, in_flight, _ in seen} == {0}
    assert StepState.FORWARDED not in {state for state, _, _ in seen}
    assert {name for *_, name in seen} == {"twostroke-serving-loop"}
    assert [handle.result(timeout=10).text for handle in handles] == ["ab" * 50, "cd" * 50]


def test_what_is_raised_between_steps_is_the_callers(serve: Serve) -> None:
    bench = serve()

    def fail() -> None:
        raise LookupError("mine")

    for recompute in (False, True):
        with pytest.raises(LookupError, match="mine"):
            bench.loop.between_steps(fail, recompute=recompute)
    assert bench.loop.add("ab", SamplingParams(max_tokens=2)).result(timeout=10).text == "ab"


def test_recompute_resumes_everyone_from_their_tokens(serve: Serve) -> None:
    bench = serve(step_seconds=0.0005)
    handles = [bench.loop.add(prompt, LONG, request_id=prompt) for prompt in ("ab", "cd")]
    for handle in handles:
        next(handle)
    assert bench.loop.between_steps(lambda: "done", recompute=True) == "done"
    assert [handle.result(timeout=10).text for handle in handles] == ["ab" * 50, "cd" * 50]
    resumed = [step.scheduled_cached_reqs.resumed_req_ids for step in bench.runner.steps]
    assert set().union(*resumed) == {"ab", "cd"}


def test_calls_that_would_wait_for_themselves_are_refused(serve: Serve) -> None:
    bench = serve()
    for call in (bench.loop.pause, lambda: bench.loop.between_steps(print)):
        with pytest.raises(LoopThreadError, match="another"):
            bench.loop.between_steps(call)


def test_an_unknown_mode_is_refused(serve: Serve) -> None:
    bench = serve()
    with pytest.raises(InputRefused, match="abort, wait, keep"):
        bench.loop.pause("stop")
    assert bench.loop.add("ab", SamplingParams(max_tokens=2)).result(timeout=10).text == "ab"


def test_a_runner_that_can_step_no_more_is_not_healthy(serve: Serve) -> None:
    bench = serve()
    assert bench.loop.healthy
    bench.loop.between_steps(lambda: setattr(bench.runner, "life", LifeState.FAULTED))
    assert not bench.loop.healthy


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_loop_that_dies_leaves_nobody_waiting(serve: Serve, mode: str) -> None:
    bench = serve()
    bench.hold_step()
    bug = KeyError("a bug")

    def fault(scheduled: object) -> None:
        raise bug

    bench.runner.faults["arrive"] = fault
    handle = bench.loop.add("ab", LONG)
    bench.wait_inside()
    with ThreadPoolExecutor() as pool:
        waiters = [
            pool.submit(bench.loop.pause, mode),
            pool.submit(bench.loop.between_steps, print),
        ]
        while bench.loop._pause is None or not bench.loop._jobs:
            threading.Event().wait(0.001)
        bench.release()
        for waiter in waiters:
            with pytest.raises(ServingLoopDown, match="a bug") as caught:
                waiter.result(timeout=10)
            assert caught.value.__cause__ is bug
    with pytest.raises(ServingLoopDown, match="a bug"):
        handle.result(timeout=10)


def test_a_failing_request_is_found_while_a_pause_waits(serve: Serve, failing: Any) -> None:
    bench = serve(step_seconds=0.0005)
    fine, broken = bench.step_together(["ab", "cd"], LONG)
    next(broken)
    bench.runner.faults["execute"] = failing(ValueError("late"), "cd")
    bench.loop.pause("wait")
    assert fine.result(timeout=0).text == "ab" * 50
    with pytest.raises(RequestFailed, match="late"):
        broken.result(timeout=0)

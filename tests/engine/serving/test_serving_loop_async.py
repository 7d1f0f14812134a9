"""Steps in flight over a real runner: whatever the depth and the device, every request gets the same."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from lazy_device import LazyDevice
from twostroke.engine.config import EngineConfig
from twostroke.engine.loop_handle import RequestHandle
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models import random_model, tiny_config
from twostroke.engine.outputs import CompletionOutput
from twostroke.engine.scheduler import InvalidSchedulerConfig
from twostroke.engine.serving_loop import ServingLoop, ServingLoopDown
from twostroke.fsm import LifeState
from twostroke.stages.device import HostDevice
from twostroke.stages.sampling_params import SamplingParams

DEVICES: dict[str, Callable[[], Any]] = {"host": HostDevice, "lazy": LazyDevice}
LIMITS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "num_kv_blocks": 14,
    "max_model_len": 48,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 12,
}
COUNT = 12
Request = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def make_runner() -> Iterator[Callable[..., ModelRunner]]:
    """Runners with little room; nothing may be left in their tables."""
    model = random_model(tiny_config())
    made: list[ModelRunner] = []

    def make(device: str = "host", **changes: Any) -> ModelRunner:
        made.append(build_runner(EngineConfig(**LIMITS | changes), model=model, device=DEVICES[device]()))
        return made[-1]

    yield make
    for runner in made:
        assert not runner.parts.table.records
        assert runner.parts.table.num_free_rows == runner.parts.table.num_rows - 1
        runner.shutdown()


def random_requests(seed: int, count: int) -> list[Request]:
    """Prompts that share prefixes, and parameters of every kind."""
    draw = random.Random(seed)
    stem = [draw.randrange(64) for _ in range(12)]
    requests: list[Request] = []
    for _ in range(count):
        prompt = stem[: draw.randint(0, 12)] + [draw.randrange(64) for _ in range(draw.randint(1, 8))]
        params = SamplingParams(
            max_tokens=draw.randint(1, 16),
            n=draw.choice([1, 1, 1, 2]),
            temperature=draw.choice([0.0, 0.7, 1.5]),
            seed=draw.randrange(100),  # ids are used again, and without a seed they draw anew
            repetition_penalty=draw.choice([1.0, 1.3]),
            stop_token_ids=draw.sample(range(64), draw.choice([0, 3, 8])),
            min_tokens=draw.choice([0, 1]),
            logprobs=draw.choice([None, 0, 2]),
            prompt_logprobs=draw.choice([None, None, None, 1]),
        )
        requests.append((prompt, params))
    return requests


def add_all(loop: ServingLoop, requests: list[Request]) -> list[RequestHandle]:
    return [loop.add(prompt, params, f"r{index}") for index, (prompt, params) in enumerate(requests)]


def summary(output: CompletionOutput) -> tuple[Any, ...]:
    logprobs = [
        {token: (pytest.approx(value.logprob, abs=1e-4), value.rank) for token, value in position.items()}
        for position in output.logprobs or ()
    ]
    return output.token_ids, output.finish_reason, output.stop_reason, logprobs


def served(loop: ServingLoop, requests: list[Request]) -> list[list[tuple[Any, ...]]]:
    results = [handle.result(timeout=60) for handle in add_all(loop, requests)]
    return [[summary(output) for output in result.outputs] for result in results]


@pytest.fixture(scope="module")
def expected(make_runner: Callable[..., ModelRunner]) -> dict[int, list[list[tuple[Any, ...]]]]:
    """What the requests of each seed get from a synchronous runner, one step at a time."""
    with ServingLoop(make_runner(async_scheduling=False)) as loop:
        assert loop.depth == 1
        return {seed: served(loop, random_requests(seed, COUNT)) for seed in (1, 2)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_and_device_change_nothing(
    make_runner: Callable[..., ModelRunner], expected: Any, depth: int, device: str
) -> None:
    with ServingLoop(make_runner(device), depth=depth) as loop:
        for seed, tokens in expected.items():
            assert served(loop, random_requests(seed, COUNT)) == tokens
        assert loop.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("device", DEVICES)
def test_aborts_leave_a_beginning_and_disturb_nobody(
    make_runner: Callable[..., ModelRunner], expected: Any, device: str
) -> None:
    draw, requests = random.Random(0), random_requests(1, COUNT)
    with ServingLoop(make_runner(device)) as loop:
        handles = add_all(loop, requests)
        doomed = draw.sample(handles, COUNT // 2)
        for handle in doomed:
            if draw.random() < 0.7:
                next(handle)
            loop.abort(handle.request_id)
        for handle, whole in zip(handles, expected[1], strict=True):
            for output, (token_ids, reason, *_) in zip(handle.result(timeout=60).outputs, whole, strict=True):
                if output.finish_reason == "abort":
                    assert handle in doomed
                    assert output.token_ids == token_ids[: len(output.token_ids)]
                else:
                    assert (output.token_ids, output.finish_reason) == (token_ids, reason)


def test_ids_are_used_again_at_once(make_runner: Callable[..., ModelRunner], expected: Any) -> None:
    requests = random_requests(1, COUNT)
    with ServingLoop(make_runner("lazy"), depth=3) as loop:
        for prompt, params in random_requests(2, COUNT):
            loop.add(prompt, params, "r0")
            loop.abort("r0")
            handle = loop.add(*requests[0], request_id="r0")
            assert summary(handle.result(timeout=60).outputs[0]) == expected[1][0][0]


def test_A7_no_step_past_max_tokens(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner()
    with ServingLoop(runner, depth=3) as loop:
        handle = loop.add([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(handle.result(timeout=60).outputs[0].token_ids) == 5
        loop.between_steps(lambda: None)
    assert runner.num_steps == 5


@pytest.mark.parametrize("device", DEVICES)
def test_sleeping_in_the_middle_changes_nothing(
    make_runner: Callable[..., ModelRunner], expected: Any, device: str
) -> None:
    runner, requests = make_runner(device), random_requests(1, COUNT)

    def nap() -> None:
        runner.sleep()
        runner.wake_up()

    with ServingLoop(runner) as loop:
        handles = add_all(loop, requests)
        for handle in handles[:6]:
            next(handle)
            loop.between_steps(nap)
        loop.pause("keep")
        nap()
        loop.resume()
        results = [handle.result(timeout=60) for handle in handles]
        assert [[summary(output) for output in result.outputs] for result in results] == expected[1]


@pytest.mark.parametrize("depth", [2, 3])
def test_faults_naps_pauses_and_aborts_at_once(
    make_runner: Callable[..., ModelRunner], expected: Any, depth: int
) -> None:
    """Stages break now and then, the runner sleeps now and then: nobody loses a token by it."""
    draw, requests, runner = random.Random(depth), random_requests(1, COUNT), make_runner("lazy")
    calls = itertools.count(1)
    for name in ("update_states", "forward", "sample", "commit"):
        runner.stages.wrap(name, partial(broken_now_and_then, calls))

    def nap() -> None:
        runner.sleep()
        runner.wake_up()

    with ServingLoop(runner, depth=depth) as loop:
        for _ in range(3):
            handles = add_all(loop, requests)
            aborted = draw.sample(handles, 3)
            while not all(handle.finished for handle in handles):
                match draw.choice(["nap", "pause", "abort", "wait"]):
                    case "nap":
                        loop.between_steps(nap)
                    case "pause":
                        loop.pause("keep")
                        loop.resume()
                    case "abort":
                        loop.abort(draw.choice(aborted).request_id)
                    case _:
                        time.sleep(0.01)
            for handle, whole in zip(handles, expected[1], strict=True):
                for output, wanted in zip(handle.result(timeout=0).outputs, whole, strict=True):
                    if output.finish_reason == "abort":
                        assert handle in aborted
                        assert output.token_ids == wanted[0][: len(output.token_ids)]
                    else:
                        assert summary(output) == wanted


def broken_now_and_then(calls: Iterator[int], stage: Callable[..., Any]) -> Callable[..., Any]:
    """A stage that raises after its work, but never again before the step was tried in parts."""

    def broken(*args: Any) -> Any:
        result = stage(*args)
        if next(calls) % 23 == 0:
            raise ArithmeticError("now and then")
        return result

    return broken


def test_new_weights_while_serving(make_runner: Callable[..., ModelRunner], expected: Any) -> None:
    model, other = random_model(tiny_config()), random_model(tiny_config(), seed=1)
    runner = build_runner(EngineConfig(**LIMITS), model=model)
    first = {name: tensor.clone() for name, tensor in model.parameters.items()}
    with ServingLoop(runner) as loop:
        loop.between_steps(lambda: runner.update_weights(other.parameters.items()), recompute=True)
        assert served(loop, random_requests(1, COUNT)) != expected[1]
        for prompt, params in random_requests(1, COUNT):
            loop.add(prompt, params)
        loop.pause("abort")
        loop.between_steps(lambda: runner.update_weights(first.items()), recompute=True)
        loop.resume()
        assert served(loop, random_requests(1, COUNT)) == expected[1]
    runner.shutdown()


class Broken(LazyDevice):
    """Fails when somebody waits for it."""

    def finish(self, uploads: list[Any]) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def test_L3_L11_an_error_that_surfaces_late_ends_everything_with_its_cause() -> None:
    runner = build_runner(EngineConfig(**LIMITS), model=random_model(tiny_config()), device=Broken())
    loop = ServingLoop(runner).start()
    for handle in [loop.add([1, 2, 3 + index], SamplingParams(max_tokens=8)) for index in range(3)]:
        with pytest.raises(ServingLoopDown, match="illegal memory access") as caught:
            handle.result(timeout=60)
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert runner.life is LifeState.FAULTED
    assert not loop.healthy
    with pytest.raises(ServingLoopDown, match="illegal memory access"):
        loop.add([1])
    loop.stop()
    runner.shutdown()


def test_depth_follows_the_runner(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner()
    assert ServingLoop(runner).depth == 2
    assert ServingLoop(make_runner(async_scheduling=False)).depth == 1
    with pytest.raises(InvalidSchedulerConfig, match="depth"):
        ServingLoop(runner, depth=0)

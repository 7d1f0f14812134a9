"""Chapter F: which call belongs to which step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver import GREEDY, Driver, Served, Wish
from modes import MODES
from twostroke.engine.model_runner import ModelRunner
from twostroke.fsm import StageFailed, StepState, StepStateError
from twostroke.stages.io import ModelRunnerOutput, SchedulerOutput
from twostroke.stages.records import ExecuteModelState

MakeRunner = Callable[..., ModelRunner]


@pytest.mark.parametrize("mode", ["eager", "full", "full_and_piecewise", "two_ubatches"])
def test_F6_logits_outlive_everything_that_is_refused_before_they_are_sampled(
    make_runner: MakeRunner, mode: str
) -> None:
    """A graph writes its logits to the same place every time: no forward may run before they were sampled."""
    runner = make_runner(**MODES[mode])
    held: list[torch.Tensor] = []

    def hold(state: ExecuteModelState) -> None:
        held.append(state.logits)

    runner.stages.insert(hold, after="forward", name="hold")
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 6), Wish("b", (4, 5), 6))
    driver.step({"a": 3, "b": 2})
    for turn in range(3):
        output = driver.output({"a": 1, "b": 1})
        runner.execute_model(output)
        logits, before = held[-1], held[-1].clone()
        with pytest.raises(StepStateError):
            runner.execute_model(output)
        for call in (runner.dummy_run, runner.capture_model, runner.sleep):
            with pytest.raises(StepStateError):
                call()
        assert torch.equal(logits, before)
        driver.launched(output, runner.sample_tokens())
        for name in ("a", "b"):
            request = driver.requests[name]
            best = before[list(output.num_scheduled_tokens).index(name)].argmax().item()
            assert request.outputs[-1] == best, f"turn {turn}: {name} was sampled from other logits"


@pytest.mark.parametrize("mode", ["eager", "full", "two_ubatches"])
def test_F6_an_output_does_not_change_with_later_steps(make_runner: MakeRunner, mode: str) -> None:
    runner = make_runner(**MODES[mode])
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 6, GREEDY))
    kept: list[tuple[ModelRunnerOutput, Any, Any]] = []
    for count in (3, 1, 1, 1):
        output = driver.output({"a": count})
        runner.execute_model(output)
        late = runner.sample_tokens()
        driver.launched(output, late)
        result = late.get_output()
        assert result.logprobs is not None
        kept.append((result, [list(ids) for ids in result.sampled_token_ids], result.logprobs.logprobs.copy()))
    for result, tokens, logprobs in kept:
        assert [list(ids) for ids in result.sampled_token_ids] == tokens
        assert result.logprobs is not None
        assert (result.logprobs.logprobs == logprobs).all()


@pytest.mark.parametrize(
    ("stage", "num_failures"), [("update_states", 3), ("prepare_inputs", 1), ("build_attn", 1), ("forward", 3)]
)
def test_F1_the_same_step_can_fail_again_and_again(
    runner: ModelRunner,
    wishes: list[Wish],
    alone: dict[str, Served],
    finish_all: Callable[..., dict[str, Served]],
    assert_served: Callable[..., None],
    stage: str,
    num_failures: int,
) -> None:
    left = [num_failures]

    def breaking(inner: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*args: Any) -> Any:
            result = inner(*args)
            if left[0]:
                left[0] -= 1
                raise ZeroDivisionError("of the user's own")
            return result

        return broken

    driver = Driver(runner)
    driver.add(*wishes[:2])
    runner.stages.wrap(stage, breaking)
    output = driver.output({wish.req_id: len(wish.prompt) for wish in wishes[:2]})
    for _ in range(num_failures):
        with pytest.raises(StageFailed, match="of the user's own") as raised:
            runner.execute_model(output)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert runner.state is StepState.IDLE
        with pytest.raises(StepStateError):
            runner.sample_tokens()
    driver.run(output)
    driver.add(wishes[2])
    assert_served(finish_all(driver), alone)


def test_F2_a_step_of_unfinished_chunks_is_a_step(runner: ModelRunner) -> None:
    """None means "sample now" and nothing else: a step that samples nobody has an output too."""
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3, 4), 3), Wish("b", (5, 6, 7), 3))
    output = driver.output({"a": 2, "b": 1})
    assert runner.execute_model(output) is None
    result = runner.sample_tokens().get_output()
    assert list(result.sampled_token_ids) == [[], []]
    assert set(result.req_ids) == {"a", "b"}
    idle = runner.execute_model(SchedulerOutput.make_empty())
    assert isinstance(idle, ModelRunnerOutput)
    assert not idle.req_ids
    with pytest.raises(StepStateError):
        runner.sample_tokens()


def test_F4_a_wrapper_of_a_stage_that_two_pipelines_share_is_made_once(runner: ModelRunner) -> None:
    """``update_states`` runs in steps with and without tokens; what a wrapper counts must be one count."""
    calls: list[int] = []

    def counting(inner: Callable[..., Any]) -> Callable[..., Any]:
        calls.append(0)
        counter = len(calls) - 1

        def counted(*args: Any) -> Any:
            calls[counter] += 1
            return inner(*args)

        return counted

    runner.stages.wrap("update_states", counting)
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2), 3))
    driver.step({"a": 2})
    driver.step({})
    driver.finish("a")
    driver.step({})
    assert calls == [3]


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_F3_after_sleep_steps_run_without_the_graphs_of_before(
    make_runner: MakeRunner,
    wishes: list[Wish],
    alone: dict[str, Served],
    finish_all: Callable[..., dict[str, Served]],
    assert_served: Callable[..., None],
    mode: str,
) -> None:
    runner = make_runner(**MODES[mode])
    captured = len(runner.parts.graphs.captured)
    for again in range(2):
        runner.sleep()
        runner.sleep()
        runner.wake_up()
        runner.wake_up()
        assert not len(runner.parts.graphs.captured)
        driver = Driver(runner, again)
        driver.add(*wishes[:2])
        assert_served(finish_all(driver), alone)
        assert runner.capture_model() == captured

"""What a failed step leaves behind, and that it can be replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from driver import GREEDY, Driver, Wish
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.models import Decoder
from twostroke.engine.recording_reader import read_recording
from twostroke.engine.replay import replay, runner_for
from twostroke.engine.serving_loop import ServingLoop
from twostroke.fsm import StageFailed
from twostroke.stages.errors import RequestFailed
from twostroke.stages.records import Batch, SamplerOutput
from twostroke.stages.sampling_params import SamplingParams


class FailsOn:
    """A stage that raises where a request of a name is in the batch and has computed so many tokens."""

    def __init__(self, req_id: str, computed: int = 0) -> None:
        self.req_id = req_id
        self.computed = computed

    def __call__(self, batch: Batch) -> None:
        for req_id, computed in zip(batch.req_ids, batch.num_computed_tokens.tolist(), strict=True):
            if req_id == self.req_id and computed >= self.computed:
                raise ZeroDivisionError(f"{req_id} is bad")


@pytest.mark.parametrize("num_steps", [2, 5, 64])
def test_a_failure_leaves_a_recording_that_fails_again(
    make_runner: Callable[..., ModelRunner], model: Decoder, wishes: list[Wish], tmp_path: Path, num_steps: int
) -> None:
    """However short the ring is: what was before it is written down and computed anew."""
    runner = make_runner()
    recorder = runner.record_failures(tmp_path, num_steps=num_steps)
    driver = Driver(runner, 2)
    driver.add(*wishes[:3], Wish("bad", (9, 8, 7, 6), 9, GREEDY))
    runner.stages.insert(FailsOn("bad", 8), after="build_attn", name="explode")
    while not recorder.files:
        with contextlib.suppress(StageFailed):
            driver.step({req_id: min(own.left, 4) for req_id, own in driver.requests.items()})
    (path,) = recorder.files
    assert "explode" in path.name
    recording = read_recording(path)
    assert len(recording.steps) == min(num_steps, 6)
    again = runner_for(recording, model=model)
    again.stages.insert(FailsOn("bad", 8), after="build_attn", name="explode")
    report = replay(recording, again)
    assert report.is_same, report.comparison.first or report.failure
    assert report.failure == "stage 'explode': ZeroDivisionError: bad is bad"
    assert not replay(recording, runner_for(recording, model=model)).is_same


def test_nothing_is_written_where_nothing_fails(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], tmp_path: Path
) -> None:
    runner = make_runner()
    with runner.record_failures(tmp_path / "failures", num_steps=3) as recorder:
        Driver(runner, 1).run_random(wishes)
    assert recorder.files == ()
    assert not (tmp_path / "failures").exists()


def test_a_serving_loop_leaves_one_recording_for_one_fault(
    make_runner: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    """The loop tries the step again in parts, which fail alike; the neighbours get their tokens."""
    runner = make_runner(async_scheduling=True)
    recorder = runner.record_failures(tmp_path)
    runner.stages.insert(FailsOn("bad"), after="prepare_inputs", name="explode")
    params = SamplingParams(max_tokens=3, temperature=0)
    with ServingLoop(runner) as loop:
        good, bad = loop.add([1, 2, 3], params, "good"), loop.add([4, 5], params, "bad")
        assert len(good.result().outputs[0].token_ids) == 3
        with pytest.raises(RequestFailed):
            bad.result()
    assert len(recorder.files) == 1
    failed = read_recording(recorder.files[0]).steps[-1]
    assert failed.failure is not None
    assert failed.failure["error"] == "bad is bad"
    assert "bad" in failed.scheduled.num_scheduled_tokens


def test_a_failing_second_stroke_is_recorded_with_its_step(
    make_runner: Callable[..., ModelRunner], model: Decoder, tmp_path: Path
) -> None:
    def explode(output: SamplerOutput) -> None:
        raise ZeroDivisionError("after sampling")

    runner = make_runner()
    recorder = runner.record_failures(tmp_path)
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    with runner.stages.restored():
        runner.stages.insert(explode, after="sample")
        scheduled = driver.output({"a": 3})
        assert runner.execute_model(scheduled) is None
        with pytest.raises(StageFailed):
            runner.sample_tokens()
        runner.rollback()
    recording = read_recording(recorder.files[0])
    again = runner_for(recording, model=model)
    again.stages.insert(explode, after="sample")
    assert replay(recording, again).failure == "stage 'explode': ZeroDivisionError: after sampling"


def test_there_are_no_more_files_than_allowed(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> None:
    runner = make_runner()
    recorder = runner.record_failures(tmp_path)
    driver = Driver(runner)
    stage = FailsOn("r0")
    runner.stages.insert(stage, after="prepare_inputs", name="explode")
    for number in range(20):
        stage.req_id = f"r{number}"
        driver.add(Wish(stage.req_id, (1, 2), 4, GREEDY))
        scheduled = driver.output({stage.req_id: 2})
        for _ in range(2):
            with pytest.raises(StageFailed):
                runner.execute_model(scheduled)
    assert len(recorder.files) == 16


def test_a_redacted_failure_tells_no_token(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> None:
    runner = make_runner()
    recorder = runner.record_failures(tmp_path, num_steps=2, redact=True)
    driver = Driver(runner)
    driver.add(Wish("a", (41, 42, 43), 9, GREEDY))
    for count in (3, 1, 1, 1):
        driver.step({"a": count})
    runner.stages.insert(FailsOn("a"), after="prepare_inputs", name="explode")
    with pytest.raises(StageFailed):
        driver.step({"a": 1})
    text = recorder.files[0].read_text()
    assert '"redacted":3' in text
    assert "41,42,43" not in text

"""What a recording holds, when it is written, and what it must not do to the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import GREEDY, Driver, Served, Wish
from lazy_device import LazyDevice
from safetensors.torch import load_file
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.recording import RecordingOptions
from twostroke.engine.recording_events import StepListener
from twostroke.engine.recording_format import grammar_fields, grammar_output, scheduler_output, step_fields
from twostroke.engine.recording_reader import RecordingError, read_recording, tensors_path
from twostroke.fsm import InputRefused, StepStateError
from twostroke.stages.io import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from twostroke.stages.sampling_params import SamplingParams

STEP = SchedulerOutput(
    scheduled_new_reqs=[
        NewRequestData(
            req_id="new",
            prompt_token_ids=[1, 2, 3],
            prefill_token_ids=[1, 2, 3, 4],
            block_ids=[[5], [6]],
            num_computed_tokens=1,
            sampling_params=SamplingParams(temperature=0.5, seed=3, logit_bias={4: -1.5}, stop_token_ids=[9]),
        )
    ],
    scheduled_cached_reqs=CachedRequestData(
        req_ids=["a", "b"],
        resumed_req_ids={"b"},
        new_token_ids=[[], [7]],
        all_token_ids={"b": [7, 8]},
        new_block_ids=[None, [[1], [2]]],
        num_computed_tokens=[4, 0],
        num_output_tokens=[1, 1],
    ),
    num_scheduled_tokens={"a": 1, "b": 2, "new": 3},
    total_num_scheduled_tokens=6,
    scheduled_spec_decode_tokens={"a": [3]},
    finished_req_ids={"c"},
    preempted_req_ids={"d"},
    num_common_prefix_blocks=[1, 0],
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_scheduler_output_comes_back() -> None:
    again = scheduler_output(json.loads(json.dumps(step_fields(STEP))))
    assert step_fields(again) == step_fields(STEP)
    assert again.scheduled_new_reqs[0].sampling_params == STEP.scheduled_new_reqs[0].sampling_params
    assert again.total_num_scheduled_tokens == 6


def test_a_line_shares_no_list_with_the_scheduler() -> None:
    blocks = [[5]]
    new = NewRequestData(req_id="a", prompt_token_ids=[1], block_ids=blocks)
    line = step_fields(SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"a": 1}))
    blocks[0].append(6)
    assert line["scheduled_new_reqs"][0]["block_ids"] == [[5]]


def test_masks_come_back() -> None:
    masks = GrammarOutput(
        structured_output_request_ids=["a", "b"], grammar_bitmask=np.array([[-1, 5], [2**31 - 1, 0]], dtype=np.int32)
    )
    again = grammar_output(json.loads(json.dumps(grammar_fields(masks))))
    assert again.structured_output_request_ids == ["a", "b"]
    assert (again.grammar_bitmask == masks.grammar_bitmask).all()


@pytest.mark.parametrize("depth", [1, 3])
def test_recording_changes_no_token_and_has_them_all(
    make_runner: Callable[..., ModelRunner],
    wishes: list[Wish],
    alone: dict[str, Served],
    tmp_path: Path,
    depth: int,
) -> None:
    device = LazyDevice() if depth > 1 else None
    runner = make_runner(device=device, async_scheduling=depth > 1)
    with runner.record(tmp_path / "run.jsonl"):
        got = Driver(runner, 3, depth).run_random(wishes)
    for req_id, served in got.items():
        served.assert_equals(alone[req_id])
    tokens: dict[str, list[int]] = {}
    numbers: list[int] = []
    for line in lines_of(tmp_path / "run.jsonl"):
        if line["kind"] == "output":
            numbers.append(line["step"])
            for req_id, ids in zip(line["req_ids"], line["sampled_token_ids"], strict=True):
                tokens.setdefault(req_id, []).extend(ids)
    assert numbers == sorted(numbers)
    assert {req_id: tuple(ids) for req_id, ids in tokens.items()} == {key: own.tokens for key, own in got.items()}


def test_a_recorder_waits_for_nothing_while_steps_are_in_flight(
    make_runner: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    runner = make_runner(device=LazyDevice(), async_scheduling=True)
    driver = Driver(runner, depth=4)
    driver.add(Wish("a", (1, 2, 3), 9))
    recorder = runner.record(tmp_path / "run.jsonl")
    for count in (3, 1, 1):
        driver.step({"a": count})
    assert not any(step.late.ready() for step in driver.in_flight)
    recorder.close()
    assert [line["step"] for line in lines_of(tmp_path / "run.jsonl") if line["kind"] == "output"] == [1, 2, 3]


def test_equal_runs_without_times_give_equal_files(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        runner = make_runner()
        with runner.record(tmp_path / name, times=False):
            Driver(runner, 5).run_random(wishes[:3])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_redacted_recording_holds_no_token(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], tmp_path: Path
) -> None:
    runner = make_runner()
    driver = Driver(runner, 1)
    driver.add(Wish("live", (41, 42, 43), 4))
    driver.step({"live": 3})
    with runner.record(tmp_path / "run.jsonl", redact=True):
        driver.step({"live": 1})
        driver.finish("live")
        driver.step({})
        Driver(runner, 1).run_random(wishes, preempt=0.3)
    for key, value in walk(lines_of(tmp_path / "run.jsonl")):
        assert key not in ("allowed_token_ids", "bad_words_token_ids", "logit_bias", "stop_token_ids")
        if key in ("prompt_token_ids", "token_ids", "prefill_token_ids"):
            assert value.keys() == {"redacted"}
        elif key == "sampled_token_ids":
            assert all(ids.keys() == {"redacted"} for ids in value)
        elif key in ("logprobs", "prompt_logprobs"):
            assert isinstance(value, int) or value.keys() == {"redacted"}, "how many were asked for, no values"
    assert read_recording(tmp_path / "run.jsonl").is_redacted


def walk(value: Any) -> Any:
    """Every key and value below a value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def test_tensors_lie_beside_the_recording(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> None:
    runner, path = make_runner(), tmp_path / "run.jsonl"
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4))
    with runner.record(path, tensors=("logits", "hidden_states")):
        driver.step({"a": 3})
    kept = load_file(tensors_path(path, 1))
    assert kept["logits"].shape == (1, 64)
    assert kept["hidden_states"].shape == (3, 32)
    assert int(kept["logits"][0].argmax()) == driver.requests["a"].outputs[0]
    assert read_recording(path).steps[0].tensors == tensors_path(path, 1)


@pytest.mark.parametrize("options", [{"tensors": ("weights",)}, {"tensors": ("logits",), "redact": True}])
def test_options_that_do_not_go_together(options: dict[str, Any]) -> None:
    with pytest.raises(InputRefused, match="tensors"):
        RecordingOptions(**options)


def test_failures_and_rollbacks_are_written(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> None:
    runner, path = make_runner(), tmp_path / "run.jsonl"
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4))
    wrong = SchedulerOutput(num_scheduled_tokens={"ghost": 1}, total_num_scheduled_tokens=1)
    with runner.record(path):
        with pytest.raises(InputRefused):
            runner.execute_model(wrong)
        first = driver.output({"a": 3})
        runner.execute_model(first)
        runner.rollback()
        driver.run(first)
        runner.settle()
    recording = read_recording(path)
    failed, rolled_back, done = recording.steps
    assert failed.failure is not None
    assert failed.failure["type"] == "InvalidSchedulerOutput"
    assert failed.was_undone
    assert rolled_back.was_undone
    assert rolled_back.output is None
    assert done.output is not None
    assert recording.settles == (3,)


def test_refused_calls_are_no_steps(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> None:
    runner = make_runner()
    with runner.record(tmp_path / "run.jsonl"), pytest.raises(StepStateError):
        runner.sample_tokens()
    assert [line["kind"] for line in lines_of(tmp_path / "run.jsonl")] == ["recording"]


def test_recording_cannot_begin_inside_a_step(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> None:
    runner = make_runner()
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4))
    runner.execute_model(driver.output({"a": 3}))
    with pytest.raises(StepStateError, match="record"):
        runner.record(tmp_path / "run.jsonl")


def test_a_closed_recorder_writes_nothing_more(make_runner: Callable[..., ModelRunner], tmp_path: Path) -> None:
    runner = make_runner()
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4))
    recorder = runner.record(tmp_path / "run.jsonl")
    recorder.close()
    recorder.close()
    driver.step({"a": 3})
    assert len(lines_of(tmp_path / "run.jsonl")) == 1
    assert len(runner.listeners) == len(runner.observers) == 0


class Broken(StepListener):
    """Raises at everything it hears of a call."""

    def executing(self, scheduler_output: SchedulerOutput) -> None:
        raise ValueError("broken")

    def sampled(self, output: object) -> None:
        raise ValueError("broken")


def test_a_listener_that_raises_fails_no_step(
    make_runner: Callable[..., ModelRunner], caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner()
    runner.listeners.add(Broken())
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    driver.step({"a": 3})
    assert len(driver.requests["a"].outputs) == 1
    assert len([record for record in caplog.records if "is not logged again" in record.message]) == 1


# ---- reading


def test_a_recording_cut_off_anywhere_in_its_last_line_is_read_up_to_it(recorded_path: Path, tmp_path: Path) -> None:
    whole = recorded_path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in (last + 1, last + 20, len(whole) - 2):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(whole[:cut])
        recording = read_recording(torn)
        assert "cut off" in recording.torn
        assert len(recording.steps) >= len(read_recording(recorded_path).steps) - 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "header"),
        ('{"kind":"step"}\n', "header"),
        ('{"kind":"recording","version":99}\n', "version 99"),
        ('{"kind":"recording","version":1}\nnonsense\n{"kind":"settle","step":1}\n', "line 2"),
        ('{"kind":"recording","version":1}\n[1]\n', "line 2"),
        ('{"kind":"recording","version":1}\n{"kind":"step","step":1}\n', "not as it should be"),
    ],
)
def test_what_is_no_recording_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(RecordingError, match=words):
        read_recording(path)


@pytest.mark.parametrize("scenario", ["plain", "chunked", "prefix", "preempt", "logprobs", "penalties"])
def test_traces_of_vllm_are_read_by_the_same_reader(data_path: Path, scenario: str) -> None:
    recording = read_recording(data_path / "vllm_traces" / f"{scenario}.jsonl")
    assert recording.header["source"] == "vllm"
    assert recording.config["max_num_seqs"] > 0
    for step in recording.steps:
        assert step.output is not None
        assert set(step.output.tokens) == set(step.scheduled.num_scheduled_tokens)
        assert all(step.output.tokens[req_id] for req_id in step.output.logprobs)

"""Replaying: the same tokens in every mode, and the first place where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import GREEDY, Driver, Wish
from modes import MODES
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.models import Decoder
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.recording_reader import Recording, read_recording
from twostroke.engine.replay import ReplayError, replay, runner_for
from twostroke.engine.replay_compare import Tolerance, compare_recordings
from twostroke.fsm import StageFailed
from twostroke.stages.io import GrammarOutput
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs, SamplerOutput


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_is_the_same_in_every_mode(recording: Recording, model: Decoder, mode: str) -> None:
    changes = {name: value for name, value in MODES[mode].items() if name not in ("block_size", "num_kv_blocks")}
    report = replay(recording, runner_for(recording, model=model, **changes))
    assert report.is_same, report.comparison.first
    assert report.comparison.num_tokens > 30
    assert report.comparison.num_logprobs > 50


class OneWrongToken:
    """Draws like the stage inside, but for one token of one request."""

    def __init__(self, inner: Callable[..., SamplerOutput], req_id: str, at: int) -> None:
        self._inner = inner
        self._left = {req_id: at}

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState, grammar: GrammarOutput | None
    ) -> SamplerOutput:
        output = self._inner(batch, inputs, state, grammar)
        for position, index in enumerate(inputs.sampling_reqs.tolist()):
            req_id = str(batch.req_ids[index])
            if req_id in self._left:
                self._left[req_id] -= 1
                if not self._left[req_id]:
                    output.sampled_token_ids[position] = (output.sampled_token_ids[position] + 1) % 64
        return output


@pytest.mark.parametrize("req_id", ["greedy", "seeded", "penalised"])
def test_one_wrong_token_is_one_difference(recording: Recording, model: Decoder, req_id: str) -> None:
    """The recorded token is put in its place, whether the request goes on or is preempted: nothing else differs."""
    runner = runner_for(recording, model=model)
    runner.stages.wrap("sample", lambda inner: OneWrongToken(inner, req_id, 2))
    comparison = replay(recording, runner, tolerance=Tolerance(tie=0.0)).comparison
    (difference,) = comparison.differences
    drawn = [
        (step.number, step.ends[req_id], step.output.tokens[req_id][0])
        for step in recording.steps
        if step.output is not None and step.output.tokens.get(req_id)
    ]
    assert (difference.step, difference.position, difference.recorded) == drawn[1]
    assert difference.req_id == req_id
    assert difference.got == (drawn[1][2] + 1) % 64
    assert difference.lead is not None
    assert f"step {difference.step}, request {req_id!r}, position {difference.position}" in str(difference)


def test_other_weights_differ_and_steps_before_the_first_are_not_compared(recording: Recording) -> None:
    other = random_model(tiny_config(), seed=1)
    whole = replay(recording, runner_for(recording, model=other)).comparison
    assert whole.first is not None
    late = replay(recording, runner_for(recording, model=other), first_step=20).comparison
    assert late.first is not None
    assert late.first.step >= 20
    assert late.differences == [difference for difference in whole.differences if difference.step >= 20]


def test_a_near_tie_is_named_and_is_no_difference(
    make_runner: Callable[..., ModelRunner], model: Decoder, tmp_path: Path
) -> None:
    """Two tokens with almost equal logits: the other one wins in the replay."""

    class Tie:
        def __init__(self, ahead: int) -> None:
            self.ahead = ahead

        def __call__(self, state: ExecuteModelState) -> ExecuteModelState:
            logits = state.logits.clone()
            logits[:, [5, 9]] = 50.0
            logits[:, self.ahead] += 0.001
            return ExecuteModelState(logits, state.hidden_states)

    runner = make_runner()
    runner.stages.insert(Tie(5), after="forward", name="tie")
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    with runner.record(tmp_path / "run.jsonl"):
        driver.step({"a": 3})
    recording = read_recording(tmp_path / "run.jsonl")
    again = runner_for(recording, model=model)
    again.stages.insert(Tie(9), after="forward", name="tie")
    report = replay(recording, again)
    assert report.is_same
    (tie,) = report.comparison.near_ties
    assert (tie.recorded, tie.got) == (5, 9)
    assert "near tie" in str(tie)


def test_masks_are_replayed(make_runner: Callable[..., ModelRunner], model: Decoder, tmp_path: Path) -> None:
    runner = make_runner()
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    only_seven = GrammarOutput(
        structured_output_request_ids=["a"], grammar_bitmask=np.array([[1 << 7, 0]], dtype=np.int32)
    )
    with runner.record(tmp_path / "run.jsonl"):
        driver.step({"a": 3}, grammar=only_seven)
    recording = read_recording(tmp_path / "run.jsonl")
    assert recording.steps[0].output is not None
    assert recording.steps[0].output.tokens == {"a": [7]}
    assert replay(recording, runner_for(recording, model=model)).is_same


@pytest.mark.parametrize("seed", range(3))
def test_a_recording_that_begins_in_the_middle_replays(
    make_runner: Callable[..., ModelRunner], model: Decoder, wishes: list[Wish], tmp_path: Path, seed: int
) -> None:
    """What was computed before is computed anew: running requests, preempted ones, and shared prefixes."""
    runner = make_runner()
    driver = Driver(runner, seed)
    driver.add(*wishes[:4])
    driver.step({wish.req_id: min(len(wish.prompt), 4) for wish in wishes[:4]})
    driver.step({wishes[0].req_id: 1}, preempted=[wishes[1].req_id])
    with runner.record(tmp_path / "run.jsonl"):
        for _ in range(5):
            counts = {req_id: driver.random.randint(1, own.left) for req_id, own in driver.requests.items()}
            driver.step(counts, preempted=driver.random.sample(sorted(counts), 1) if driver.random.random() < 0 else ())
    recording = read_recording(tmp_path / "run.jsonl")
    assert len(recording.state) == 4
    report = replay(recording, runner_for(recording, model=model))
    assert report.comparison.first is None, str(report.comparison.first)
    assert report.comparison.num_tokens > 4
    assert any("computed anew" in note for note in report.notes)


def test_a_redacted_recording_replays_with_the_same_schedule(
    make_runner: Callable[..., ModelRunner], model: Decoder, wishes: list[Wish], tmp_path: Path
) -> None:
    runner = make_runner()
    with runner.record(tmp_path / "run.jsonl", redact=True):
        Driver(runner, 4).run_random(wishes, preempt=0.3)
    recording = read_recording(tmp_path / "run.jsonl")
    report = replay(recording, runner_for(recording, model=model))
    assert report.is_same, report.comparison.first
    assert report.comparison.num_logprobs == 0
    assert any("redacted" in note for note in report.notes)


def test_logits_that_moved_are_found_before_tokens_differ(
    make_runner: Callable[..., ModelRunner], model: Decoder, tmp_path: Path
) -> None:
    runner = make_runner()
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY), Wish("b", (4, 5), 4, GREEDY))
    with runner.record(tmp_path / "run.jsonl", tensors=("logits",)):
        driver.step({"a": 3, "b": 2})
    recording = read_recording(tmp_path / "run.jsonl")

    def nudge(state: ExecuteModelState) -> ExecuteModelState:
        logits = state.logits.clone()
        logits[1, logits[1].argmin()] -= 0.25
        return ExecuteModelState(logits, state.hidden_states)

    again = runner_for(recording, model=model)
    again.stages.insert(nudge, after="forward")
    differences = replay(recording, again).comparison.differences
    assert [(own.what, own.req_id, own.position) for own in differences if own.what == "logits"] == [("logits", "b", 1)]


def test_a_step_that_failed_last_fails_again_or_does_not(
    make_runner: Callable[..., ModelRunner], model: Decoder, tmp_path: Path
) -> None:
    def explode(state: ExecuteModelState) -> None:
        raise ZeroDivisionError("a bug of a stage")

    runner = make_runner()
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    with runner.record(tmp_path / "run.jsonl"):
        driver.step({"a": 3})
        runner.stages.insert(explode, after="forward")
        with pytest.raises(StageFailed):
            driver.step({"a": 1})
    recording = read_recording(tmp_path / "run.jsonl")
    healthy = replay(recording, runner_for(recording, model=model))
    assert healthy.recorded_failure == "stage 'explode': ZeroDivisionError: a bug of a stage"
    assert healthy.failure == ""
    assert not healthy.is_same
    broken = runner_for(recording, model=model)
    calls = []

    def explode_later(state: ExecuteModelState) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("a bug of a stage")

    broken.stages.insert(explode_later, after="forward", name="explode")
    assert replay(recording, broken).is_same


def test_a_recorded_object_needs_its_model(recording: Recording) -> None:
    with pytest.raises(ReplayError, match="--model"):
        runner_for(recording)


def test_a_model_of_another_shape_is_refused(recording: Recording) -> None:
    with pytest.raises(ReplayError, match="num_layers 2, not 3"):
        runner_for(recording, model=random_model(tiny_config(num_hidden_layers=3)))


def test_what_no_recording_holds_is_refused(recorded_path: Path, model: Decoder, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in recorded_path.read_text().splitlines()]
    lines[1]["scheduled_new_reqs"][0]["left_out"] = ["prompt_embeds"]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    recording = read_recording(path)
    with pytest.raises(ReplayError, match="prompt_embeds"):
        replay(recording, runner_for(recording, model=model))


# ---- two recordings


def test_two_recordings_are_compared_by_position_whatever_the_schedule(
    make_runner: Callable[..., ModelRunner], recording: Recording, wishes: list[Wish], tmp_path: Path
) -> None:
    runner = make_runner()
    with runner.record(tmp_path / "other.jsonl"):
        Driver(runner, 99).run_random(wishes)
    comparison = compare_recordings(recording, read_recording(tmp_path / "other.jsonl"), Tolerance())
    assert comparison.first is None, str(comparison.first)
    assert comparison.num_tokens > 30


def test_the_first_position_where_two_recordings_differ(
    recording: Recording, recorded_path: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in recorded_path.read_text().splitlines()]
    changed = next(
        line for line in lines[20:] if line["kind"] == "output" and dict(sampled(line)).get("seeded", [63]) != [63]
    )
    changed["sampled_token_ids"][changed["req_ids"].index("seeded")] = [63]
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, lines)))
    comparison = compare_recordings(recording, read_recording(tmp_path / "other.jsonl"), Tolerance())
    assert comparison.first is not None
    assert (comparison.first.step, comparison.first.req_id) == (changed["step"], "seeded")
    assert comparison.first.got == 63


def sampled(line: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Requests of an output line that got a token, with it."""
    return [(req_id, ids) for req_id, ids in zip(line["req_ids"], line["sampled_token_ids"], strict=True) if ids]


@pytest.mark.model
@pytest.mark.parametrize("scenario", ["chunked"])
def test_a_trace_of_vllm_replays(data_path: Path, smollm2: Any, scenario: str) -> None:
    recording = read_recording(data_path / "vllm_traces" / f"{scenario}.jsonl")
    report = replay(recording, runner_for(recording, model=smollm2.model))
    assert report.is_same, report.comparison.first
    assert report.comparison.num_tokens > 30

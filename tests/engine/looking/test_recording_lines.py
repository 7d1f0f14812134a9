"""Lines that are kept in parts until they are read: the same text, the same fields, and no list of the scheduler's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from driver import Driver, Wish
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.recording import Recorder, RecordingOptions
from twostroke.engine.recording_book import RequestBook
from twostroke.engine.recording_failures import FailureRecorder
from twostroke.engine.recording_file import LineFile
from twostroke.engine.recording_format import step_fields
from twostroke.engine.recording_lines import (
    Line,
    OutputLine,
    OutputWriter,
    StepLine,
    StepReader,
    encode_line,
    fields_of,
    tells_tokens_only,
    text_of,
)
from twostroke.engine.recording_reader import read_recording
from twostroke.stages.io import CachedRequestData, LogprobsLists, ModelRunnerOutput, NewRequestData, SchedulerOutput
from twostroke.stages.records import BatchExecutionDescriptor, CUDAGraphMode
from twostroke.stages.sampling_params import SamplingParams

CACHED = CachedRequestData(
    req_ids=["b", 'quoted "ü" %d'], num_computed_tokens=[7, 12], num_output_tokens=[2, 3], new_block_ids=[None, None]
)
DECODE = SchedulerOutput(
    scheduled_cached_reqs=CACHED, num_scheduled_tokens={'quoted "ü" %d': 1, "b": 3}, total_num_scheduled_tokens=4
)
WITH_BLOCKS = evolve(
    DECODE,
    scheduled_cached_reqs=evolve(CACHED, new_block_ids=[None, [[5], [6]]], num_output_tokens=[]),
    num_common_prefix_blocks=[2, 0],
)
OF_NUMPY = evolve(DECODE, scheduled_cached_reqs=evolve(CACHED, num_computed_tokens=np.array([7, 12])))
PLAN = BatchExecutionDescriptor(mode=CUDAGraphMode.NONE, num_tokens=4, num_reqs=2, reason='says "no"')
OUTPUT = ModelRunnerOutput(req_ids=["b", 'quoted "ü" %d'], sampled_token_ids=[[], [3, 4]])


@pytest.mark.parametrize("scheduled", [DECODE, WITH_BLOCKS, OF_NUMPY])
def test_a_step_that_continues_requests_is_kept_in_parts_and_says_the_same(scheduled: SchedulerOutput) -> None:
    line = StepReader().line(3, scheduled)
    assert line is not None
    assert line.text() == encode_line({"kind": "step", "step": 3, **step_fields(scheduled)})
    assert line.text() == encode_line(line.fields())


@pytest.mark.parametrize(
    "changes",
    [
        {"finished_req_ids": {"c"}},
        {"preempted_req_ids": {"c"}},
        {"scheduled_spec_decode_tokens": {"b": [1]}},
        {"scheduled_new_reqs": [NewRequestData(req_id="n", prompt_token_ids=[1], block_ids=[[1]])]},
        {"scheduled_cached_reqs": evolve(CACHED, new_token_ids=[[], [7]])},
        {"scheduled_cached_reqs": evolve(CACHED, resumed_req_ids={"b"}, all_token_ids={"b": [1]})},
        {"scheduled_cached_reqs": CachedRequestData(), "num_scheduled_tokens": {}},
        {"kv_connector_metadata": object()},
    ],
)
def test_a_step_that_does_more_is_not(changes: dict) -> None:
    assert StepReader().line(3, evolve(DECODE, **changes)) is None


def test_lines_of_equal_steps_share_who_takes_part_until_that_changes() -> None:
    reader = StepReader()
    later = evolve(DECODE, scheduled_cached_reqs=evolve(CACHED, num_computed_tokens=[8, 13]))
    swapped = evolve(DECODE, num_scheduled_tokens={"b": 3, 'quoted "ü" %d': 1})
    first, second, third = (reader.line(number, step) for number, step in enumerate((DECODE, later, swapped)))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.lineup is second.lineup
    assert list(third.fields()["num_scheduled_tokens"]) == ["b", 'quoted "ü" %d'], "order counts: it is that of rows"


def test_a_line_shares_no_list_with_scheduler_or_output() -> None:
    computed, tokens = [7], [[1]]
    scheduled = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(req_ids=["a"], num_computed_tokens=computed),
        num_scheduled_tokens={"a": 1},
    )
    step = StepReader().line(1, scheduled)
    output = OutputLine(1, None, ModelRunnerOutput(req_ids=["a"], sampled_token_ids=tokens), None, OutputWriter(0))
    assert step is not None
    computed[0] = 99
    tokens[0].clear()
    assert step.computed == [7]
    assert output.fields()["sampled_token_ids"] == [[1]]


def test_an_output_says_the_same_as_text_and_as_fields() -> None:
    writer = OutputWriter(100)
    stages = [(("one", 'per "cent" %s'), 150, [160, 185]), (("failed",), 200, []), (("last", "failed"), 210, [213])]
    for plan in (PLAN, PLAN, None, evolve(PLAN, should_ubatch=True)):
        for times in (None, stages):
            line = OutputLine(4, plan, OUTPUT, times, writer)
            assert json.loads(line.text()) == json.loads(encode_line(line.fields()))
    assert line.fields()["stages"] == [("one", 50, 10), ('per "cent" %s', 60, 25), ("last", 110, 3)]


class Kept:
    """A sink that keeps lines as they come."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def write(self, line: Line) -> None:
        self.lines.append(line)

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("times", [False, True])
def test_a_run_in_parts_reads_as_the_run_in_fields(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], tmp_path: Path, times: bool
) -> None:
    runner, sink = make_runner(), Kept()
    with Recorder(runner, sink, RecordingOptions(times=times)).start():
        driver = Driver(runner, 4)
        driver.run_random(wishes)
        driver.add(Wish("plain", (1, 2), 12, SamplingParams()))
        for count in (2, 1, 1, 1):
            driver.step({"plain": count})
    kinds = {type(line) for line in sink.lines}
    assert kinds == {dict, StepLine, OutputLine}
    assert [json.loads(text_of(line)) for line in sink.lines] == [
        json.loads(encode_line(fields_of(line))) for line in sink.lines
    ]


def test_a_book_kept_by_parts_is_the_book_kept_by_fields(make_runner: Callable[..., ModelRunner]) -> None:
    runner, sink = make_runner(), Kept()
    with Recorder(runner, sink, RecordingOptions()).start():
        driver = Driver(runner, 2)
        driver.add(*(Wish(name, (1, 2, 3), 30, SamplingParams(temperature=0)) for name in "abc"))
        driver.step(dict.fromkeys("abc", 3))
        for _ in range(20):
            driver.step(dict.fromkeys("abc", 1))
    by_parts, pairs = RequestBook(), 0
    for line, later in zip(sink.lines, [*sink.lines[1:], None], strict=True):
        if isinstance(line, StepLine) and isinstance(later, OutputLine):
            by_parts.continued(line, later)
            pairs += 1
        elif isinstance(line, dict) and line["kind"] == "step":
            assert isinstance(later, OutputLine)
            by_parts.requests = {
                data["req_id"]: RequestBook([{**data, "token_ids": data["prompt_token_ids"]}]).requests[data["req_id"]]
                for data in line["scheduled_new_reqs"]
            }
            by_parts.sampled(line["num_scheduled_tokens"], dict(zip(later.req_ids, later.tokens, strict=True)))
    assert pairs == 20
    for name, request in driver.requests.items():
        assert by_parts.requests[name].token_ids == list(request.tokens)
        assert by_parts.requests[name].block_ids == [list(ids) for ids in request.blocks]


def test_the_last_steps_are_in_the_file_when_a_failure_is_reported(
    make_runner: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    """The ring's file holds the steps that were kept in parts."""
    runner = make_runner()
    recorder = runner.record_failures(tmp_path, num_steps=4)
    assert isinstance(recorder, FailureRecorder)
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 60, SamplingParams(temperature=0)))
    driver.step({"a": 3})
    for _ in range(20):
        driver.step({"a": 1})

    def explode() -> None:
        raise ZeroDivisionError("now")

    runner.stages.insert(explode, after="forward", name="explode")
    with pytest.raises(Exception, match="explode"):
        driver.step({"a": 1})
    recording = read_recording(recorder.files[0])
    assert [step.number for step in recording.steps] == [19, 20, 21, 22]
    known = recording.state[0]["token_ids"]
    assert known == list(driver.requests["a"].tokens)[: len(known)]
    assert len(known) == 3 + 18


def test_a_file_makes_text_of_many_lines_and_loses_none(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    for number in range(1000):
        file.write({"kind": "settle", "step": number})
    file.close()
    file.write({"kind": "settle", "step": -1})
    file.close()
    lines = [json.loads(text) for text in (tmp_path / "lines").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1000))


def test_with_logprobs_or_errors_an_output_is_written_as_fields() -> None:
    table = LogprobsLists(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), np.zeros(1, np.int64), [0, 0, 1])
    assert tells_tokens_only(OUTPUT)
    assert not tells_tokens_only(evolve(OUTPUT, logprobs=table))
    assert not tells_tokens_only(evolve(OUTPUT, prompt_logprobs_dict={"b": table}))
    assert not tells_tokens_only(evolve(OUTPUT, request_errors={"b": ValueError("no")}))

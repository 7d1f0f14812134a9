"""What `twostroke watch` knows of a run, live and from a file, and how it shows it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from driver import GREEDY, Driver, Wish
from rich.console import Console
from twostroke.engine.cli_report import Report
from twostroke.engine.cli_watch import FollowedFile, WatchView, picture
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.recording import Recorder, RecordingOptions
from twostroke.engine.recording_reader import RecordingError
from twostroke.engine.watch import Snapshot, Watcher
from twostroke.fsm import StageFailed
from twostroke.stages.records import Batch


@pytest.fixture
def watched(make_runner: Callable[..., ModelRunner]) -> tuple[Driver, Watcher]:
    """A driver of a runner that is watched."""
    runner, watcher = make_runner(), Watcher()
    Recorder(runner, watcher, RecordingOptions()).start()
    return Driver(runner), watcher


def shown(snapshot: Snapshot, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=100, height=height)
    console.print(picture(snapshot, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_state_batch_and_blocks_follow_the_run(watched: tuple[Driver, Watcher]) -> None:
    driver, watcher = watched
    assert watcher.snapshot().state == "IDLE"
    driver.add(Wish("a", (1, 2, 3, 4, 5), 4, GREEDY), Wish("b", (6,), 4, GREEDY))
    output = driver.output({"a": 5, "b": 1})
    driver.runner.execute_model(output)
    now = watcher.snapshot()
    assert now.state == "FORWARDED"
    assert [(part.req_id, part.num_scheduled, part.is_decode) for part in now.batch] == [
        ("a", 5, False),
        ("b", 1, False),
    ]
    assert now.num_blocks == 3
    assert now.max_blocks == 39
    driver.launched(output, driver.runner.sample_tokens())
    driver.step({"a": 1})
    now = watcher.snapshot()
    assert (now.state, now.num_steps, now.num_tokens, now.num_live) == ("SAMPLED", 2, 3, 2)
    assert [(part.num_computed, part.num_tokens, part.is_decode) for part in now.batch] == [(5, 6, True)]
    assert (now.mode, now.num_scheduled, now.num_padded) == ("NONE", 1, 1)
    assert now.tokens_per_second > 0
    assert set(now.stage_seconds) == set(driver.runner.stages.names)
    driver.finish("a", "b")
    driver.step({})
    assert watcher.snapshot().num_blocks == 0


def test_failures_are_counted_and_named(watched: tuple[Driver, Watcher]) -> None:
    def explode(batch: Batch) -> None:
        raise ZeroDivisionError("a bug")

    driver, watcher = watched
    driver.runner.stages.insert(explode, after="update_states")
    driver.add(Wish("a", (1, 2), 4, GREEDY))
    with pytest.raises(StageFailed):
        driver.step({"a": 2})
    assert watcher.snapshot().num_failures == 1
    assert watcher.snapshot().last_failure == "step 1: explode: a bug"
    assert "1 failures, the last: step 1: explode: a bug" in shown(watcher.snapshot())


def test_speed_is_that_of_the_recorded_clock() -> None:
    watcher = Watcher()
    for step in range(1, 12):
        watcher.write({"kind": "step", "step": step, "num_scheduled_tokens": {"a": 1}})
        stages = [["forward", step * 500_000_000, 0]]
        watcher.write({"kind": "output", "step": step, "req_ids": ["a"], "sampled_token_ids": [[1]], "stages": stages})
    assert watcher.snapshot().tokens_per_second == pytest.approx(2.0)


def test_a_picture_fits_its_terminal(recorded_path: Path) -> None:
    watcher = Watcher()
    with FollowedFile(recorded_path) as lines:
        lines.feed(watcher)
    for height in (24, 40):
        text = shown(watcher.snapshot(), height)
        assert "twostroke watch" in text
        assert "forward" in text
        assert len(text.splitlines()) <= height


def test_an_empty_run_can_be_shown() -> None:
    assert "no plan yet" in shown(Watcher().snapshot())


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.touch()
    with path.open("w") as file, FollowedFile(path) as followed:
        file.write('{"kind":"settle","step":1}\n{"kind":"set')
        file.flush()
        assert [line["step"] for line in followed.new_lines()] == [1]
        assert list(followed.new_lines()) == []
        file.write('tle","step":2}\n')
        file.flush()
        assert [line["step"] for line in followed.new_lines()] == [2]
        file.write("nonsense\n")
        file.flush()
        with pytest.raises(RecordingError, match="none of a recording"):
            list(followed.new_lines())


def test_the_view_shows_the_engine_and_then_the_texts() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    watcher = Watcher()
    watcher.write(json.loads('{"kind":"step","step":1,"num_scheduled_tokens":{"my-request":1}}'))
    view = WatchView(["Once"], 8, watcher, console)
    with view:
        pass
    view.results([None])
    view.report(
        Report(model="tiny", load_seconds=1, run_seconds=1, num_steps=1, results=[], stage_seconds={"forward": 0.5})
    )
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "my-request" in text
    assert "Where a step's time goes" in text

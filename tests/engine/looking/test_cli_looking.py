"""The commands replay, timeline and watch, and the recording options of generate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from twostroke.engine import cli


def test_two_equal_recordings(recorded_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(recorded_path), "--against", str(recorded_path)]) == 0
    assert "no difference" in capsys.readouterr().out


def test_two_recordings_that_differ(recorded_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in recorded_path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "output":
            line["sampled_token_ids"] = [[63] if ids else [] for ids in line["sampled_token_ids"]]
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(map(json.dumps, lines)))
    assert cli.main(["replay", str(recorded_path), "--against", str(other)]) == 1
    out = capsys.readouterr().out
    assert "first difference: step" in out
    assert "token 63 instead of" in out
    assert "more" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--model"),
        (["--against", "no-such-file.jsonl"], "no-such-file"),
        (["--against", "{}", "--device", "cpu"], "leave out"),
        (["--stage", "sample"], "sample"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    recorded_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag.format(recorded_path) for flag in flags]
    assert cli.main(["replay", str(recorded_path), *flags]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint
    assert complaint.count("\n") == 1


def test_a_timeline_is_a_page_and_a_trace(
    recorded_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert cli.main(["timeline", str(recorded_path), "--html", str(html), "--trace", str(trace)]) == 0
    assert html.read_text().startswith("<!doctype html>")
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100
    assert "perfetto" in capsys.readouterr().out


def test_watch_shows_how_things_stand(recorded_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", "--once", str(recorded_path)]) == 0
    assert "twostroke watch" in capsys.readouterr().out


def test_no_recording_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text\nmore\n")
    for command in (["replay"], ["timeline"], ["watch", "--once"]):
        assert cli.main([*command, str(tmp_path / "a.txt")]) == 2
        assert str(tmp_path / "a.txt") in capsys.readouterr().err


@pytest.mark.model
def test_generate_records_and_the_recording_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    flags = ["--prompt", "Once upon a time", "--max-tokens", "4", "--plain", "--watch", "--record", str(path)]
    flags += ["--record-failures", str(tmp_path / "failures"), "--device", "cpu", "--dtype", "float32"]
    assert cli.main(["generate", *flags]) == 0
    assert not (tmp_path / "failures").exists()
    capsys.readouterr()
    assert cli.main(["replay", str(path), "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "no difference" in out
    assert "compared: 3 tokens" in out

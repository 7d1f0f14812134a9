"""The command line: exit codes, output with and without a terminal, and how fast it says what it can."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from twostroke.engine import cli, cli_generate
from twostroke.engine.cli_live import LiveView
from twostroke.engine.cli_report import OUTSIDE, Report
from twostroke.engine.cli_view import PlainView, bar, choose_view, one_line
from twostroke.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from twostroke.fsm import StageFailed, life_diagram, step_diagram


def output(text: str, *, tokens: int = 2, finished: bool = True) -> RequestOutput:
    completion = CompletionOutput(
        index=0, text=text, token_ids=(1,) * tokens, finish_reason="stop" if finished else None
    )
    return RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=(1, 2, 3),
        outputs=(completion,),
        finished=finished,
        metrics=RequestMetrics(arrival_time=1.0, first_token_time=1.25, finished_time=2.0),
        num_cached_tokens=1,
    )


@pytest.fixture
def report() -> Report:
    return Report(
        model="tiny",
        load_seconds=1.5,
        run_seconds=2.0,
        num_steps=4,
        results=[output("a"), output("b", tokens=6)],
        stage_seconds={"my_probe": 0.2, "sample": 0.1, "forward": 1.0, "update_states": 0.2, "idle_dispatch": 0.0001},
    )


@pytest.mark.parametrize(
    ("flags", "text"),
    [pytest.param([], step_diagram(), id="step"), pytest.param(["--life"], life_diagram(), id="life")],
)
def test_diagram(capsys: pytest.CaptureFixture[str], flags: list[str], text: str) -> None:
    assert cli.main(["diagram", *flags]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_help_and_diagram_need_no_torch() -> None:
    program = (
        "import sys\nfrom twostroke.engine.cli import main\n"
        "try:\n    main(['generate', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "main(['diagram'])\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--max-tokens" in done.stdout
    assert "stateDiagram" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--model", "no/such/folder.gguf"], "no/such/folder.gguf", id="model"),
        pytest.param(["--temperature", "-1"], "temperature", id="sampling"),
        pytest.param(["--max-tokens", "0"], "max_tokens", id="max_tokens"),
        pytest.param(["--num-threads", "0"], "num-threads", id="threads"),
        pytest.param(["--prompts-file", "no-such-file.txt"], "no-such-file.txt", id="file"),
        pytest.param(["--max-num-seqs", "0"], "max_num_seqs", id="config"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    if "--max-num-seqs" in arguments:
        monkeypatch.setattr(cli_generate, "build_runner", refuse_config)
    assert cli.main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("twostroke: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def refuse_config(config: Any) -> Any:
    """What a runner says to these sizes once it has read its model."""
    from twostroke.stages.specs import ModelSpec

    spec = ModelSpec(architecture="llama", vocab_size=9, hidden_size=8, max_position=16, attention_layers=())
    config.resolve(spec)


@pytest.mark.parametrize(
    ("flags", "is_async"), [pytest.param([], True, id="async"), pytest.param(["--sync"], False, id="sync")]
)
def test_sync_turns_asynchronous_scheduling_off(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], is_async: bool
) -> None:
    seen: list[bool] = []

    def note(config: Any) -> None:
        seen.append(config.async_scheduling)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_generate, "build_runner", note)
    assert cli.main(["generate", *flags]) == 130
    assert seen == [is_async]


def test_an_empty_prompts_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n")
    assert cli.main(["generate", "--prompts-file", str(file)]) == 2
    assert "holds no prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(StageFailed("forward", 3, ("r",), MemoryError("no\nroom")), 1, id="failure"),
        pytest.param(KeyboardInterrupt(), 130, id="interrupt"),
    ],
)
def test_failures_and_interrupts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(config: object) -> None:
        raise error

    monkeypatch.setattr(cli_generate, "build_runner", fail)
    assert cli.main(["generate"]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("twostroke: ")
    assert captured.err.count("\n") == 1


def test_report_figures(report: Report) -> None:
    summary = dict(report.summary())
    assert summary["tokens generated"] == "8 in 2.0 s"
    assert summary["prompts"] == "2 with 6 tokens (2 from the prefix cache)"
    assert summary["time to first token"] == "250 ms median, 250 ms longest"
    assert summary["tokens per second"] == "4.0"
    assert summary["steps"] == "4, 500.0 ms each"


def test_stages_come_in_the_order_they_run(report: Report) -> None:
    stages = report.stages()
    assert [stage.name for stage in stages] == ["update_states", "forward", "sample", "my_probe", OUTSIDE]
    assert (stages[1].ms, stages[1].share) == (250.0, 0.5)
    assert sum(stage.share for stage in stages) == pytest.approx(1.0, abs=1e-3)


def test_plain_lines(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    with PlainView(["first\nprompt", "second"]) as view:
        view.delta(1, output("two ", finished=False))
        view.delta(1, output("lines\nof text"))
        view.delta(0, output("one"))
    view.results(report.results)
    view.report(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["[1/2] second", "    two lines of text", "[2/2] first prompt", "    one"]
    assert any(line.startswith("forward") and "250.00" in line and "50.0%" in line for line in lines)


def test_live_view(report: Report) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    with LiveView(["first", "second"], 8, console) as view:
        view.delta(0, output("half of ", finished=False))
        view.delta(0, output("a text"))
        console.print(view._picture())
    view.results([output("half of a text"), None])
    view.report(report)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for piece in ("half of a text", "✓", "›", "4/8", "forward", "50.0%", "tokens per second"):
        assert piece in shown


def test_without_a_terminal_the_view_is_plain() -> None:
    assert isinstance(choose_view(["x"], 1, plain=False), PlainView)


def test_one_line_and_bar() -> None:
    assert one_line("a\n b") == "a b"
    assert one_line("abcdef", 4) == "abc…"
    assert (bar(0.0), bar(0.001), bar(0.5)) == ("", "▏", "█" * 12)


@pytest.mark.model
def test_generate_with_the_packaged_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads: list[int] = []  # the whole process would have fewer from here on
    monkeypatch.setattr(cli_generate.torch, "set_num_threads", threads.append)
    file = tmp_path / "prompts.txt"
    file.write_text("The capital of France is\n\nOne, two, three,\n")
    arguments = ["--temperature", "0", "--max-tokens", "4", "--num-threads", "1", "--device", "cpu"]
    assert cli.main(["generate", "--prompts-file", str(file), *arguments]) == 0
    assert threads == [1]
    out = capsys.readouterr().out
    assert "Paris" in out
    assert "four" in out
    for stage in ("update_states", "prepare_inputs", "dispatch", "ubatch_slice", "build_attn", "preprocess", "forward"):
        assert stage in out
    assert "8 in" in out

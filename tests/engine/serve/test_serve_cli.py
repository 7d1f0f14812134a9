"""The command ``twostroke serve``: a process of its own with the packaged model, and what it refuses to start with."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from attrs import frozen
from twostroke.engine import cli
from twostroke.engine.recording_reader import read_recording


@frozen
class Process:
    """A server that listens, and what it wrote to standard error before that."""

    popen: subprocess.Popen[str]
    url: str

    def end(self) -> tuple[int, list[str]]:
        """Exit code and the rest of its lines."""
        rest = self.popen.communicate(timeout=60)[1]
        return self.popen.returncode, rest.splitlines()


@pytest.fixture
def launch() -> Iterator[Callable[..., Process]]:
    """Starts ``twostroke serve``; what is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> Process:
        command = [sys.executable, "-m", "twostroke.engine.cli", "serve", "--port", "0", "--device", "cpu", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TWOSTROKE_API_KEY": ""}
        popen = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
        started.append(popen)
        assert popen.stderr is not None
        lines: list[str] = []
        for line in popen.stderr:
            lines.append(line)
            if found := re.search(r"serving .* on (http://\S+)", line):
                return Process(popen, found[1])
        raise AssertionError("".join(lines))

    yield begin
    for popen in started:
        if popen.poll() is None:
            popen.kill()
        popen.communicate()


@pytest.mark.model
def test_a_server_from_start_to_end(launch: Callable[..., Process]) -> None:
    process = launch("--served-model-name", "little", "--max-model-len", "512", "--drain-timeout", "1000")
    fields: Any = {"model": "little", "temperature": 0, "max_tokens": 24}
    fields["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(**fields).choices[0]
        assert "Paris" in (answer.message.content or "")
        assert answer.finish_reason == "stop"
        chunks = list(client.chat.completions.create(**fields, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    curl = shutil.which("curl")
    if curl is not None:
        body = json.dumps({**fields, "stream": True})
        command = [
            curl,
            "-sSN",
            f"{process.url}/v1/chat/completions",
            "-H",
            "content-type: application/json",
            "-d",
            body,
        ]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        events = [line.removeprefix("data: ") for line in printed.splitlines() if line]
        assert events[-1] == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert text == answer.message.content
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_raw())
        process.popen.send_signal(signal.SIGTERM)
        while not is_closed(process.url):
            time.sleep(0.02)
        assert process.popen.poll() is None  # it drains
        process.popen.send_signal(signal.SIGTERM)
        code, lines = process.end()
    assert code == 130, lines
    requests = [json.loads(line) for line in lines if '"request"' in line]
    assert [line["path"] for line in requests if line["status"] == 200][:2] == ["/v1/chat/completions"] * 2
    assert all(line["request_id"].startswith("req-") for line in requests)
    assert [json.loads(line)["message"] for line in lines if "in_flight" in line] == ["draining", "stopping at once"]


def is_closed(url: str) -> bool:
    """Whether nobody listens any more."""
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    return False


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(["--host", "0.0.0.0"], "--allow-public", id="public"),
        pytest.param(["--port", "99999"], "port", id="port"),
        pytest.param(["--model", "/no/such/folder"], "/no/such/folder", id="model"),
        pytest.param(["--num-threads", "0"], "--num-threads", id="threads"),
    ],
)
def test_what_cannot_be_served_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TWOSTROKE_API_KEY", raising=False)
    monkeypatch.setattr("twostroke.engine.serve.logs.set_up_logging", lambda *_: None)
    assert cli.main(["serve", *arguments]) == cli.BAD_INPUT
    assert complaint in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.engine.serve.logs.set_up_logging", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == cli.FAILED
    assert "use" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "twostroke.engine.serve.server", raising=False)
    assert cli.main(["serve"]) == cli.FAILED
    assert "pip install 'twostroke[serve]'" in capsys.readouterr().err


def test_reading_the_arguments_needs_neither_torch_nor_a_server() -> None:
    program = (
        "import sys\nfrom twostroke.engine.cli import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'torch', 'starlette', 'uvicorn', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--exit-on-fault" in done.stdout


FAILING_STAGE = '''
from twostroke.stages.records import Batch


class FailsAtFive:
    """Raises where a request has computed five tokens."""

    def __call__(self, batch: Batch) -> None:
        if 5 in batch.num_computed_tokens:
            raise ZeroDivisionError("five")
'''


@pytest.mark.model
def test_a_step_that_fails_leaves_a_recording_and_the_server_goes_on(
    launch: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_stage.py").write_text(FAILING_STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = tmp_path / "failures"
    process = launch(
        *("--stage", "after:build_attn=failing_stage:FailsAtFive", "--max-model-len", "256"),
        *("--record-failures", str(folder), "--redact"),
    )
    body = {"prompt": list(range(20, 23)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    assert httpx.post(f"{process.url}/v1/completions", json=body, timeout=60).status_code == 500
    body["max_tokens"] = 2
    assert httpx.post(f"{process.url}/v1/completions", json=body, timeout=60).status_code == 200
    process.popen.send_signal(signal.SIGTERM)
    assert process.end()[0] == 0
    (path,) = folder.iterdir()
    recording = read_recording(path)
    assert recording.is_redacted
    failed = recording.steps[-1].failure
    assert failed is not None
    assert (failed["type"], failed["error"]) == ("ZeroDivisionError", "five")

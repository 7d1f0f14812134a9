"""What happens around requests: clients that leave, limits, pauses, sleep, faults, and the end of the server."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from twostroke.engine.serve.logs import JsonFormatter, TextFormatter
from twostroke.engine.serve.server import EXIT_FAULT
from twostroke.stages.records import Batch

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True, "temperature": 0}


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails after ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def text_of(http: httpx.Client, body: dict[str, Any]) -> str:
    """The text of a completion."""
    return http.post("/v1/completions", json=body).json()["choices"][0]["text"]


class Brake:
    """A stage that holds every step until it is let go; by itself from call ``hold_at`` on."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.error: BaseException | None = None
        self.hold_at, self.num_calls = 0, 0

    def __call__(self, batch: Batch) -> None:
        self.num_calls += 1
        if self.num_calls == self.hold_at:
            self.is_open.clear()
        assert self.is_open.wait(20)
        if self.error is not None:
            raise self.error


@pytest.fixture
def braked(start: Callable[..., Any], stack: ExitStack) -> Callable[..., tuple[Any, Brake]]:
    """A server and the brake of its engine."""

    def begin(**settings: Any) -> tuple[Any, Brake]:
        served, brake = start(stack, **settings), Brake()
        served.loop.between_steps(lambda: served.loop.runner.stages.insert(brake, after="prepare_inputs"))
        stack.callback(brake.is_open.set)
        return served, brake

    return begin


def request_head(length: int) -> bytes:
    """Of a completion, by hand."""
    lines = ("POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {length}", "", "")).encode()


def open_stream(served: Any, body: dict[str, Any], lines: int = 1) -> socket.socket:
    """A connection on which an answer has begun: so many events were read."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", served.background.server.port), timeout=20)
    connection.sendall(request_head(len(data)) + data)
    seen = b""
    while seen.count(b"data: ") < lines:
        piece = connection.recv(4096)
        assert piece, seen
        seen += piece
    return connection


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_ends_its_requests(braked: Callable[..., Any], n: int) -> None:
    served, brake = braked()
    connection = open_stream(served, {**LONG, "n": n, "temperature": 1})
    brake.is_open.clear()
    connection.close()
    wait_until(lambda: served.loop.num_live_requests == 0)  # within the step that is held
    assert served.service.calls.num_sequences == 0
    brake.is_open.set()
    wait_until(lambda: not served.loop.scheduler.has_work())


def test_a_client_that_leaves_while_it_waits_ends_its_request(braked: Callable[..., Any]) -> None:
    served, brake = braked()
    brake.is_open.clear()
    data = json.dumps({**LONG, "stream": False}).encode()
    with socket.create_connection(("127.0.0.1", served.background.server.port)) as connection:
        connection.sendall(request_head(len(data)) + data)
        wait_until(lambda: served.loop.num_live_requests == 1)
    wait_until(lambda: served.loop.num_live_requests == 0)


def test_a_full_queue_is_told_to_come_back(braked: Callable[..., Any]) -> None:
    served, brake = braked(engine={"max_num_seqs": 2}, max_queue=1)
    brake.is_open.clear()
    with served.http() as http, ExitStack() as waiting:
        for _ in range(3):
            thread = threading.Thread(target=lambda: http.post("/v1/completions", json={"prompt": "a"}))
            thread.start()
            waiting.callback(thread.join)
        wait_until(lambda: served.service.calls.num_sequences == 3)
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        never = http.post("/v1/completions", json={"prompt": "a", "n": 4})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        brake.is_open.set()
    wait_until(lambda: served.service.calls.num_sequences == 0)
    with served.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_so_much_time(braked: Callable[..., Any], stream: bool) -> None:
    served, brake = braked(request_timeout_s=0.2)
    brake.is_open.clear()
    with served.http() as http:
        answer = http.post("/v1/completions", json={**LONG, "stream": stream})
        assert answer.status_code == (200 if stream else 504)
        error = answer.json() if not stream else json.loads(answer.text.removeprefix("data: "))
        assert error["error"]["code"] == "timeout"
    wait_until(lambda: served.loop.num_live_requests == 0)


def test_a_reader_that_stops_reading_holds_up_nobody(start: Callable[..., Any], stack: ExitStack) -> None:
    served = start(stack, request_timeout_s=2)
    slow = open_stream(served, {**LONG, "n": 6, "temperature": 1, "logprobs": 20})
    with served.openai() as client:
        for _ in range(3):
            assert client.completions.create(model="tiny", prompt="b", max_tokens=3).choices[0].finish_reason
    wait_until(lambda: served.service.calls.num_sequences == 0)  # its time ran out, however far the engine came
    wait_until(lambda: served.loop.num_live_requests == 0)
    slow.close()


@pytest.mark.parametrize("by", ["answer", "request"])
def test_requests_are_aborted_by_the_id_of_their_answer_or_their_own(braked: Callable[..., Any], by: str) -> None:
    served, brake = braked()
    with served.openai() as client, served.http() as http:
        fields: Any = {"prompt": "a", "max_tokens": 500, "stream": True, "extra_body": {"ignore_eos": True}}
        brake.hold_at = 5
        stream = client.completions.create(model="tiny", extra_headers={"x-request-id": "mine"}, **fields)
        name = {"answer": next(iter(stream)).id, "request": "mine"}[by]
        answer = http.post("/abort_requests", json={"request_ids": [name, "nobody"]}).json()
        assert answer == {"aborted": [name], "unknown": ["nobody"]}
        brake.is_open.set()
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"


def test_pause_and_resume_lose_no_token(served: Any, http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    whole = text_of(http, body)
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(text_of(http, body))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert http.post("/pause").json() == {"status": "paused", "mode": "keep"}
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 503
    assert "resume" in http.get("/ready").json()["reason"]
    steps = served.loop.num_steps
    assert http.post("/resume").json() == {"status": "running"}
    for thread in threads:
        thread.join()
    assert texts == [whole] * 4
    assert served.loop.num_steps > steps
    assert http.get("/ready").status_code == 200


def test_sleep_and_wake_up_with_requests_in_flight(served: Any, http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    whole = text_of(http, body)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(text_of(http, body)))
    thread.start()
    wait_until(lambda: served.loop.num_live_requests == 1)
    assert http.post("/sleep?level=1").json() == {"status": "asleep", "level": 1}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert "wake_up" in http.get("/ready").json()["reason"]
    assert http.post("/sleep?level=2").json()["error"]["code"] == "invalid_value"  # nothing to load it from
    assert http.post("/wake_up?tags=kv_cache").json() == {"status": "awake"}
    thread.join()
    assert texts == [whole]


def test_health_and_what_it_says_of_the_engine(http: httpx.Client) -> None:
    health = http.get("/health").json()
    assert (health["status"], health["runner"], health["loop"]) == ("ok", "READY", "RUNNING")
    assert http.get("/version").json()["version"]
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 512


@pytest.mark.parametrize("exit_on_fault", [False, True])
def test_an_engine_that_cannot_go_on(braked: Callable[..., Any], exit_on_fault: bool) -> None:
    served, brake = braked(exit_on_fault=exit_on_fault)
    brake.is_open.clear()
    with served.openai() as client, served.http() as http:
        errors: list[Exception] = []

        def ask() -> None:
            try:
                client.completions.create(model="tiny", prompt="a")
            except openai.APIError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: served.loop.num_live_requests == 1)
        brake.error = KeyboardInterrupt("not an error that a step can take back")
        brake.is_open.set()
        thread.join()
        assert isinstance(errors[0], openai.APIStatusError)
        assert errors[0].status_code == 503
        if exit_on_fault:
            served.background.join()
            assert served.background.server.exit_code == EXIT_FAULT
        else:
            health = http.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "fault"
            assert http.get("/ready").status_code == 503
            refused = http.post("/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_down")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stage_that_fails_fails_its_request_alone(braked: Callable[..., Any], stream: bool, n: int) -> None:
    served, brake = braked()
    brake.error = ValueError("a fault of this step")
    with served.http() as http:
        failed = http.post("/v1/completions", json={"prompt": "a", "stream": stream, "n": n})
        assert failed.status_code == (200 if stream else 500)
        (line,) = [line for line in failed.text.splitlines() if line]
        error = json.loads(line.removeprefix("data: "))["error"]
        assert error["code"] == "request_failed"
        assert "a fault of this step" in error["message"]
        brake.error = None
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert http.get("/health").status_code == 200


def test_draining_lets_requests_end_and_takes_no_new_ones(braked: Callable[..., Any]) -> None:
    served, brake = braked()
    stream = open_stream(served, {**LONG, "max_tokens": 40})
    brake.is_open.clear()
    served.background.server.stop()
    brake.is_open.set()
    rest = b""
    while piece := stream.recv(4096):
        rest += piece
    assert b'"finish_reason":"length"' in rest
    assert b"data: [DONE]" in rest
    served.background.join()
    assert served.background.server.exit_code == 0
    with pytest.raises(httpx.ConnectError), served.http() as http:
        http.get("/health")


def test_what_is_not_done_when_draining_ends_is_told_why(braked: Callable[..., Any]) -> None:
    served, brake = braked(drain_timeout_s=0.2)
    stream = open_stream(served, LONG)
    brake.is_open.clear()
    served.background.server.stop()
    rest = b""
    while piece := stream.recv(4096):
        rest += piece
    assert b'"code":"shutting_down"' in rest
    brake.is_open.set()
    served.background.join()
    assert served.loop.num_live_requests == 0


def test_stopping_twice_stops_at_once(braked: Callable[..., Any]) -> None:
    served, brake = braked(drain_timeout_s=1000)
    stream = open_stream(served, LONG)
    brake.is_open.clear()
    served.background.server.stop()
    served.background.server.stop()
    served.background.join()
    assert served.background.server.exit_code == 130
    stream.close()
    wait_until(lambda: served.loop.num_live_requests == 0)


def test_the_log_has_a_line_a_request(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "ignore_eos": True}

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if getattr(record, "facts", {}).get("request_id") == "mine-1"]

    with caplog.at_level("INFO", logger="twostroke.engine.serve"):
        http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
        wait_until(lambda: bool(lines()))  # the answer is there a moment before its line
    (line,) = lines()
    facts = line.facts  # pyright: ignore[reportAttributeAccessIssue]
    assert (facts["method"], facts["path"], facts["status"]) == ("POST", "/v1/completions", 200)
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (3, 2)
    assert json.loads(JsonFormatter().format(line))["request_id"] == "mine-1"
    assert "request_id=mine-1" in TextFormatter().format(line)
    line.facts = {"path": "/a\n2026 a line of its own"}
    assert "\n" not in TextFormatter().format(line)


def test_nothing_waits_for_a_step_or_for_a_long_prompt(
    braked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, brake = braked()
    may_encode, is_encoding = threading.Event(), threading.Event()
    tokenizer = served.service.model.tokenizer
    encode = tokenizer.encode

    def slowly(text: str, **options: Any) -> list[int]:
        if text == "long":
            is_encoding.set()
            assert may_encode.wait(20)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slowly)
    brake.is_open.clear()
    with served.http() as http, ThreadPoolExecutor() as users:
        answers = [users.submit(http.post, "/v1/completions", json={"prompt": text}) for text in ("short", "long")]
        wait_until(lambda: served.loop.num_live_requests == 1)  # its step is held
        assert is_encoding.wait(10)
        for path in ("/health", "/metrics", "/v1/models", "/ready"):
            assert http.get(path).status_code == 200
        assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
        may_encode.set()
        wait_until(lambda: served.loop.num_live_requests == 2)  # taken in while the step goes on
        assert not any(answer.done() for answer in answers)
        brake.is_open.set()
        assert [answer.result(20).status_code for answer in answers] == [200, 200]


def test_a_pause_that_waits_can_be_taken_back(braked: Callable[..., Any]) -> None:
    served, brake = braked()
    with served.http() as http, ThreadPoolExecutor() as users:
        answer = users.submit(http.post, "/v1/completions", json={**LONG, "stream": False, "max_tokens": 50})
        wait_until(lambda: served.loop.num_live_requests == 1)
        brake.is_open.clear()
        pauses = [users.submit(http.post, "/pause?mode=wait") for _ in range(3)]
        wait_until(lambda: served.loop._pause == "wait")
        assert http.post("/resume").status_code == 200
        brake.is_open.set()
        assert [pause.result(20).status_code for pause in pauses] == [200] * 3
        served.loop.resume()
        assert answer.result(20).json()["usage"]["completion_tokens"] == 50


def test_pauses_that_wait_keep_nobody_from_ending_them(braked: Callable[..., Any]) -> None:
    served, brake = braked()
    with served.http() as http, ThreadPoolExecutor(20) as users:
        answer = users.submit(http.post, "/v1/completions", json={**LONG, "stream": False, "max_tokens": 50})
        wait_until(lambda: served.loop.num_live_requests == 1)
        brake.is_open.clear()
        pauses = [users.submit(http.post, "/pause?mode=wait") for _ in range(16)]
        wait_until(lambda: served.service._room._value == 0)
        refused = http.post("/sleep")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_waiting")
        assert refused.headers["retry-after"] == "1"
        assert http.post("/resume").status_code == 200
        assert [pause.result(20).status_code for pause in pauses] == [200] * 16
        pauses = [users.submit(http.post, "/pause?mode=wait") for _ in range(4)]
        wait_until(lambda: served.loop._pause == "wait")
        pauses.append(users.submit(http.post, "/pause?mode=abort"))
        wait_until(lambda: served.loop.num_live_requests == 0)  # though the step is held and others wait
        brake.is_open.set()
        assert [pause.result(20).status_code for pause in pauses] == [200] * 5
        assert answer.result(20).json()["choices"][0]["finish_reason"] == "abort"
        assert http.post("/resume").status_code == 200

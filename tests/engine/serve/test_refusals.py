"""Bad requests: each is told what is wrong with which field, in OpenAI's shape, and nothing of it stays behind."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from twostroke.engine.serve.config import InvalidServeConfig, ServeConfig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED_G = {"type": "function", "function": {"name": "g"}}
CALL = {"function": {"name": "f", "arguments": "{}"}}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

BAD: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, "{", None, "invalid_json"),
    (COMPLETIONS, "[1]", None, "invalid_json"),
    (COMPLETIONS, '{"prompt": "\\ud800"}', None, "invalid_json"),
    (COMPLETIONS, '{"prompt": "x", "temperature": NaN}', "temperature", "invalid_value"),
    (COMPLETIONS, {}, "prompt", "missing_field"),
    (COMPLETIONS, {"prompt": []}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [257]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": "a" * 512}, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "a" * 40000}, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 512}, "max_tokens", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "n": True}, "n", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "n": 17}, "n", "invalid_value"),
    (COMPLETIONS, {"prompt": ["a"] * 64, "n": 16}, "n", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "unsupported_field"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", "unsupported_field"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1, "05": -1}}, "logit_bias", "invalid_value"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "echo": True, "prompt_logprobs": 1},
        "prompt_logprobs",
        "invalid_value",
    ),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [256], "min_tokens": 2}, None, "unsatisfiable"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "bad_words": [""]}, "bad_words[0]", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 20}, "min_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "unknown_field"),
    (COMPLETIONS, {"prompt": "a", "model": "gpt"}, "model", "model_not_found"),
    (COMPLETIONS, {"prompt": "a", "guided_regex": "a+"}, "guided_regex", "unsupported_field"),
    (COMPLETIONS, {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
    (
        COMPLETIONS,
        {"prompt": "a", "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_field",
    ),
    (CHATS, {"messages": []}, "messages", "invalid_value"),
    (CHATS, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "invalid_value"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", "missing_field"),
    (
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "invalid_value",
    ),
    (CHATS, {**CHAT, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHATS, {**CHAT, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "invalid_value"),
    (CHATS, {**CHAT, "functions": []}, "functions", "unsupported_field"),
    (CHATS, {**CHAT, "tool_choice": "auto"}, "tool_choice", "invalid_value"),
    (CHATS, {**CHAT, "tools": [TOOL, TOOL]}, "tools", "invalid_value"),
    (CHATS, {**CHAT, "tools": [TOOL], "tool_choice": "required"}, "tools", "unsupported_field"),
    (CHATS, {**CHAT, "tools": [TOOL], "tool_choice": NAMED_G}, "tool_choice", "invalid_value"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "invalid_value"),
    (CHATS, {**CHAT, "max_tokens": 600}, "max_tokens", "context_length_exceeded"),
    ("/tokenize", {}, "prompt", "invalid_value"),
    ("/tokenize", {"messages": [{}]}, "messages[0].role", "missing_field"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a", "junk": 1}]}, "messages[0].junk", "unknown_field"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "missing_field"),
    ("/tokenize", {**CHAT, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "invalid_value"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "invalid_value"),
    ("/detokenize", {"tokens": [300]}, "tokens", "invalid_value"),
    ("/abort_requests", {"request_ids": [1]}, "request_ids[0]", "invalid_value"),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_bad_body_names_its_field(
    http: httpx.Client, served: Any, path: str, body: Any, param: str | None, code: str
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"]
    assert error["type"] == ("not_found_error" if code == "model_not_found" else "invalid_request_error")
    assert served.service.calls.num_sequences == 0


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        pytest.param("GET", "/nothing", 404, "not_found", id="unknown_path"),
        pytest.param("GET", COMPLETIONS, 405, "method_not_allowed", id="wrong_method"),
        pytest.param("POST", "/health", 405, "method_not_allowed", id="post_to_health"),
        pytest.param("GET", "/v1/models/other", 404, "model_not_found", id="unknown_model"),
        pytest.param("POST", "/pause?mode=never", 400, "invalid_value", id="pause_mode"),
        pytest.param("POST", "/sleep?level=7", 400, "invalid_value", id="sleep_level"),
        pytest.param("POST", "/wake_up?tags=dreams", 400, "invalid_value", id="wake_tags"),
        pytest.param("GET", "/health?now=1", 400, "unknown_field", id="unknown_query"),
        pytest.param("POST", "/pause?mode=keep&mode=abort", 400, "invalid_value", id="pause_twice"),
        pytest.param("POST", "/sleep?level=1&level=2", 400, "invalid_value", id="sleep_twice"),
    ],
)
def test_every_refusal_has_the_same_shape(http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("path", ["/pause", "/resume", "/sleep", "/wake_up"])
def test_settings_in_a_body_that_nobody_reads_are_refused(http: httpx.Client, served: Any, path: str) -> None:
    answer = http.post(path, json={"level": 2, "mode": "abort"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unexpected_body")
    assert not served.loop.is_paused
    assert http.get("/ready").status_code == 200
    if path in ("/resume", "/wake_up"):
        assert http.post(path, json={}).status_code == 200


def test_parts_that_cannot_wake_are_named(http: httpx.Client) -> None:
    error = http.post("/wake_up?tags=weights&tags=dreams").json()["error"]
    assert error["param"] == "tags"
    assert "dreams" in error["message"]


def test_fields_that_change_nothing_are_named_in_a_header(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "user": "me", "metadata": {"a": 1}})
    assert answer.headers["x-twostroke-ignored"] == "user, metadata"
    assert "x-twostroke-ignored" not in http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).headers


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"\u00e9\u0144": 1}}, "chat_template_kwargs.\\xe9\\u0144"),
        ({"messages": [{"role": "user", "content": "a", "name": "b", "reasoning_content": ""}]}, "messages.name"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}], "user": "me"}, "user"),
    ],
)
def test_what_the_chat_template_leaves_out_is_named(http: httpx.Client, fields: Any, ignored: str) -> None:
    answer = http.post(CHATS, json={**CHAT, "max_tokens": 1, **fields})
    assert answer.status_code == 200
    assert answer.headers.get("x-twostroke-ignored") == ignored


def test_a_body_must_say_that_it_is_json_and_be_small_enough(http: httpx.Client) -> None:
    assert http.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert http.post(COMPLETIONS, content=b"{}").status_code == 415
    big = b'{"prompt": "' + b"a" * (8 * 2**20) + b'"}'
    headers = {"content-type": "application/json"}
    assert http.post(COMPLETIONS, content=big, headers=headers).status_code == 413
    chunks = (big[start : start + 2**20] for start in range(0, len(big), 2**20))
    assert http.post(COMPLETIONS, content=chunks, headers=headers).json()["error"]["code"] == "body_too_large"


def test_a_body_that_does_not_arrive_is_given_up(start: Callable[..., Any], stack: ExitStack) -> None:
    served = start(stack, body_timeout_s=0.1)
    with socket.create_connection(("127.0.0.1", served.background.server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b'content-length: 100\r\n\r\n{"prompt'
        )
        assert b"408" in connection.recv(4096).split(b"\r\n")[0]


def test_a_key_is_needed_where_there_is_one(start: Callable[..., Any], stack: ExitStack) -> None:
    served = start(stack, api_keys=["first", "second"])
    with served.http() as http:
        for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "Basic first"}):
            answer = http.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert http.get("/metrics").status_code == 401
        assert http.get("/health").status_code == 200
    with served.openai(api_key="second") as client:
        assert client.models.list().data[0].id == "tiny"


def test_other_peoples_pages_are_kept_out(http: httpx.Client, start: Callable[..., Any], stack: ExitStack) -> None:
    assert (
        http.get("/v1/models", headers={"origin": "https://evil.example"}).json()["error"]["code"] == "origin_refused"
    )
    assert http.get("/v1/models", headers={"host": "evil.example"}).json()["error"]["code"] == "host_refused"
    own = f"{http.base_url.scheme}://{http.base_url.netloc.decode()}"
    assert http.get("/v1/models", headers={"origin": own}).status_code == 200
    page = "https://chat.example"
    with start(stack, allowed_origins=[page]).http() as other:
        answer = other.get("/v1/models", headers={"origin": page})
        assert answer.headers["access-control-allow-origin"] == page
        preflight = {"origin": page, "access-control-request-method": "POST"}
        assert other.options(COMPLETIONS, headers=preflight).status_code == 200


@pytest.mark.parametrize("origin", ["http://[::1", "http://]", "null", "", "//"])
def test_an_origin_that_is_none_is_refused(http: httpx.Client, origin: str) -> None:
    answer = http.get("/health", headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_refused")


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        pytest.param({"host": "0.0.0.0"}, "host", id="public_without_key"),
        pytest.param({"host": "my-machine"}, "host", id="name_without_key"),
        pytest.param({"port": 70000}, "port", id="port"),
        pytest.param({"api_keys": [""]}, "api_keys", id="empty_key"),
        pytest.param({"request_timeout_s": float("nan")}, "request_timeout_s", id="nan"),
        pytest.param({"max_queue": True}, "max_queue", id="bool"),
    ],
)
def test_settings_that_are_not_safe_are_refused(settings: dict[str, Any], setting: str) -> None:
    with pytest.raises(InvalidServeConfig) as refused:
        ServeConfig(**settings)
    assert refused.value.setting == setting


def test_public_addresses_need_a_key_or_a_flag() -> None:
    assert not ServeConfig(host="0.0.0.0", api_keys=["key"]).is_local
    assert not ServeConfig(host="0.0.0.0", allow_public=True).is_local
    assert ServeConfig(host="::1").is_local
    assert "key" not in repr(ServeConfig(api_keys=["key-of-mine"])).replace("api_keys", "")

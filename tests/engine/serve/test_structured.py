"""Structured output and tools over HTTP: what comes out has the form that was asked for, and bad forms are refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from twostroke.engine.serve.tools import ToolUse

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "celsius": {"type": "boolean"}},
    "required": ["city", "celsius"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def constrained(start: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    """A client of a server whose loop has a grammar provider; at the end nothing may be left."""
    pytest.importorskip("xgrammar")
    with ExitStack() as opened:
        served = start(opened, grammar=True)
        with served.openai() as client:
            yield client
        assert served.loop.num_live_requests == 0
        assert served.service.calls.num_sequences == 0


def is_weather(text: str | None) -> bool:
    """Whether a text is what ``SCHEMA`` describes."""
    value = json.loads(text or "")
    return (
        value.keys() == {"city", "celsius"} and value["city"] in ("Paris", "Rome") and value["celsius"] in (True, False)
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema(constrained: openai.OpenAI, stream: bool) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    fields: Any = {"model": "tiny", "messages": MESSAGES, "response_format": response_format, "n": 3}
    if stream:
        texts = [""] * 3
        for chunk in constrained.chat.completions.create(**fields, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        choices = constrained.chat.completions.create(**fields).choices
        assert [choice.finish_reason for choice in choices] == ["stop"] * 3
        texts = [choice.message.content or "" for choice in choices]
    assert all(map(is_weather, texts)), texts


def test_other_forms(constrained: openai.OpenAI) -> None:
    def text(**form: Any) -> str:
        answer = constrained.completions.create(model="tiny", prompt="x", max_tokens=60, extra_body=form)
        return answer.choices[0].text

    assert re.fullmatch(r"[a-c]{3}-\d{2}", text(guided_regex=r"[a-c]{3}-\d{2}"))
    assert text(guided_choice=["yes", "no"]) in ("yes", "no")
    assert text(guided_grammar='root ::= "a" [0-9] "z"')[::2] == "az"
    assert is_weather(text(guided_json=SCHEMA))


@pytest.mark.parametrize(
    ("form", "param"),
    [
        pytest.param({"guided_json": {"type": "no such type"}}, "guided_json", id="schema"),
        pytest.param({"guided_regex": "(["}, "guided_regex", id="regex"),
        pytest.param({"guided_grammar": "nothing"}, "guided_grammar", id="grammar"),
        pytest.param({"guided_choice": [""]}, "guided_choice", id="choice"),
    ],
)
def test_what_cannot_be_compiled_is_refused(constrained: openai.OpenAI, form: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        constrained.completions.create(model="tiny", prompt="x", extra_body=form)
    assert refused.value.param == param
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        pytest.param({"guided_grammar": "root ::= root"}, id="no_text"),
        pytest.param({"guided_grammar": 'root ::= "a" dead\ndead ::= dead'}, id="no_end"),
        pytest.param({"guided_choice": ["a"], "min_tokens": 5}, id="min_tokens"),
        pytest.param({"guided_choice": ["a"], "allowed_token_ids": [1]}, id="allowed_token_ids"),
    ],
)
def test_what_no_text_can_be_is_the_clients_fault(constrained: openai.OpenAI, form: Any, stream: bool) -> None:
    def ask() -> None:
        answer = constrained.completions.create(
            model="tiny", prompt="a", max_tokens=8, n=2, stream=stream, extra_body=form
        )
        for _ in answer if stream else ():
            pass

    with pytest.raises(openai.APIError) as caught:
        ask()
    assert caught.value.code == "unsatisfiable"
    assert caught.value.type == "invalid_request_error"
    assert getattr(caught.value, "status_code", 400) == 400


def test_without_xgrammar_the_extra_is_named(
    start: Callable[..., Any], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with start(stack, grammar=True).openai() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="x", extra_body={"guided_regex": "a"})
        assert (refused.value.param, refused.value.code) == ("guided_regex", "unsupported_field")
        assert "twostroke[serve]" in str(refused.value)
        plain = client.completions.create(model="tiny", prompt="x", extra_body={"ignore_eos": True})
        assert plain.choices[0].finish_reason == "length"


def test_a_tool_by_name(constrained: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, CLOCK], "tool_choice": NAMED}
    choice = constrained.chat.completions.create(**fields).choices[0]
    (call,) = choice.message.tool_calls or [None]
    assert call is not None
    assert call.type == "function"
    assert call.function.name == "weather"
    assert is_weather(call.function.arguments)
    assert choice.message.content is None
    arguments, names = "", []
    for chunk in constrained.chat.completions.create(**fields, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.function is not None
            arguments += piece.function.arguments or ""
            names += [piece.function.name] if piece.function.name else []
    assert is_weather(arguments)
    assert names == ["weather"]


@pytest.mark.parametrize("stream", [False, True])
def test_some_tool_is_required(constrained: openai.OpenAI, stream: bool) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, CLOCK], "tool_choice": "required"}
    for seed in range(4):
        if stream:
            chunks = list(constrained.chat.completions.create(**fields, seed=seed, stream=True))
            (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
            reason = chunks[-1].choices[0].finish_reason
        else:
            choice = constrained.chat.completions.create(**fields, seed=seed).choices[0]
            (call,), reason = choice.message.tool_calls or [Any], choice.finish_reason
        assert reason == "tool_calls"
        function: Any = call.function  # pyright: ignore[reportAttributeAccessIssue]
        assert is_weather(function.arguments) if function.name == "weather" else json.loads(function.arguments) == {}


def test_a_call_and_its_answer_are_part_of_the_next_prompt(constrained: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = constrained.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
    rendered = f'"arguments": {json.dumps({"city": "Rome"})}'
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > len(rendered) + len(MESSAGES[0]["content"])


def read(mode: Any, *pieces: str, reason: str = "stop") -> tuple[str, list[tuple[str, Any]], str]:
    """Content, calls and finish reason that a reader makes of a text in pieces."""
    reader = ToolUse(mode=mode, name="weather").reader()
    deltas = [delta for piece in pieces for delta in reader.push(piece)]
    rest, shown = reader.finish(reason)
    deltas += rest
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    return content, [(call["name"], json.loads(call["arguments"])) for call in calls], shown


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "a > b"}}\n</tool_call>'
NO_CALL = "<tool_call>not JSON</tool_call>!"
WANTED = ("weather", {"city": "a > b"})


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "result"),
    [
        pytest.param("just text > and < signs", ("just text > and < signs", [], "stop"), id="text"),
        pytest.param(CALL, ("", [WANTED], "tool_calls"), id="call"),
        pytest.param(f"so: {CALL}\n{CALL} end", ("so: \n end", [WANTED, WANTED], "tool_calls"), id="two"),
        pytest.param(CALL[: -len("</tool_call>")], ("", [WANTED], "tool_calls"), id="unclosed"),
        pytest.param(
            "<tool_call>not JSON</tool_call>!", ("<tool_call>not JSON</tool_call>!", [], "stop"), id="no_call"
        ),
        pytest.param("a <tool_cal", ("a <tool_cal", [], "stop"), id="begun"),
    ],
)
def test_calls_are_found_in_text_however_it_is_cut(text: str, result: Any, size: int) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read("auto", *pieces) == result


def test_calls_that_were_cut_off_stay_text() -> None:
    assert read("required", '{"name": "wea', reason="length") == ('{"name": "wea', [], "length")
    assert read("auto", '<tool_call>{"name"', reason="length") == ('<tool_call>{"name"', [], "length")
    assert read("none", "text") == ("text", [], "stop")

"""A stream, put together, is the whole answer: for both endpoints and any mixture of parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twostroke.engine.serve.token_texts import TextLength

CUT_CHARACTERS = [("c3", "a9", [0, 0, 1]), ("c3", "61", [0, 1, 2]), ("e2", "c3", [0, 1, 2])]
PARAMETERS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**63)},
    optional={
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0, 0.7, 1, 2]),
        "top_p": st.sampled_from([0.5, 1]),
        "top_k": st.sampled_from([-1, 0, 5]),
        "max_tokens": st.integers(1, 24),
        "stop": st.lists(st.sampled_from(["a", "e", "ab", "0", "\u00e9", "}", "\x00"]), min_size=1, max_size=3),
        "stop_token_ids": st.lists(st.integers(0, 255), max_size=4),
        "min_tokens": st.just(1),
        "include_stop_str_in_output": st.booleans(),
        "presence_penalty": st.sampled_from([-1, 0, 2]),
        "repetition_penalty": st.sampled_from([1, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, 256).map(str), st.floats(-100, 100, width=32), max_size=3),
        "bad_words": st.just(["a"]),
    },
)
PROMPTS = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
    st.lists(st.integers(0, 255), min_size=1, max_size=12),
    st.lists(st.sampled_from(["one", "two", "\u20ac"]), min_size=1, max_size=3),
)
QUIET = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every chunk; the last line must say that it was the last."""
    answer = http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    *lines, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert last == "[DONE]", answer.text
    return [json.loads(line) for line in lines]


def gathered(chunks: list[dict[str, Any]], count: int, text_of: Callable[[Any], str]) -> list[dict[str, Any]]:
    """Text, ends and log probabilities of each choice."""
    choices = [{"text": "", "ends": [], "tokens": [], "token_logprobs": []} for _ in range(count)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            mine = choices[choice["index"]]
            assert not mine["ends"], "something came after the end"
            mine["text"] += text_of(choice)
            if choice["finish_reason"]:
                mine["ends"].append((choice["finish_reason"], choice["stop_reason"]))
            logprobs = choice["logprobs"] or {}
            mine["tokens"] += logprobs.get("tokens", [entry["token"] for entry in logprobs.get("content", [])])
            mine["token_logprobs"] += logprobs.get(
                "token_logprobs", [entry["logprob"] for entry in logprobs.get("content", [])]
            )
    return choices


def rounded(values: list[float | None]) -> list[float | None]:
    """To what arithmetic in another batch may change."""
    return [None if value is None else round(value, 2) + 0.0 for value in values]


@given(prompt=PROMPTS, params=PARAMETERS, logprobs=st.sampled_from([None, 0, 2]), echo=st.booleans())
@QUIET
def test_completions(http: httpx.Client, prompt: Any, params: Any, logprobs: int | None, echo: bool) -> None:
    body = {**params, "prompt": prompt, "logprobs": logprobs, "echo": echo}
    whole = http.post("/v1/completions", json=body).json()
    chunks = streamed(http, "/v1/completions", body)
    choices = gathered(chunks, len(whole["choices"]), lambda choice: choice["text"])
    for want, got in zip(whole["choices"], choices, strict=True):
        assert got["text"] == want["text"]
        assert got["ends"] == [(want["finish_reason"], want["stop_reason"])]
        tokens = want["logprobs"] or {"tokens": [], "token_logprobs": []}
        assert got["tokens"] == tokens["tokens"]
        assert rounded(got["token_logprobs"]) == rounded(tokens["token_logprobs"])
    assert without_cache(chunks[-1]["usage"]) == without_cache(whole["usage"])


@given(text=st.text(st.characters(codec="utf-8"), max_size=20), params=PARAMETERS, top=st.sampled_from([None, 0, 2]))
@QUIET
def test_chats(http: httpx.Client, text: str, params: Any, top: int | None) -> None:
    messages = [{"role": "user", "content": text}]
    body = {"max_tokens": 20, **params, "messages": messages, "logprobs": top is not None, "top_logprobs": top}
    whole = http.post("/v1/chat/completions", json=body).json()
    chunks = streamed(http, "/v1/chat/completions", body)
    choices = gathered(chunks, len(whole["choices"]), lambda choice: choice["delta"].get("content", ""))
    for want, got in zip(whole["choices"], choices, strict=True):
        assert got["text"] == want["message"]["content"]
        assert got["ends"] == [(want["finish_reason"], want["stop_reason"])]
        assert got["tokens"] == [entry["token"] for entry in (want["logprobs"] or {"content": []})["content"]]
    assert without_cache(chunks[-1]["usage"]) == without_cache(whole["usage"])


def without_cache(usage: dict[str, Any]) -> dict[str, Any]:
    """The counts that do not depend on what was asked before."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


def test_counts_may_come_with_every_chunk(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "stream": True, "temperature": 0}
    answer = http.post("/v1/completions", json={**body, "stream_options": {"continuous_usage_stats": True}})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert all(event["choices"] for event in events)
    plain = http.post("/v1/completions", json=body).text
    assert "usage" not in plain


def test_what_may_be_said_in_a_conversation(http: httpx.Client) -> None:
    def num_tokens(*messages: dict[str, Any], **fields: Any) -> int:
        body = {"messages": messages, "max_tokens": 1, **fields}
        return http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]

    plain = num_tokens({"role": "user", "content": "one two"})
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert num_tokens({"role": "user", "content": parts}) == plain == len("<user>one two<assistant>")
    assert num_tokens({"role": "user", "content": "one two"}, add_generation_prompt=False) == len("<user>one two")
    developer = num_tokens({"role": "developer", "content": "x"}, {"role": "user", "content": ""})
    assert developer == len("<system>x<user><assistant>")
    copied = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    assert num_tokens(copied) == len("<assistant>x<assistant>")


def test_the_log_probabilities_of_a_prompt(http: httpx.Client) -> None:
    body = {"prompt": "abcd", "max_tokens": 1, "prompt_logprobs": 2}
    table = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert table[0] is None
    assert len(table) == 4
    assert all(len(position) in (2, 3) for position in table[1:])
    assert all(entry["logprob"] <= 0 for position in table[1:] for entry in position.values())


def test_a_model_without_a_chat_template(start: Callable[..., Any], stack: ExitStack) -> None:
    with start(stack, template="").http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_offsets_hold_where_bytes_make_no_character() -> None:
    for first, second, offsets in CUT_CHARACTERS:
        written, tokens = TextLength(), [bytes.fromhex(first), bytes.fromhex(second), b"b"]
        assert [written.add(list(token)) for token in tokens] == offsets
        assert b"".join(tokens).decode(errors="replace")[offsets[-1]] == "b"

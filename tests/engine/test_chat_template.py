"""Chat templates: where they come from, what they may use, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from twostroke.engine.chat_template import ChatTemplate, ChatTemplateError

PLAIN = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def test_renders_messages() -> None:
    template = ChatTemplate(PLAIN, {"bos_token": "<s>"})
    messages = [{"role": "system", "content": "be brief"}, *HI]
    assert template.render(messages) == "<s>[system] be brief\n[user] hi\n[assistant]"
    assert template.render(HI, add_generation_prompt=False) == "<s>[user] hi\n"


def test_blocks_leave_no_blank_lines() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    )
    assert template.render(HI) == "hi\n"


def test_json_is_not_escaped_for_html() -> None:
    template = ChatTemplate("{{ tools | tojson }}")
    assert template.render(HI, tools=[{"name": "<é & 'x'>"}]) == """[{"name": "<é & 'x'>"}]"""


def test_helpers_and_extra_variables() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') | length }} {{ enable_thinking }}")
    assert template.render(HI, enable_thinking=False) == "4 False"


def test_loop_controls_and_generation_marks() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert template.render([*HI, *HI]) == "hi"


def test_tools_pick_their_own_template() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(HI) == "plain"
    assert template.render(HI, tools=[{}]) == "tools"
    assert ChatTemplate("plain").render(HI, tools=[{}]) == "plain"


def test_a_tool_call_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert ChatTemplate("{{ messages[1].tool_calls[0].name }}").render([*HI, call]) == "f"


def write(folder: Path, config: dict[str, Any] | None = None, jinja: str | None = None) -> ChatTemplate:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return ChatTemplate.from_folder(folder)


def test_from_folder(tmp_path: Path) -> None:
    assert not write(tmp_path).exists
    config = {"bos_token": {"content": "<b>"}, "eos_token": None, "chat_template": PLAIN}
    assert write(tmp_path, config).render(HI) == "<b>[user] hi\n[assistant]"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    assert write(tmp_path, {"chat_template": named}).render(HI, tools=[{}]) == "two"
    assert write(tmp_path, {"bos_token": "<b>"}, jinja="{{ bos_token }}!").render(HI) == "<b>!"


def test_from_gguf() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 9,
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "tools",
    }
    template = ChatTemplate.from_gguf(metadata)
    assert template.render(HI) == "<s></s>"
    assert template.render(HI, tools=[{}]) == "tools"
    assert "pad_token" not in template.special_tokens
    assert not ChatTemplate.from_gguf({}).exists


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list of messages, got str"),
        ({"role": "user"}, "messages must be a list of messages, got dict"),
        ([], "messages are empty"),
        (["hi"], "message 0 must be a mapping with a 'role', got 'hi'"),
        ([*HI, {"content": "x"}], "message 1 must be a mapping with a 'role'"),
        ([{"role": "user"}], r"message 0 \(user\) has neither 'content' nor 'tool_calls'"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(PLAIN).render(messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[5].content }}", "failed on these messages"),
        ("{{ 'x' + messages }}", "failed on these messages"),
        ("{% for %}", "does not parse, line 1"),
        ("{{ ''.__class__.__mro__ }}", "failed on these messages: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "failed on these messages"),
    ],
)
def test_what_a_template_raises_is_an_error_of_the_messages(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source).render(HI)


def test_a_model_without_template_says_what_to_do() -> None:
    with pytest.raises(ChatTemplateError, match="the model has no chat template: pass the prompt as text or token ids"):
        ChatTemplate({}).render(HI)
    with pytest.raises(ChatTemplateError, match=r"no chat template named 'default' \(it has rag\)"):
        ChatTemplate({"rag": "x"}).render(HI)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.from_folder(tmp_path)

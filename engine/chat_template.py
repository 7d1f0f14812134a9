"""Chat templates: from messages to prompt text, in Jinja2's sandbox with the helpers that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..fsm.errors import TwoStrokeError
from .tokenizer import read_tokenizer_config

Message = Mapping[str, Any]
DEFAULT = "default"
TOOL_USE = "tool_use"


class ChatTemplateError(TwoStrokeError, ValueError):
    """Messages that cannot become a prompt: they are malformed, the template refuses them, or there is no template."""


class ChatTemplate:
    """The chat template of a model. It is compiled when it is first used.

    ``sources`` are Jinja2 sources by name: ``default``, and ``tool_use`` where tools have their own.
    ``special_tokens`` are what the template may name (``bos_token``, ``eos_token`` …).
    """

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self.sources: Mapping[str, str] = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """The template of a Hugging Face folder: ``chat_template.jinja``, else that of ``tokenizer_config.json``.

        Raises:
            ChatTemplateError: a template file that cannot be read.
            TokenizerError: a ``tokenizer_config.json`` that cannot be read.
        """
        config = read_tokenizer_config(folder)
        special_tokens = _special_tokens(config)
        file = folder / "chat_template.jinja"
        if file.is_file():
            try:
                return cls(file.read_text(encoding="utf-8"), special_tokens)
            except (OSError, UnicodeDecodeError) as error:
                raise ChatTemplateError(f"{file} cannot be read: {error}") from error
        sources = config.get("chat_template") or {}
        if isinstance(sources, list):
            try:
                sources = {named["name"]: named["template"] for named in sources}
            except (TypeError, KeyError) as error:
                raise ChatTemplateError(f"{folder}: of several chat templates each needs name and template") from error
        if not isinstance(sources, (str, dict)):
            raise ChatTemplateError(f"{folder}: chat_template must be a text or a list of them, got {sources!r:.80}")
        return cls(sources, special_tokens)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ChatTemplate:
        """The template of a GGUF file, from its metadata."""
        prefix, tokens = "tokenizer.chat_template", metadata.get("tokenizer.ggml.tokens", ())
        sources = {
            key.removeprefix(f"{prefix}."): text for key, text in metadata.items() if key.startswith(f"{prefix}.")
        }
        if prefix in metadata:
            sources[DEFAULT] = metadata[prefix]
        special_tokens: dict[str, str] = {}
        for name, role in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
            if isinstance(token_id, int) and 0 <= token_id < len(tokens):
                special_tokens[f"{name}_token"] = tokens[token_id]
        return cls(sources, special_tokens)

    @property
    def exists(self) -> bool:
        """Whether the model came with a template."""
        return bool(self.sources)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt text of a conversation; it already holds the special tokens that the model wants.

        Args:
            messages: mappings with ``role`` and ``content`` (or ``tool_calls``), oldest first.
            add_generation_prompt: end with the opening of an assistant's turn.
            tools: function schemas, for templates that know tools.
            extra: further variables of the template, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: no template, malformed messages, or the template raised.
        """
        _check_messages(messages)
        variables = {**self.special_tokens, **extra, "messages": messages, "tools": tools}
        try:
            template = self._compiled(TOOL_USE if tools and TOOL_USE in self.sources else DEFAULT)
            return template.render(add_generation_prompt=add_generation_prompt, **variables)
        except ChatTemplateError:
            raise
        except Exception as error:  # the template is foreign code: whatever it raises is an error of these messages
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error

    def _compiled(self, name: str) -> jinja2.Template:
        if name not in self.sources:
            names = f" named {name!r} (it has {', '.join(self.sources)})" if self.sources else ""
            raise ChatTemplateError(f"the model has no chat template{names}: pass the prompt as text or token ids")
        try:
            return self._environment.get_template(name)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template does not parse, line {error.lineno}: {error}") from error

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        """Holds the compiled templates."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            loader=jinja2.DictLoader(self.sources),
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only shows what it holds."""

    tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja2's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("messages are empty: at least one is needed")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"message {index} must be a mapping with a 'role', got {message!r}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ChatTemplateError(f"message {index} ({message['role']}) has neither 'content' nor 'tool_calls'")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens

"""Tools: what the model must write for them, and reading its calls back out of the text.

The arguments of a named or a required call are held to the tool's JSON schema by a grammar. With "auto" the model
decides, in the form that its chat template teaches: ``<tool_call>{"name": …, "arguments": …}</tool_call>``
(Hermes, Qwen).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from attrs import frozen

from ..stop_strings import StopStrings
from .chat_bodies import ChatBody, Tool
from .errors import ApiError
from .grammars import Constraint
from .served_model import ServedModel

Mode = Literal["none", "auto", "required", "named"]
OPENING, CLOSING = "<tool_call>", "</tool_call>"
_DEFINITIONS = ("$defs", "definitions")


@frozen(kw_only=True, eq=False)
class ToolUse:
    """How a request uses tools. ``schemas`` are for the chat template; ``name`` is that of a named tool."""

    mode: Mode = "none"
    schemas: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Tool] = ()
    name: str = ""

    @classmethod
    def of(cls, body: ChatBody, model: ServedModel) -> ToolUse:
        """What a body says.

        Raises:
            ApiError: 400, a choice without its tool, or a model that knows no tools.
        """
        choice: Any = body.tool_choice
        if not body.tools:
            if choice not in (None, "none"):
                raise ApiError(400, "tool_choice: only with tools", param="tool_choice", code="invalid_value")
            return cls()
        names = [tool.function.name for tool in body.tools]
        if len(set(names)) < len(names):
            raise ApiError(400, "tools: two of them have the same name", param="tools", code="invalid_value")
        if choice == "none":
            return cls()
        sources = model.require_chat_template().sources.values()
        if not any("tools" in source for source in sources):
            message = "tools: this model's chat template has no tools"
            raise ApiError(400, message, param="tools", code="unsupported_field")
        schemas = [tool.model_dump(exclude_none=True) for tool in body.tools]
        if isinstance(choice, dict):
            name = choice["function"]["name"]
            if name not in names:
                message = f"tool_choice: {name!r:.80} is none of the tools ({', '.join(names)})"
                raise ApiError(400, message, param="tool_choice", code="invalid_value")
            return cls(mode="named", schemas=schemas, tools=body.tools, name=name)
        if choice == "required":
            return cls(mode="required", schemas=schemas, tools=body.tools)
        if not any(OPENING in source for source in sources):
            message = f'tool_choice: this model writes no {OPENING}; choose "required", "none" or a tool by name'
            raise ApiError(400, message, param="tool_choice", code="unsupported_field")
        return cls(mode="auto", schemas=schemas, tools=body.tools)

    def constraint(self) -> Constraint | None:
        """What the text must be."""
        if self.mode == "named":
            chosen = next(tool for tool in self.tools if tool.function.name == self.name)
            return Constraint("json_schema", _parameters(chosen), "tools")
        if self.mode == "required":
            return Constraint("json_schema", _any_call(self.tools), "tools")
        return None

    def reader(self) -> ToolReader:
        """Reads the text of one choice."""
        return _READERS[self.mode](self)


class ToolReader:
    """Turns a choice's text into deltas as it comes: here, all of it is content."""

    def __init__(self, use: ToolUse) -> None:
        self.use = use

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas for a piece of text."""
        return [{"content": text}] if text else []

    def finish(self, reason: str) -> tuple[list[dict[str, Any]], str]:
        """Deltas for what was kept back, and the finish reason to show."""
        return [], reason


class _NamedReader(ToolReader):
    """The text is the arguments."""

    _is_open = False

    def push(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        if self._is_open:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        self._is_open = True
        return [{"tool_calls": [_call(0, self.use.name, text)]}]


class _RequiredReader(ToolReader):
    """The text is an object with name and arguments; the call is given at the end."""

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._text: list[str] = []

    def push(self, text: str) -> list[dict[str, Any]]:
        self._text.append(text)
        return []

    def finish(self, reason: str) -> tuple[list[dict[str, Any]], str]:
        text = "".join(self._text)
        call = _read_call(text)
        if call is None:  # it was cut off
            return [{"content": text}], reason
        return [{"tool_calls": [_call(0, *call)]}], "tool_calls"


class _AutoReader(ToolReader):
    """Content, and calls between tags; a call is given when its closing tag has come."""

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._opening: StopStrings | None = StopStrings([OPENING])
        self._closing = StopStrings([CLOSING])
        self._call = ""
        self._count = 0

    def push(self, text: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        # The scanners cut off what follows a match, so they get it letter by letter only where a tag may be near.
        for piece in _pieces(text):
            deltas += self._push_piece(piece)
        return _joined(deltas)

    def finish(self, reason: str) -> tuple[list[dict[str, Any]], str]:
        if self._opening is not None:
            rest = self._opening.flush()
        else:  # cut off within a call, or its closing tag was the end
            call = _read_call(self._call + self._closing.flush())
            if call is not None:
                self._count += 1
                return [{"tool_calls": [_call(self._count - 1, *call)]}], "tool_calls"
            rest = OPENING + self._call
        deltas = [{"content": rest}] if rest else []
        return deltas, "tool_calls" if self._count and reason == "stop" else reason

    def _push_piece(self, piece: str) -> list[dict[str, Any]]:
        if self._opening is not None:
            shown = self._opening.push(piece)
            if self._opening.matched is not None:
                self._opening, self._closing, self._call = None, StopStrings([CLOSING]), ""
            return [{"content": shown}] if shown else []
        self._call += self._closing.push(piece)
        if self._closing.matched is None:
            return []
        self._opening = StopStrings([OPENING])
        call = _read_call(self._call)
        if call is None:
            return [{"content": OPENING + self._call + CLOSING}]
        self._count += 1
        return [{"tool_calls": [_call(self._count - 1, *call)]}]


_READERS: Mapping[Mode, type[ToolReader]] = {
    "none": ToolReader,
    "auto": _AutoReader,
    "required": _RequiredReader,
    "named": _NamedReader,
}


def _pieces(text: str) -> Sequence[str]:
    """Cut after every ``>``, with which both tags end, so that no piece goes on after a tag."""
    *whole, rest = text.split(">")
    return [*(piece + ">" for piece in whole), *([rest] if rest else [])]


def _joined(deltas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring pieces of content as one."""
    joined: list[dict[str, Any]] = []
    for delta in deltas:
        if joined and "content" in delta and "content" in joined[-1]:
            joined[-1] = {"content": joined[-1]["content"] + delta["content"]}
        else:
            joined.append(delta)
    return joined


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments, or None if this is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _any_call(tools: Sequence[Tool]) -> dict[str, Any]:
    """A schema for a call of any of the tools; definitions move to its top, where references look for them."""
    schema: dict[str, Any] = {"anyOf": []}
    for tool in tools:
        parameters = dict(_parameters(tool))
        for place in _DEFINITIONS:
            for name, definition in parameters.pop(place, {}).items():
                if schema.setdefault(place, {}).setdefault(name, definition) != definition:
                    message = f"tools: two of them define {place}/{name} differently; rename one"
                    raise ApiError(400, message, param="tools", code="invalid_value")
        schema["anyOf"].append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return schema

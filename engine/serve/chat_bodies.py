"""Bodies with conversations: messages, tools, and how they are to be chosen."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from .bodies import MAX_INT, Body, SamplingBody, Unsupported

NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,64}$"


def _checked_content(value: Any) -> str:
    """The text; parts of text are put together."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of parts of type text")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('every part must be {"type": "text", "text": …}: this model reads nothing else')
        if unknown := part.keys() - {"type", "text"}:
            raise ValueError(f"a part of type text has no field {sorted(unknown)[0]!r}")
    return "".join(part["text"] for part in value)


def _checked_tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.keys() == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
            return value
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}')


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
Content = Annotated[
    Any,
    AfterValidator(_checked_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]
ToolChoice = Annotated[
    Any,
    AfterValidator(_checked_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]}),
]


class CalledFunction(Body):
    """What an assistant called, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """One turn. Fields that clients copy from an answer may be there if they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Function(Body):
    """A function that may be called; ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are all there is."""

    type: Literal["function"]
    function: Function


class ChatBody(SamplingBody):
    """``/v1/chat/completions``."""

    IGNORED = (*SamplingBody.IGNORED, "parallel_tool_calls")

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class TokenizeBody(Body):
    """``/tokenize``: a text or a conversation."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

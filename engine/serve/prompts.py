"""From what a request gives as prompt to token ids. Tokenizing takes time: not for the event loop."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from .bodies import CompletionBody
from .chat_bodies import ChatBody, Message, TokenizeBody
from .config import ServeConfig
from .errors import ApiError
from .served_model import ServedModel

_PLAIN_FIELDS = ("name", "tool_call_id", "reasoning_content")
_MESSAGE_FIELDS = (*_PLAIN_FIELDS, "tool_calls")
_MAX_UNREAD = 32


@frozen(eq=False)
class PromptTokens:
    """A prompt; ``text`` is None where it was given as token ids."""

    token_ids: Sequence[int]
    text: str | None = None


def num_prompts(body: CompletionBody) -> int:
    """How many prompts a completion has."""
    prompt = body.prompt
    return 1 if _is_single(prompt) else len(prompt)


def completion_prompts(body: CompletionBody, model: ServedModel, config: ServeConfig) -> list[PromptTokens]:
    """The prompts of a completion.

    Raises:
        ApiError: 400, too long or without a tokenizer.
        InvalidText: a text that can't be tokenized.
    """
    given: Any = [body.prompt] if _is_single(body.prompt) else body.prompt
    special = body.add_special_tokens is not False
    return [_tokens(item, model, config, add_special_tokens=special) for item in given]


def chat_prompt(
    body: ChatBody | TokenizeBody, tools: Sequence[Mapping[str, Any]] | None, model: ServedModel, config: ServeConfig
) -> PromptTokens:
    """The prompt of a conversation, through the model's chat template, which writes the special tokens itself.

    Raises:
        ApiError: 400, too long, or the model has no chat template.
        ChatTemplateError: the template refuses the messages.
    """
    messages = body.messages or ()
    for index, message in enumerate(messages):
        if message.content is None and not message.tool_calls:
            param = f"messages[{index}].content"
            raise ApiError(400, f"{param}: is required without tool_calls", param=param, code="missing_field")
    check_length(sum(len(message.content or "") for message in messages), "messages", model, config)
    text = model.require_chat_template().render(
        [template_message(message) for message in messages],
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        **_template_variables(body),
    )
    has_special_tokens = isinstance(body, TokenizeBody) and bool(body.add_special_tokens)
    return PromptTokens(model.require_tokenizer("messages").encode(text, add_special_tokens=has_special_tokens), text)


def unread_fields(body: ChatBody, model: ServedModel) -> list[str]:
    """What a conversation says and the model's chat template leaves out: names as they go into a header.

    Raises:
        ApiError: 400 if the model has no chat template.
    """
    variables = list(body.chat_template_kwargs or ())[:_MAX_UNREAD]
    unread = [f"chat_template_kwargs.{ascii(name)[1:-1][:64]}" for name in variables if not model.template_reads(name)]
    said = [name for name in _MESSAGE_FIELDS if any(getattr(message, name) for message in body.messages)]
    return unread + [f"messages.{name}" for name in said if not model.template_reads(name)]


def template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: plain text, and the arguments of calls as objects."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": message.content or ""}
    for name in _PLAIN_FIELDS:
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def check_context(prompts: Sequence[PromptTokens], max_tokens: int | None, param: str, model: ServedModel) -> None:
    """Raises:
    ApiError: 400 if a prompt and what is to follow do not fit into the context.
    """
    for prompt in prompts:
        room = model.max_model_len - len(prompt.token_ids)
        if room < 1:
            message = (
                f"{param}: has {len(prompt.token_ids)} tokens; with one to generate that is more than the context of "
                f"{model.max_model_len}"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if max_tokens is not None and max_tokens > room:
            message = (
                f"max_tokens: {max_tokens} after a prompt of {len(prompt.token_ids)} tokens is more than the context "
                f"of {model.max_model_len}; at most {room}"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")


def _tokens(given: Any, model: ServedModel, config: ServeConfig, *, add_special_tokens: bool) -> PromptTokens:
    if not isinstance(given, str):
        return PromptTokens(given)
    check_length(len(given), "prompt", model, config)
    token_ids = model.require_tokenizer("prompt").encode(given, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise ApiError(400, "prompt: has no tokens; give at least one", param="prompt", code="invalid_value")
    return PromptTokens(token_ids, given)


def _is_single(prompt: Any) -> bool:
    return isinstance(prompt, str) or isinstance(prompt[0], int)


def check_length(num_chars: int, param: str, model: ServedModel, config: ServeConfig) -> None:
    """Raises:
    ApiError: 400 for a text that is too long to be tokenized.
    """
    limit = config.max_prompt_chars_per_token * model.max_model_len
    if num_chars > limit:
        message = f"{param}: {num_chars} characters are more than the context of {model.max_model_len} tokens can hold"
        raise ApiError(400, message, param=param, code="context_length_exceeded")


def _template_variables(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    variables = body.chat_template_kwargs or {}
    taken = {"messages", "tools", "add_generation_prompt", "self"} & variables.keys()
    if taken or not all(map(str.isidentifier, variables)):
        name = sorted(taken)[0] if taken else next(name for name in variables if not name.isidentifier())
        message = f"chat_template_kwargs: {name!r:.80} can't be set this way"
        raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
    return variables


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # what a model made up and was cut off is shown to it as it was
        return text

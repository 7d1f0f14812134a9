"""From the fields of a body to sampling parameters and constraints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...stages.sampling_params import SamplingParams
from .bodies import CompletionBody, SamplingBody
from .chat_bodies import ChatBody
from .config import ServeConfig
from .errors import ApiError
from .grammars import Constraint

CHAT_NAMES: Mapping[str, str] = {"logprobs": "top_logprobs", "prompt": "messages", "bad_words_token_ids": "bad_words"}
COMPLETION_NAMES: Mapping[str, str] = {"bad_words_token_ids": "bad_words"}
DEFAULT_COMPLETION_TOKENS = 16

_SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
)


def check_common(body: SamplingBody, config: ServeConfig) -> None:
    """Raises:
    ApiError: 400 for what the server's limits forbid, or fields that contradict each other.
    """
    if body.n is not None and body.n > config.max_n:
        raise ApiError(400, f"n: at most {config.max_n} here, got {body.n}", param="n", code="invalid_value")
    if body.stream_options is not None and not body.stream:
        message = "stream_options: only with stream=true"
        raise ApiError(400, message, param="stream_options", code="invalid_value")


def completion_params(body: CompletionBody, config: ServeConfig) -> SamplingParams:
    """Sampling parameters of a completion.

    Raises:
        ApiError: 400 with the field.
        InvalidSamplingParams: values that don't fit each other.
    """
    _check_logprobs("logprobs", body.logprobs, config)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        message = "max_tokens: 0 is for looking at the prompt, with echo=true; otherwise at least 1"
        raise ApiError(400, message, param="max_tokens", code="invalid_value")
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is None and body.echo:
        prompt_logprobs = body.logprobs
    if prompt_logprobs is not None and body.stream and not (body.echo and body.logprobs is not None):
        message = "prompt_logprobs: only without stream, or with echo and logprobs"
        raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")
    _check_logprobs("prompt_logprobs", prompt_logprobs, config)
    fields = _fields(body)
    if max_tokens == 0:  # one is generated all the same, and not shown
        fields.pop("min_tokens", None)
    return SamplingParams(
        max_tokens=max(max_tokens, 1), logprobs=body.logprobs, prompt_logprobs=prompt_logprobs, **fields
    )


def chat_params(body: ChatBody, config: ServeConfig) -> SamplingParams:
    """Sampling parameters of a chat completion; without ``max_tokens`` it may go on to the end of the context.

    Raises:
        ApiError: 400 with the field.
        InvalidSamplingParams: values that don't fit each other.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs=true", param="top_logprobs", code="invalid_value")
    _check_logprobs("top_logprobs", body.top_logprobs, config)
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs: only without stream"
        raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")
    _check_logprobs("prompt_logprobs", body.prompt_logprobs, config)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        message = "max_tokens: contradicts max_completion_tokens; give one of them"
        raise ApiError(400, message, param="max_tokens", code="invalid_value")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs, **_fields(body)
    )


def constraint_of(body: SamplingBody) -> Constraint | None:
    """What the text must be, if the request says so.

    Raises:
        ApiError: 400 if it says so twice, or a response format lacks its schema.
    """
    found: list[Constraint] = []
    chosen = body.response_format
    if chosen is not None and chosen.type != "json_schema" and chosen.json_schema is not None:
        param = "response_format.json_schema"
        raise ApiError(400, f"{param}: only with type json_schema", param=param, code="invalid_value")
    if chosen is not None and chosen.type == "json_object":
        found.append(Constraint("json_object", True, "response_format"))
    elif chosen is not None and chosen.type == "json_schema":
        param = "response_format.json_schema"
        if chosen.json_schema is None:
            raise ApiError(400, f"{param}: is required with type json_schema", param=param, code="missing_field")
        found.append(Constraint("json_schema", chosen.json_schema.schema_, f"{param}.schema"))
    if body.guided_json is not None:
        found.append(Constraint("json_schema", body.guided_json, "guided_json"))
    if body.guided_regex is not None:
        found.append(Constraint("regex", body.guided_regex, "guided_regex"))
    if body.guided_choice is not None:
        found.append(Constraint("choice", tuple(body.guided_choice), "guided_choice"))
    if body.guided_grammar is not None:
        found.append(Constraint("grammar", body.guided_grammar, "guided_grammar"))
    if len(found) > 1:
        message = f"{found[1].param}: the text is constrained by {found[0].param} already; give one of them"
        raise ApiError(400, message, param=found[1].param, code="invalid_value")
    return found[0] if found else None


def _fields(body: SamplingBody) -> dict[str, Any]:
    fields = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    return fields


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 20 and token == str(int(token))):
            message = f"logit_bias: {token!r:.80} is not a token id (digits, without leading zeros)"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
        bias[int(token)] = value
    return bias


def _check_logprobs(param: str, count: int | None, config: ServeConfig) -> None:
    if count is not None and count > config.max_logprobs:
        message = f"{param}: at most {config.max_logprobs} here, got {count}"
        raise ApiError(400, message, param=param, code="invalid_value")

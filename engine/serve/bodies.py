"""The bodies of requests: what the fields are called and may hold. Names and meanings are OpenAI's and vLLM's.

Every model refuses fields that it does not know. ``null`` means the default. The same models make the OpenAPI schema.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

MAX_INT = 2**31 - 1
MAX_STOPS, MAX_STOP_CHARS = 16, 256

TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(max_length=65536)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Unsupported = Annotated[None, Field(description="Not supported: leave it out, or give null.")]


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _checked_prompt(value: Any) -> Any:
    if isinstance(value, str) or _is_token_ids(value):
        return value
    items = value if isinstance(value, list) else []
    if items and (all(isinstance(item, str) for item in items) or all(map(_is_token_ids, items))):
        return value
    raise ValueError("must be a text, a list of token ids, or a list of either, none of them empty")


def _checked_stop(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} strings, got {len(texts)}")
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in texts):
        raise ValueError(f"each string must have from 1 to {MAX_STOP_CHARS} characters")
    return texts


def _one_of(*schemas: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(schemas)})


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string"}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}

Prompt = Annotated[
    Any,
    AfterValidator(_checked_prompt),
    _one_of(
        _TEXT,
        _IDS,
        {"type": "array", "items": _TEXT, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ),
]
Stop = Annotated[
    Any, AfterValidator(_checked_stop), _one_of(_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS})
]


class Body(BaseModel):
    """Base of every body: exact types, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    IGNORED: ClassVar[tuple[str, ...]] = ()
    """Fields that are taken and change nothing here; the answer says so in a header."""

    def ignored(self) -> list[str]:
        """Those of ``IGNORED`` that were given a value."""
        return [name for name in self.IGNORED if name in self.model_fields_set and getattr(self, name) is not None]


class StreamOptions(Body):
    """``include_usage``: a last chunk with the counts of tokens; ``continuous_usage_stats``: counts in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Body):
    """A named JSON schema."""

    name: Annotated[str, Field(max_length=64)] = "schema"
    description: str | None = None
    # "schema" is a method of pydantic's models.
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """How the text must be formed; ``json_schema`` goes with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingBody(Body):
    """What completions and chat completions have in common."""

    IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "store", "service_tier")

    model: Annotated[str, Field(max_length=512)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=4096)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Word], Field(max_length=256)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    service_tier: str | None = None


class CompletionBody(SamplingBody):
    """``/v1/completions``. ``max_tokens`` may be 0 with ``echo``: then only the prompt is looked at."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    add_special_tokens: bool | None = None
    best_of: Unsupported = None
    suffix: Unsupported = None


class DetokenizeBody(Body):
    """``/detokenize``."""

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None


class AbortBody(Body):
    """``/abort_requests``: ids of answers, or of requests (``x-request-id``)."""

    request_ids: Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=65536)]

"""Which requests can be served at all."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from ..stages.sampling_params import SamplingParams
from .scheduler_records import RequestRefused, SchedulerConfig
from .scheduler_request import Request


def checked_prompt(req_id: str, prompt_token_ids: Iterable[int], sampling_params: SamplingParams) -> tuple[int, ...]:
    """The prompt as plain integers: what is hashed later, in the middle of a step, must not fail there.

    Raises:
        RequestRefused: an id, token ids or parameters of the wrong kind.
    """
    if not isinstance(req_id, str) or not _is_text(req_id):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestRefused(repr(req_id), "the id of a request must be a string of whole characters")
    if not isinstance(sampling_params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestRefused(req_id, f"its parameters must be SamplingParams, got {sampling_params!r:.80}")
    try:
        prompt = tuple(array("q", iter(prompt_token_ids)))
    except (TypeError, OverflowError) as error:
        raise RequestRefused(req_id, f"its prompt must be token ids: {error}") from error
    if min(prompt, default=0) < 0:
        raise RequestRefused(req_id, f"token id {min(prompt)} of its prompt is negative")
    return prompt


def _is_text(text: str) -> bool:
    """Whether it can be encoded; half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_servable(request: Request, config: SchedulerConfig) -> None:
    """Refuse a request that would wait for ever, or that is more than one.

    Raises:
        RequestRefused: naming the request, the reason and the way out.
    """
    prompt, outputs = request.num_prompt_tokens, request.max_total_tokens - request.num_prompt_tokens
    if prompt == 0:
        raise RequestRefused(
            request.req_id, "has an empty prompt; give at least one token, such as the beginning of sequence"
        )
    if request.sampling_params.n != 1:
        raise RequestRefused(
            request.req_id,
            f"asks for n={request.sampling_params.n} outputs; add one request for each, with an id of its own",
        )
    if prompt >= config.max_model_len:
        raise RequestRefused(
            request.req_id,
            f"its prompt of {prompt} tokens leaves no room for an output within max_model_len {config.max_model_len}; "
            f"shorten it to at most {config.max_model_len - 1}",
        )
    # The last token is sampled but not computed, so it needs no slot.
    needed = sum(-(-(request.max_total_tokens - 1) // size) for size in config.block_sizes)
    if needed > config.num_kv_blocks - 1:
        raise RequestRefused(
            request.req_id,
            f"{prompt} prompt tokens and up to {outputs} outputs need {needed} KV blocks, and the pool has "
            f"{config.num_kv_blocks - 1}; shorten the prompt, lower max_tokens or raise num_kv_blocks",
        )

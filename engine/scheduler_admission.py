"""Which requests can be served at all."""

from __future__ import annotations

from .scheduler_records import RequestRefused, SchedulerConfig
from .scheduler_request import Request


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

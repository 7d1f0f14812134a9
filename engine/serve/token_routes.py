"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .bodies import DetokenizeBody
from .chat_bodies import TokenizeBody
from .errors import ApiError, as_api_error
from .params import CHAT_NAMES
from .parsing import no_unknown_query, parsed_body
from .prompts import chat_prompt, check_length
from .service import Service


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation through the chat template."""
    service: Service = request.app.state.service
    no_unknown_query(request)
    body = await parsed_body(request, TokenizeBody, service)
    service.model.require_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", param="prompt", code="invalid_value")
    tokenizer = service.model.require_tokenizer("prompt")

    if body.messages is None:
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name}: only with messages", param=name, code="invalid_value")

    def work() -> Sequence[int]:
        if body.messages is not None:
            return chat_prompt(body, None, service.model, service.config).token_ids
        assert body.prompt is not None, "one of the two was given"
        check_length(len(body.prompt), "prompt", service.model, service.config)
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)

    try:
        token_ids = await service.work(work)
    except Exception as error:
        raise as_api_error(error, {} if body.messages is None else CHAT_NAMES) from error
    max_model_len = service.model.max_model_len
    answer: dict[str, Any] = {"tokens": token_ids, "count": len(token_ids), "max_model_len": max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.id_to_token(token_id) for token_id in token_ids]
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service: Service = request.app.state.service
    no_unknown_query(request)
    body = await parsed_body(request, DetokenizeBody, service)
    service.model.require_name(body.model)
    tokenizer = service.model.require_tokenizer("tokens")
    for token_id in body.tokens:
        if token_id >= service.model.vocab_size:
            message = f"tokens: {token_id} is outside the vocabulary of {service.model.vocab_size}"
            raise ApiError(400, message, param="tokens", code="invalid_value")
    skip = bool(body.skip_special_tokens)
    return JSONResponse({"prompt": await service.work(lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip))})

"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..outputs import CompletionOutput, PositionLogprobs, RequestOutput
from .bodies import CompletionBody
from .errors import ApiError
from .generate import Job, answer
from .params import COMPLETION_NAMES, check_common, completion_params, constraint_of
from .parsing import no_unknown_query, parsed_body
from .prompts import PromptTokens, check_context, completion_prompts, num_prompts
from .served_model import ServedModel
from .service import Plan, Service
from .token_texts import TextLength, TokenTexts


async def completions(request: Request) -> Response:
    """Complete one prompt or several."""
    service: Service = request.app.state.service
    no_unknown_query(request)
    body = await parsed_body(request, CompletionBody, service)
    service.model.require_name(body.model)
    check_common(body, service.config)
    count = num_prompts(body)
    if count > service.config.max_prompts:
        message = f"prompt: at most {service.config.max_prompts} prompts in one call, got {count}"
        raise ApiError(400, message, param="prompt", code="invalid_value")

    def plan() -> Plan:
        params, constraint = completion_params(body, service.config), constraint_of(body)
        prompts = completion_prompts(body, service.model, service.config)
        check_context(prompts, body.max_tokens, "prompt", service.model)
        return Plan(prompts=prompts, params=params, constraint=constraint, shows_output=body.max_tokens != 0)

    job = Job(
        body=body,
        prefix="cmpl",
        kind="text_completion",
        chunk_kind="text_completion",
        num_sequences=count * (body.n or 1),
        plan=plan,
        shape=lambda chosen: CompletionShape(body, chosen, service.model, service.token_texts),
        param_names=COMPLETION_NAMES,
    )
    return await answer(request, service, job)


class CompletionShape:
    """Choices of a completion."""

    def __init__(self, body: CompletionBody, plan: Plan, model: ServedModel, token_texts: TokenTexts) -> None:
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._plan = plan
        self._model = model
        self._token_texts = token_texts
        self._written: dict[int, TextLength] = {}

    def choice(self, index: int, prompt: int, result: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        """One whole choice."""
        (choice,) = self.chunks(index, prompt, result, output)
        if self._prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_table(result, self._token_texts)
        return choice

    def chunks(self, index: int, prompt: int, delta: RequestOutput, output: CompletionOutput) -> list[dict[str, Any]]:
        """What is new of a choice; the prompt comes first where it is echoed."""
        given = self._plan.prompts[prompt]
        text, token_ids = (output.text, output.token_ids) if self._plan.shows_output else ("", ())
        positions: Sequence[PositionLogprobs | None] = (output.logprobs or ()) if self._plan.shows_output else ()
        is_first = index not in self._written
        written = self._written.setdefault(index, TextLength())
        if self._echo and is_first:
            text = self._prompt_text(given) + text
            if self._logprobs is not None:
                token_ids = (*given.token_ids, *token_ids)
                positions = (*(delta.prompt_logprobs or [None] * len(given.token_ids)), *positions)
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._token_texts.completion(token_ids, positions, self._logprobs, written)
        if not (text or output.finished or (logprobs is not None and token_ids)):
            return []
        reason = output.finish_reason if self._plan.shows_output or output.finish_reason is None else "length"
        return [
            {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": reason,
                "stop_reason": output.stop_reason,
            }
        ]

    def _prompt_text(self, prompt: PromptTokens) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._model.require_tokenizer("echo").decode(prompt.token_ids, skip_special_tokens=False)


def prompt_table(result: RequestOutput, token_texts: TokenTexts) -> list[dict[str, Any] | None]:
    """The log probabilities of a prompt in vLLM's shape: by token id, None for the first position."""
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": max(logprob.logprob, -9999.0),
                "rank": logprob.rank,
                "decoded_token": token_texts.of(token)[0],
            }
            for token, logprob in position.items()
        }
        for position in result.prompt_logprobs or ()
    ]

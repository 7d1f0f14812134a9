"""What completions and chat completions do alike: let in, wait or stream, answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response

from ..outputs import CompletionOutput, RequestOutput
from .bodies import SamplingBody
from .calls import Call
from .errors import as_api_error
from .service import Plan, Service, usage
from .streaming import DONE, Deadline, EventStream, event, until_gone

IGNORED_HEADER = "x-twostroke-ignored"


class Shape(Protocol):
    """How one kind of answer is written. ``prompt`` counts the prompts of a call, from 0."""

    def choice(self, index: int, prompt: int, result: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        """One whole choice."""
        ...

    def chunks(self, index: int, prompt: int, delta: RequestOutput, output: CompletionOutput) -> list[dict[str, Any]]:
        """The choices of the chunks that say what is new."""
        ...


@frozen(kw_only=True, eq=False)
class Job:
    """One request, understood: ``plan`` tokenizes, ``shape`` is made once it is known what it gave."""

    body: SamplingBody
    prefix: str
    kind: str
    chunk_kind: str
    num_sequences: int
    plan: Callable[[], Plan]
    shape: Callable[[Plan], Shape]
    param_names: Mapping[str, str]
    unread: Sequence[str] = ()
    """Fields beside the body's own that change nothing here."""


async def answer(request: Request, service: Service, job: Job) -> Response:
    """The whole answer, or a stream of it.

    Raises:
        ApiError: it was refused or failed.
        ClientGone: the client left; its requests are aborted.
    """
    deadline = Deadline.after(service.config.request_timeout_s)
    ignored = [*job.body.ignored(), *job.unread]
    headers = {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}
    facts = request.state.facts
    request_id = request.state.request_id

    async def begin() -> tuple[Call, Plan]:
        span = service.tracing.begin(job.kind, request.headers)
        try:
            call, plan = await service.begin(job.prefix, request_id, job.num_sequences, job.plan)
        except BaseException as error:
            span.failed(error)
            span.end(())
            if isinstance(error, Exception):
                raise as_api_error(error, job.param_names) from error
            raise
        call.span = span
        span.let_in(call.id, plan)
        return call, plan

    if job.body.stream:
        call, plan = await until_gone(request.receive, deadline.keep(begin()))
        facts["call"] = call.id
        events = _events(service, call, plan, job, facts)
        return EventStream(events, call, deadline, headers, job.param_names)

    async def whole() -> bytes:
        call, plan = await begin()
        facts["call"] = call.id
        try:
            results = await call.results()
        except Exception as error:
            raise as_api_error(error, job.param_names) from error
        finally:
            call.close()

        def written() -> bytes:
            answer = _whole(service, call, results, plan, job, facts)
            return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()

        has_much = plan.params.logprobs is not None or plan.params.prompt_logprobs is not None
        return await service.work(written) if has_much else written()

    content = await until_gone(request.receive, deadline.keep(whole()))
    return Response(content, media_type="application/json", headers=headers)


def _whole(
    service: Service, call: Call, results: Sequence[RequestOutput], plan: Plan, job: Job, facts: dict[str, Any]
) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    shape = job.shape(plan)
    for prompt, result in enumerate(results):
        for output in result.outputs:
            _check_end(service, output)
            choices.append(shape.choice(len(choices), prompt, result, output))
    facts |= _counts(results, call.num_generated if plan.shows_output else 0)
    cached = sum(result.num_cached_tokens for result in results)
    return {
        **_head(service, call, job.kind),
        "choices": choices,
        "usage": usage(facts["prompt_tokens"], facts["completion_tokens"], cached),
    }


async def _events(
    service: Service, call: Call, plan: Plan, job: Job, facts: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Every event of a stream, ``[DONE]`` included."""
    shape, options, n = job.shape(plan), job.body.stream_options, plan.params.n
    head = _head(service, call, job.chunk_kind)
    counted = options is not None and bool(options.continuous_usage_stats)
    has_usage = options is not None and bool(options.include_usage)
    latest: dict[int, RequestOutput] = {}
    async with aclosing(call.deltas()) as deltas:
        async for prompt, delta in deltas:
            latest[prompt] = delta
            for output in delta.outputs:
                _check_end(service, output)
                if output.finish_reason == "error":
                    continue  # what went wrong is raised in place of the next delta
                for choice in shape.chunks(prompt * n + output.index, prompt, delta, output):
                    chunk = {**head, "choices": [choice]}
                    if counted:
                        chunk["usage"] = _usage_so_far(plan, call, latest)
                    elif has_usage:
                        chunk["usage"] = None
                    yield event(chunk)
    facts |= _counts(list(latest.values()), call.num_generated if plan.shows_output else 0)
    if has_usage:
        yield event({**head, "choices": [], "usage": _usage_so_far(plan, call, latest)})
    yield DONE


def _check_end(service: Service, output: CompletionOutput) -> None:
    if output.finish_reason == "abort" and (error := service.aborted_by()) is not None:
        raise error


def _head(service: Service, call: Call, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": service.model.name}


def _usage_so_far(plan: Plan, call: Call, latest: Mapping[int, RequestOutput]) -> Mapping[str, object]:
    cached = sum(delta.num_cached_tokens for delta in latest.values())
    num_generated = call.num_generated if plan.shows_output else 0
    return usage(sum(len(prompt.token_ids) for prompt in plan.prompts), num_generated, cached)


def _counts(results: Sequence[RequestOutput], num_generated: int) -> dict[str, int]:
    prompt_tokens = sum(len(result.prompt_token_ids) for result in results)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": num_generated}

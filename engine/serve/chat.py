"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..outputs import CompletionOutput, RequestOutput
from .chat_bodies import ChatBody
from .completions import prompt_table
from .errors import ApiError
from .generate import Job, answer
from .grammars import Constraint
from .params import CHAT_NAMES, chat_params, check_common, constraint_of
from .parsing import no_unknown_query, parsed_body
from .prompts import chat_prompt, check_context, unread_fields
from .service import Plan, Service
from .token_texts import TokenTexts
from .tools import ToolReader, ToolUse


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    no_unknown_query(request)
    body = await parsed_body(request, ChatBody, service)
    service.model.require_name(body.model)
    check_common(body, service.config)
    tools = ToolUse.of(body, service.model)

    def plan() -> Plan:
        params, constraint = chat_params(body, service.config), _constraint(body, tools)
        prompt = chat_prompt(body, tools.schemas, service.model, service.config)
        check_context([prompt], params.max_tokens, "messages", service.model)
        return Plan(prompts=[prompt], params=params, constraint=constraint)

    job = Job(
        body=body,
        prefix="chatcmpl",
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        num_sequences=body.n or 1,
        plan=plan,
        shape=lambda _: ChatShape(body, tools, service.token_texts),
        param_names=CHAT_NAMES,
        unread=unread_fields(body, service.model),
    )
    return await answer(request, service, job)


def _constraint(body: ChatBody, tools: ToolUse) -> Constraint | None:
    asked, needed = constraint_of(body), tools.constraint()
    if asked is not None and needed is not None:
        message = f"{asked.param}: the text is constrained by tool_choice already; give one of them"
        raise ApiError(400, message, param=asked.param, code="invalid_value")
    return asked or needed


class ChatShape:
    """Choices of a chat completion."""

    def __init__(self, body: ChatBody, tools: ToolUse, token_texts: TokenTexts) -> None:
        self._top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._prompt_logprobs = body.prompt_logprobs
        self._tools = tools
        self._token_texts = token_texts
        self._readers: dict[int, ToolReader] = {}

    def choice(self, index: int, prompt: int, result: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        """One whole choice."""
        reader = self._tools.reader()
        deltas = reader.push(output.text)
        rest, reason = reader.finish(output.finish_reason or "stop")
        content: str | None = None
        calls: list[dict[str, Any]] = []
        for delta in (*deltas, *rest):
            if "content" in delta:
                content = (content or "") + delta["content"]
            calls += [
                {name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())
            ]
        message: dict[str, Any] = {"role": "assistant", "content": content if calls else content or "", "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }
        if self._prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_table(result, self._token_texts)
        return choice

    def chunks(self, index: int, prompt: int, delta: RequestOutput, output: CompletionOutput) -> list[dict[str, Any]]:
        """What is new of a choice; the role comes first."""
        chunks: list[dict[str, Any]] = []
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._tools.reader()
            chunks.append(_chunk(index, {"role": "assistant", "content": ""}))
        logprobs, deltas = self._logprobs(output), reader.push(output.text)
        reason = output.finish_reason
        if reason is not None:
            rest, reason = reader.finish(reason)
            deltas += rest
        if logprobs is not None and output.token_ids and not deltas:
            deltas = [{"content": ""}]  # tokens that complete no character yet
        for piece in deltas:
            chunks.append(_chunk(index, piece, logprobs))
            logprobs = None
        if reason is not None:
            chunks.append(_chunk(index, {}, None, reason, output.stop_reason))
        return chunks

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if self._top_logprobs is None:
            return None
        return self._token_texts.chat(output.token_ids, output.logprobs or (), self._top_logprobs)


def _chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
) -> dict[str, Any]:
    chunk = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    if finish_reason is not None:
        chunk["stop_reason"] = stop_reason
    return chunk

"""Errors as OpenAI's clients expect them: a status, a type, the field to blame, a code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...fsm.errors import InputRefused, RunnerFaulted, StepStateError, TwoStrokeError
from ...stages.errors import InvalidSamplingParams, NothingToSample, RequestFailed
from ..chat_template import ChatTemplateError
from ..scheduler_records import RequestRefused
from ..serving_loop import ServingLoopDown
from ..structured import GrammarTooSlow
from ..tokenizer import InvalidText, TokenizerError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(TwoStrokeError):
    """What a client is told: ``param`` is the field of its request that is wrong, ``code`` a word for programs.

    ``retry_after_s`` says when to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> Mapping[str, str]:
        """Headers that go with it."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


class ClientGone(TwoStrokeError):
    """The client closed the connection before its answer was complete."""


def as_api_error(error: Exception, params: Mapping[str, str] | None = None) -> ApiError:
    """What to tell a client of an error of the engine.

    ``params`` has the names that fields of the engine go by in the API, where they differ.
    """
    names = params or {}
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidSamplingParams):
        param = names.get(error.parameter, error.parameter)
        message = str(error).removeprefix(f"{error.parameter}: ")
        return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
    if isinstance(error, RequestRefused):
        return ApiError(400, error.reason, param=names.get("prompt", "prompt"), code="invalid_value")
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), param="messages", code="invalid_value")
    if isinstance(error, (InvalidText, TokenizerError)):
        return ApiError(400, str(error), param=names.get("prompt", "prompt"), code="invalid_value")
    if isinstance(error, RequestFailed):
        if isinstance(error, NothingToSample) or isinstance(error.__cause__, GrammarTooSlow):
            return ApiError(400, error.reason, code="unsatisfiable")
        return ApiError(500, error.reason, code="request_failed")
    if isinstance(error, (ServingLoopDown, RunnerFaulted)):
        return ApiError(503, str(error), code="engine_down")
    if isinstance(error, StepStateError):
        return ApiError(409, str(error), code="wrong_state")
    if isinstance(error, InputRefused):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(500, f"{type(error).__name__}: the server failed; its log says more", code="internal_error")

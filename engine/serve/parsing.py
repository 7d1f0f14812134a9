"""From the bytes of a request to a checked body, or to an error that names the field."""

from __future__ import annotations

import asyncio
import difflib
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from .bodies import Body
from .config import ServeConfig
from .errors import ApiError, ClientGone

if TYPE_CHECKING:
    from .service import Service

B = TypeVar("B", bound=Body)
_LARGE_BODY = 2**16


async def read_body(request: Request, config: ServeConfig) -> bytes:
    """The body, up to ``max_body_bytes``, if it arrives in time and says that it is JSON.

    Raises:
        ApiError: 408, 413 or 415.
        ClientGone: the client left before it was complete.
    """
    _check_kind(request)
    return await _received(request, config)


async def no_body(request: Request, config: ServeConfig) -> None:
    """For endpoints that are told everything by their query: settings in a body would go unheard.

    Raises:
        ApiError: 400 for a body that is neither empty nor an empty object.
        ClientGone: the client left before it was complete.
    """
    if (await _received(request, config)).strip() not in (b"", b"{}"):
        message = f"{request.url.path} takes no body; what it can be told are query parameters"
        raise ApiError(400, message, code="unexpected_body")


def _check_kind(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = repr(kind[:80]) if kind else "nothing"
        raise ApiError(415, f"content-type must be application/json, got {shown}", code="unsupported_media_type")


async def _received(request: Request, config: ServeConfig) -> bytes:
    limit = config.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError as error:
        message = f"the body did not arrive within {config.body_timeout_s:g} s"
        raise ApiError(408, message, code="body_timeout") from error
    except ClientDisconnect as error:
        raise ClientGone("the client left while its request was read") from error
    return b"".join(chunks)


def parse(kind: type[B], data: bytes) -> B:
    """The body as one of our models.

    Raises:
        ApiError: 400 with the first field that is wrong.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(kind, error) from error
    except (RecursionError, ValueError) as error:
        raise ApiError(400, f"the body cannot be read: {error}", code="invalid_json") from error


async def parsed_body(request: Request, kind: type[B], service: Service) -> B:
    """Both of the above; a large body is parsed on another thread."""
    data = await read_body(request, service.config)
    return parse(kind, data) if len(data) < _LARGE_BODY else await service.work(lambda: parse(kind, data))


def no_unknown_query(request: Request, *known: str, repeatable: bool = False) -> None:
    """Raises:
    ApiError: 400 for a query parameter that the endpoint does not have, or has only once.
    """
    for name in request.query_params:
        if name not in known:
            offer = f"known: {', '.join(known)}" if known else "there are none"
            raise ApiError(400, f"unknown query parameter {name!r:.80} ({offer})", param=name, code="unknown_field")
        if not repeatable and len(request.query_params.getlist(name)) > 1:
            raise ApiError(400, f"{name}: is given more than once", param=name, code="invalid_value")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def _refusal(kind: type[BaseModel], error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False, include_input=False)
    # Of a field that may have several shapes the problem of each is listed; the deepest says most.
    first = problems[0]["loc"][:1]
    problem = max((item for item in problems if item["loc"][:1] == first), key=lambda item: len(item["loc"]))
    path, reason, code = problem["loc"], problem["type"], "invalid_value"
    param = _path(path)
    message = problem["msg"].removeprefix("Value error, ")
    if reason == "json_invalid":
        return ApiError(
            400, f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    if reason in ("model_type", "model_attributes_type", "dataclass_type") and not path:
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    if reason == "extra_forbidden":
        message, code = f"unknown field{_suggestion(kind, path)}", "unknown_field"
    elif reason == "missing":
        message, code = "is required", "missing_field"
    elif reason == "none_required":
        message, code = "is not supported by this server; leave it out", "unsupported_field"
    else:
        message = message[:1].lower() + message[1:]
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].content``; without what only pydantic knows of (which shape of several was tried)."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() or not text:
            text += f".{part}" if text else part
    return text


def _suggestion(kind: type[BaseModel], path: tuple[Any, ...]) -> str:
    if len(path) != 1:
        return ""
    close = difflib.get_close_matches(str(path[0])[:100], kind.model_fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

"""The API, described: ``GET /openapi.json``, made from the models that check the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .bodies import AbortBody, Body, CompletionBody, DetokenizeBody
from .chat_bodies import ChatBody, TokenizeBody
from .parsing import no_unknown_query

_BODIES: Sequence[tuple[str, str, type[Body]]] = (
    ("/v1/completions", "Complete one prompt or several.", CompletionBody),
    ("/v1/chat/completions", "Answer a conversation.", ChatBody),
    ("/tokenize", "The token ids of a text or a conversation.", TokenizeBody),
    ("/detokenize", "The text of token ids.", DetokenizeBody),
    ("/abort_requests", "End requests now.", AbortBody),
)
_LOOKS = (
    ("/v1/models", "The model, under each of its names."),
    ("/health", "Whether the engine can serve."),
    ("/ready", "Whether a request would be served at once."),
    ("/metrics", "Figures for Prometheus."),
    ("/version", "The version of this package."),
    ("/is_sleeping", "Whether any part of the engine sleeps."),
)
_ACTIONS: Sequence[tuple[str, str, str | None, dict[str, Any]]] = (
    ("/pause", "Stop stepping.", "mode", {"type": "string", "enum": ["keep", "wait", "abort"]}),
    ("/resume", "Go on after a pause.", None, {}),
    ("/sleep", "Give memory back.", "level", {"type": "string", "enum": ["1", "2"]}),
    ("/wake_up", "Take memory again.", "tags", {"type": "string", "enum": ["weights", "kv_cache"]}),
)
_REFERENCE = "#/components/schemas/{model}"


def openapi_schema() -> dict[str, Any]:
    """The description, version 3.1 of the standard."""
    kinds = [body for _, _, body in _BODIES]
    _, definitions = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REFERENCE)
    schemas = {**definitions.get("$defs", {}), "Error": _error_schema()}
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in _LOOKS}
    paths["/v1/models/{name}"] = {"get": _operation("One name of the model.")}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    for path, text, kind in _BODIES:
        operation = _operation(text)
        schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": operation}
    for path, text, parameter, schema in _ACTIONS:
        operation = _operation(text)
        if parameter is not None:
            operation["parameters"] = [{"name": parameter, "in": "query", "required": False, "schema": schema}]
        paths[path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "twostroke", "version": version("twostroke")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


async def openapi(request: Request) -> Response:
    """The description as JSON."""
    no_unknown_query(request)
    return JSONResponse(openapi_schema())


def _operation(text: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    return {
        "summary": text,
        "responses": {
            "200": {"description": "Done."},
            "default": {"description": "An error, in OpenAI's shape.", "content": error},
        },
    }


def _error_schema() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    error = {
        "type": "object",
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text},
        "required": ["message", "type", "param", "code"],
    }
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}

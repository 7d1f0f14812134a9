"""The application: routes, errors, and what they share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import engine_routes, token_routes
from .chat import chat_completions
from .completions import completions
from .config import ServeConfig
from .errors import ApiError
from .gate import Gate
from .openapi import openapi
from .page_routes import page_routes
from .served_model import ServedModel
from .service import Service

if TYPE_CHECKING:
    from ..serving_loop import ServingLoop

_DEFAULTS = ServeConfig()


def create_app(
    loop: ServingLoop,
    config: ServeConfig = _DEFAULTS,
    *,
    model: ServedModel | None = None,
) -> Starlette:
    """An ASGI application over a running loop, which stays the caller's: it goes on when the application ends.

    Args:
        loop: serves the requests.
        config: limits and keys; ``host`` and ``port`` are for the one who listens.
        model: None for the runner's, with the names in ``config``.
    """
    chosen = model or ServedModel.of(loop.runner, config.served_model_names)
    service = Service(loop, config, chosen)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.close()

    middleware = [Middleware(Gate, service=service)]
    if config.allowed_origins:
        middleware.insert(
            0,
            Middleware(CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]),
        )
    app = Starlette(
        routes=_routes(),
        middleware=middleware,
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def _routes() -> list[Route]:
    get, post = ["GET"], ["POST"]
    return [
        Route("/v1/models", engine_routes.models, methods=get),
        Route("/v1/models/{name:path}", engine_routes.model, methods=get),
        Route("/v1/completions", completions, methods=post),
        Route("/v1/chat/completions", chat_completions, methods=post),
        Route("/tokenize", token_routes.tokenize, methods=post),
        Route("/detokenize", token_routes.detokenize, methods=post),
        Route("/health", engine_routes.health, methods=get),
        Route("/ready", engine_routes.ready, methods=get),
        Route("/metrics", engine_routes.metrics, methods=get),
        Route("/version", engine_routes.show_version, methods=get),
        Route("/abort_requests", engine_routes.abort_requests, methods=post),
        Route("/pause", engine_routes.pause, methods=post),
        Route("/resume", engine_routes.resume, methods=post),
        Route("/sleep", engine_routes.sleep, methods=post),
        Route("/wake_up", engine_routes.wake_up, methods=post),
        Route("/is_sleeping", engine_routes.is_sleeping, methods=get),
        Route("/openapi.json", openapi, methods=get),
        *page_routes(),
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method) in OpenAI's shape."""
    assert isinstance(error, HTTPException), "the handler is registered for these"
    message = {404: f"there is no {request.url.path!r:.200} here", 405: f"{request.method} is not for this path"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    refusal = ApiError(error.status_code, message.get(error.status_code, error.detail), code=code)
    return JSONResponse(refusal.body(), refusal.status, headers={**(error.headers or {}), **refusal.headers()})

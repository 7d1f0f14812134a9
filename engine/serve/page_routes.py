"""The page at ``/``: its files, and the engine's figures of this moment for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .metrics import graph_counts
from .parsing import no_unknown_query

if TYPE_CHECKING:
    from .service import Service

_FOLDER = Path(__file__).parent / "page"
_FILES = (
    ("/", "index.html", "text/html; charset=utf-8"),
    ("/page/page.css", "page.css", "text/css; charset=utf-8"),
    ("/page/page.js", "page.js", "text/javascript; charset=utf-8"),
)
_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


def page_routes() -> Sequence[Route]:
    """Routes of the page, for an application whose ``state.service`` is a :class:`Service`. The files are read now."""
    files = [Route(path, _File((_FOLDER / name).read_bytes(), kind), methods=["GET"]) for path, name, kind in _FILES]
    return [*files, Route("/engine/state", engine_state, methods=["GET"])]


async def engine_state(request: Request) -> Response:
    """What the engine does: states, queues, KV use, and counters from which the page makes speeds."""
    no_unknown_query(request)
    return JSONResponse(state_of(request.app.state.service), headers={"cache-control": "no-store"})


def state_of(service: Service) -> dict[str, Any]:
    """Single figures, each read at once, so that no lock is held and no step waits.

    ``seconds`` is a clock; ``stages`` has host seconds since the server began; ``modes`` counts steps by graph mode.
    """
    loop = service.loop
    stats = loop.scheduler.stats()
    return {
        "model": service.model.name,
        "max_model_len": service.model.max_model_len,
        "seconds": time.monotonic(),
        "loop": str(loop.state),
        "runner": str(loop.runner.life),
        "state": str(loop.runner.state),
        "is_healthy": loop.healthy,
        "is_paused": loop.is_paused,
        "fault": None if loop.healthy else service.fault(),
        "num_steps": loop.num_steps,
        "generated_tokens": _generated_tokens(service),
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "kv_cache_usage": stats.kv_cache_usage,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "num_preemptions": stats.num_preemptions,
        "stages": dict(service.metrics.stage_seconds),
        "modes": [
            {"mode": mode, "reason": reason, "steps": steps} for (mode, reason), steps in graph_counts(loop).items()
        ],
    }


def _generated_tokens(service: Service) -> int:
    samples = (sample for family in service.metrics.generation_tokens.collect() for sample in family.samples)
    return int(next(sample.value for sample in samples if sample.name.endswith("_total")))


class _File:
    """Answers with one file of the page, as an endpoint."""

    def __init__(self, content: bytes, kind: str) -> None:
        self._content = content
        self._headers = {**_HEADERS, "content-type": kind}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await Response(self._content, headers=self._headers)(scope, receive, send)

"""Looking after the engine: health, metrics, models, pause, sleep, abort."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...fsm import LifeState
from ..loop_jobs import PauseMode
from .bodies import AbortBody
from .errors import ApiError
from .parsing import no_body, no_unknown_query, parsed_body
from .service import Service

_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
_PARTS = ("weights", "kv_cache")


def _service(request: Request) -> Service:
    return request.app.state.service


async def health(request: Request) -> Response:
    """200 while the engine can serve, now or after a pause or its sleep; 503 when it can't any more."""
    no_unknown_query(request)
    service = _service(request)
    runner, loop = service.loop.runner, service.loop
    facts: dict[str, Any] = {
        "status": "ok",
        "runner": str(runner.life),
        "step": str(runner.state),
        "loop": str(loop.state),
    }
    if loop.healthy:
        return JSONResponse(facts)
    return JSONResponse({**facts, "status": "fault", "reason": service.fault()}, 503)


async def ready(request: Request) -> Response:
    """200 when a request would be served at once, 503 with the reason when not."""
    no_unknown_query(request)
    reason = _service(request).why_not_ready()
    return JSONResponse(
        {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}, 503 if reason else 200
    )


async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    no_unknown_query(request)
    service = _service(request)
    return Response(await service.work(service.metrics.text), headers={"content-type": _EXPOSITION})


async def show_version(request: Request) -> Response:
    """The version of this package."""
    no_unknown_query(request)
    return JSONResponse({"version": version("twostroke")})


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "twostroke",
        "root": service.model.name,
        "max_model_len": service.model.max_model_len,
    }


async def models(request: Request) -> Response:
    """The model, under each of its names."""
    no_unknown_query(request)
    service = _service(request)
    return JSONResponse({"object": "list", "data": [_model_card(service, name) for name in service.model.names]})


async def model(request: Request) -> Response:
    """One of them."""
    no_unknown_query(request)
    service, name = _service(request), request.path_params["name"]
    service.model.require_name(name)
    return JSONResponse(_model_card(service, name))


async def abort_requests(request: Request) -> Response:
    """End requests now; their finish reason is "abort". Says which ids were live."""
    no_unknown_query(request)
    service = _service(request)
    body = await parsed_body(request, AbortBody, service)
    found = {name: service.calls.named(name) for name in dict.fromkeys(body.request_ids)}

    def abort() -> None:
        for calls in found.values():
            for call in calls:
                for handle in call.handles:
                    handle.close()

    await service.work(abort)
    live = [name for name, calls in found.items() if calls]
    return JSONResponse({"aborted": live, "unknown": [name for name in found if name not in live]})


async def pause(request: Request) -> Response:
    """Stop stepping. ``mode``: keep what has begun for later (the default), wait for it, or abort it."""
    no_unknown_query(request, "mode")
    service = _service(request)
    await no_body(request, service.config)
    mode: Any = request.query_params.get("mode", "keep")
    if mode not in get_args(PauseMode):
        message = f"mode: must be one of {', '.join(get_args(PauseMode))}, got {mode!r:.80}"
        raise ApiError(400, message, param="mode", code="invalid_value")
    await service.administer(lambda: service.loop.pause(mode))
    return JSONResponse({"status": "paused", "mode": mode})


async def resume(request: Request) -> Response:
    """Go on after a pause."""
    no_unknown_query(request)
    service = _service(request)
    await no_body(request, service.config)
    await service.work(service.loop.resume)  # not behind a pause that still waits
    return JSONResponse({"status": "running"})


async def sleep(request: Request) -> Response:
    """Give memory back between two steps; ``level`` 1: the KV cache, 2: the weights too. Requests wait."""
    no_unknown_query(request, "level")
    service = _service(request)
    await no_body(request, service.config)
    text = request.query_params.get("level", "1")
    if text not in ("1", "2"):
        message = f"level: must be 1 (KV cache) or 2 (KV cache and weights), got {text!r:.80}"
        raise ApiError(400, message, param="level", code="invalid_value")
    runner, loop = service.loop.runner, service.loop
    await service.administer(lambda: loop.between_steps(lambda: runner.sleep(int(text))))
    return JSONResponse({"status": "asleep", "level": int(text)})


async def wake_up(request: Request) -> Response:
    """Take the memory again, all of it or the parts in ``tags`` (``weights``, ``kv_cache``), and go on."""
    no_unknown_query(request, "tags", repeatable=True)
    service = _service(request)
    await no_body(request, service.config)
    tags = request.query_params.getlist("tags") or None
    if unknown := [tag for tag in tags or () if tag not in _PARTS]:
        message = f"tags: must be {' or '.join(_PARTS)}, got {unknown[0]!r:.80}"
        raise ApiError(400, message, param="tags", code="invalid_value")
    runner, loop = service.loop.runner, service.loop

    def wake() -> None:
        runner.wake_up(tags)
        if runner.life is LifeState.READY:
            runner.capture_model()

    await service.administer(lambda: loop.between_steps(wake))
    is_awake = runner.life is LifeState.READY
    return JSONResponse({"status": "awake" if is_awake else "partly asleep"})


async def is_sleeping(request: Request) -> Response:
    """Whether any part of the engine sleeps."""
    no_unknown_query(request)
    return JSONResponse({"is_sleeping": _service(request).loop.runner.life is LifeState.ASLEEP})

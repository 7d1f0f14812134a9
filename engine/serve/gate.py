"""Around every request: an id, who may come in, one line in the log, and an answer whatever happens."""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServeConfig
from .errors import ApiError, ClientGone, as_api_error

if TYPE_CHECKING:
    from .service import Service

_LOG = logging.getLogger(__name__)
REQUEST_ID = "x-request-id"
OPEN_PATHS = frozenset({"/health", "/ready", "/"})
"""What needs no key; files of the page (``/page/…``) neither."""

_ID_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLIENT_GONE = 499
_QUIET = frozenset({"/health", "/ready", "/metrics", "/engine/state"})
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


class Gate:
    """The outermost layer. Nothing gets past it: what the application raises is answered with 500 and logged."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = [key.encode() for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _ID_PATTERN.fullmatch(given) else f"req-{uuid4().hex}"
        facts: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, facts=facts)
        sent = _Sent(send, request_id)
        began = time.monotonic()
        try:
            self._check(scope, headers)
            await self._app(scope, receive, sent)
        except ClientGone:
            sent.status = sent.status or _CLIENT_GONE
            facts["client_gone"] = True
        except Exception as error:
            refusal = as_api_error(error)
            facts["error"] = refusal.message
            if refusal.code == "internal_error":
                _LOG.exception("a request failed", extra={"facts": {"request_id": request_id, "path": scope["path"]}})
            await sent.fail(scope, receive, refusal)
        finally:
            self._note(scope, sent.status, request_id, time.monotonic() - began)

    def _check(self, scope: Scope, headers: Headers) -> None:
        config = self._service.config
        path = scope["path"]
        _check_origin(config, headers)
        if self._keys and path not in OPEN_PATHS and not path.startswith("/page/") and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode() if scheme.lower() == "bearer" else b""
            matches = [hmac.compare_digest(given, known) for known in self._keys]
            if not any(matches):
                message = 'no valid API key: send "Authorization: Bearer KEY"'
                raise ApiError(401, message, code="invalid_api_key")

    def _note(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        method, path = _route(scope)
        self._service.metrics.http(method, path, status)
        level = logging.DEBUG if scope["path"] in _QUIET and status < 500 else logging.INFO
        if _LOG.isEnabledFor(level):
            facts = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(seconds * 1000, 1),
                "client": (scope.get("client") or ("",))[0],
                **scope["state"]["facts"],
            }
            _LOG.log(level, "request", extra={"facts": facts})


def _route(scope: Scope) -> tuple[str, str]:
    """Method and path for a label: a client must not be able to make up new ones."""
    endpoint = scope.get("endpoint")
    if endpoint is None:
        return "(any)", "(unknown)"
    name = getattr(endpoint, "__name__", "(unknown)")
    return scope["method"], scope["path"] if not scope.get("path_params") else f"({name})"


class _Sent:
    """The way to the client: adds the request's id, and remembers whether an answer has begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(raw=message["headers"])[REQUEST_ID] = self._request_id
        await self._send(message)

    async def fail(self, scope: MutableMapping[str, Any], receive: Receive, error: ApiError) -> None:
        """Answer with an error, unless the answer has begun: then the connection breaks off."""
        if self.status:
            raise error
        await JSONResponse(error.body(), error.status, headers=error.headers())(scope, receive, self)


def _check_origin(config: ServeConfig, headers: Headers) -> None:
    """Keep other people's web pages out: a browser on this machine can reach a server that has no key.

    Raises:
        ApiError: 403.
    """
    origin = headers.get("origin")
    host = _host_name(headers.get("host", ""))
    is_ours = origin is None or origin in config.allowed_origins or _address(origin) == headers.get("host", "")
    if not is_ours:
        message = f"the origin {origin!r:.200} may not call this server; --allowed-origin lets it"
        raise ApiError(403, message, code="origin_refused")
    if config.is_local and not config.api_keys and host and host not in _LOCAL_HOSTS:
        message = f"this server answers to localhost only, not to {host!r:.200}; set an API key to use another name"
        raise ApiError(403, message, code="host_refused")


def _address(origin: str) -> str | None:
    """Host and port of an origin; None where it is not written as one."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # brackets that are no IPv6 address
        return None


def _host_name(host: str) -> str:
    """Without the port and the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()

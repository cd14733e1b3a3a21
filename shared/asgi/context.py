"""What is known about a request from its first byte on: its id, and one access line when it ends.

Pure ASGI, and `receive` is handed on untouched, so nothing here can hide a disconnect.
"""

from __future__ import annotations

import secrets
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.asgi.text import clipped, is_internal_id, visible_ascii

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
QUIET_PATHS = OPEN_PATHS | {"/v1/info"}  # asked every few seconds, for ever
_log = structlog.get_logger(__name__)


def new_request_id() -> str:
    """A fresh internal id, `req-` and 24 hex digits; it cannot be guessed from another one."""
    return f"req-{secrets.token_hex(12)}"


def request_id_of(scope: Scope) -> str:
    """The internal id of the request that `scope` belongs to."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def adopt_request_id(scope: Scope, request_id: str) -> None:
    """On a worker: go by the id that the router wrote into the body, in every line from here on."""
    scope["state"]["request_id"] = request_id
    structlog.contextvars.bind_contextvars(request_id=request_id)


def note_ending(scope: Scope, ending: str) -> None:
    """Say how the request ended where its status cannot: `ending` is the access line's, default by status."""
    scope["state"]["ending"] = ending


def note_unread_body(scope: Scope) -> None:
    """Part of the body was not taken: the answer closes the connection instead of waiting for the rest."""
    scope["state"]["unread_body"] = True


class RequestContext:
    """Gives each request its id, its log context and one access line, also when the client went away.

    trust_caller_id: on a worker, where the caller is the router, its X-Request-Id is the request's id. On the
    router it is the client's own name for the request: logged and echoed, cleaned, never used as a key.
    """

    def __init__(self, app: ASGIApp, *, trust_caller_id: bool) -> None:
        self.app = app
        self._trust_caller_id = trust_caller_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        facts = scope.setdefault("state", {})
        told = Headers(scope=scope).get("x-request-id", "")
        if self._trust_caller_id and is_internal_id(told):
            request_id, client_id = told, ""
        else:
            request_id, client_id = new_request_id(), "" if self._trust_caller_id else visible_ascii(told)
        structlog.contextvars.clear_contextvars()
        adopt_request_id(scope, request_id)
        if client_id:
            structlog.contextvars.bind_contextvars(client_request_id=client_id)
        status: int | None = None
        complete = False

        async def observed_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", client_id or request_id_of(scope))
                if facts.get("unread_body"):
                    headers["connection"] = "close"
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        ending = "cancelled"
        try:
            await self.app(scope, receive, observed_send)
            ending = "ok" if complete else "incomplete"
        except ClientDisconnect:
            ending = "client_gone"
        except Exception:
            ending = "error"
            raise
        finally:
            if ending == "ok" and status is not None and status >= 400:
                ending = "refused" if status < 500 else "error"
            _write_line(scope, status, facts.get("ending", ending), time.monotonic() - started)


def _write_line(scope: Scope, status: int | None, ending: str, duration_s: float) -> None:
    write = _log.debug if scope["path"] in QUIET_PATHS else _log.info
    write(
        "request",
        method=scope["method"],
        path=clipped(scope["path"], 200),
        status=status,
        ending=ending,
        duration_s=round(duration_s, 6),
    )

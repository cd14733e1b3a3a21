"""Bearer keys: between our own processes, and from clients to the router."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.asgi.answers import error_response
from shared.errors import Unauthorized


class BearerAuth:
    """Answers 401 to every request without one of `keys`, except on `open_paths` (exact paths).

    Every key is compared, each in constant time, so the time of an answer tells nothing about any of them.
    """

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], open_paths: Iterable[str]) -> None:
        self.app = app
        self._keys = tuple(key.encode() for key in keys)
        self._open_paths = frozenset(open_paths)
        if not self._keys or not all(self._keys):
            raise ValueError("BearerAuth needs at least one key, and no empty one")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths and not self._allowed(scope):
            exc = Unauthorized("Missing or wrong key: send it as 'Authorization: Bearer <key>'.")
            await error_response(exc)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # NOTE: ASGI header values are bytes that starlette reads as latin-1; keys may be any UTF-8.
        given = key.strip().encode("latin-1")
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

"""The one place where exceptions become answers."""

from __future__ import annotations

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.asgi.answers import error_response, status_response
from shared.asgi.context import note_ending
from shared.asgi.validation import describe
from shared.errors import ServingError

_log = structlog.get_logger(__name__)


def install_error_handlers(app: FastAPI) -> None:
    """Every error of `app` becomes JSON in the OpenAI shape.

    A pydantic ValidationError that is not about the request (`parse_json` and FastAPI convert those) is a
    mistake of ours and so a 500, like every other unexpected exception.
    """
    app.add_exception_handler(ServingError, _answer_serving_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_middleware(AnswerUnexpected)


class AnswerUnexpected:
    """Logs an unexpected exception with its stack and answers 500, without showing anything of it.

    In place of starlette's own handler, which raises again after its answer: the server would log it twice.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def observed_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, observed_send)
        except ClientDisconnect:
            raise
        except ServingError as exc:  # from a middleware; those of routes are answered further in
            if started:
                raise
            await _report(scope, exc)(scope, receive, send)
        except Exception:  # noqa: BLE001 - the last handler: logged whole, and answered
            _log.exception("unexpected_error")
            note_ending(scope, "error")
            if started:
                return  # the server closes a connection whose answer is not complete
            failure = ServingError("The server failed while it handled the request.")
            await error_response(failure)(scope, receive, send)


async def _answer_serving_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ServingError)
    return _report(request.scope, exc)


def _report(scope: Scope, exc: ServingError) -> Response:
    note_ending(scope, exc.code)
    if exc.http_status >= 500:
        _log.warning("request_failed", code=exc.code, error=exc.message, cause=type(exc.__cause__).__name__)
    return error_response(exc)


async def _answer_validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    findings = [{**e, "loc": e["loc"][1:] if e["loc"][:1] == ("body",) else e["loc"]} for e in exc.errors()]
    return _report(request.scope, describe(findings, exc.body))


async def _answer_http_exception(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 404:
        message = "There is nothing under this path."
    elif exc.status_code == 405:
        message = "This path does not take this method."
        allowed = (exc.headers or {}).get("Allow", "")
        if "GET" in allowed.split(", ") and "HEAD" not in allowed:
            exc.headers = {**(exc.headers or {}), "Allow": f"{allowed}, HEAD"}  # see shared.asgi.head
    else:
        message = str(exc.detail)
    return status_response(exc.status_code, message, exc.headers)

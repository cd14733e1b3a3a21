"""Everything around an app's routes, in the one right order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from shared.asgi.auth import BearerAuth
from shared.asgi.context import OPEN_PATHS, RequestContext
from shared.asgi.handlers import install_error_handlers
from shared.asgi.head import HeadAsGet
from shared.asgi.openapi import error_responses

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def new_app(title: str, lifespan: Lifespan) -> FastAPI:
    """An app that is not draining, with its errors documented, without pages of docs or redirects for slashes."""
    app = FastAPI(
        title=title,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=error_responses(),
    )
    app.state.draining = False
    return app


def install_http(
    app: FastAPI,
    *,
    keys: Iterable[str],
    trust_caller_id: bool,
    open_paths: Iterable[str] = OPEN_PATHS,
    cors_origins: Sequence[str] = (),
    expose_headers: Sequence[str] = (),
) -> None:
    """Request id and access line, HEAD as GET, CORS, errors, keys: from the outside in.

    keys: none means that everything is open. cors_origins: none means no CORS; preflights need no key then,
    and errors and streams carry the headers too. trust_caller_id: see RequestContext.
    """
    keys = tuple(keys)
    if keys:
        app.add_middleware(BearerAuth, keys=keys, open_paths=tuple(open_paths))
    install_error_handlers(app)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=list(expose_headers),
        )
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestContext, trust_caller_id=trust_caller_id)

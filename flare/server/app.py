"""The ASGI application.

Owns the routes, the order of middleware, and the last answer to every error. Does not own any endpoint. Surprising
rule: sse-starlette ends open streams on SIGTERM by default; that is switched off here, for the engine drains them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from sse_starlette.sse import AppStatus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import status
from .auth import KeyCheck
from .chat import chat_completions
from .completions import completions
from .context import ServerContext
from .errors import ApiError, error_response, translate
from .tokenize import detokenize, tokenize

log = structlog.get_logger(__name__)

Endpoint = Callable[[Request, ServerContext], Awaitable[Response]]

POSTS: dict[str, Endpoint] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
GETS: dict[str, Endpoint] = {
    "/v1/models": status.models,
    "/v1/models/{name:path}": status.model,
    "/health": status.ready,
    "/ready": status.ready,
    "/live": status.live,
    "/metrics": status.metrics,
    "/version": status.version,
    "/graphs": status.graphs,
}


def create_app(context: ServerContext) -> Starlette:
    """The application over an engine. It starts and stops nothing."""
    AppStatus.enable_automatic_graceful_drain = False
    routes = [Route(path, _bind(endpoint, context), methods=["POST"]) for path, endpoint in POSTS.items()]
    routes += [Route(path, _bind(endpoint, context), methods=["GET"]) for path, endpoint in GETS.items()]
    middleware = [Middleware(ErrorBoundary), Middleware(KeyCheck, keys=context.api_keys)]
    if context.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=context.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        middleware.insert(0, cors)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return app


class ErrorBoundary:
    """ASGI middleware: any exception becomes an answer, and the server lives on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            log.info("server.client_left", path=scope.get("path"))
        except Exception as error:
            answer = translate(error)
            if answer.code == "internal_error":
                log.exception("server.internal_error", path=scope.get("path"))
            if started or scope["type"] != "http":
                raise
            await error_response(answer)(scope, receive, send)


def _bind(endpoint: Endpoint, context: ServerContext) -> Callable[[Request], Awaitable[Response]]:
    async def bound(request: Request) -> Response:
        return await endpoint(request, context)

    return bound


async def _http_error(request: Request, error: Exception) -> Response:
    """What starlette's own routing refuses: an unknown path, a wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path[:128]}: {error.detail}."
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))

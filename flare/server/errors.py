"""Errors as clients see them.

Owns `ApiError` and OpenAI's error shape. Does not decide when something is an error. Surprising rule: an error that is
the server's own fault never carries its exception's text; that goes to the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from .engine_api import NotServing, QueueFull, RequestFailed, ServerStopping

INTERNAL_MESSAGE = "The server failed to answer this request. Its log says why."


class ApiError(Exception):
    """An answer with a 4xx or 5xx status. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def translate(error: Exception) -> ApiError:
    """Any exception as an answer: the one place that says whose fault it is."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            headers = {"Retry-After": str(max(1, error.retry_after_s))}
            message = f"The queue is full. Try again in {error.retry_after_s} s."
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="queue_full", headers=headers)
        case NotServing():
            headers = {"Retry-After": "1"}
            message = f"The server accepts no requests now: {error.reason}"
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="not_serving", headers=headers)
        case ServerStopping():
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="server_stopping")
        case RequestFailed():
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), code="request_failed")
        case _:
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL_MESSAGE, code="internal_error")


def error_body(error: ApiError) -> dict[str, object]:
    """OpenAI's error object; `type` follows from the status."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def error_type(status: int) -> str:
    """OpenAI's word for the kind of error."""
    match status:
        case HTTPStatus.UNAUTHORIZED:
            return "authentication_error"
        case HTTPStatus.NOT_FOUND:
            return "not_found_error"
        case _ if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return "server_error"
        case _:
            return "invalid_request_error"


def error_response(error: ApiError) -> Response:
    """The whole answer for an error."""
    body = msgspec.json.encode(error_body(error))
    return Response(body, error.status, headers=error.headers, media_type="application/json")

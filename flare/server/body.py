"""Reading a request's body.

Owns the media type, the size limit and where the parsing happens. Does not own fields (`wire`). Surprising rule: the
limit holds while bytes arrive, whatever Content-Length says, so that memory stays flat.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from .context import Limits
from .errors import ApiError
from .threads import off_loop
from .wire import Body, decode_body


async def read_body(request: Request, body_type: type[Body], limits: Limits) -> tuple[Body, int]:
    """The body of a POST and its size in bytes. Raises `ApiError` 400, 413 or 415."""
    _check_media(request)
    raw = await _read_limited(request, limits.body_bytes)
    body = await off_loop(partial(decode_body, raw, body_type), len(raw), limits.inline_bytes)
    return body, len(raw)


def _check_media(request: Request) -> None:
    """JSON or nothing said. A browser's form needs no preflight, so accepting one would let any page post here."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media and media != "application/json" and not media.endswith("+json"):
        raise ApiError(415, f"The Content-Type must be application/json, not {media[:64]!r}.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, "A compressed body (Content-Encoding) is not supported.")


async def _read_limited(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:18]) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than the limit of {limit} bytes.", code="body_too_large")

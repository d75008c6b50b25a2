"""What the server says about itself: health, models, metrics, version, graphs.

Owns those GET endpoints. Surprising rule: none of them asks the device anything, so that each answers at once however
long the running frame is (docs/api.md, "Health").
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from .context import ServerContext
from .engine_api import Health
from .envelope import json_line
from .validate import check_model


async def ready(_request: Request, context: ServerContext) -> Response:
    """200 while requests are accepted, else 503. /health and /ready."""
    health = context.engine.health
    return _json({"status": health}, 200 if health is Health.SERVING else 503)


async def live(_request: Request, _context: ServerContext) -> Response:
    """200 while the loop runs, which it does if this is answered."""
    return _json({"status": "live"})


async def models(_request: Request, context: ServerContext) -> Response:
    """All served names."""
    return _json({"object": "list", "data": [_model(name, context) for name in context.served_names]})


async def model(request: Request, context: ServerContext) -> Response:
    """One served name, or 404."""
    name: str = request.path_params["name"]
    check_model(name, context)
    return _json(_model(name, context))


async def metrics(_request: Request, context: ServerContext) -> Response:
    """Prometheus text."""
    return Response(context.render_metrics(), media_type="text/plain; version=0.0.4")


async def version(_request: Request, context: ServerContext) -> Response:
    """The server's version."""
    return _json({"version": context.version})


async def graphs(_request: Request, context: ServerContext) -> Response:
    """The catalog of prepared graphs with their measured durations."""
    return _json(context.engine.graphs())


def _json(value: object, status: int = 200) -> Response:
    return Response(json_line(value), status, media_type="application/json")


def _model(name: str, context: ServerContext) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": context.started_unix_s,
        "owned_by": "flare",
        "root": context.served_names[0],
        "parent": None,
        "max_model_len": context.max_model_len,
    }

"""Views and decisions as JSON, both ways and without loss.

Owns the encoding that a trace carries and that `explain` reads back (docs/scheduling.md, "Decisions that can be
taken again"). Does not own what is in them. Surprising rule: JSON has no infinity, and a null price means "not yet
set", so a view with a price that is not finite is refused when written rather than changed.
"""

from __future__ import annotations

import math

import msgspec

from .view import Decision, View


def encode_view(view: View) -> bytes:
    """JSON of a view. Raises ValueError if a price is not finite, naming the slot."""
    for row in view.requests:
        for name, price in (("token_price", row.token_price), ("delivery_price", row.delivery_price)):
            if price is not None and not math.isfinite(price):
                raise ValueError(f"{name} of slot {row.slot} is {price}: give the view a greater log_scale")
    return msgspec.json.encode(view)


def decode_view(data: bytes | str) -> View:
    """The view of `encode_view`. Raises msgspec.DecodeError (ValidationError among them), naming the field."""
    return msgspec.json.decode(data, type=View)


def encode_decision(decision: Decision) -> bytes:
    """JSON of a decision."""
    return msgspec.json.encode(decision)


def decode_decision(data: bytes | str) -> Decision:
    """The decision of `encode_decision`. Raises msgspec.DecodeError, naming the field."""
    return msgspec.json.decode(data, type=Decision)

"""Identities shared by every layer.

Owns the types that name a request, its place on the device, a submitted frame and a page. Does not own any state.
Surprising rule: a slot alone never identifies a request. Only a handle (slot and generation) does, because slots are
given again while completions that name their earlier owner may still be on their way.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

RequestId = NewType("RequestId", int)
"""A logical request, numbered in order of arrival; never used twice."""

Fence = NewType("Fence", int)
"""A submitted frame, numbered in order of submission from 1; 0 means none."""

PageId = NewType("PageId", int)
"""A page of the KV cache."""

StateRow = NewType("StateRow", int)
"""A private row of the device that holds the saved state of one request."""


class RequestHandle(NamedTuple):
    """One execution of a request: a request slot and the generation of its owner."""

    slot: int
    generation: int

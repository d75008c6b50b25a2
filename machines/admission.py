"""Whether a request can be served by this server at all.

Owns the refusals at arrival: pages, state rows, graphs that the request needs and the catalog lacks. Does not own
queue limits (`waiting`). Surprising rule: what could never be served must not wait, since it would hold up all behind
it for ever (docs/scheduling.md, "Slots and pages").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .graph import PROMPT_KINDS, GraphKind, GraphShape
from .pages import PagePool
from .request import RequestSpec
from .state_rows import StateRows


def check_admissible(spec: RequestSpec, catalog: Sequence[GraphShape], pages: PagePool, state_rows: StateRows) -> None:
    """Raise ValueError, saying what is lacking, if `spec` can never be served."""
    tokens = spec.prompt_tokens + spec.max_tokens
    if pages.needed(tokens) > pages.total:
        capacity = pages.total * pages.page_tokens
        raise ValueError(f"prompt_tokens and max_tokens come to {tokens} tokens; all pages hold {capacity}")
    kinds = {shape.kind for shape in catalog}
    for field, served in _needed(spec):
        if not kinds & served:
            raise ValueError(f"{field}: no {' or '.join(sorted(served))} graph is prepared")
    if spec.needs_state_row and not state_rows.total:
        raise ValueError("windows, checkpoints: the device has no state rows")
    serving = _prompt_kinds(spec) & PROMPT_KINDS
    longest = max((end - start for start, end in spec.spans), default=0)
    capacity = max(shape.prefill_tokens for shape in catalog if shape.kind in serving)
    if longest > capacity:
        raise ValueError(f"spans: {longest} tokens pass the largest prompt capacity, {capacity}")


def _prompt_kinds(spec: RequestSpec) -> set[GraphKind]:
    return {GraphKind.SCORED_PREFILL} if spec.scored else {GraphKind.PREFILL, GraphKind.MIXED}


def _needed(spec: RequestSpec) -> Iterator[tuple[str, set[GraphKind]]]:
    """Each need of a request, by the field that brings it, and the kinds of which any serves it."""
    yield "prompt_tokens", _prompt_kinds(spec)
    if spec.max_tokens > 1:
        yield "max_tokens", {GraphKind.DECODE, GraphKind.SPECULATIVE, GraphKind.MIXED}
    if spec.initialize:
        yield "initialize", {GraphKind.INITIALIZE}
    if spec.restored_tokens:
        yield "restored_tokens", {GraphKind.RESTORE}
    if spec.windows_left:
        yield "windows", {GraphKind.VISION}
    if len(spec.windows_left) > 1:
        yield "windows", {GraphKind.SNAPSHOT}
        yield "windows", {GraphKind.RESTORE}
    if spec.checkpoints_left:
        yield "checkpoints", {GraphKind.SNAPSHOT}

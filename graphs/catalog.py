"""The catalog: which prepared graphs a device makes ready.

Owns the checks of a recipe and the choice of its graphs for one server. Does not own programs, buffers or durations.
Surprising rule: decode batches go through the concurrency rounded up to a power of two, so the largest graph may have
more rows than there are requests.
"""

from __future__ import annotations

import itertools

from flare.config.schema import REQUEST_SLOTS_MAX, ConfigError, Recipe
from flare.machines.graph import GraphKind, GraphShape


def padded_concurrency(max_num_seqs: int) -> int:
    """The least power of two that is not below `max_num_seqs`. Raises `ConfigError` outside 1 to 64."""
    if not 1 <= max_num_seqs <= REQUEST_SLOTS_MAX:
        raise ConfigError(f"max_num_seqs: {max_num_seqs} is outside 1 to {REQUEST_SLOTS_MAX}")
    return 1 << (max_num_seqs - 1).bit_length()


def build_catalog(recipe: Recipe, max_num_seqs: int, max_prefill_tokens: int) -> tuple[GraphShape, ...]:
    """The graphs that `recipe` gives a server of `max_num_seqs` slots: decode, prefill, scored prefill, each rising.

    Raises `ConfigError` naming the recipe's key for capacities that repeat, do not rise or are out of range, and naming
    `max_prefill_tokens` if it is none of the recipe's prefill capacities (docs/scheduling.md, "Graphs").
    """
    rows = padded_concurrency(max_num_seqs)
    batches = _rising(recipe, "decode_batches", recipe.decode_batches, REQUEST_SLOTS_MAX)
    prefill = _rising(recipe, "prefill_tokens", recipe.prefill_tokens)
    scored = _rising(recipe, "scored_prefill_tokens", recipe.scored_prefill_tokens)
    if max_prefill_tokens not in prefill:
        capacities = ", ".join(map(str, prefill))
        raise ConfigError(
            f"max_prefill_tokens: {max_prefill_tokens} is no capacity of recipe {recipe.name}; take one of {capacities}"
        )
    catalog = (
        *(GraphShape(GraphKind.DECODE, batch) for batch in batches if batch <= rows),
        *(GraphShape(GraphKind.PREFILL, 1, tokens) for tokens in prefill if tokens <= max_prefill_tokens),
        *(GraphShape(GraphKind.SCORED_PREFILL, 1, tokens) for tokens in scored if tokens <= max_prefill_tokens),
    )
    for kind in GraphKind:
        if all(shape.kind is not kind for shape in catalog):
            raise ConfigError(f"recipe {recipe.name}: no {kind} graph is small enough for these limits")
    return catalog


def _rising(recipe: Recipe, key: str, values: tuple[int, ...], maximum: int | None = None) -> tuple[int, ...]:
    """`values`, once they are known to be at least 1, at most `maximum` and strictly rising."""
    for value in values:
        if value < 1 or (maximum is not None and value > maximum):
            allowed = "at least 1" if maximum is None else f"from 1 to {maximum}"
            raise ConfigError(f"recipe {recipe.name}: {key}: {value} is not {allowed}")
    for before, after in itertools.pairwise(values):
        if before == after:
            raise ConfigError(f"recipe {recipe.name}: {key}: {after} is listed twice")
        if before > after:
            raise ConfigError(f"recipe {recipe.name}: {key}: {after} follows {before}; list capacities in rising order")
    return values

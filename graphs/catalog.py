"""The catalog: which prepared graphs a device makes ready.

Owns the checks of a recipe and the choice of its graphs for one server. Does not own programs, buffers or durations.
Surprising rule: decode batches go through the concurrency rounded up to a power of two, so the largest graph may have
more rows than there are requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from flare.config.schema import REQUEST_SLOTS_MAX, ConfigError, Recipe
from flare.machines.graph import GraphKind, GraphShape, Source

from .mixed_shapes import mixed_shapes
from .speculative_shapes import speculative_shapes

PROMPT_ALIGNMENT = 64
"""Prompt capacities of mixed graphs are multiples of this many tokens."""


def padded_concurrency(max_num_seqs: int) -> int:
    """The least power of two that is not below `max_num_seqs`. Raises `ConfigError` outside 1 to 64."""
    if not 1 <= max_num_seqs <= REQUEST_SLOTS_MAX:
        raise ConfigError(f"max_num_seqs: {max_num_seqs} is outside 1 to {REQUEST_SLOTS_MAX}")
    return 1 << (max_num_seqs - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Speculation:
    """Rounds of several tokens: with programs that propose themselves (`drafts`) or copies alone, of `width` target
    positions (None: of every width that the recipe has), and of at most `envelope` target rows where wider than one."""

    drafts: bool
    width: int | None
    envelope: int


def build_catalog(
    recipe: Recipe,
    max_num_seqs: int,
    max_prefill_tokens: int,
    *,
    mixed_prefill: bool = False,
    speculation: Speculation | None = None,
) -> tuple[GraphShape, ...]:
    """The graphs that `recipe` gives a server of `max_num_seqs` slots: decode or, with `speculation`, speculative ones,
    prefill, scored prefill and, with `mixed_prefill`, mixed ones, each rising.

    Raises `ConfigError` naming the recipe's key for capacities that repeat, do not rise, are out of range or not as
    their kind needs them, and naming `max_prefill_tokens` if it is none of the recipe's prefill capacities
    (docs/scheduling.md, "Graphs").
    """
    rows = padded_concurrency(max_num_seqs)
    batches = _rising(recipe, "decode_batches", recipe.decode_batches, maximum=REQUEST_SLOTS_MAX)
    prefill = _rising(recipe, "prefill_tokens", recipe.prefill_tokens)
    scored = _rising(recipe, "scored_prefill_tokens", recipe.scored_prefill_tokens)
    if max_prefill_tokens not in prefill:
        capacities = ", ".join(map(str, prefill))
        raise ConfigError(
            f"max_prefill_tokens: {max_prefill_tokens} is no capacity of recipe {recipe.name}; take one of {capacities}"
        )
    if recipe.prompt_rows < 1:
        raise ConfigError(f"recipe {recipe.name}: prompt_rows: {recipe.prompt_rows} is not at least 1")
    prompt_rows = min(recipe.prompt_rows, rows)
    _check_fit(recipe, GraphKind.DECODE, "decode_batches", batches, "max_num_seqs", rows)
    _check_fit(
        recipe, GraphKind.SCORED_PREFILL, "scored_prefill_tokens", scored, "max_prefill_tokens", max_prefill_tokens
    )
    batches = tuple(batch for batch in batches if batch <= rows)
    catalog = [
        *_rounds(recipe, batches, speculation),
        *(GraphShape(GraphKind.PREFILL, prompt_rows, tokens) for tokens in prefill if tokens <= max_prefill_tokens),
        *(GraphShape(GraphKind.SCORED_PREFILL, 1, tokens) for tokens in scored if tokens <= max_prefill_tokens),
    ]
    mixed_batches, mixed_tokens = _mixed_extents(recipe)
    if mixed_prefill:
        without = ", or leave out --mixed-prefill"
        for key, values, limit, most in (
            ("mixed_batches", mixed_batches, "max_num_seqs", rows),
            ("mixed_prefill_tokens", mixed_tokens, "max_prefill_tokens", max_prefill_tokens),
        ):
            _check_fit(recipe, GraphKind.MIXED, key, values, limit, most, without)
        width = None if speculation is None else max((1, *_draft_widths(recipe, speculation)))
        mixed = mixed_shapes(
            [batch for batch in mixed_batches if batch <= rows],
            [tokens for tokens in mixed_tokens if tokens <= max_prefill_tokens],
            prompt_rows,
            width=width,
            envelope=0 if speculation is None else speculation.envelope,
        )
        only = None if speculation is None or not speculation.drafts else speculation.width
        catalog += [shape for shape in mixed if only in (None, shape.width)]
    return tuple(catalog)


def _rounds(recipe: Recipe, batches: Sequence[int], speculation: Speculation | None) -> list[GraphShape]:
    """Graphs that give output without a prompt."""
    if speculation is None:
        return [GraphShape(GraphKind.DECODE, batch) for batch in batches]
    only, envelope = speculation.width, speculation.envelope
    copies = _rising(recipe, "copy_widths", recipe.copy_widths) if only is None else (only,)
    drafted = speculative_shapes(
        batches, _draft_widths(recipe, speculation), envelope=envelope, ragged=recipe.ragged and speculation.drafts
    )
    shapes = [*drafted, *speculative_shapes(batches, copies, source=Source.COPY, envelope=envelope)]
    kept = [shape for shape in shapes if only in (None, shape.width)]
    if not kept:
        raise ConfigError(
            f"speculative_token_capacity: {envelope} target rows hold no round of width {only} of {recipe.name}; "
            f"raise it to {only * batches[0] if only else batches[0]} or more"
        )
    return kept


def _draft_widths(recipe: Recipe, speculation: Speculation) -> tuple[int, ...]:
    """Widths of programs that propose themselves."""
    if not speculation.drafts:
        return ()
    widths = _rising(recipe, "draft_widths", recipe.draft_widths, minimum=2)
    return widths if speculation.width is None else (speculation.width,)


def _check_fit(
    recipe: Recipe, kind: GraphKind, key: str, values: tuple[int, ...], limit: str, most: int, without: str = ""
) -> None:
    """Raises `ConfigError` if none of `values` is within the server's limit."""
    if not values:
        raise ConfigError(f"recipe {recipe.name}: {key}: empty, so that there is no {kind} graph; list some{without}")
    if values[0] > most:
        raise ConfigError(
            f"{limit}: too small for recipe {recipe.name}, whose {key} begin with {values[0]}, so that there is "
            f"no {kind} graph; raise it to {values[0]}{without}"
        )


def _mixed_extents(recipe: Recipe) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batches and prompt capacities of the mixed graphs, once they are known to be within their contract."""
    batches = _rising(recipe, "mixed_batches", recipe.mixed_batches, minimum=2, maximum=REQUEST_SLOTS_MAX)
    tokens = _rising(recipe, "mixed_prefill_tokens", recipe.mixed_prefill_tokens)
    for value in tokens:
        if value % PROMPT_ALIGNMENT:
            below = max(value // PROMPT_ALIGNMENT, 1) * PROMPT_ALIGNMENT
            raise ConfigError(
                f"recipe {recipe.name}: mixed_prefill_tokens: {value} is no multiple of {PROMPT_ALIGNMENT}; "
                f"take {below} or another multiple"
            )
    for has, key, lacks in (
        (batches, "mixed_prefill_tokens", tokens),
        (tokens, "mixed_batches", batches),
    ):
        if has and not lacks:
            raise ConfigError(f"recipe {recipe.name}: {key}: empty, but mixed graphs need both; list its capacities")
    return batches, tokens


def _rising(
    recipe: Recipe, key: str, values: tuple[int, ...], *, minimum: int = 1, maximum: int | None = None
) -> tuple[int, ...]:
    """`values`, once they are known to be within bounds and strictly rising."""
    for value in values:
        if value < minimum or (maximum is not None and value > maximum):
            allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise ConfigError(f"recipe {recipe.name}: {key}: {value} is not {allowed}")
    for before, after in itertools.pairwise(values):
        if before == after:
            raise ConfigError(f"recipe {recipe.name}: {key}: {after} is listed twice")
        if before > after:
            raise ConfigError(f"recipe {recipe.name}: {key}: {after} follows {before}; list capacities in rising order")
    return values

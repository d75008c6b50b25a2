"""The catalog as arrays: what never changes between decisions.

Owns the columns of the prepared shapes, grouped by what they can serve, and which shapes are larger than which. Does
not own durations or requests: those are a view's. Surprising rule: a mixed graph is in two groups, as a round of
output without a prompt (`rounds`) and as a graph that consumes one (`prompts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..graph import PROMPT_KINDS, SNAPSHOT_KINDS, STAGE_KINDS, GraphKind, GraphShape, Source

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

KINDS = tuple(GraphKind)

UNBOUNDED = 1 << 62
"""A prompt capacity that no graph has, and more streams than there can be."""


class Offer(NamedTuple):
    """What a program offers each decoding row: `depth` proposals at most, of the host's if `copied`.

    Programs of the same offer are worth the same to a row. No row of a program can use more than min(W - 1, D)
    proposals, nor more target rows than there are; one without proposals is the same whatever its source.
    """

    copied: bool
    depth: int

    @staticmethod
    def of(shape: GraphShape) -> Offer:
        """The offer of a shape that gives output; of any other, that of no proposals."""
        depth = min(shape.width - 1, shape.draft_depth, shape.packed_targets - 1)
        return Offer(shape.source is Source.COPY, depth) if depth > 0 else NO_PROPOSALS


NO_PROPOSALS = Offer(False, 0)


@dataclass(frozen=True, slots=True)
class Larger:
    """Pairs of places [e] in one group of shapes: `shape` is at least `than` in every capacity and larger in one.

    Both are rectangular and have the same kind, source, D, W and upkeep of the draft's context. `shape` rises; each of
    its values, `heads`, begins at one of `starts`. `most` [q, e] is the number of ready streams up to which the smaller
    shape has room for q + 1 prompt rows and for as many streams beside them as the larger one; -1 if it has none for
    the prompts.
    """

    shape: NDArray[np.intp]
    than: NDArray[np.intp]
    heads: NDArray[np.intp]
    starts: NDArray[np.intp]
    most: Ints


@dataclass(frozen=True, slots=True)
class Shapes:
    """A group of prepared shapes; arrays are [g].

    `index` is the place in the view's graphs, `kind_at` that of the kind in `KINDS`. `rows` are the rows that may
    consume a prompt, 0 if none; `beside` [q, g] those that q + 1 prompt rows leave for streams. `offer_at` is the place
    in `Compiled.offers`, `capacity_at` that of `prefill_tokens` in `Compiled.capacities`. `below` is the place of the
    next smaller capacity that is equal in all else, -1 if there is none. `larger` has all pairs of larger and smaller
    shapes, `next_larger` those with nothing in between. `batch_below` is the greatest batch of any smaller shape, 0 if
    there is none. Ragged programs have no part in these.
    """

    index: NDArray[np.intp]
    shapes: tuple[GraphShape, ...]
    kind_at: NDArray[np.intp]
    batch: Ints
    prefill_tokens: Ints
    rows: Ints
    beside: Ints
    offer_at: NDArray[np.intp]
    capacity_at: NDArray[np.intp]
    mixed: Bools
    below: NDArray[np.intp]
    larger: Larger
    next_larger: Larger
    batch_below: Ints

    @property
    def rows_max(self) -> int:
        """The most rows that one of them may consume prompts of; 0 if there are none."""
        return int(self.rows.max(initial=0))

    def __len__(self) -> int:
        return len(self.shapes)


class Companion(IntEnum):
    """What a following graph does beside output for ready and newly ready streams."""

    NONE = 0
    READY_PROMPT = 1
    PROMPT = 2
    SCORED_PROMPT = 3


@dataclass(frozen=True, slots=True)
class Sequels:
    """Graphs that may follow a prerequisite, once for each `Companion`; arrays are [s], in the order of companions.

    `groups` and `place` say where the shape is; `first` [4] where each companion begins. `rooms` are its rows for
    decoding requests; `enabled` is 1 where the prerequisite enables the prompt, which takes a row of it. `batch_below`
    is the batch of a smaller shape that holds the same streams if they fit, 0 if there is none.
    """

    groups: tuple[Shapes, ...]
    first: tuple[int, ...]
    companion: Ints
    place: NDArray[np.intp]
    index: NDArray[np.intp]
    rooms: Ints
    enabled: Ints
    offer_at: NDArray[np.intp]
    capacity_at: NDArray[np.intp]
    batch_below: Ints

    @staticmethod
    def of(rounds: Shapes, prompts: Shapes, scored: Shapes) -> Sequels:
        """The sequels of a catalog, no ragged ones. A round with a smaller one of its batch never has a cohort of its
        own."""
        beside = np.where(prompts.mixed, prompts.batch - 1, 0)
        ragged = np.array([shape.ragged for shape in rounds.shapes], np.bool_)
        own, mixed = np.flatnonzero((rounds.batch > rounds.batch_below) & ~ragged), np.flatnonzero(prompts.mixed)
        parts = (
            (rounds, own, rounds.batch[own], rounds.batch_below[own]),
            (prompts, mixed, beside[mixed], np.zeros(len(mixed), np.int64)),
            (prompts, np.arange(len(prompts)), beside, np.zeros(len(prompts), np.int64)),
            (scored, np.arange(len(scored)), np.zeros(len(scored), np.int64), np.zeros(len(scored), np.int64)),
        )
        companion = np.repeat(np.arange(len(parts)), [len(places) for _, places, _, _ in parts])
        return Sequels(
            tuple([group for group, _, _, _ in parts]),
            tuple(np.searchsorted(companion, np.arange(len(parts))).tolist()),
            companion,
            np.concatenate([places for _, places, _, _ in parts]),
            np.concatenate([group.index[places] for group, places, _, _ in parts]),
            np.concatenate([rooms for _, _, rooms, _ in parts]),
            (companion >= Companion.PROMPT).astype(np.int64),
            np.concatenate([group.offer_at[places] for group, places, _, _ in parts]),
            np.concatenate([group.capacity_at[places] for group, places, _, _ in parts]),
            np.concatenate([below for _, _, _, below in parts]),
        )


@dataclass(frozen=True, slots=True)
class Compiled:
    """A catalog, compiled once. `offers` and `capacities` are distinct and rising. The first offer is none, and the
    copied ones come last: `depths` are those of the others, `copied_depths` theirs. The last capacity is beyond every
    prompt and no graph's: it stands for all that a row can consume.

    `rounds` give output to decoding rows alone: decode, speculative and mixed graphs. Of those `shared` has the place
    of every ragged one and of every one that a ragged one may make redundant, with the places of what is smaller than
    it; `fewer_copies` those of copies, with the shapes of no more rows that are supplied with fewer proposals or none.
    `prompts` consume prompts: prefill and mixed; `scored` those that are scored. `stages` move state; `sequels` may
    follow a prerequisite. `kinds` has the shapes of every kind. `alike` are places in the durations of all graphs, and
    at the end in one that never comes: the rounds of each offer, then the prompts and the scored ones of each capacity;
    each begins at one of `alike_first`.
    """

    shapes: tuple[GraphShape, ...]
    offers: tuple[Offer, ...]
    depths: Ints
    copied_depths: Ints
    capacities: Ints
    kinds: dict[GraphKind, Shapes]
    rounds: Shapes
    shared: dict[int, tuple[int, ...]]
    fewer_copies: dict[int, tuple[GraphShape, ...]]
    prompts: Shapes
    scored: Shapes
    stages: Shapes
    retiring: Shapes
    sequels: Sequels
    alike: NDArray[np.intp]
    alike_first: NDArray[np.intp]

    @staticmethod
    def of(shapes: Sequence[GraphShape]) -> Compiled:
        """Compile the shapes of a view's graphs, in their order.

        Raises ValueError for a ragged mixed program: no rule here shares target rows out beside a prompt.
        """
        for shape in shapes:
            if shape.ragged and shape.kind is GraphKind.MIXED:
                raise ValueError(f"{shape.name}: a mixed program must have rows of one width")
        offers = tuple(sorted({Offer.of(shape) for shape in shapes} | {NO_PROPOSALS}))
        capacities = (*sorted({shape.prefill_tokens for shape in shapes if shape.prefill_tokens}), UNBOUNDED)

        def group(*kinds: GraphKind) -> Shapes:
            return _group(shapes, kinds, offers, capacities)

        rounds = group(GraphKind.DECODE, GraphKind.SPECULATIVE, GraphKind.MIXED)
        prompts, scored = group(GraphKind.PREFILL, GraphKind.MIXED), group(GraphKind.SCORED_PREFILL)
        alike = [rounds.index[rounds.offer_at == place].tolist() for place in range(len(offers))]
        for part in (prompts, scored):
            alike += [part.index[part.capacity_at == place].tolist() for place in range(len(capacities))]
        alike = [[*places, len(shapes)] for places in alike]
        return Compiled(
            tuple(shapes),
            offers,
            np.array([offer.depth for offer in offers if not offer.copied], np.int64),
            np.array([offer.depth for offer in offers if offer.copied], np.int64),
            np.array(capacities, np.int64),
            {kind: group(kind) for kind in GraphKind},
            rounds,
            _shared(rounds.shapes),
            _fewer_copies(rounds.shapes),
            prompts,
            scored,
            group(*STAGE_KINDS),
            group(*SNAPSHOT_KINDS),
            Sequels.of(rounds, prompts, scored),
            np.array(list(chain.from_iterable(alike)), np.intp),
            np.array([0, *accumulate(map(len, alike[:-1]))], np.intp),
        )


def _group(
    shapes: Sequence[GraphShape], kinds: Sequence[GraphKind], offers: Sequence[Offer], capacities: Sequence[int]
) -> Shapes:
    index = [place for place, shape in enumerate(shapes) if shape.kind in kinds]
    chosen = tuple([shapes[place] for place in index])
    families = sorted({_family(shape) for shape in chosen})
    family = np.array([families.index(_family(shape)) for shape in chosen], np.int64)
    extents = np.array([(s.batch, s.prefill_tokens, _prompt_rows(s)) for s in chosen], np.int64).reshape(-1, 3)
    alike = family[:, None] == family
    ragged = np.array([shape.ragged for shape in chosen], np.bool_)
    at_least = (extents[:, None] >= extents).all(axis=2) & alike & ~ragged & ~ragged[:, None]
    larger = at_least & ~at_least.T
    between = larger.astype(np.int64) @ larger.astype(np.int64) > 0
    smaller_capacity = larger & (extents[:, None, [0, 2]] == extents[:, [0, 2]]).all(axis=2)
    tokens = np.where(smaller_capacity, extents[:, 1], -1)
    capacity_at = np.array([capacities.index(s.prefill_tokens) if s.prefill_tokens else 0 for s in chosen], np.intp)

    batch, rows = extents[:, 0], extents[:, 2]
    mixed = np.array([s.kind is GraphKind.MIXED for s in chosen], np.bool_)
    prompts = np.arange(1, rows.max(initial=0) + 1)[:, None]
    beside = np.where(mixed, np.maximum(batch - prompts, 0), 0)

    def pairs(which: Bools) -> Larger:
        shape, than = np.nonzero(which)
        most = np.where(prompts + beside[:, shape] <= batch[than], UNBOUNDED, batch[than] - prompts)
        return Larger(shape, than, *np.unique(shape, return_index=True), np.where(prompts <= rows[than], most, -1))

    return Shapes(
        np.array(index, np.intp),
        chosen,
        np.array([KINDS.index(s.kind) for s in chosen], np.intp),
        batch,
        extents[:, 1],
        rows,
        beside,
        np.array([offers.index(Offer.of(s)) for s in chosen], np.intp),
        capacity_at,
        mixed,
        np.where(smaller_capacity.any(axis=1), tokens.argmax(axis=1) if len(chosen) else 0, -1).astype(np.intp),
        pairs(larger),
        pairs(larger & ~between),
        np.where(larger, batch, 0).max(axis=1, initial=0),
    )


def _shared(rounds: Sequence[GraphShape]) -> dict[int, tuple[int, ...]]:
    """See `Compiled`. Smaller: of the same family, no more rows and targets, and fewer of one."""
    found = {}
    ragged = {_family(shape) for shape in rounds if shape.ragged}
    places = [place for place, shape in enumerate(rounds) if _family(shape) in ragged]
    for place in places:
        shape = rounds[place]
        smaller = [
            other
            for other in places
            if other != place
            and _family(rounds[other]) == _family(shape)
            and rounds[other].batch <= shape.batch
            and rounds[other].packed_targets <= shape.packed_targets
        ]
        if shape.ragged or any(rounds[other].ragged for other in smaller):
            found[place] = tuple(smaller)
    return found


def _fewer_copies(rounds: Sequence[GraphShape]) -> dict[int, tuple[GraphShape, ...]]:
    """See `Compiled`. Only of families without ragged programs: these differ in nothing but the proposals that they
    have room for."""
    ragged = {_family(shape) for shape in rounds if shape.ragged}
    return {
        place: tuple(
            [
                other
                for other in rounds
                if other.kind is shape.kind
                and other.drafts == shape.drafts
                and (other.width == 1 or (other.source is Source.COPY and not other.ragged))
                and other.width < shape.width
                and other.batch <= shape.batch
            ]
        )
        for place, shape in enumerate(rounds)
        if shape.source is Source.COPY and _family(shape) not in ragged
    }


def _family(shape: GraphShape) -> tuple[str, str, int, int, bool]:
    """What must be equal before capacities are compared."""
    return (shape.kind, shape.source, shape.draft_depth, shape.width, shape.drafts)


def _prompt_rows(shape: GraphShape) -> int:
    """How many rows may consume a prompt: all of a prefill graph's."""
    if shape.kind is GraphKind.MIXED:
        return shape.prompt_rows
    return shape.batch if shape.kind in PROMPT_KINDS else 0

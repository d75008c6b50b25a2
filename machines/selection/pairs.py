"""Candidates of two graphs: a prerequisite, and the inference that it enables.

Owns the joint choice of both cohorts over all pairs of prepared shapes (docs/scheduling.md, "Stages and
prerequisites"). Does not own the arithmetic of one pair (`sequence`) or the bounds (`bounds`). Surprising rule: of
hundreds of pairs few are ever worked out. All are bounded from above at once, and those whose bound is below the best
score so far are passed over; that changes no choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .blocked import Before, Blocked, stage_lane
from .board import Board
from .bounds import ROUNDING, Bounds, Prerequisite
from .cohort import Ranking
from .compiled import Companion, Offer, Shapes
from .lanes import Option, Sequel, Terms
from .prompt import Prompts, prompt_lane
from .sequence import Lines, Split, sequence_score, splits
from .streams import round_lane

NEVER = float("-inf")


class Choice(NamedTuple):
    """One candidate: both graphs, the split of their lanes, and the place of the following graph's prompt row (None
    without). `first` is a place in the view's graphs, `sequel` one in the catalog's sequels."""

    ready: Ranking
    prerequisite: Prerequisite
    first: int
    sequel: int
    split: Split
    prompt: int | None
    horizon_ms: float
    score: float


class PairPool(NamedTuple):
    """Candidates [n] of two graphs; all of them compete."""

    terms: Terms
    dispatched: NDArray[np.intp]
    blocked: Blocked
    choices: tuple[Choice, ...]

    def option(self, index: int) -> Option:
        """Both graphs and their cohorts."""
        return _option(self.blocked, self.choices[index])

    def barred(self, index: int) -> str:
        """Raises ValueError: no redundant pair becomes a candidate."""
        raise ValueError(f"candidate {index} competes")


def pair_pool(
    blocked: Blocked, *, known: float = NEVER, unknown: float = NEVER, every: bool = False, only: int | None = None
) -> PairPool | None:
    """The best pair with all that tie with it, or the best of `every` pair of graphs; None without any.

    Pairs below the score of a candidate that is there already are left out: `known` is that of the best measured one,
    `unknown` that of the best other. `only` admits a single first graph, by its place in the view's graphs.
    """
    board = blocked.board
    choices: list[Choice] = []
    # An unknown candidate goes before the known ones, whatever these are worth.
    if not board.times.known:
        choices += _search(blocked, NEVER if every else unknown, every=every, only=only, aged=False)
    if every or (not choices and unknown == NEVER):
        choices += _search(blocked, NEVER if every else known, every=every, only=only, aged=True)
    if not choices:
        return None
    dispatched = np.array([choice.first for choice in choices], np.intp)
    return PairPool(_terms(blocked, choices), dispatched, blocked, tuple(choices))


def _search(blocked: Blocked, floor: float, *, every: bool, only: int | None, aged: bool) -> list[Choice]:
    """The best measured pairs if `aged`, else the best unknown ones: none below `floor`, or those of `every` cell."""
    pairs = Bounds.of(blocked, aged=aged, fastest=aged and not every and only is None, only=only)
    if pairs is None or not pairs.bound.size:
        return []
    bounds = pairs.bound.ravel()
    slack = ROUNDING * (abs(float(bounds.max())) + 2.0 * pairs.cost_max)
    found: list[Choice] = []
    # Best bound first: the first few scores pass over all the rest.
    while True:
        cell = int(bounds.argmax())
        if bounds[cell] == NEVER or bounds[cell] < floor - slack:
            return found
        bounds[cell] = NEVER
        for choice in _best(blocked, pairs, *pairs.cell(cell)):
            if every:
                found.append(choice)
            elif choice.score >= floor:
                found = [choice, *(found if choice.score == floor else ())]
                floor = choice.score


def _best(blocked: Blocked, pairs: Bounds, one: Prerequisite, first: int, sequel: int) -> list[Choice]:
    """The best choices of one pair of graphs that nothing smaller makes redundant: one, or all that tie."""
    board, sequels = blocked.board, blocked.board.compiled.sequels
    offer_at, enabled = int(sequels.offer_at[sequel]), int(sequels.enabled[sequel])
    first_ms = float(board.times.spent_ms[first])
    horizon_ms = first_ms + float(board.times.spent_ms[sequels.index[sequel]]) if pairs.aged else 0.0
    lanes = _prompt_lanes(board, one.before, sequel, horizon_ms)
    gap_cost = _gap_cost(board, horizon_ms)
    found = [
        (split.value + value, split, place)
        for split in splits(
            Lines.of(one.newly, offer_at if one.before.streams else 0),
            Lines.of(pairs.ready, offer_at),
            Lines.of(one.terminals),
            least=1 - enabled,
            first_rooms=board.compiled.shapes[first].batch - enabled,
            following_rooms=int(sequels.rooms[sequel]),
            first_ms=first_ms,
            horizon_ms=horizon_ms,
            terminal_age_price=board.scaled.terminal_age_price if pairs.aged else 0.0,
        )
        for place, value in lanes
    ]
    found.sort(key=lambda choice: -choice[0])
    best: list[Choice] = []
    for value, split, place in found:
        score = sequence_score(value, horizon_ms, board.waiting_price, gap_cost)
        if best and score < best[0].score:
            break
        if not _redundant(board, sequel, split, place):
            best.append(Choice(pairs.ready, one, first, sequel, split, place, horizon_ms, score))
    return best


def _gap_cost(board: Board, horizon_ms: float) -> float:
    """What the gaps of a sequence cost per ms; nothing if its time is not known (0)."""
    return 0.0 if board.gaps is None or not horizon_ms else board.gaps.cost(horizon_ms)


def _prompts(board: Board, sequel: int) -> Prompts | None:
    """The prompts of which a sequel consumes one; None if it consumes none."""
    companion = int(board.compiled.sequels.companion[sequel])
    if companion == Companion.NONE:
        return None
    return board.scored if companion == Companion.SCORED_PROMPT else board.prompts


def _prompt_lanes(board: Board, before: Before, sequel: int, horizon_ms: float) -> list[tuple[int | None, float]]:
    """The prompt rows that a sequel could consume one of, and what each is worth; one entry without any for none.

    `horizon_ms` 0: unknown; then a row is worth its priced service alone.
    """
    companion = int(board.compiled.sequels.companion[sequel])
    prompts = _prompts(board, sequel)
    if prompts is None:
        return [(None, 0.0)]
    if companion == Companion.READY_PROMPT:
        places = list(range(prompts.ready))
    else:
        places = before.scored if companion == Companion.SCORED_PROMPT else before.prompts
    sequels = board.compiled.sequels
    group, shape, capacity_at = sequels.groups[companion], int(sequels.place[sequel]), sequels.capacity_at[sequel]
    known = board.times.known or board.times.ms[group.index[shape]] > 0.0
    lanes = prompts.service[:, capacity_at]
    tokens = prompts.tokens[:, capacity_at].tolist()
    if horizon_ms and prompts.urgency > 0.0:
        lanes = lanes + prompts.urgency * prompts.tokens[:, capacity_at] * (prompts.age_ms + horizon_ms)
    worth = lanes.tolist()
    able = [place for place in places if tokens[place]]
    return [(place, worth[place]) for place in able if known or not _left_out(prompts, group, shape, place)]


def _left_out(prompts: Prompts, group: Shapes, shape: int, row: int) -> bool:
    """Whether a smaller capacity gets a prompt row as near to its next endpoint: bars a shape that is not measured."""
    if group.below[shape] < 0:
        return False
    reached = [
        min(int(prompts.tokens[row, group.capacity_at[at]]), int(prompts.stop[row]))
        for at in (shape, group.below[shape])
    ]
    return reached[0] == reached[1]


def _redundant(board: Board, sequel: int, split: Split, row: int | None) -> bool:
    """Whether a smaller shape than the sequel's does the same for the same lanes and prompt row."""
    sequels, prompts = board.compiled.sequels, _prompts(board, sequel)
    streams = split.newly + split.ready
    if prompts is None or row is None:
        return streams <= int(sequels.batch_below[sequel])
    group, shape = sequels.groups[sequels.companion[sequel]], int(sequels.place[sequel])
    tokens = prompts.tokens[row, group.capacity_at[shape]]
    return any(
        prompts.tokens[row, group.capacity_at[smaller]] == tokens
        and (not group.mixed[shape] or 1 + streams <= group.batch[smaller])
        and (board.times.ms[group.index[smaller]] > 0.0 or not _left_out(prompts, group, smaller, row))
        for smaller in group.larger.than[group.larger.shape == shape].tolist()
    )


def _terms(blocked: Blocked, choices: Sequence[Choice]) -> Terms:
    """The columns of `choices`."""
    columns = []
    for choice in choices:
        split = choice.split
        service, age = _sums(blocked, choice)
        batch = blocked.board.compiled.shapes[choice.first].batch
        rows = min(batch, blocked.counts[choice.prerequisite.kind])
        ready_prompt = blocked.board.compiled.sequels.companion[choice.sequel] == Companion.READY_PROMPT
        waiting = choice.horizon_ms * (0.5 * blocked.board.waiting_price)
        columns.append((choice.horizon_ms, service, age, waiting, choice.score, rows + split.ready + ready_prompt))
    horizon_ms, service, age, waiting, score, served = np.array(columns).T
    gap = None if blocked.board.gaps is None else np.array([_gap_cost(blocked.board, c.horizon_ms) for c in choices])
    eligible = np.ones(len(choices), np.bool_)
    return Terms(horizon_ms, service, age, waiting, score, served.astype(np.int64), eligible, gap)


def _sums(blocked: Blocked, choice: Choice) -> tuple[float, float]:
    """Priced service and age term of all lanes of a choice."""
    board, one, split = blocked.board, choice.prerequisite, choice.split
    sequels, horizon_ms = board.compiled.sequels, choice.horizon_ms
    first_ms = float(board.times.spent_ms[choice.first])
    offer_at = int(sequels.offer_at[choice.sequel])
    service = age = 0.0
    for ranking, count in ((one.newly, split.newly), (choice.ready, split.ready)):
        at = offer_at if len(ranking.service) > 1 else 0
        service += float(ranking.service[at, count])
        age += float(ranking.aged[at, count] + ranking.urgency[at, count] * horizon_ms)
    prompts, retired = _prompts(board, choice.sequel), split.retired
    if prompts is not None and choice.prompt is not None:
        cell = choice.prompt, sequels.capacity_at[choice.sequel]
        service += float(prompts.service[cell])
        if horizon_ms:
            age += prompts.urgency * float(prompts.tokens[cell]) * (float(prompts.age_ms[choice.prompt]) + horizon_ms)
    if retired:
        service += float(one.terminals.service[0, retired])
        if horizon_ms:
            saved = (horizon_ms * horizon_ms - first_ms * first_ms) * (0.5 * board.scaled.terminal_age_price)
            age += float(one.terminals.aged[0, retired] + one.terminals.urgency[0, retired] * first_ms)
            age += retired * saved
    return service, age


def _option(blocked: Blocked, choice: Choice) -> Option:
    board, one, split = blocked.board, choice.prerequisite, choice.split
    sequels, streams = board.compiled.sequels, board.streams.rows
    following = board.view.graphs[sequels.index[choice.sequel]]
    offer_at, rooms = int(sequels.offer_at[choice.sequel]), int(sequels.rooms[choice.sequel])

    newly_order = one.newly.order[offer_at if one.before.streams else 0].tolist()
    newly = [streams[one.before.streams[place]] for place in newly_order]
    ready = [streams[place] for place in choice.ready.order[offer_at, : split.ready].tolist()]
    enabled = newly[: split.newly]
    work = [(row, round_lane(row, Offer.of(following.shape))) for row in (*enabled, *ready)]
    prompts = _prompts(board, choice.sequel)
    if prompts is not None and choice.prompt is not None:
        row = prompts.rows[choice.prompt]
        tokens = int(prompts.tokens[choice.prompt, sequels.capacity_at[choice.sequel]])
        work.append((row, prompt_lane(row, tokens)))
        if sequels.enabled[choice.sequel]:
            enabled.append(row)
    work.sort(key=lambda lane: lane[0].slot)
    sequel = Sequel(following, tuple([row for row, _ in work]), tuple([lane for _, lane in work]), len(enabled))

    graph = board.view.graphs[choice.first]
    chosen = enabled + [board.terminals[place] for place in one.terminals.order[0, : split.retired].tolist()]
    room = graph.shape.batch - len(chosen)
    if room:
        # What the following graph could have served comes first, then what needs another one, then chains.
        spare = newly[split.newly :] if rooms else []
        taken = {row.slot for row in (*enabled, *spare)}
        spare += [row for row in blocked.last(one.kind) if row.slot not in taken]
        spare += blocked.valued.chains(one.kind, float(board.times.spent_ms[choice.first]))
        chosen += spare[:room]
    chosen.sort(key=lambda row: row.slot)
    lanes = tuple([stage_lane(row) for row in chosen])
    return Option(graph, tuple(chosen), lanes, graph.shape.batch - len(chosen), split.retired, sequel)

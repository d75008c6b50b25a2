"""Rounds: how many tokens they commit, where they end, and what their lanes may not ask."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flare.graphs.frames import History, LaneInput, Sampling
from flare.graphs.sim.acceptance import FixedAcceptance, RandomAcceptance
from flare.graphs.sim.tokens import EosAt, TokenSource, never
from flare.machines.allocation import allocate
from flare.machines.graph import GraphKind, GraphShape, Source, rectangular
from flare.machines.ids import PageId
from flare.machines.request import EndReason
from tests.graphs.host import CATALOG, DECODE, Host, Row, decode_lane, ok, prompt_lane, prompt_of
from tests.graphs.sim.rig import sim_host

WIDE = rectangular(GraphKind.SPECULATIVE, 4, 8)
RAGGED = GraphShape(GraphKind.SPECULATIVE, 4, width=4, draft_depth=3, packed_targets=8, drafts=True)
COPIES = rectangular(GraphKind.SPECULATIVE, 4, 5, source=Source.COPY)
MIXED = GraphShape(GraphKind.MIXED, 4, 64, prompt_rows=2)
MIXED_WIDE = GraphShape(GraphKind.MIXED, 4, 64, 1, width=4, draft_depth=3, packed_targets=10, drafts=True)


def host_of(accepted: int, eos_at: EosAt = never) -> Host:
    """A device whose rounds accept `accepted` proposals."""
    source = TokenSource(range(200), eos_at=eos_at)
    return sim_host(
        (*CATALOG, WIDE, RAGGED, COPIES, MIXED, MIXED_WIDE), acceptance=FixedAcceptance(accepted), tokens=source
    )


def stream(host: Host, slot: int = 0, *, output_limit: int = 20, stop_tokens: tuple[int, ...] = ()) -> Row:
    """A row that decodes."""
    row = host.admit(slot, prompt_of(5, slot), output_limit=output_limit, stop_tokens=stop_tokens)
    host.prefill(row)
    return row


@pytest.mark.parametrize("accepted", [0, 3, 7])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_a_round_commits_what_is_accepted_and_one_more(accepted: int, width: int) -> None:
    host = host_of(accepted)
    row = stream(host)
    (result,) = host.serve(WIDE, [(row, decode_lane(row, width=width))])
    assert len(result.tokens) == min(accepted, width - 1) + 1
    assert result.committed == 6 + len(result.tokens)


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_stop_token_within_the_accepted_span_ends_it(stop: int) -> None:
    host = host_of(7, lambda _prompt, _tokens, index: index == stop)
    row = stream(host, stop_tokens=(250,))
    (result,) = host.serve(WIDE, [(row, decode_lane(row, width=8))])
    assert (result.tokens[-1], len(result.tokens), result.ended) == (250, stop, EndReason.STOP)
    (after,) = host.serve(WIDE, [(row, decode_lane(row, width=8))])
    assert (after.committed, after.tokens) == (result.committed, ())


def test_the_length_ends_a_round() -> None:
    host = host_of(7)
    row = stream(host, output_limit=5)
    (result,) = host.serve(WIDE, [(row, decode_lane(row, width=4))])
    assert (len(result.tokens), result.ended) == (4, EndReason.LENGTH)


def test_a_round_may_not_write_beyond_the_pages() -> None:
    host = host_of(7)
    row = host.admit(0, prompt_of(14, 0), pages=[PageId(0)], output_limit=10)
    host.prefill(row)
    error = host.run(WIDE, [decode_lane(row, width=3)]).error
    assert error is not None and "would write position 16; its pages hold 16" in error
    host.serve(WIDE, [(row, decode_lane(row, width=2))])


def test_scores_come_for_every_token_of_a_round() -> None:
    plain, wide = host_of(0), host_of(7)
    rows = [host.admit(0, prompt_of(5, 1), logprobs=2) for host in (plain, wide)]
    for host, row in zip((plain, wide), rows, strict=True):
        host.prefill(row)
    single = [plain.serve(DECODE[1], [(rows[0], decode_lane(rows[0]))])[0] for _ in range(4)]
    (round_,) = wide.serve(WIDE, [(rows[1], decode_lane(rows[1], width=4))])
    assert round_.scores == tuple(score for result in single for score in result.scores or ())


@pytest.mark.parametrize("banned_for", [1, 2])
def test_a_ban_holds_for_as_many_tokens_as_it_says(banned_for: int) -> None:
    host = host_of(7)
    rows = [host.admit(slot, prompt_of(5, 9), output_limit=20) for slot in range(2)]
    for row in rows:
        host.prefill(row)
    host.decode(rows[:1], 4)
    free = rows[0].tokens[1:]
    ban = History(np.zeros(0, np.int32), np.zeros(0, np.int32), tuple(free), banned_for)
    (result,) = host.serve(WIDE, [(rows[1], replace(decode_lane(rows[1], width=4), history=ban))])
    assert not set(result.tokens[:banned_for]) & set(free)
    assert list(result.tokens[banned_for:]) == free[banned_for:]


@pytest.mark.parametrize("right", range(5))
def test_copied_proposals_are_accepted_as_far_as_they_are_right(right: int) -> None:
    host = host_of(0)
    rows = [host.admit(slot, prompt_of(5, 9), output_limit=20) for slot in range(2)]
    for row in rows:
        host.prefill(row)
    host.decode(rows[:1], 6)
    free = rows[0].tokens[1:]
    given = np.array([*free[:right], *(199 - token for token in free[right:4])], np.int32)
    (result,) = host.serve(COPIES, [(rows[1], replace(decode_lane(rows[1], width=5), proposals=given))])
    assert (list(result.tokens), result.verified) == (free[: right + 1], 5)


def test_a_program_that_allocates_shares_its_rows_by_confidence() -> None:
    process = RandomAcceptance(3, mean=0.6, spread=0.3, insight=0.7)
    host = sim_host((*CATALOG, RAGGED), acceptance=process, confidence=process.confidence)
    rows = [stream(host, slot) for slot in range(3)]
    lanes = [replace(decode_lane(row), width=ceiling) for row, ceiling in zip(rows, (4, 4, 2), strict=True)]
    completion = host.run(RAGGED, lanes, allocates=True)
    assert completion.confidence is not None and completion.confidence.shape == (2, 4, 3)
    conditional, joint = completion.confidence
    assert np.array_equal(joint, np.cumprod(conditional, axis=1)) and not joint[3].any()
    shares = allocate(joint[:3].tolist(), (4, 4, 2), 8)
    assert [result.verified for result in ok(completion)] == shares and sum(shares) == 8
    assert all(1 <= len(result.tokens) <= result.verified for result in ok(completion))


def test_only_what_proposes_has_confidence() -> None:
    process = RandomAcceptance(3, mean=0.6)
    catalog = (*CATALOG, RAGGED, COPIES, rectangular(GraphKind.SPECULATIVE, 4, 1))
    host = sim_host(catalog, acceptance=process, confidence=process.confidence)
    row = stream(host)
    copied = replace(decode_lane(row), width=2, proposals=np.zeros(1, np.int32))
    assert host.run(COPIES, [copied]).confidence is None
    assert host.run(catalog[-1], [decode_lane(row)]).confidence is None
    assert host.run(RAGGED, [decode_lane(row)]).confidence is not None


def test_penalties_count_the_outputs_before_the_round() -> None:
    host = host_of(7)
    row = host.admit(0, prompt_of(5, 2), sampling=Sampling(presence_penalty=0.5))
    seen = [History(np.array([7], np.int32), np.array([count], np.int32)) for count in (0, 1, 2)]
    host.prefill(row, history=seen[0])
    lanes = [LaneInput(row.handle, 5, True, history=history, width=2) for history in seen]
    assert "history does not say so" in (host.run(WIDE, [lanes[2]]).error or "")
    (result,) = host.serve(WIDE, [(row, lanes[1])])
    assert len(result.tokens) == 2


def limited(host: Host) -> list[LaneInput]:
    row = stream(host, output_limit=4)
    return [decode_lane(row, width=3), LaneInput(row.handle, 5, True, width=4)]


def crowded(host: Host) -> list[LaneInput]:
    return [decode_lane(stream(host, slot), width=3) for slot in range(3)]


def too_many_prompts(host: Host) -> list[LaneInput]:
    return [prompt_lane(host.admit(slot, prompt_of(3, slot)), 3) for slot in range(3)]


def too_long_a_prompt(host: Host) -> list[LaneInput]:
    return [prompt_lane(host.admit(slot, prompt_of(40, slot)), 40) for slot in range(2)]


def crowded_beside_a_prompt(host: Host) -> list[LaneInput]:
    decoding = [decode_lane(stream(host, slot), width=4) for slot in range(3)]
    return [*decoding, prompt_lane(host.admit(3, prompt_of(3, 3)), 3)]


def wide_prompt(host: Host) -> list[LaneInput]:
    row = host.admit(0, prompt_of(3, 0))
    lane = prompt_lane(row, 3)
    return [LaneInput(lane.handle, 0, lane.emits, lane.tokens, None, lane.binding, width=2)]


def copied(width: int, count: int) -> Callable[[Host], list[LaneInput]]:
    given = np.zeros(count, np.int32)
    return lambda host: [replace(decode_lane(stream(host), width=width), proposals=given)]


REFUSALS: dict[str, tuple[GraphShape, Callable[[Host], list[LaneInput]], str]] = {
    "a round beyond the limit": (WIDE, lambda host: limited(host)[1:], "may produce 3 more tokens"),
    "more targets than are packed": (RAGGED, crowded, "9 targets .* packs 8"),
    "wider than the graph": (RAGGED, lambda host: [decode_lane(stream(host), width=5)], "5 targets"),
    "wider than plain decode": (DECODE[1], lambda host: [decode_lane(stream(host), width=2)], "2 targets"),
    "wider than an ordinary mixed graph": (MIXED, lambda host: [decode_lane(stream(host), width=2)], "2 targets"),
    "copies for a program that proposes": (WIDE, copied(2, 1), "1 copied proposals"),
    "fewer copies than targets": (COPIES, copied(3, 1), "1 copied proposals"),
    "no copies": (COPIES, lambda host: [decode_lane(stream(host), width=2)], "0 copied proposals"),
    "no target": (WIDE, lambda host: [decode_lane(stream(host), width=0)], "0 targets"),
    "a wide prompt": (MIXED_WIDE, wide_prompt, "2 targets"),
    "too many prompts": (MIXED, too_many_prompts, "3 prompts .* takes 2"),
    "too long a prompt": (MIXED, too_long_a_prompt, "80 prompt tokens"),
    "targets beside a prompt": (MIXED_WIDE, crowded_beside_a_prompt, "12 targets .* packs 10"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_round_keeps_to_the_graph_and_the_limit(case: str) -> None:
    shape, lanes, message = REFUSALS[case]
    host = host_of(3)
    error = host.run(shape, lanes(host)).error
    assert error is not None
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("shape", "message"), [(WIDE, "no target rows to share"), (COPIES, "no target rows"), (RAGGED, "does not share")]
)
def test_rows_are_shared_out_only_where_that_means_something(shape: GraphShape, message: str) -> None:
    host = host_of(3)
    given = np.zeros(1, np.int32) if shape is COPIES else None
    error = host.run(shape, [replace(decode_lane(stream(host), width=2), proposals=given)], allocates=True).error
    assert error is not None and message in error


def test_a_round_up_to_the_limit_is_run() -> None:
    host = host_of(3)
    assert host.run(WIDE, limited(host)[:1]).error is None

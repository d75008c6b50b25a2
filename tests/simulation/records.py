"""What a driver makes of a simulated completion, and what the second account takes from it.

Owns the way from results to records and reports. Does not own what is right (`oracle`). Surprising rule: the simulated
device draws by no rejection, so what a program would know of survival is made up here, and is as good as any.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from flare.graphs.frames import Completion, LaneResult
from flare.machines.events import CompletionRecord
from flare.machines.ids import RequestHandle, RequestId

from .oracle import Oracle, Report


def records_of(rng: random.Random, completion: Completion, *, tells_survival: bool) -> tuple[CompletionRecord, ...]:
    """The scheduler's part of a completion."""
    return tuple(
        CompletionRecord(
            result.handle,
            result.committed,
            result.ended,
            result.verified,
            _confidence(completion, result.handle.slot),
            _survival(rng, result) if tells_survival else None,
        )
        for result in completion.results
    )


def report_of(record: CompletionRecord) -> Report:
    """The second account's part of a record."""
    joint = () if record.confidence is None else record.confidence[1]
    return Report(record.committed, record.ended, record.verified, joint, record.survival)


def check_counters(oracle: Oracle, completion: Completion, ids: Mapping[RequestHandle, RequestId]) -> None:
    """The device's counters of lanes that count go on from the second account by what the lane was to do."""
    flight = oracle.flights[0]
    for result in completion.results:
        known = oracle.requests[ids[result.handle]]
        if not oracle.counts(known.id):
            continue
        lane = flight.lanes[known.id]
        before, work = known.committed, lane.work
        if lane.stage is not None:
            # After a host's stop, rounds that were in flight had gone on with a row that is now given up.
            beyond = lane.stage.retires and lane.stage.state_row is None and result.committed > before
            assert beyond or result.committed == (lane.stage.restored_tokens or before)
        elif known.prefills:
            assert result.committed == before + work.tokens + work.emits
        else:
            assert before < result.committed <= before + result.verified <= before + work.tokens


def _confidence(completion: Completion, slot: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if completion.confidence is None:
        return None
    conditional, joint = completion.confidence[:, slot].tolist()
    return tuple(conditional), tuple(joint)


def _survival(rng: random.Random, result: LaneResult) -> tuple[float, ...] | None:
    """Of the prefixes that were verified, or of some of them where the output ended."""
    if result.verified < 2:
        return None
    survival = sorted((rng.random() for _ in range(result.verified - 1)), reverse=True)
    return tuple(survival[: rng.randint(0, len(survival))] if result.ended else survival)

"""Completions that say what cannot be.

Owns the ways in which a simulated completion is spoiled before the scheduler sees it. Surprising rule: a wrong counter
of a lane that nobody waits for any longer spoils nothing; a wrong list of lanes always does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from msgspec.structs import replace

from flare.machines.events import CompletionRecord
from flare.machines.graph import STAGE_KINDS, GraphShape
from flare.machines.ids import RequestHandle
from flare.machines.request import EndReason

Records = tuple[CompletionRecord, ...]


def spoil(
    rng: random.Random, records: Records, limits: Sequence[int], shape: GraphShape
) -> tuple[Records, bool, set[RequestHandle]]:
    """Spoiled records, whether their list is wrong, and else which lanes are. `limits`: outputs left of each lane
    before the frame. No wrong counter is by chance a possible one: it is off by the width at least, and never more than
    the right one where a row that is given up may have gone on.
    """
    width = shape.width
    beyond = () if shape.kind in STAGE_KINDS else (width, width + 6)
    lane = rng.randrange(len(records))
    record = records[lane]

    def with_lane(changed: CompletionRecord) -> Records:
        return (*records[:lane], changed, *records[lane + 1 :])

    match rng.randrange(10):
        case 0:
            return (*records[:lane], *records[lane + 1 :]), True, set()
        case 1:
            return (*records, record), True, set()
        case 2:
            handle = RequestHandle(record.handle.slot, record.handle.generation + rng.choice((-1, 1)))
            return with_lane(replace(record, handle=handle)), True, set()
        case 3 if len(records) > 1:
            return (*records[1:], records[0]), True, set()
        case 4 if limits[lane] > 1 and record.ended is None:
            return with_lane(replace(record, ended=EndReason.LENGTH)), False, {record.handle}
        case 5 if record.ended is EndReason.LENGTH:
            return with_lane(replace(record, ended=None)), False, {record.handle}
        case 6 if record.verified:
            return with_lane(replace(record, verified=record.verified + width)), False, {record.handle}
        case 7 if record.verified:
            return with_lane(replace(record, survival=(1.0,) * record.verified)), False, {record.handle}
        case 8 if record.verified and record.confidence is not None:
            planes = (record.confidence[0], (math.nan, *record.confidence[1][1:]))
            return with_lane(replace(record, confidence=planes)), False, {record.handle}
        case _:
            wrong = record.committed + rng.choice((-record.committed - 1, -width, *beyond))
            return with_lane(replace(record, committed=wrong)), False, {record.handle}

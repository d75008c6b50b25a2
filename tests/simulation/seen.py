"""What a block of worlds must have seen.

Owns the names of the counts that show each fault, each kind of graph and each moment of a cancellation. Surprising
rule: names of kinds and faults come from their enumerations, so that a new one is missed until worlds have it.
"""

from __future__ import annotations

from flare.graphs.sim.timing import Fault
from flare.machines.graph import GraphKind
from flare.machines.selection.view import Reason

STAGES = (
    *("queued", "preparing", "prefilling", "in_flight", "decoding", "preempting", "preempted", "retiring", "ended"),
    *("any", "stage_in_flight"),
)
"""When a request that is to be cancelled is cancelled."""

SEEN = {
    *("cancelled", "completed", "decisions", "delivered", "failed", "frames_1", "frames_2", "lost"),
    *("refused", "refused_commits", "stopped", "preempted", "parked", "retired", "malformed", "copies", "allocated"),
    *(reason.value for reason in Reason),
    *(fault.value for fault in (Fault.FAILED, Fault.UNTIMED, Fault.LATE)),
    *(kind.value for kind in GraphKind),
    *(f"cancelled_{stage}" for stage in STAGES),
}
"""What must come about in every block of worlds."""

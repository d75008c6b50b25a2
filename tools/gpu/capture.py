"""What preparing a catalog took: graphs, time and memory, beside what was foretold.

Owns the comparison with the plan. Does not own capture. Surprising rule: what the plan says too little of is a fault,
because a server that trusts it runs out of memory; what it says too much of is memory that no page gets, and is told.
"""

from __future__ import annotations

from collections.abc import Iterator

from flare.graphs.cuda.plan import CudaPlan

from .player import Player
from .report import Finding, judged

GIB = 1 << 30


def capture_findings(player: Player, plan: CudaPlan, taken: int) -> Iterator[Finding]:
    """Rows for a player that has prepared its graphs, which took so many bytes in all."""
    first, last = player.prepared_s[0], player.prepared_s[-1]
    count = len(player.prepared_s)
    yield Finding("capture", "graphs", f"{count} in {last - first:.1f} s, after {first:.1f} s of loading")
    planned = plan.weights_bytes + plan.kv_bytes + plan.state_bytes + plan.buffers_bytes + plan.capture_bytes
    yield Finding("capture", "memory", f"{taken / GIB:.2f} GiB, of which KV cache {plan.kv_bytes / GIB:.2f} GiB")
    yield judged("capture", "memory, against the plan", taken / planned, "x", most=1.02)

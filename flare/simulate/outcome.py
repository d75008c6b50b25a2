"""What became of one simulated request.

Owns the times at which it was served, from which every figure is worked out. Does not own figures (`figures`).
Surprising rule: prompt tokens count once, when they are first consumed; what a preempted request computes anew is work,
and no service to its client.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from .traces import TraceRequest

NS_PER_S = 1_000_000_000

OnProgress = Callable[[float], None]
"""Called now and then with the share of the load, 0 to 1, that has arrived."""


@dataclass(slots=True)
class Outcome:
    """Instants are nanoseconds of virtual time. `prompts` are (instant, tokens) of consumed chunks, `tokens` the
    instants of the output tokens. `refused`: no KV cache of this size could ever hold it."""

    request: TraceRequest
    refused: bool = False
    prompts: list[tuple[int, int]] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("q"))

    @property
    def arrival_ns(self) -> int:
        """When it arrived."""
        return round(self.request.arrival_s * NS_PER_S)

    @property
    def finished(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.tokens) >= self.request.output_tokens

    @property
    def begun_ns(self) -> int | None:
        """When the first frame that served it ended; None if none did."""
        return self.prompts[0][0] if self.prompts else None

"""What a device asks of a model program: one step over the lanes in the buffers.

Owns the protocol between frames and programs. The torch program (`reference`) defines it; the native one is its fast
twin. Surprising rule: there is one step, not one for each kind of graph; every lane is a run of packed rows, and
whether they are a prompt's or a pending token is data. A step advances the state rows itself, so a second one can
follow without the host.
"""

from __future__ import annotations

from typing import Protocol

from ..memory.pages import KvPages
from .buffers import StepBuffers
from .rows import StateRows


class StepProgram(Protocol):
    """Runs steps over state rows, buffers and pages that it was built with. Not reentrant."""

    rows: StateRows
    buffers: StepBuffers
    kv: KvPages

    def step(
        self, lanes: int, scored: bool = False, depth: int = 0, target_rows: int = 0, rejects: bool = False
    ) -> int:
        """Run all `lanes` in one packed forward pass; returns its nanoseconds.

        A lane in `prefill_row` consumes its prompt rows, scored if asked, and draws a token if it emits. Every other
        consumes the pending token of its state row and draws the next, unless the row has ended; then it is left alone.
        With a query length beyond one, such a lane verifies proposals: those that the draft makes, at most `depth`, or
        those in the buffers where `depth` is 0. A proposal is accepted while it equals what is drawn at its position,
        or, with `rejects`, with probability min(1, p/q) (docs/scheduling.md, "Speculative rounds"). `target_rows`: what
        the lanes' query lengths come to at most is shared out by confidence (0: they are exact).
        Where logits are not finite, the token is NOT_FINITE, and nothing is drawn for the row.
        """
        ...

    def close(self) -> None:
        """Give back threads and memory. Idempotent."""
        ...

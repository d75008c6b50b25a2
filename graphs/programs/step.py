"""What a device asks of a model program: one step over the lanes in the buffers.

Owns the protocol between frames and programs. The torch program (`reference`) defines it; the native one is its fast
twin. Surprising rule: a step advances the state rows itself, so a second step can follow without the host.
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

    def decode(self, lanes: int) -> int:
        """Consume the pending token of each lane's row and draw the next; ended rows are left alone. Returns ns.

        Where logits are not finite, the token is NOT_FINITE, and the row stays as it was.
        """
        ...

    def prefill(self, lanes: int, scored: bool) -> int:
        """Consume each lane's prompt rows; score them if asked; draw a token where a lane emits. Returns ns."""
        ...

    def close(self) -> None:
        """Give back threads and memory. Idempotent."""
        ...

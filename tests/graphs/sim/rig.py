"""A simulated device without a thread: each frame is completed within its submission.

Owns nothing but the adaptation, so that `tests.graphs.host` drives a `SimCore` as fast as it can. Surprising rule: time
stands still but for the durations of the frames, which follow one another without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

from flare.graphs.device import OnCompletion, OnProgress
from flare.graphs.frames import Frame
from flare.graphs.sim.acceptance import Acceptance, Confidence, FixedAcceptance
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.timing import by_kind
from flare.graphs.sim.tokens import TokenSource
from flare.machines.graph import GraphKind, GraphShape
from tests.graphs.host import Host

UNIT = by_kind(dict.fromkeys(GraphKind, 1))


class InstantDevice:
    """A `Device` over a core; it holds one frame at a time."""

    def __init__(self, core: SimCore) -> None:
        self._core = core
        self.request_slots, self.pages, self.page_tokens = core.request_slots, core.pages, core.page_tokens
        self._on_completion: OnCompletion | None = None

    def prepare(self, catalog: Sequence[GraphShape], progress: OnProgress) -> None:
        """See `Device`."""
        self._core.prepare(catalog)
        for shape in catalog:
            progress(shape, 0, 0)

    def start(self, on_completion: OnCompletion) -> None:
        """See `Device`."""
        self._on_completion = on_completion

    def submit(self, frame: Frame) -> None:
        """See `Device`; the completion comes before it returns."""
        assert self._on_completion is not None
        self._core.submit(frame, 0)
        due_ns = self._core.next_finish_ns()
        assert due_ns is not None
        self._on_completion(self._core.finish(due_ns))

    def close(self) -> None:
        """See `Device`."""


def sim_host(
    catalog: Sequence[GraphShape],
    *,
    slots: int = 4,
    pages: int = 64,
    page_tokens: int = 16,
    state_rows: int = 2,
    tokens: TokenSource | None = None,
    acceptance: Acceptance | None = None,
    confidence: Confidence | None = None,
) -> Host:
    """A host of a small device."""
    accepts = acceptance or FixedAcceptance(0)
    core = SimCore(
        *(slots, pages, page_tokens, UNIT),
        tokens=tokens,
        acceptance=accepts,
        confidence=confidence,
        state_rows=state_rows,
        strict=True,
    )
    return Host(InstantDevice(core), catalog)

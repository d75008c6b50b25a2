"""The simulated device in virtual time: frames in with the time of submission, completions out with theirs.

Owns the order of frames in time: they run one after another. Has no clock and no thread; a driver steps it, such as a
simulation (which jumps from finish to finish) or `PacedDevice` (which waits for each). Surprising rule: rows are
changed when a frame's results are first asked for, which may be before its finish; nobody can see the difference,
because frames run in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flare.machines.graph import QUEUEABLE_KINDS, GraphShape

from ..device import DeviceLost
from ..frames import Completion, Frame
from .acceptance import Acceptance, Confidence, FixedAcceptance
from .rows import SimRows
from .state import FrameRefused, PageConflict
from .timing import Duration, Fault, Faults
from .tokens import TokenSource

_WINDOW = 2
_NOTHING_ACCEPTED = FixedAcceptance(0)


@dataclass(slots=True)
class _InFlight:
    frame: Frame
    start_ns: int
    end_ns: int
    delivery_ns: int
    completion: Completion | None = None


class SimCore:
    """A device of `request_slots` rows, `pages` pages of `page_tokens` tokens and `state_rows` state rows.

    `strict`: a page that is bound to two live rows raises `PageConflict` out of `finish` (and out of `run_head`) where
    otherwise the frame ends with an error.
    """

    def __init__(
        self,
        request_slots: int,
        pages: int,
        page_tokens: int,
        duration: Duration,
        *,
        tokens: TokenSource | None = None,
        faults: Faults | None = None,
        acceptance: Acceptance = _NOTHING_ACCEPTED,
        confidence: Confidence | None = None,
        state_rows: int = 0,
        strict: bool = False,
    ) -> None:
        self.request_slots = request_slots
        self.pages = pages
        self.page_tokens = page_tokens
        self.state_rows = state_rows
        self._duration = duration
        self._faults = faults or Faults()
        self._strict = strict
        self._rows = SimRows(
            request_slots, pages, page_tokens, tokens or TokenSource(), acceptance, state_rows, confidence
        )
        self._catalog: frozenset[GraphShape] | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._last_fence = 0
        self._free_at_ns = 0
        self._delivered_at_ns = 0
        self._lost: str | None = None

    def prepare(self, catalog: Sequence[GraphShape]) -> None:
        """From now on, a frame of a shape outside the catalog is refused."""
        self._catalog = frozenset(catalog)

    def submit(self, frame: Frame, now_ns: int) -> None:
        """Queue a frame. Raises `DeviceLost` after the device has died, and `ValueError` if the caller breaks the
        rules of the window: more than two frames, fences that do not rise, or a second frame beside one of a kind
        that needs an empty window."""
        if self._lost is not None:
            raise DeviceLost(self._lost)
        if len(self._in_flight) >= _WINDOW:
            raise ValueError(f"fence {frame.fence}: {_WINDOW} frames are in flight already")
        if frame.fence <= self._last_fence:
            raise ValueError(f"fence {frame.fence} follows fence {self._last_fence}")
        for kind in {frame.shape.kind, *(entry.frame.shape.kind for entry in self._in_flight)} - QUEUEABLE_KINDS:
            if self._in_flight:
                raise ValueError(f"fence {frame.fence}: a frame of kind {kind} needs an empty window")
        self._last_fence = frame.fence
        start_ns = max(now_ns, self._free_at_ns)
        self._free_at_ns = end_ns = start_ns + self._duration(frame)
        late_ns = self._faults.late_ns if self._faults.at.get(frame.fence) is Fault.LATE else 0
        self._delivered_at_ns = max(end_ns + late_ns, self._delivered_at_ns)
        self._in_flight.append(_InFlight(frame, start_ns, end_ns, self._delivered_at_ns))

    def next_finish_ns(self) -> int | None:
        """When the oldest frame's completion is due; None if no frame is in flight."""
        return self._in_flight[0].delivery_ns if self._in_flight else None

    def run_head(self) -> tuple[int, int]:
        """Work out the results of the oldest frame ahead of `finish`. Returns when it starts and when its completion is
        due. Raises `IndexError` if no frame is in flight."""
        head = self._in_flight[0]
        if head.completion is None:
            head.completion = self._run(head)
        return head.start_ns, head.delivery_ns

    def finish(self, now_ns: int) -> Completion:
        """Take the completion of the oldest frame. Raises `ValueError` if it is not due at `now_ns`."""
        due_ns = self.next_finish_ns()
        if due_ns is None or now_ns < due_ns:
            raise ValueError(f"no completion is due at {now_ns} ns; the next is due at {due_ns}")
        self.run_head()
        completion = self._in_flight.popleft().completion
        assert completion is not None
        return completion

    def _run(self, entry: _InFlight) -> Completion:
        frame, fault = entry.frame, self._faults.at.get(entry.frame.fence)
        device_ns = 0 if fault is Fault.UNTIMED else max(1, entry.end_ns - entry.start_ns)
        if fault is Fault.LOST and self._lost is None:
            self._lost = f"the device died in frame {frame.fence}"
        if self._lost is not None:
            return Completion(frame.fence, 0, (), self._lost, lost=True)
        if fault is Fault.FAILED:
            return Completion(frame.fence, device_ns, (), f"frame {frame.fence} failed")
        if self._catalog is not None and frame.shape not in self._catalog:
            return Completion(frame.fence, 0, (), f"{frame.shape.name} was not prepared")
        try:
            results, confidence = self._rows.execute(frame)
        except FrameRefused as error:
            return Completion(frame.fence, device_ns, (), str(error))
        except PageConflict as error:
            if self._strict:
                raise
            return Completion(frame.fence, device_ns, (), str(error))
        if fault is Fault.MALFORMED:
            results = tuple(replace(result, committed=result.committed + 1) for result in results)
        return Completion(frame.fence, device_ns, results, confidence=confidence)

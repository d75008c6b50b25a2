"""Service history: who is charged for which interval.

Owns the rules by which validated frames move the prices of their participants. Does not own the prices' arithmetic
(`prices`) or the frames. Surprising rule: participants are those frozen at commit; one that has since ended, or whose
slot has a new owner, is left alone (docs/scheduling.md, "Prices").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from .execution import Request
from .ids import Fence, RequestHandle
from .prices import QueuedService
from .selection.reference import UNMEASURED, Normalizer
from .slot import Commit, FrameSlot
from .validation import Progress


class Accounting:
    """Charges intervals, starts newcomers and corrects by publications."""

    __slots__ = ("adaptation_ms", "newcomer_share")

    def __init__(self, adaptation_ms: float, newcomer_share: float) -> None:
        self.adaptation_ms = adaptation_ms
        self.newcomer_share = newcomer_share

    def start(
        self, newcomers: Sequence[Request], runnable: int, normalizers: Mapping[RequestHandle, Normalizer]
    ) -> None:
        """Set the token prices of all requests admitted in this instant, among `runnable` in all, where a normalizer
        exists; anew for those that came earlier in it, so that they count alike.

        Where none does, the first charged interval that has one sets it.
        """
        for request in newcomers:
            assert request.handle is not None
            normalizer = normalizers.get(request.handle, UNMEASURED)
            request.prices.log_token = None
            request.prices.start(self.newcomer_share, runnable, normalizer.tokens_per_ms)

    def charge(
        self, commit: Commit, interval_ns: int, resident: Sequence[Request | None], progress: Iterable[Progress]
    ) -> None:
        """Charge a validated frame's interval to its participants, served or not. An untimed frame charges nothing."""
        if interval_ns <= 0:
            return
        served = {lane.request.id: lane.prompt_tokens + lane.output_tokens for lane in progress}
        count = sum(request is not None and request.advances for request in resident)
        for participant in commit.participants:
            request = resident[participant.handle.slot]
            if request is None or request.handle != participant.handle or not request.advances:
                continue
            request.prices.start(self.newcomer_share, count, participant.normalizer.tokens_per_ms)
            request.prices.charge(commit.fence, served.get(request.id, 0), interval_ns / 1e6, self.adaptation_ms)

    def publish(self, request: Request, fence: Fence) -> None:
        """Text of `request` became visible under `fence`."""
        request.prices.publish(fence, self.adaptation_ms)

    def projected(
        self, requests: Iterable[Request], frames: Sequence[FrameSlot]
    ) -> list[tuple[float | None, float | None]]:
        """(token, delivery) log prices of each request at the expected end of the queued frames. Changes nothing."""
        queued: dict[RequestHandle, list[QueuedService]] = {}
        for frame in frames:
            commit = frame.commit
            if commit is None or commit.plan.duration_ns <= 0:
                continue
            duration_ms = commit.plan.duration_ns / 1e6
            for participant in commit.participants:
                service = QueuedService(participant.expected_tokens, int(participant.expects_delivery), duration_ms)
                queued.setdefault(participant.handle, []).append(service)
        return [
            request.prices.projected(queued.get(request.handle, ()) if request.handle else (), self.adaptation_ms)
            for request in requests
        ]

    def check(self, residents: Iterable[Request]) -> None:
        """Raise AssertionError unless every price is a finite logarithm, hence positive. For tests."""
        for request in residents:
            for log_price in (request.prices.log_token, request.prices.log_delivery):
                assert log_price is None or math.isfinite(log_price)

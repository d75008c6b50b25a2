"""A scheduler from a policy and a catalog: what the server and the simulator run alike.

Owns the way from settings to scheduling state. Does not own either. Surprising rule: duration estimates start unknown,
here as everywhere; no table of costs preloads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flare.config.schema import Policy
from flare.machines.durations import DurationTable
from flare.machines.graph import GraphShape
from flare.machines.pages import PagePool
from flare.machines.scheduler import Scheduler
from flare.machines.selection.view import PolicyRow
from flare.machines.waiting import WaitingQueue


def make_scheduler(
    policy: Policy,
    catalog: Sequence[GraphShape],
    *,
    slots: int,
    pages: PagePool,
    waiting: WaitingQueue,
    device_allocates: bool = False,
    keeps_prefixes: bool = False,
) -> Scheduler:
    """A fresh scheduler of `slots` request slots under `policy` (docs/scheduling.md, "Policy"); the rest as there."""
    return Scheduler(
        catalog,
        policy_row(policy),
        slots=slots,
        pages=pages,
        waiting=waiting,
        durations=DurationTable(catalog, policy.estimate_ttl_ns),
        adaptation_ms=policy.adaptation_ms,
        adaptive_verification_alpha=policy.adaptive_verification_alpha,
        device_allocates=device_allocates,
        keeps_prefixes=keeps_prefixes,
    )


def policy_row(policy: Policy) -> PolicyRow:
    """The coefficients that selection reads."""
    return msgspec.convert(policy, PolicyRow, from_attributes=True)

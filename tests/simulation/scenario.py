"""What one seed stands for: a catalog, its costs, the limits, the load and the faults.

Owns the random choice of all of these. Does not own what happens then (`world`). Surprising rule: every fault is
switched off in about half of the seeds, so that each is also seen without the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from flare.graphs.frames import Frame
from flare.machines.graph import GraphShape
from flare.machines.request import RequestSpec
from flare.machines.selection.view import PolicyRow

from .catalogs import draw_catalog
from .prompts import draw_spec

MS = 1_000_000
LONGEST = 76
"""Prompt and output tokens of the longest request."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Probabilities of everything that may go wrong, each for one occasion."""

    cancel: float
    host_stop: float
    hold_text: float
    delay_text: float
    failed: float
    untimed: float
    late: float
    malformed: float
    late_commit: float
    preempt: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seed. Times are nanoseconds; `idle_ns` is the pause between two bursts of arrivals. `throttled`: of so many
    frames in a row, the last half takes three times as long (0: never). `device_allocates`, `keeps_prefixes`: see
    `Scheduler`; where it allocates, the device tells what it thinks of its proposals."""

    seed: int
    catalog: tuple[GraphShape, ...]
    costs_ns: dict[GraphShape, int]
    drift: float
    noise: float
    slots: int
    pages: int
    page_tokens: int
    state_rows: int
    requests_max: int | None
    tokens_max: int | None
    policy: PolicyRow
    weights: dict[str, float]
    exponent: float
    throttled: int
    adaptation_ms: float
    estimate_ttl_ns: int
    clients: int
    gap_ns: int
    burst: int
    idle_ns: int
    tick_ns: int
    rates: Rates
    device_allocates: bool
    keeps_prefixes: bool

    def duration(self) -> Callable[[Frame], int]:
        """The time of a frame: its shape's cost, drifting as fences rise, with noise; a whole number of ticks."""
        rng = random.Random(self.seed + 1)

        def of(frame: Frame) -> int:
            factor = (1.0 + self.drift) ** frame.fence * (1.0 + self.noise * rng.uniform(-1.0, 1.0))
            if self.throttled and frame.fence % self.throttled >= self.throttled // 2:
                factor *= 3.0
            ticks = round(self.costs_ns[frame.shape] * factor / self.tick_ns)
            return max(1, ticks) * self.tick_ns

        return of

    def spec(self, rng: random.Random) -> RequestSpec:
        """A request of this scenario."""
        return draw_spec(rng, self.catalog, self.state_rows, f"client-{rng.randrange(self.clients)}")


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    slots = rng.choice((1, 2, 3, 4, 6, 8))
    tick_ns = rng.choice((MS // 4, MS, 5 * MS))
    catalog = draw_catalog(rng, slots)
    page_tokens = rng.choice((4, 8, 16))
    largest = -(-LONGEST // page_tokens)
    slowness = rng.choice((1.0, 1.0, 1.0, 40.0))
    return Scenario(
        seed=seed,
        catalog=catalog,
        costs_ns={shape: round(_cost_ns(rng, shape) * slowness) for shape in catalog},
        drift=rng.choice((0.0, 0.0, 0.003, -0.003)),
        noise=rng.choice((0.0, 0.1, 0.5)),
        slots=slots,
        pages=rng.randint(largest, largest * slots),
        page_tokens=page_tokens,
        state_rows=rng.choice((0, 1, 1, 3)),
        requests_max=rng.choice((None, 0, 2, 8)),
        tokens_max=rng.choice((None, None, 100)),
        policy=_policy(rng),
        weights=rng.choice(({}, {"client-0": 2.0, "client-1": 0.5})),
        exponent=rng.choice((1.0, 1.0, 0.5)),
        throttled=rng.choice((0, 0, 10)),
        adaptation_ms=rng.choice((0.5, 20.0, 100.0, 2000.0)),
        estimate_ttl_ns=rng.choice((40 * MS, 500 * MS, 30_000 * MS)),
        clients=rng.choice((1, 2, 5)),
        gap_ns=rng.choice((0, 2 * MS, 20 * MS)),
        burst=rng.choice((1, 4, 20)),
        idle_ns=rng.choice((0, 50 * MS, 40_000 * MS)),
        tick_ns=tick_ns,
        rates=_rates(rng),
        device_allocates=rng.random() < 0.5,
        keeps_prefixes=rng.random() < 0.2,
    )


def _cost_ns(rng: random.Random, shape: GraphShape) -> int:
    work = shape.prefill_tokens or shape.batch * shape.width
    return round((rng.uniform(1.0, 20.0) + rng.choice((0.05, 0.5, 2.0)) * work) * MS)


def _policy(rng: random.Random) -> PolicyRow:
    balanced = PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0)
    throughput = PolicyRow(64.0, 16.0, 0.0, 0.0, 8.0)
    weight = [rng.choice((0.0, 1.0, 1e3)) for _ in range(4)]
    wild = PolicyRow(
        weight[0],
        weight[1],
        weight[2],
        weight[3],
        rng.choice((0.5, 8.0)),
        terminal_value=rng.choice((0.0, 256.0)),
        terminal_age_price=rng.choice((0.0, 1.0)),
        first_output_age_price=rng.choice((0.0, 0.1, 1e3)),
    )
    waiting = PolicyRow(1.0, 1.0, 1.0, 0.3, 2.0, first_output_age_price=0.1)
    policy = rng.choice((balanced, balanced, throughput, waiting, wild))
    return replace(policy, host_gap_pricing=rng.random() < 0.3)


def _rates(rng: random.Random) -> Rates:
    def perhaps(rate: float) -> float:
        return rate if rng.random() < 0.5 else 0.0

    return Rates(
        cancel=perhaps(0.3),
        host_stop=perhaps(0.05),
        hold_text=perhaps(0.4),
        delay_text=perhaps(0.2),
        failed=perhaps(0.04),
        untimed=perhaps(0.1),
        late=perhaps(0.1),
        malformed=perhaps(0.06),
        late_commit=perhaps(0.1),
        preempt=perhaps(0.3),
    )

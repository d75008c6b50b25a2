"""What one seed stands for: a catalog, its costs, the limits, the load and the faults.

Owns the random choice of all of these. Does not own what happens then (`world`). Surprising rule: every fault is
switched off in about half of the seeds, so that each is also seen without the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from flare.graphs.frames import Frame
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.request import RequestSpec
from flare.machines.selection.view import PolicyRow

MS = 1_000_000
PROMPT_TOKENS_MAX = 60
OUTPUT_TOKENS_MAX = 16


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


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seed. Times are nanoseconds; `idle_ns` is the pause between two bursts of arrivals."""

    seed: int
    catalog: tuple[GraphShape, ...]
    costs_ns: dict[GraphShape, int]
    drift: float
    noise: float
    slots: int
    pages: int
    page_tokens: int
    requests_max: int | None
    tokens_max: int | None
    policy: PolicyRow
    adaptation_ms: float
    estimate_ttl_ns: int
    clients: int
    gap_ns: int
    burst: int
    idle_ns: int
    tick_ns: int
    rates: Rates

    def duration(self) -> Callable[[Frame], int]:
        """The time of a frame: its shape's cost, drifting as fences rise, with noise; a whole number of ticks."""
        rng = random.Random(self.seed + 1)

        def of(frame: Frame) -> int:
            factor = (1.0 + self.drift) ** frame.fence * (1.0 + self.noise * rng.uniform(-1.0, 1.0))
            ticks = round(self.costs_ns[frame.shape] * factor / self.tick_ns)
            return max(1, ticks) * self.tick_ns

        return of

    def spec(self, rng: random.Random) -> RequestSpec:
        """A request of this scenario."""
        prompt = rng.randint(1, rng.choice((4, PROMPT_TOKENS_MAX)))
        scored = rng.random() < 0.2 and any(shape.kind is GraphKind.SCORED_PREFILL for shape in self.catalog)
        return RequestSpec(
            client=f"client-{rng.randrange(self.clients)}",
            prompt_tokens=prompt,
            max_tokens=0 if scored and rng.random() < 0.5 else rng.randint(1, rng.choice((2, OUTPUT_TOKENS_MAX))),
            system_end=rng.choice((0, rng.randint(0, prompt))),
            messages=tuple(sorted(rng.randint(0, prompt) for _ in range(rng.randrange(4)))),
            scored=scored,
            needs_feedback=rng.random() < 0.3,
        )


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    slots = rng.choice((1, 2, 3, 4, 6, 8))
    tick_ns = rng.choice((MS // 4, MS, 5 * MS))
    catalog = _catalog(rng, slots)
    page_tokens = rng.choice((4, 8, 16))
    largest = -(-(PROMPT_TOKENS_MAX + OUTPUT_TOKENS_MAX) // page_tokens)
    return Scenario(
        seed=seed,
        catalog=catalog,
        costs_ns={shape: _cost_ns(rng, shape) for shape in catalog},
        drift=rng.choice((0.0, 0.0, 0.003, -0.003)),
        noise=rng.choice((0.0, 0.1, 0.5)),
        slots=slots,
        pages=rng.randint(largest, largest * slots),
        page_tokens=page_tokens,
        requests_max=rng.choice((None, 0, 2, 8)),
        tokens_max=rng.choice((None, None, 100)),
        policy=_policy(rng),
        adaptation_ms=rng.choice((0.5, 20.0, 100.0, 2000.0)),
        estimate_ttl_ns=rng.choice((40 * MS, 500 * MS, 30_000 * MS)),
        clients=rng.choice((1, 2, 5)),
        gap_ns=rng.choice((0, 2 * MS, 20 * MS)),
        burst=rng.choice((1, 4, 20)),
        idle_ns=rng.choice((0, 50 * MS, 40_000 * MS)),
        tick_ns=tick_ns,
        rates=_rates(rng),
    )


def _catalog(rng: random.Random, slots: int) -> tuple[GraphShape, ...]:
    batches = [batch for batch in (1, 2, 4, 8) if batch < 2 * slots]
    kept = sorted(rng.sample(batches, rng.randint(1, len(batches))))
    shapes = [GraphShape(GraphKind.DECODE, batch) for batch in kept]
    for kind in (GraphKind.PREFILL, GraphKind.SCORED_PREFILL):
        count = rng.randint(1 if kind is GraphKind.PREFILL else 0, 4)
        shapes.extend(GraphShape(kind, 1, tokens) for tokens in sorted(rng.sample((4, 8, 16, 32, 64), count)))
    return tuple(shapes)


def _cost_ns(rng: random.Random, shape: GraphShape) -> int:
    work = shape.batch if shape.kind is GraphKind.DECODE else shape.prefill_tokens
    return round((rng.uniform(1.0, 20.0) + rng.choice((0.05, 0.5, 2.0)) * work) * MS)


def _policy(rng: random.Random) -> PolicyRow:
    balanced = PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0)
    throughput = PolicyRow(64.0, 16.0, 0.0, 0.0, 8.0)
    weight = [rng.choice((0.0, 1.0, 1e3)) for _ in range(4)]
    wild = PolicyRow(weight[0], weight[1], weight[2], weight[3], rng.choice((0.5, 8.0)))
    return rng.choice((balanced, balanced, throughput, wild))


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
    )

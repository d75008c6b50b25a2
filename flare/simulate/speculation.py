"""Speculation in a simulated run: which proposals are right, what they cost, and which graphs verify them.

Owns the options of a run that speculates, and the identity under which a request's proposals are known. Does not own
the process that decides them (`graphs/sim/acceptance.py`) or other servers' controllers (`rules`). Surprising rule: a
request is known by what the simulated device knows it by, its prompt and how it draws, so that rules which have no
device see the very same proposals accepted.
"""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from flare.config.schema import REQUEST_SLOTS_MAX, WIDTH_MAX
from flare.graphs import catalog
from flare.graphs.frames import Binding, Sampling
from flare.graphs.sim.acceptance import Acceptance, Confidence, FixedAcceptance, RandomAcceptance
from flare.graphs.sim.tokens import TokenSource, hash_tokens

from .traces import TraceRequest

_MODE = re.compile(rf"off|adaptive|fixed:[1-{WIDTH_MAX}]")


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """How a run speculates.

    `mode`: the graphs that Flare has, `off`, `adaptive` or `fixed:W`; other servers' rules say themselves what they
    propose. `target_rows` bounds the target positions of one graph. Each request's proposals are right with a
    probability of its own, uniform in `acceptance`. `draft_costs` is a table of costs whose decode steps are the
    draft's. `insight`: what the program sees of its own proposals, 0 to 1; unset, it does not tell.
    """

    mode: str = "adaptive"
    target_rows: Annotated[int, Meta(ge=1, le=REQUEST_SLOTS_MAX * WIDTH_MAX)] = 256
    acceptance: tuple[Annotated[float, Meta(ge=0, le=1)], Annotated[float, Meta(ge=0, le=1)]] = (0.6, 0.8)
    draft_costs: str | UnsetType = UNSET
    insight: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if not _MODE.fullmatch(self.mode):
            raise ValueError(f"--speculative {self.mode:.40}: give off, adaptive, or fixed:W with W from 1 to 8")

    @property
    def fixed_width(self) -> int | None:
        """The one width of its rounds; None if widths compete."""
        return int(self.mode.removeprefix("fixed:")) if self.mode.startswith("fixed:") else None

    @property
    def graphs(self) -> catalog.Speculation | None:
        """What the catalog is built for; None: for decoding alone."""
        return None if self.mode == "off" else catalog.Speculation(True, self.fixed_width, self.target_rows)


class Proposer(NamedTuple):
    """Which proposals are right, and what the program that makes them thinks of them, if it tells."""

    acceptance: Acceptance
    confidence: Confidence | None = None


NO_PROPOSER = Proposer(FixedAcceptance(0))


def proposer_of(speculation: Speculation, seed: int) -> Proposer:
    """The process of a run."""
    low, high = sorted(speculation.acceptance)
    told = speculation.insight is not UNSET
    insight = 0.0 if isinstance(speculation.insight, UnsetType) else speculation.insight
    process = RandomAcceptance(seed, (low + high) / 2, (high - low) / 2, insight=insight)
    return Proposer(process, process.confidence if told else None)


def parse_acceptance(text: str) -> tuple[float, float]:
    """`0.6-0.8`, or one number for all requests. Raises ValueError."""
    low, dash, high = text.partition("-")
    try:
        return float(low), float(high if dash else low)
    except ValueError:
        raise ValueError(f"--acceptance {text:.40}: give two probabilities, as 0.6-0.8") from None


def sampling_of(request: TraceRequest) -> Sampling:
    """How a request draws."""
    return Sampling(seed=request.seed)


def request_key(request: TraceRequest) -> int:
    """What `Acceptance` knows a request by: the simulated host's prompts are all zeros."""
    prompt = hash_tokens(np.zeros(request.prompt_tokens, np.int32), 0)
    return prompt ^ TokenSource().rules(Binding((), sampling_of(request), (), 1)).key

"""What a decision reads, and what it answers.

Owns the frozen snapshot `View` that `select` takes, and the `Plan` and `Decision` that it returns. Does not own how a
view is taken (the scheduler does) or how it is decided. Surprising rule: whatever needs an exponential, a logarithm or
a power is computed before and carried here, so that the same view gives the same decision on every machine
(docs/scheduling.md, "Decisions that can be taken again"). All of it goes to JSON and back without loss.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ..graph import QUEUEABLE_KINDS, GraphKind, GraphShape, Source


class Phase(StrEnum):
    """What a resident request needs, once the stages before it are done. `TERMINAL`: only its retirement is left."""

    PREFILL = "prefill"
    SCORED_PREFILL = "scored_prefill"
    DECODE = "decode"
    TERMINAL = "terminal"


class Reason(StrEnum):
    """Why a plan was chosen."""

    ORDINARY = "ordinary"
    DISCOVERY = "discovery"
    TIMING_REFRESH = "timing_refresh"
    ACCEPTANCE_PROBE = "acceptance_probe"


class Hold(StrEnum):
    """Why nothing is submitted."""

    NOTHING_READY = "nothing_ready"
    WAITING_FOR_DRAIN = "waiting_for_drain"
    OVERRUN = "overrun"


class PolicyRow(msgspec.Struct, frozen=True):
    """The coefficients that selection uses (docs/scheduling.md, "Policy"); values in prompt tokens, times in ms."""

    output_token_value: float
    token_fairness: float
    delivery_fairness: float
    decode_age_price: float
    newcomer_share: float
    terminal_value: float = 256.0
    terminal_age_price: float = 1.0
    first_output_age_price: float = 0.0
    output_time_price: float = 0.0
    prompt_time_price: float = 0.0
    first_output_value: float = 0.0
    first_output_growth_ms: float = 0.0
    first_output_urgency: float = 0.0
    first_output_patience_ms: float = 500.0
    gap_price: float = 0.0
    gap_stretch: float = 5.0
    host_gap_pricing: bool = False


class GraphRow(msgspec.Struct, frozen=True):
    """A prepared graph as measured now. `duration_ns` 0 means unknown; times of 0 mean never."""

    shape: GraphShape
    duration_ns: int
    observed_at_ns: int
    attempted_at_ns: int
    stale: bool

    @property
    def runs_alone(self) -> bool:
        """Whether a frame of this graph has the window to itself, whoever takes part (docs/scheduling.md, "Window and
        holds"): its kind cannot be queued, or its cost is unknown or stale."""
        return self.shape.kind not in QUEUEABLE_KINDS or self.duration_ns == 0 or self.stale

    @property
    def drains(self) -> bool:
        """Whether it needs an empty window, whoever takes part: it runs alone, or the host feeds it."""
        return self.runs_alone or self.shape.source is Source.COPY


class RequestRow(msgspec.Struct, frozen=True):
    """A resident request as it will stand at the planning start: queued frames are projected.

    `position` counts prompt tokens consumed (all of them once decoding). `boundary` is the prompt position that a chunk
    may not cross from here (end of the system prompt, else of the prompt). `next_endpoint` is the first message or
    prompt endpoint beyond `position`. `output_left` is the number of tokens that it may still produce after queued
    work; a decoding request with none left cannot be served, yet is still charged.
    `stages` are the operations that it needs, in order, before it can do what its phase says; none for one that is
    ready. `spans` are the [start, end) prompt positions ahead that one chunk consumes whole or not at all.
    `survival` [D] estimates that the first d = 1..D proposals of a program are all accepted, never rising;
    `scored_survival` is the same raised to the policy's exponent, for scores alone; `forecast` [D] is the joint
    probability that the program is expected to find for each prefix, by which it allocates rows. All are empty where
    nothing can be proposed. `copy_survival` and `copy_scored_survival` are the first two of the host's proposals, as
    many as it can supply now. `optimistic` and `copy_optimistic` are their bounded optimistic estimates, raised to the
    exponent too, and `weights` and `copy_weights` the aged weights of each depth: given while a probe is funded.
    `token_price` (pi, ms/token) and `delivery_price` (delta, ms/delivery) are multiplied by the view's `value_scale`;
    None: not yet set. `age_ms` is the wait at the planning start: of a decoding request since its last visible output,
    of a terminal one since it ended, of any other since it arrived. `last_fence` is the fence of the last frame that
    served it, 0 if none. `needs_feedback`: its next step reads what the host knows only after a completion.
    """

    slot: int
    generation: int
    phase: Phase
    position: int
    prompt_tokens: int
    boundary: int
    next_endpoint: int
    output_left: int
    token_price: float | None
    delivery_price: float | None
    age_ms: float
    last_fence: int
    needs_feedback: bool
    stages: tuple[GraphKind, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    survival: tuple[float, ...] = ()
    scored_survival: tuple[float, ...] = ()
    forecast: tuple[float, ...] = ()
    copy_survival: tuple[float, ...] = ()
    copy_scored_survival: tuple[float, ...] = ()
    optimistic: tuple[float, ...] = ()
    copy_optimistic: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    copy_weights: tuple[float, ...] = ()


class QueuedFrame(msgspec.Struct, frozen=True):
    """A frame in flight, with the finish that was expected of it and the slots that it serves."""

    fence: int
    shape: GraphShape
    expected_finish_ns: int
    slots: tuple[int, ...]


class View(msgspec.Struct, frozen=True):
    """All that one decision reads.

    `planning_ns` is the later of `now_ns` and the expected end of the queued frames. `value_scale` is
    exp(-log_scale): every value of the decision is multiplied by it. Rows of `requests` are in slot order.
    `queued_requests` and `queued_tokens` describe accepted requests that wait for a slot. `refresh_funded`: the ledger
    allows one stale graph to run in place of the ordinary winner; `probe_funded`: one round that offers more than the
    ordinary winner. `device_allocates`: ragged programs that propose share out their rows themselves, below the lanes'
    ceilings. `keeps_prefixes`: lanes are shortened only by the limits of requests (fixed selection). `host_gap_ms` is
    what a frame that needs the empty window takes beside its own time, 0 where it has no price.
    """

    now_ns: int
    planning_ns: int
    overrun: bool
    policy: PolicyRow
    log_scale: float
    value_scale: float
    graphs: tuple[GraphRow, ...]
    requests: tuple[RequestRow, ...]
    window: tuple[QueuedFrame, ...]
    free_slots: int
    free_pages: int
    queued_requests: int
    queued_tokens: int
    refresh_funded: bool = False
    probe_funded: bool = False
    device_allocates: bool = False
    keeps_prefixes: bool = False
    host_gap_ms: float = 0.0


class LaneWork(msgspec.Struct, frozen=True):
    """What a plan does for one request: `tokens` positions from `start`.

    A prompt lane consumes so many prompt tokens; a decode lane's `tokens` are its target positions, the pending token
    and the proposals to verify (1 without speculation), at most where the program allocates them; the lane of a stage
    has none. `emits`: it ends with an output token. `delivers`: what it emits counts as a delivery. `expected_tokens`
    is the service that is expected of it, prompt tokens and output tokens together.
    """

    slot: int
    generation: int
    start: int
    tokens: int
    emits: bool
    delivers: bool
    expected_tokens: float


class Following(msgspec.Struct, frozen=True):
    """The graph that a prerequisite enables, chosen jointly with it, and what it would do. It is never submitted: when
    the prerequisite has completed, the choice is made anew."""

    shape: GraphShape
    lanes: tuple[LaneWork, ...]
    duration_ns: int


class Plan(msgspec.Struct, frozen=True):
    """A graph and the requests that it serves. `duration_ns` 0: unknown; then `score` is its priced service alone.

    `duration_ns` is the graph's own, also where `score` is that of a sequence with `following`.

    `score` (docs/scheduling.md, "Score") is scaled: value/ms times the scale; `log_scale` is the logarithm of the
    inverse factor. `observation_age_ns` is None for an unknown graph. `allocates`: the program shares out its target
    rows itself, and the lanes' `tokens` are ceilings.
    """

    shape: GraphShape
    lanes: tuple[LaneWork, ...]
    duration_ns: int
    observation_age_ns: int | None
    score: float
    log_scale: float
    reason: Reason
    needs_empty_window: bool
    following: Following | None = None
    allocates: bool = False


class Candidate(msgspec.Struct, frozen=True):
    """A candidate as `flare explain` shows it: the terms of its score, and why it lost (None: it won).

    `service` and `age_term` sum over all lanes of the sequence, and `waiting_cost` and `gap_cost` are what it costs per
    ms; `newly`, `ready` and `terminal` say how many of its lanes the prerequisite enables, were ready, and retire (0 of
    a candidate of one graph, but for `terminal`). Where rows are shared out, `targets` has those of each lane, as
    expected if the program `allocates` them.
    """

    shape: GraphShape
    slots: tuple[int, ...]
    tokens: int
    duration_ns: int
    service: float
    age_term: float
    waiting_cost: float
    score: float
    needs_empty_window: bool
    lost: str | None
    following: Following | None = None
    newly: int = 0
    ready: int = 0
    terminal: int = 0
    gap_cost: float = 0.0
    targets: tuple[int, ...] = ()
    allocates: bool = False


class Decision(msgspec.Struct, frozen=True):
    """The chosen plan, or the reason for submitting nothing (then `plan` is None).

    While the winner waits for the window to drain, `awaited` is that winner. `candidates` is filled when asked for,
    best first.
    """

    plan: Plan | None
    hold: Hold | None
    awaited: Plan | None
    candidates: tuple[Candidate, ...] = ()

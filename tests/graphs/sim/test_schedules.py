"""Whatever way a request takes through the simulated device, it gives the output that it gives alone.

Random legal schedules: chunks of any size, packed and mixed with others, scored, rounds of any width, image windows,
restored prefixes, snapshots, preemption. And one step off the legal way is refused.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from flare.graphs.frames import LaneInput, Sampling, TokenScore
from flare.graphs.sim.acceptance import RandomAcceptance
from flare.graphs.sim.tokens import TokenSource, mix
from flare.machines.graph import STAGE_KINDS, GraphKind, GraphShape, rectangular
from flare.machines.request import ImageWindow
from tests.graphs.host import Row, decode_lane, prompt_lane, prompt_of, stage_lane
from tests.graphs.sim.rig import sim_host

K = GraphKind
STOP = 250
SHAPES: dict[GraphKind, GraphShape] = {
    K.PREFILL: GraphShape(K.PREFILL, 3, 40),
    K.SCORED_PREFILL: GraphShape(K.SCORED_PREFILL, 2, 40),
    K.DECODE: GraphShape(K.DECODE, 3),
    K.SPECULATIVE: rectangular(K.SPECULATIVE, 3, 5),
    K.MIXED: rectangular(K.MIXED, 4, 3, prefill_tokens=40, prompt_rows=2),
} | {kind: GraphShape(kind, 2) for kind in STAGE_KINDS}
WHOLE = {kind: GraphShape(kind, 1, 100) for kind in (K.PREFILL, K.SCORED_PREFILL)}
TOKENS = TokenSource(range(200), seed=3, eos_at=lambda prompt, tokens, index: mix(prompt + tokens + index) % 25 == 0)


@dataclass
class Guest:
    """A request and where it stands. `away`: the state row that it was preempted into; `saved`: its state of here is in
    a state row."""

    row: Row
    state_row: int
    scored: bool
    restored: int
    initialized: bool
    window: int = 0
    operations: int = 0
    saved: bool = False
    away: bool = False
    retired: bool = False
    scores: list[TokenScore] = field(default_factory=list)

    @property
    def windows(self) -> tuple[ImageWindow, ...]:
        return self.row.binding.windows

    @property
    def position(self) -> int:
        return self.row.sent

    def next_kind(self) -> GraphKind:
        """What it needs."""
        if self.away:
            return K.RESUME
        if not self.initialized:
            return K.INITIALIZE
        if self.restored and not self.position:
            return K.RESTORE
        if self.window < len(self.windows):
            if self.operations < self.windows[self.window].operations and self.position >= self._start(self.window):
                return K.VISION
            if self.position == self._start(self.window + 1):
                return K.RESTORE if self.saved else K.SNAPSHOT
        if self.position < len(self.row.prompt):
            return K.SCORED_PREFILL if self.scored else K.PREFILL
        return K.DECODE if self.row.ended is None else K.TERMINAL_SNAPSHOT

    def reach(self, tokens: int) -> int:
        """How much of `tokens` its next chunk may have; 0 if none of it makes a legal chunk."""
        stops = [self._start(self.window + 1), len(self.row.prompt), self.position + tokens]
        if self.window < len(self.windows) and self.operations < self.windows[self.window].operations:
            stops.append(self._start(self.window))
        end = min(stops)
        for first, last in self.row.binding.spans:
            end = first if first < end < last else end
        return max(0, end - self.position)

    def _start(self, window: int) -> int:
        return self.windows[window].start if window < len(self.windows) else len(self.row.prompt) + 1


class Schedule:
    """One seed: three requests in four slots."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        acceptance = RandomAcceptance(seed, mean=0.5, spread=0.5)
        self.catalog = [*SHAPES.values(), *WHOLE.values()]
        self.host = sim_host(self.catalog, pages=400, page_tokens=8, state_rows=3, tokens=TOKENS, acceptance=acceptance)
        self.guests = [self.admit(slot) for slot in range(3)]
        self.served, self.provoked = Counter[GraphKind](), Counter[GraphKind]()
        self.expected = [self.alone(guest) for guest in self.guests]

    def admit(self, slot: int) -> Guest:
        """A request with a random history before it."""
        rng = self.rng
        prompt = prompt_of(rng.randint(1, 60), rng.getrandbits(32))
        cuts = sorted([*rng.sample(range(len(prompt)), min(len(prompt), rng.choice((0, 2, 4)))), len(prompt)])
        ranges = list(zip(cuts[0:-1:2], cuts[1::2], strict=False))
        windows = tuple(ImageWindow(first, last, rng.randint(1, 3)) for first, last in ranges)
        starts = {window.start for window in windows}
        spans = tuple((first, last) for first, last in ranges if last - first <= 40 and rng.random() < 0.5)
        scored = rng.random() < 0.2
        restored = 0 if scored or rng.random() < 0.6 else rng.choice([0, *(last for _, last in ranges), *starts])
        row = self.host.admit(
            slot,
            prompt,
            sampling=Sampling(seed=rng.getrandbits(40)),
            output_limit=rng.randint(1, 20),
            stop_tokens=(STOP,),
            prompt_logprobs=1 if scored else None,
            initialize=rng.random() < 0.3,
            windows=windows,
            spans=spans,
        )
        return Guest(row, slot, scored, restored if restored < len(prompt) else 0, not row.binding.initialize)

    def alone(self, guest: Guest) -> tuple[list[int], list[TokenScore]]:
        """Its output on a device of its own, from one prefill and decode frames."""
        host, bound = sim_host(self.catalog, page_tokens=128, tokens=TOKENS), guest.row.binding
        row = host.admit(
            0,
            guest.row.prompt,
            sampling=bound.sampling,
            output_limit=bound.output_limit,
            stop_tokens=bound.stop_tokens,
            prompt_logprobs=bound.prompt_logprobs,
        )
        (result,) = host.prefill(row, chunk=100, shape=WHOLE[K.SCORED_PREFILL if guest.scored else K.PREFILL])
        while row.ended is None:
            host.serve(SHAPES[K.DECODE], [(row, decode_lane(row))])
        return row.tokens, list(result.prompt_scores or ())

    def run(self) -> None:
        """Serve all to their end, by random frames."""
        while waiting := [guest for guest in self.guests if not guest.retired]:
            leader = self.rng.choice(waiting)
            self.provoke(leader)
            kind = self.kind_for(leader)
            others = [guest for guest in self.guests if guest is not leader and self.rng.random() < 0.8]
            self.frame(kind, [leader, *(guest for guest in others if not guest.retired)])

    def provoke(self, guest: Guest) -> None:
        """Try what is not its due; it is refused, and the rest of the schedule shows that it left no trace."""
        row, due, kind = guest.row, guest.next_kind(), self.rng.choice([*K])
        fresh = replace(stage_lane(row, state_row=(guest.state_row + 1) % 3), binding=row.binding)
        fresh = replace(fresh, handle=row.handle._replace(generation=row.handle.generation + 1000))
        # A prefix may be restored or read; the device does not know of the cache.
        may_read = due in (K.PREFILL, K.SCORED_PREFILL) or (due is K.RESTORE and not guest.position)
        inside, beyond = guest.position < len(row.prompt), guest.reach(30) + 1
        wrong: dict[GraphKind, LaneInput | None] = {
            K.PREFILL: prompt_lane(row, 1) if inside and not may_read else None,
            K.MIXED: prompt_lane(row, beyond) if beyond <= min(30, len(row.prompt) - guest.position) else None,
            K.SCORED_PREFILL: prompt_lane(row, 1) if inside and not guest.scored else None,
            K.DECODE: decode_lane(row) if due is not K.DECODE and (row.ended is None or guest.away) else None,
            K.SPECULATIVE: replace(decode_lane(row), width=row.binding.output_limit - len(row.tokens) + 1),
            K.INITIALIZE: stage_lane(row) if due is not K.INITIALIZE else None,
            K.VISION: stage_lane(row, operation=guest.operations + 1),
            K.TERMINAL_SNAPSHOT: stage_lane(row) if inside else None,
            K.SNAPSHOT: stage_lane(row, state_row=3),
            K.RESTORE: fresh,
            K.RESUME: fresh,
        }
        lane = wrong[kind]
        if lane is not None and not (kind is K.SPECULATIVE and row.ended):
            self.provoked[kind] += 1
            completion = self.host.run(SHAPES[kind], [lane])
            assert completion.error is not None, f"{kind} of a row that needs {due}"

    def kind_for(self, guest: Guest) -> GraphKind:
        """A kind that serves it, or leads away from its straight way."""
        kind, chance = guest.next_kind(), self.rng.random()
        if kind in (K.PREFILL, K.DECODE, K.SCORED_PREFILL) and chance < 0.2:
            return self.rng.choice((K.SNAPSHOT, K.TERMINAL_SNAPSHOT))
        if kind is K.DECODE and chance < 0.8:
            return self.rng.choice((K.SPECULATIVE, K.MIXED))
        if kind is K.PREFILL and chance < 0.6:
            return K.MIXED
        if kind is K.TERMINAL_SNAPSHOT and chance < 0.5:
            return K.SNAPSHOT
        return kind

    def frame(self, kind: GraphKind, guests: list[Guest]) -> None:
        """One frame of those that can take part."""
        shape, served, lanes = SHAPES[kind], list[Guest](), list[tuple[Row, LaneInput]]()
        room, rows = shape.prefill_tokens, shape.prompt_rows or shape.batch
        for guest in guests:
            lane = self.lane(kind, guest, room, rows) if len(lanes) < shape.batch else None
            if lane is not None:
                served.append(guest)
                lanes.append((guest.row, lane))
                room -= 0 if lane.tokens is None else len(lane.tokens)
                rows -= lane.tokens is not None
        if not lanes:
            return
        self.served[kind] += 1
        for guest, result in zip(served, self.host.serve(shape, lanes), strict=True):
            guest.scores.extend(result.prompt_scores or ())
            if kind in STAGE_KINDS:
                self.moved(kind, guest)
            else:
                guest.saved = False

    def lane(self, kind: GraphKind, guest: Guest, room: int, rows: int) -> LaneInput | None:
        """Its lane in a frame of this kind; None if it cannot take part."""
        due, rng, row = guest.next_kind(), self.rng, guest.row
        if due is K.DECODE and kind in (K.DECODE, K.SPECULATIVE, K.MIXED):
            return decode_lane(row, width=rng.randint(1, SHAPES[kind].width))
        if due in (K.PREFILL, K.SCORED_PREFILL) and kind in (due, *((K.MIXED,) if due is K.PREFILL else ())):
            reach = guest.reach(rng.choice((room, rng.randint(0, room)))) if rows else 0
            return prompt_lane(row, reach) if reach else None
        if kind in (K.SNAPSHOT, K.TERMINAL_SNAPSHOT):
            if due is K.TERMINAL_SNAPSHOT:
                return stage_lane(row)
            ready = due in (K.PREFILL, K.SCORED_PREFILL, K.DECODE)
            return stage_lane(row, state_row=guest.state_row) if due is kind or ready else None
        if due is not kind:
            return None
        if kind is K.RESTORE and not guest.position:
            return stage_lane(row, restored=guest.restored)
        if kind in (K.RESTORE, K.RESUME):
            self.host.rebind(row, self.free_slot() if kind is K.RESUME else None)
            return stage_lane(row, state_row=guest.state_row)
        return stage_lane(row, operation=guest.operations)

    def free_slot(self) -> int:
        taken = {
            guest.row.handle.slot for guest in self.guests if not (guest.retired or (guest.away and guest.row.bound))
        }
        return self.rng.choice([slot for slot in range(4) if slot not in taken])

    def moved(self, kind: GraphKind, guest: Guest) -> None:
        """What an operation did."""
        match kind:
            case K.INITIALIZE:
                guest.initialized = True
            case K.VISION:
                guest.operations += 1
            case K.RESUME:
                guest.away = False
            case K.RESTORE if guest.saved:
                guest.window, guest.operations, guest.saved = guest.window + 1, 0, False
            case K.RESTORE:
                guest.window = sum(window.end <= guest.restored for window in guest.windows)
            case _ if guest.row.ended is not None:
                guest.retired = True
            case _:
                guest.saved, guest.away = kind is K.SNAPSHOT, kind is K.TERMINAL_SNAPSHOT


@pytest.mark.parametrize("block", range(5))
def test_every_schedule_gives_the_output_of_a_lone_run(block: int) -> None:
    served, provoked = Counter[GraphKind](), Counter[GraphKind]()
    for seed in range(block * 60, block * 60 + 60):
        schedule = Schedule(seed)
        schedule.run()
        got = [(guest.row.tokens, guest.scores) for guest in schedule.guests]
        assert got == schedule.expected, f"seed {seed}"
        served.update(schedule.served)
        provoked.update(schedule.provoked)
    assert set(served) == set(provoked) == set(K), "the schedules do not reach every kind"

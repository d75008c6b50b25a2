"""The torch program and the step of a card, given the same frames.

Owns what must be equal after each frame, and random frames of every kind. Surprising rule: both serve the same requests
with the same pages, so that a frame is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from flare.graphs.frames import Binding, History, LaneInput, LaneResult, Sampling, TokenScore
from flare.graphs.models.config import ModelConfig
from flare.graphs.models.draft import DraftModel
from flare.graphs.models.source import WeightSource
from flare.graphs.programs.rows import WAITING_MAX
from flare.machines.graph import GraphKind, GraphShape, Source, rectangular
from flare.machines.ids import RequestHandle
from tests.graphs.cuda.step_program import ADVANCES, CudaProgram
from tests.graphs.programs_driver import Driver, reference

SLOTS, WIDTH, PROMPT_ROWS, LENGTH = 5, 5, 40, 160
CLOSE = 1e-4


class Twins:
    """Two drivers of the same slots and pages."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        draft: DraftModel | None = None,
        *,
        rejects: bool = False,
        slots: int = SLOTS,
    ) -> None:
        self.exact, self.card = (
            Driver(
                make,
                config,
                source,
                slots=slots,
                max_model_len=LENGTH,
                shuffle=4,
                prompt_rows=PROMPT_ROWS,
                draft=draft,
                width=WIDTH,
                rejects=rejects,
            )
            for make in (reference, CudaProgram)
        )
        self._rejects = rejects

    def bind(self, slot: int, sampling: Sampling, limit: int) -> tuple[RequestHandle, Binding]:
        """A fresh generation of a slot."""
        self.card.bind(slot, sampling, limit=limit)
        return self.exact.bind(slot, sampling, limit=limit)

    def run(self, shape: GraphShape, lanes: Sequence[LaneInput], *, allocates: bool = False) -> tuple[LaneResult, ...]:
        """A frame on both, and the results of both, which are the same."""
        card = self.card.program
        assert isinstance(card, CudaProgram)
        card.shape = shape
        outcomes: list[tuple[LaneResult, ...] | str] = []
        for driver in (self.exact, self.card):
            try:
                outcomes.append(driver.run(shape, lanes, allocates=allocates))
            except FloatingPointError as error:
                outcomes.append(str(error))
        expected, got = outcomes
        for name in ADVANCES:
            ours, theirs = (getattr(driver.program.rows, name) for driver in (self.exact, self.card))
            assert torch.equal(ours, theirs), name
        if isinstance(expected, str) or isinstance(got, str):
            assert got == expected
            raise FloatingPointError(expected)
        for one, other in zip(expected, got, strict=True):
            _check(one, other)
        if shape.source is Source.DRAFT and shape.draft_depth:
            self._check_proposals(lanes, shape.draft_depth)
        return got

    def _check_proposals(self, lanes: Sequence[LaneInput], depth: int) -> None:
        (ours, said), (theirs, heard) = (
            (driver.program.buffers.tokens, driver.program.buffers.confidence) for driver in (self.exact, self.card)
        )
        packed = np.cumsum([0, *(lane.width if lane.tokens is None else len(lane.tokens) for lane in lanes)])
        for first, lane in zip(packed, lanes, strict=False):
            slot = lane.handle.slot
            assert lane.tokens is not None or torch.equal(ours[first:][1 : lane.width], theirs[first:][1 : lane.width])
            torch.testing.assert_close(heard[:, slot, :depth], said[:, slot, :depth], rtol=1e-3, atol=1e-5)


def _check(one: LaneResult, other: LaneResult) -> None:
    for name in ("handle", "committed", "tokens", "ended", "verified"):
        assert getattr(one, name) == getattr(other, name), name
    np.testing.assert_allclose(other.survival or (), one.survival or (), atol=CLOSE)
    for name in ("scores", "prompt_scores"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert (ours is None) == (theirs is None)
        np.testing.assert_allclose(_numbers(theirs or ()), _numbers(ours or ()), atol=CLOSE)


def _numbers(scores: Sequence[TokenScore]) -> list[float]:
    """All log-probabilities; alternatives that are as likely may stand in either order."""
    return [value for score in scores for value in (score.logprob, *(each for _, each in score.top))]


@dataclass
class Guest:
    """A request that is served in random frames: `at` tokens of its prompt have been consumed."""

    handle: RequestHandle
    binding: Binding
    prompt: list[int]
    minimum: int
    at: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def left(self) -> int:
        """How many tokens it may still get."""
        return self.binding.output_limit - len(self.tokens)

    def history(self) -> History:
        """What it has seen."""
        seen = sorted({*self.prompt, *self.tokens})
        counts = np.array([self.tokens.count(token) for token in seen], np.int32)
        missing = max(0, self.minimum - len(self.tokens))
        return History(np.array(seen, np.int32), counts, (3, 9) if missing else (), max(1, missing))


class Crowd:
    """Random requests, and random frames of them."""

    def __init__(self, twins: Twins, seed: int, *, drafts: bool) -> None:
        self._twins = twins
        self._random = np.random.default_rng(seed)
        self._drafts = drafts
        self._guests: list[Guest | None] = [None] * twins.exact.slots
        self.kinds: set[str] = set()

    def frame(self) -> None:
        """One frame of a random kind, where it has anyone to serve."""
        random, guests = self._random, self._guests
        for slot, guest in enumerate(guests):
            if guest is None or (guest.ended and random.random() < 0.5):
                guests[slot] = self._guest(slot)
        order = [guest for guest in random.permutation(np.array(guests, object)) if guest is not None]
        reading = [guest for guest in order if not guest.tokens and not guest.ended]
        going = [guest for guest in order if guest.tokens]  # some have ended
        kinds = [
            *(["prefill", "scored"] if reading else []),
            *(["rounds", "rounds", "copies", "ragged"] if going else []),
        ]
        kind = str(random.choice(["mixed"] if reading and going and random.random() < 0.5 else kinds))
        self.kinds.add(kind)
        getattr(self, f"_{kind}")(reading, going)

    def _prefill(self, reading: list[Guest], going: list[Guest]) -> None:
        lanes = self._chunks(reading[:3], PROMPT_ROWS)
        self._run(GraphShape(GraphKind.PREFILL, 3, PROMPT_ROWS), lanes)

    def _scored(self, reading: list[Guest], going: list[Guest]) -> None:
        self._run(GraphShape(GraphKind.SCORED_PREFILL, 1, PROMPT_ROWS), self._chunks(reading[:1], PROMPT_ROWS))

    def _rounds(self, reading: list[Guest], going: list[Guest]) -> None:
        width = int(self._random.integers(1, WIDTH + 1)) if self._drafts else 1
        self._run(rectangular(GraphKind.SPECULATIVE, SLOTS, width), [self._verify(guest, width) for guest in going])

    def _copies(self, reading: list[Guest], going: list[Guest]) -> None:
        width = int(self._random.integers(2, WIDTH + 1))
        shape = rectangular(GraphKind.SPECULATIVE, SLOTS, width, source=Source.COPY)
        self._run(shape, [self._copied(guest, width) for guest in going])

    def _ragged(self, reading: list[Guest], going: list[Guest]) -> None:
        if not self._drafts:
            return self._copies(reading, going)
        allocates = bool(self._random.random() < 0.5)
        targets = int(self._random.integers(SLOTS, SLOTS * WIDTH))
        shape = GraphShape(
            GraphKind.SPECULATIVE, SLOTS, width=WIDTH, draft_depth=WIDTH - 1, packed_targets=targets, drafts=True
        )
        lanes, room = [], targets - len(going)
        for guest in going:
            lane = self._verify(guest, WIDTH if allocates else min(WIDTH, room + 1))
            room -= lane[1].width - 1
            lanes.append(lane)
        self._run(shape, lanes, allocates=allocates)
        return None

    def _mixed(self, reading: list[Guest], going: list[Guest]) -> None:
        width = int(self._random.integers(1, WIDTH + 1)) if self._drafts else 1
        lanes = [*self._chunks(reading[:2], 24), *(self._verify(guest, width) for guest in going[: SLOTS - 2])]
        shape = rectangular(GraphKind.MIXED, SLOTS, width, 24, 2)
        if not self._drafts:
            shape = GraphShape(GraphKind.MIXED, SLOTS, 24, 2)
        self._run(shape, [lanes[i] for i in self._random.permutation(len(lanes))])

    def _run(self, shape: GraphShape, lanes: Sequence[tuple[Guest, LaneInput]], *, allocates: bool = False) -> None:
        results = self._twins.run(shape, [lane for _, lane in lanes], allocates=allocates)
        for (guest, lane), result in zip(lanes, results, strict=True):
            guest.at += 0 if lane.tokens is None else len(lane.tokens)
            guest.tokens += result.tokens
            guest.ended = guest.ended or result.ended is not None

    def _guest(self, slot: int) -> Guest:
        random = self._random
        sampling = Sampling(
            temperature=float(random.choice([0.0, 0.7, 1.0])),
            top_k=int(random.choice([0, 5, 400])),
            top_p=float(random.choice([1.0, 0.8])),
            min_p=float(random.choice([0.0, 0.05])),
            seed=int(random.integers(0, 2**63)),
            logit_bias=((7, 3.0), (11, -50.0)) if random.random() < 0.3 else (),
            presence_penalty=float(random.choice([0.0, 0.6])),
            frequency_penalty=float(random.choice([0.0, 0.4])),
            repetition_penalty=float(random.choice([1.0, 1.3])),
        )
        limit = int(random.integers(1, 30))
        handle, binding = self._twins.bind(slot, sampling, limit)
        binding = replace(
            binding,
            stop_tokens=tuple(int(token) for token in random.integers(0, 300, random.integers(0, 60))),
            logprobs=int(random.choice([0, 4, 20])) if random.random() < 0.6 else None,
            prompt_logprobs=int(random.integers(0, 5)),
        )
        prompt = [int(token) for token in random.integers(0, 300, random.integers(1, LENGTH - limit - WAITING_MAX))]
        return Guest(handle, binding, prompt, int(random.integers(0, 4)))

    def _chunks(self, guests: Sequence[Guest], capacity: int) -> list[tuple[Guest, LaneInput]]:
        lanes = []
        for guest in guests:
            most = min(len(guest.prompt) - guest.at, capacity // len(guests))
            end = guest.at + int(self._random.integers(1, most + 1))
            part, whole = np.array(guest.prompt[guest.at : end], np.int32), end == len(guest.prompt)
            target, binding = None if whole else guest.prompt[end], guest.binding if guest.at == 0 else None
            history = guest.history() if whole else None
            lanes.append((guest, LaneInput(guest.handle, guest.at, whole, part, target, binding, history)))
        return lanes

    def _verify(self, guest: Guest, width: int) -> tuple[Guest, LaneInput]:
        most = max(1, min(width, guest.left))
        lane = LaneInput(guest.handle, 0, True, history=guest.history(), width=int(self._random.integers(1, most + 1)))
        return guest, lane

    def _copied(self, guest: Guest, width: int) -> tuple[Guest, LaneInput]:
        guest, lane = self._verify(guest, width)
        given = self._random.choice(np.array([*guest.tokens, 7], np.int32), lane.width - 1)
        return guest, replace(lane, proposals=given if lane.width > 1 else None)

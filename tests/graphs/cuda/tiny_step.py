"""A program without a model, in place of `CudaStep`: it draws the tokens of the simulated device.

Owns what it reads and writes, which is what the real step does: bindings, state rows, inputs, outputs, and pages in
which it keeps tokens as keys and values. Does not own how tokens come about (`TokenSource`). Surprising rule: it knows
a prompt by its pages alone; so a page that two rows share, or a row that is another's, gives other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from flare.graphs.cuda.staging import Records
from flare.graphs.frames import Binding, Sampling
from flare.graphs.memory.pages import PAGE_TOKENS
from flare.graphs.programs.extents import prompt_lanes
from flare.graphs.programs.frame_results import arrays
from flare.graphs.programs.rows import ENDED_LENGTH, ENDED_STOP, NO_TOKEN, RUNNING, StateRows
from flare.graphs.sim.acceptance import RandomAcceptance
from flare.graphs.sim.tokens import DrawRules, TokenSource, hash_tokens
from flare.machines.allocation import allocate
from flare.machines.graph import GraphKind, GraphShape, Source


@dataclass(slots=True)
class _Lane:
    """One that runs: its first packed row, its rows, and what it is known by."""

    index: int
    slot: int
    packed: int
    width: int
    prompt_hash: int
    rules: DrawRules


class TinyStep:
    """Draws from `tokens` over records and rows; `complaints` says what a device should never have asked for."""

    def __init__(
        self, records: Records, rows: StateRows, *, pages: int, tokens: TokenSource, acceptance: RandomAcceptance
    ) -> None:
        self.complaints: list[str] = []
        self._binds = records.binds
        self._rows = rows
        self._row = arrays(rows)
        self._buffer = arrays(records.buffers)
        scalars = records.scalars
        self._scalars = SimpleNamespace(
            lane_count=scalars.lane_count.numpy(),
            allocates=scalars.allocates.numpy(),
            committed=scalars.committed.numpy(),
            ended=scalars.ended.numpy(),
        )
        self._pages = np.full((pages + 1, PAGE_TOKENS), -1, np.int32)
        self._consumed = np.zeros(len(rows.ended), np.int64)
        self._tokens = tokens
        self._acceptance = acceptance

    def body(self, shape: GraphShape) -> Callable[[], None]:
        """See `CudaStep.body`."""
        return lambda: self._run(shape)

    def _run(self, shape: GraphShape) -> None:
        buffer, row = self._buffer, self._row
        prompts: set[int] = set()
        if prompt_lanes(shape):
            self._binds.apply(self._rows)
            prompts = {int(lane) for lane in buffer.prefill_row if lane >= 0}
        count, packed, running = int(self._scalars.lane_count[0]), 0, list[_Lane]()
        buffer.count[:] = buffer.verified[:] = 0
        buffer.token[:, 0] = NO_TOKEN
        for lane in range(count):
            slot, length = int(buffer.slot[lane]), int(buffer.rows[lane])
            if lane in prompts:
                self._consume(shape, lane, slot, packed, length)
            elif row.ended[slot] == RUNNING:
                width = min(length, int(row.remaining[slot]))
                running.append(_Lane(lane, slot, packed, width, self._hash(slot), self._rules(slot)))
            packed += length
        if shape.source is Source.DRAFT and shape.draft_depth:
            self._propose(shape, running)
        for one in running:
            self._verify(shape, one)
        for lane in range(count):
            slot = int(buffer.slot[lane])
            self._scalars.committed[lane], self._scalars.ended[lane] = row.committed[slot], row.ended[slot]

    def _consume(self, shape: GraphShape, lane: int, slot: int, packed: int, length: int) -> None:
        buffer, start = self._buffer, int(self._buffer.start[lane])
        self._write(slot, start, buffer.tokens[packed : packed + length])
        self._consumed[slot] = self._row.committed[slot] = start + length
        if shape.kind is GraphKind.SCORED_PREFILL:
            for at in range(packed, packed + length):
                target = int(buffer.targets[at])
                if target >= 0:
                    score = self._tokens.score(target, start + at - packed + 1, 0)
                    buffer.row_logprob[at] = score.logprob
        if buffer.emits[lane]:
            self._draw(_Lane(lane, slot, packed, 1, self._hash(slot), self._rules(slot)), 1, None)
            buffer.verified[lane] = 0

    def _propose(self, shape: GraphShape, lanes: list[_Lane]) -> None:
        """Tell what is thought of proposals; share out target rows by it if the frame says so."""
        depth = shape.draft_depth
        planes = self._buffer.confidence
        for lane in lanes:
            told = self._acceptance.confidence(lane.prompt_hash ^ lane.rules.key, self._drawn(lane.slot) - 1, depth)
            planes[0, lane.slot, :depth] = told
            planes[1, lane.slot, :depth] = np.cumprod(planes[0, lane.slot, :depth])
        if self._scalars.allocates[0]:
            order = sorted(lanes, key=lambda lane: lane.slot)
            joint = [planes[1, lane.slot, :depth].tolist() for lane in order]
            shares = allocate(joint, [lane.width for lane in order], shape.packed_targets)
            for lane, width in zip(order, shares, strict=True):
                lane.width = width

    def _verify(self, shape: GraphShape, lane: _Lane) -> None:
        slot, width = lane.slot, lane.width
        proposals = self._buffer.tokens[lane.packed + 1 : lane.packed + width].copy()
        pending = np.array([self._row.pending[slot]], np.int32)
        self._write(slot, int(self._row.committed[slot]) - 1, np.concatenate((pending, proposals)))
        if shape.source is Source.COPY:
            self._draw(lane, 1, proposals.tolist())
            return
        accepted = 0
        if width > 1:
            accepted = self._acceptance(lane.prompt_hash ^ lane.rules.key, self._drawn(slot) - 1, width - 1)
        self._draw(lane, 1 + accepted, None)

    def _draw(self, lane: _Lane, most: int, copied: list[int] | None) -> None:
        """Up to `most` tokens, and one more for each copy that is right."""
        row, buffer, slot, index = self._row, self._buffer, lane.slot, lane.index
        if row.presence[slot]:
            said = int(buffer.history_counts[index, : buffer.seen[index]].sum())
            if said != self._drawn(slot):
                self.complaints.append(f"slot {slot}: {self._drawn(slot)} tokens drawn, and its history has {said}")
        stops = row.stop_tokens[slot, : row.stop_count[slot]].tolist()
        drawn: list[int] = []
        consumed = int(self._consumed[slot])
        while len(drawn) < most and row.ended[slot] == RUNNING:
            token = self._tokens.draw(lane.rules, lane.prompt_hash, consumed, self._drawn(slot), frozenset())
            assert token is not None
            if copied is not None and len(drawn) < len(copied) and token == copied[len(drawn)]:
                most += 1
            drawn.append(token)
            row.pending[slot] = token
            row.committed[slot] += 1
            row.remaining[slot] -= 1
            if token in stops:
                row.ended[slot] = ENDED_STOP
            elif row.remaining[slot] <= 0:
                row.ended[slot] = ENDED_LENGTH
        buffer.token[index, : len(drawn)] = drawn
        buffer.count[index], buffer.verified[index] = len(drawn), lane.width

    def _drawn(self, slot: int) -> int:
        return int(self._row.committed[slot] - self._consumed[slot])

    def _rules(self, slot: int) -> DrawRules:
        row = self._row
        sampling = Sampling(float(row.temperature[slot]), seed=int(row.seed[slot]))
        stops = tuple(row.stop_tokens[slot, : row.stop_count[slot]].tolist())
        return self._tokens.rules(Binding((), sampling, stops, 0))

    def _write(self, slot: int, start: int, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        position = np.arange(start, start + len(tokens))
        page = self._row.page_table[slot, position // PAGE_TOKENS]
        if len(tokens) and position[-1] // PAGE_TOKENS >= self._row.page_count[slot]:
            self.complaints.append(f"slot {slot}: position {position[-1]} is beyond its pages")
        self._pages[page, position % PAGE_TOKENS] = tokens

    def _hash(self, slot: int) -> int:
        """Of the prompt, as it stands in the row's pages."""
        consumed = int(self._consumed[slot])
        pages = self._row.page_table[slot, : -(-consumed // PAGE_TOKENS)]
        return hash_tokens(self._pages[pages].reshape(-1)[:consumed], 0)

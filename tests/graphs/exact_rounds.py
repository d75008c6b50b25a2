"""What a program passes whose rounds are exact: the output of plain decode, whatever proposes and however many.

Owns the checks that every program passes, to be subclassed with `make`. Does not own how tokens are distributed
(`rounds_distribution`). Surprising rule: all drafts here are of random weights; the whole model as its own draft is the
one that is always right.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from flare.graphs.frames import LaneInput, Sampling, TokenScore
from flare.graphs.models.draft import DraftModel, whole_model
from flare.graphs.programs.rows import WAITING_MAX
from flare.machines.allocation import allocate
from flare.machines.graph import GraphKind, GraphShape, rectangular
from flare.machines.request import EndReason
from tests.graphs.drafts import first_layers, random_head
from tests.graphs.programs_driver import GREEDY, Driver, Make, Tensors
from tests.graphs.rounds import Row, confidence, finish, proposals, shape_of, step
from tests.tiny_models import tiny_config, tiny_tensors

CONFIG = tiny_config()
SOURCE = Tensors({name: tensor / 3 for name, tensor in tiny_tensors(CONFIG).items()})
WIDTHS = range(1, 9)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(seed=5),
    "cut": Sampling(temperature=0.9, top_p=0.8, min_p=0.02, top_k=50, seed=6),
}


@cache
def head() -> DraftModel:
    """A head that is hardly ever right."""
    with tempfile.TemporaryDirectory() as folder:
        return random_head(Path(folder), CONFIG, SOURCE)


@cache
def cut() -> DraftModel:
    """The first layer of the model."""
    return first_layers(CONFIG, SOURCE)


@cache
def whole() -> DraftModel:
    """The model itself."""
    return whole_model("whole", CONFIG, SOURCE, CONFIG)


DRAFTS: dict[str, Callable[[], DraftModel]] = {"head": head, "cut": cut, "whole": whole}


def ids(length: int, seed: int) -> list[int]:
    """Any tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 300, length)]


def close(got: Sequence[TokenScore], expected: Sequence[TokenScore]) -> bool:
    """Whether scores are of the same tokens, and as good as the same."""
    pairs = list(zip(got, expected, strict=True))
    same = all([t for t, _ in one.top] == [t for t, _ in other.top] for one, other in pairs)
    values = [[score.logprob, *(value for _, value in score.top)] for each in pairs for score in each]
    return same and bool(np.allclose(values[::2], values[1::2], atol=1e-4))


_PLAIN: dict[str, tuple[Driver, dict[str, Row]]] = {}
"""Of each suite: its program without a draft, and what that has served."""


class ExactRounds:
    """Subclass with `make`, a static method."""

    make: Make

    def driver(self, draft: str | None = None, width: int = 8, slots: int = 4, *, rejects: bool = False) -> Driver:
        """The program, with a draft or without."""
        made = None if draft is None else DRAFTS[draft]()
        return Driver(self.make, CONFIG, SOURCE, slots=slots, shuffle=3, draft=made, width=width, rejects=rejects)

    def plain(self, row: Row) -> Row:
        """The request, served without any speculation."""
        if (name := type(self).__name__) not in _PLAIN:
            _PLAIN[name] = Driver(self.make, CONFIG, SOURCE, slots=1), {}
        driver, served = _PLAIN[name]
        key = repr(row.fresh())
        if key not in served:
            served[key] = made = row.fresh()
            made.begin(driver, 0)
            while made.ended is None:
                made.take(driver.decode([made.handle], [made.history()])[0])
        return served[key]

    @pytest.mark.parametrize("sampling", SAMPLINGS)
    @pytest.mark.parametrize("draft", DRAFTS)
    def test_no_width_changes_the_output(self, draft: str, sampling: str) -> None:
        driver = self.driver(draft)
        row = Row(ids(13, 1), SAMPLINGS[sampling], limit=26)
        expected = self.plain(row)
        for width in WIDTHS:
            got = row.fresh()
            got.begin(driver, width % 4, chunk=5)
            finish(driver, [got], width)
            assert (got.tokens, got.ended) == (expected.tokens, EndReason.LENGTH)
            if draft == "whole":
                assert got.counts[1:-1] == [width] * (25 // width - (25 % width == 0))
            if draft == "head":
                assert len(got.counts) >= 18

    @pytest.mark.parametrize("draft", DRAFTS)
    def test_lanes_of_all_widths_go_on_beside_one_another(self, draft: str) -> None:
        kinds = list(SAMPLINGS.values())
        rows = [Row(ids(5 + 7 * i, 20 + i), kinds[i % 3], limit=18 + 5 * i) for i in range(4)]
        expected = [self.plain(row).tokens for row in rows]
        for together in (2, 4):
            driver = self.driver(draft)
            served = [row.fresh() for row in rows[:together]]
            for slot, row in enumerate(served):
                row.begin(driver, 3 - slot, chunk=9)
            widths = itertools.cycle(range(1, 9))
            while any(row.ended is None for row in served):
                step(driver, served, [next(widths) for _ in served])
            assert [row.tokens for row in served] == expected[:together]

    @pytest.mark.parametrize("draft", DRAFTS)
    def test_rounds_go_on_beside_prompts(self, draft: str) -> None:
        driver, shape = self.driver(draft), rectangular(GraphKind.MIXED, 4, 4, prefill_tokens=32, prompt_rows=2)
        rows = [Row(ids(5, 30 + i), Sampling(seed=i), limit=16) for i in range(2)]
        late = [Row(ids(30 + 9 * i, 40 + i), GREEDY, limit=9) for i in range(2)]
        for slot, row in enumerate(rows):
            row.begin(driver, slot)
        bound = [driver.bind(2 + i, limit=9) for i in range(2)]
        for start in range(0, 39, 13):
            lanes = []
            for (handle, binding), row in zip(bound, late, strict=True):
                row.handle, part = handle, np.array(row.prompt[start : start + 13], np.int32)
                ends = start + 13 >= len(row.prompt)
                target = None if ends else row.prompt[start + 13]
                lanes.append(LaneInput(handle, start, ends, part, target, binding if start == 0 else None))
            waiting = [row for row in rows if row.ended is None]
            lanes = [*(row.lane(4) for row in waiting[:1]), *lanes, *(row.lane(3) for row in waiting[1:])]
            served = [*waiting[:1], *late, *waiting[1:]]
            here = [
                (row, lane) for row, lane in zip(served, lanes, strict=True) if lane.tokens is None or len(lane.tokens)
            ]
            for (row, _), result in zip(here, driver.run(shape, [lane for _, lane in here]), strict=True):
                row.take(result)
        finish(driver, [*rows, *late], 4)
        for row in [*rows, *late]:
            assert row.tokens == self.plain(row).tokens

    @pytest.mark.parametrize("draft", ["head", "cut"])
    @pytest.mark.parametrize("way", ["decoded", "narrow", "copied", "drafted", "all in turn"])
    def test_what_waited_for_the_draft_is_read_before_it_proposes(self, draft: str, way: str) -> None:
        """In a slot and pages where another has been, after many rounds, as it would be after a prompt of them all."""
        driver, sampling = self.driver(draft), Sampling(seed=8)
        former = Row(ids(50, 50), GREEDY, limit=70)
        former.begin(driver, 1)
        finish(driver, [former], 4)
        row = Row(ids(21, 51), sampling, limit=100)
        row.begin(driver, 1, chunk=8)
        turns = itertools.cycle(["decoded", "copied", "drafted", "narrow"] if way == "all in turn" else [way])
        while len(row.tokens) < 2 * WAITING_MAX + 7:
            match next(turns):
                case "decoded":
                    row.take(driver.decode([row.handle])[0])
                case "narrow":
                    step(driver, [row], [1])
                case "copied":
                    step(driver, [row], [5], lambda row, count: [row.tokens[-1]] * count)
                case _:
                    step(driver, [row], [6])
        prompt, limit = [*row.prompt, *row.tokens[:-1]], 100 - len(row.tokens) + 1
        fresh, again = self.driver(draft), Row(prompt, sampling, limit)
        again.begin(fresh, 1)
        assert again.tokens == row.tokens[-1:]
        step(driver, [row], [5])
        step(fresh, [again], [5])
        assert proposals(driver, [5]) == proposals(fresh, [5])
        torch.testing.assert_close(confidence(driver)[:, 1, :4], confidence(fresh)[:, 1, :4], rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("draft", ["head", "cut"])
    @pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)], ids=["greedy", "sampled"])
    def test_rows_are_shared_out_by_confidence(self, draft: str, sampling: Sampling) -> None:
        driver = self.driver(draft)
        rows = [Row(ids(6 + i, 60 + i), replace(sampling, seed=i), limit=20) for i in range(4)]
        expected = [self.plain(row).tokens for row in rows]
        for slot, row in enumerate(rows):
            row.begin(driver, 3 - slot)
        targets, uneven = itertools.cycle([4, 5, 7, 12, 20, 31]), 0
        while any(row.ended is None for row in rows):
            live = [row for row in rows if row.ended is None]
            ceilings = [row.lane((8, 1, 5, 8)[rows.index(row)]).width for row in live]
            share = max(next(targets), len(live))
            shape = GraphShape(GraphKind.SPECULATIVE, 4, width=8, draft_depth=7, packed_targets=share, drafts=True)
            results = driver.run(shape, [row.lane(w) for row, w in zip(live, ceilings, strict=True)], allocates=True)
            said = confidence(driver)
            for lane, (row, ceiling) in enumerate(zip(live, ceilings, strict=True)):
                conditional, joint = said[:, row.handle.slot]
                torch.testing.assert_close(joint[: ceiling - 1], conditional[: ceiling - 1].cumprod(0))
                assert not said[:, row.handle.slot, ceiling - 1 :].any()
                row.take(results[lane])
            order = sorted(range(len(live)), key=lambda lane: live[lane].handle.slot)
            joints = [said[1, live[lane].handle.slot, : ceilings[lane] - 1].tolist() for lane in order]
            lengths = allocate(joints, [ceilings[lane] for lane in order], share)
            assert [results[lane].verified for lane in order] == lengths
            uneven += len(set(lengths)) > 2
        assert uneven > 1
        assert [row.tokens for row in rows] == expected

    @pytest.mark.parametrize("right", [0, 1, 3, 7])
    def test_copies_are_accepted_as_far_as_they_are_right(self, right: int) -> None:
        for draft in (None, "head"):
            driver, row = self.driver(draft), Row(ids(9, 70), Sampling(seed=4), limit=25)
            expected = self.plain(row).tokens

            def copied(row: Row, count: int, expected: Sequence[int] = expected) -> list[int]:
                ahead = expected[len(row.tokens) : len(row.tokens) + count]
                return [*ahead[:right], *((token + 1) % 300 for token in ahead[right:])]

            got = row.fresh()
            got.begin(driver, 2)
            finish(driver, [got], 8, copied)
            assert got.tokens == expected
            assert got.counts[1:-1] == [right + 1] * (24 // (right + 1) - (24 % (right + 1) == 0))

    @pytest.mark.parametrize("source", ["copied", "whole", "cut"])
    @pytest.mark.parametrize(
        "row",
        [
            Row(ids(8, 80), Sampling(seed=1, repetition_penalty=1.4), logprobs=3),
            Row(ids(8, 81), Sampling(seed=2, presence_penalty=1.5, frequency_penalty=0.8), logprobs=0),
            Row(ids(8, 82), Sampling(temperature=0.0, frequency_penalty=0.3, repetition_penalty=1.2), logprobs=5),
            Row(ids(8, 83), Sampling(seed=3, logit_bias=((7, 6.0), (9, 6.0), (11, -9.0)), top_p=0.9), logprobs=2),
            Row(ids(8, 84), Sampling(seed=4, logit_bias=((7, 9.0),)), stop=(7,), ban=(7,), minimum=6, logprobs=20),
            Row(ids(8, 85), Sampling(seed=5, logit_bias=((7, 9.0),)), stop=(7, 9), ban=(9, 7), minimum=3),
            Row(ids(8, 86), GREEDY, limit=11, logprobs=1),
        ],
        ids=["repetition", "presence", "greedy penalties", "bias", "minimum", "short minimum", "limit"],
    )
    def test_all_that_shapes_a_draw_holds_within_a_round(self, row: Row, source: str) -> None:
        driver, expected = self.driver(None if source == "copied" else source), self.plain(row)

        def copied(row: Row, count: int) -> list[int]:
            ahead = expected.tokens[len(row.tokens) : len(row.tokens) + count]
            return [*ahead, *[7] * (count - len(ahead))]

        for width in (2, 5, 8):
            got = row.fresh()
            got.begin(driver, 0)
            finish(driver, [got], width, copied if source == "copied" else None)
            assert (got.tokens, got.ended) == (expected.tokens, expected.ended)
            assert close(got.scores, expected.scores)
            if source == "copied":
                assert all(count == width for count in got.counts[1:-1])

    def test_a_round_is_no_wider_than_what_is_proposed(self) -> None:
        driver, row = self.driver("head"), Row(ids(4, 90))
        row.begin(driver, 0)
        narrow = GraphShape(GraphKind.SPECULATIVE, 1, width=4, draft_depth=1, packed_targets=4, drafts=True)
        with pytest.raises(ValueError, match="verifies 1 to 2 positions"):
            driver.run(narrow, [row.lane(3)])
        deep = GraphShape(GraphKind.SPECULATIVE, 1, width=2, draft_depth=7, packed_targets=2, drafts=True)
        assert [result.verified for result in driver.run(deep, [row.lane(2)])] == [2]
        assert shape_of(1).draft_depth == 0

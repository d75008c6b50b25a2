"""Arrival: what can never be served is refused, by the field that asks for it, and changes nothing."""

from __future__ import annotations

import pytest

from flare.machines.graph import GraphKind
from flare.machines.request import ImageWindow

from .rig import MIXED, STAGED, Rig

TWO = (ImageWindow(2, 3, 1), ImageWindow(4, 5, 1))


@pytest.mark.parametrize(
    ("missing", "fields", "complaint"),
    [
        ((GraphKind.PREFILL,), {}, "prompt_tokens: no mixed or prefill graph"),
        ((GraphKind.SCORED_PREFILL,), {"scored": True}, "prompt_tokens: no scored_prefill graph"),
        ((GraphKind.DECODE,), {"max_tokens": 2}, "max_tokens: no decode or mixed or speculative graph"),
        ((GraphKind.INITIALIZE,), {"initialize": True}, "initialize: no initialize graph"),
        ((GraphKind.RESTORE,), {"restored_tokens": 1}, "restored_tokens: no restore graph"),
        ((GraphKind.VISION,), {"windows": TWO[:1]}, "windows: no vision graph"),
        ((GraphKind.SNAPSHOT,), {"windows": TWO}, "windows: no snapshot graph"),
        ((GraphKind.RESTORE,), {"windows": TWO}, "windows: no restore graph"),
        ((GraphKind.SNAPSHOT,), {"checkpoints": (3,)}, "checkpoints: no snapshot graph"),
    ],
)
def test_a_kind_of_graph_that_is_lacking(
    missing: tuple[GraphKind, ...], fields: dict[str, object], complaint: str
) -> None:
    catalog = tuple(shape for shape in STAGED if shape.kind not in missing)
    rig = Rig(catalog=catalog, state_rows=1)
    with pytest.raises(ValueError, match=complaint):
        rig.arrive(**fields)  # type: ignore[arg-type]
    assert rig.scheduler.idle and rig.scheduler.waiting.requests == 0
    Rig(catalog=STAGED, state_rows=1).arrive(**fields)  # type: ignore[arg-type]


def test_a_mixed_graph_serves_prompts_and_outputs() -> None:
    Rig(catalog=(MIXED,)).arrive()


@pytest.mark.parametrize("fields", [{"windows": TWO}, {"checkpoints": (3,)}])
def test_a_device_without_state_rows(fields: dict[str, object]) -> None:
    rig = Rig(catalog=STAGED)
    with pytest.raises(ValueError, match="windows, checkpoints: the device has no state rows"):
        rig.arrive(**fields)  # type: ignore[arg-type]


def test_a_span_that_no_graph_can_take_whole() -> None:
    rig = Rig(catalog=STAGED)
    rig.arrive(40, spans=((2, 18),))
    with pytest.raises(ValueError, match="spans: 17 tokens pass the largest prompt capacity, 16"):
        rig.arrive(40, spans=((2, 19),))


def test_a_window_behind_the_restored_prefix_asks_for_nothing() -> None:
    catalog = tuple(shape for shape in STAGED if shape.kind not in (GraphKind.VISION, GraphKind.SNAPSHOT))
    request = Rig(catalog=catalog).arrive(windows=TWO, checkpoints=(3,), restored_tokens=5)
    assert request.stages == (GraphKind.RESTORE,)

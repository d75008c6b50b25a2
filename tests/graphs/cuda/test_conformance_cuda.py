"""The conformance suites on the CUDA device, with a tiny random model, on the fake runtime (`devices`)."""

from __future__ import annotations

from functools import partial

import pytest

from flare.machines.graph import GraphKind, GraphShape, rectangular
from tests.graphs.conformance import DeviceConformance
from tests.graphs.conformance_mixed import MixedConformance
from tests.graphs.conformance_rounds import RoundConformance, SharingConformance
from tests.graphs.cuda.devices import make_cuda
from tests.graphs.host import CATALOG, DECODE
from tests.graphs.test_conformance_cpu import cut, head


class TestCaptured(DeviceConformance):
    """Every check, on captured graphs."""

    make = partial(make_cuda, CATALOG)


class TestEager(DeviceConformance):
    """Every check, kernel by kernel."""

    make = partial(make_cuda, CATALOG, eager=True)


class TestMixed(MixedConformance):
    """Mixed graphs and packed prompts."""

    make = partial(make_cuda, MixedConformance.catalog)


class TestRounds(RoundConformance):
    """Speculative rounds with a head."""

    make = partial(make_cuda, RoundConformance.catalog, head)


class TestRoundsOfAModel(RoundConformance):
    """Speculative rounds with a draft model."""

    make = partial(make_cuda, RoundConformance.catalog, cut)


class TestSharing(SharingConformance):
    """Target rows shared out by a head's confidence."""

    make = partial(make_cuda, SharingConformance.catalog, head)


class TestRejection(SharingConformance):
    """The same where proposals are judged by rejection; greedy rows are as they were."""

    make = partial(make_cuda, SharingConformance.catalog, cut, rejects=True)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (GraphShape(GraphKind.SNAPSHOT, 1), "no program for snapshot/b1"),
        (rectangular(GraphKind.SPECULATIVE, 2, 3), "speculative/b2d2w3 makes proposals, and there is no draft"),
        (rectangular(GraphKind.MIXED, 2, 3, 64, 1), "mixed/b2t64d2w3 makes proposals, and there is no draft"),
    ],
)
def test_a_graph_without_a_program_is_refused_by_name(shape: GraphShape, reason: str) -> None:
    device = make_cuda([DECODE[1], shape])
    with pytest.raises(ValueError, match=reason):
        device.prepare([DECODE[1], shape], lambda *_: None)
    device.close()

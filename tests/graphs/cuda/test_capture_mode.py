"""What a graph cannot hold is found on any machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.graphs.cuda.capture_mode import CaptureMode, ForbiddenInCapture

X = torch.arange(4.0)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: float(X.sum()),
        lambda: X.tolist(),
        lambda: bool((X > 1).any()),
        lambda: X[X > 1],
        lambda: X.clone().index_put_((X > 1,), X.new_zeros(())),
        lambda: X.nonzero(),
        lambda: X.masked_select(X > 1),
        lambda: torch.unique_consecutive(X),
        lambda: torch.equal(X, X),
        lambda: torch.tensor([1, 2]),
        lambda: X.repeat_interleave(torch.arange(4)),
    ],
)
def test_a_body_that_waits_or_whose_shapes_depend_on_data_is_refused(operation: Callable[[], object]) -> None:
    with CaptureMode(), pytest.raises(ForbiddenInCapture):
        operation()


def test_what_a_graph_can_hold_is_not_refused() -> None:
    with CaptureMode():
        order = X.argsort(descending=True)
        assert X[order].masked_fill(X > 1, 0.0).shape == X.clone().index_copy_(0, order, X).shape

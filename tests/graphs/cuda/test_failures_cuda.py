"""A call that fails, at every point at which it may.

Surprising rule: none of this runs on a real card, which cannot be made to fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from flare.graphs.cuda.failures import DeviceFailure, OutOfMemory
from flare.graphs.device import DeviceLost
from flare.graphs.frames import LaneResult
from flare.graphs.weights.errors import ModelError
from tests.graphs.cuda.devices import PlainDevice, make_cuda
from tests.graphs.cuda.fake_runtime import FakeRuntime
from tests.graphs.host import CATALOG, DECODE, Host, Row, decode_lane, ok, prompt_of
from tests.graphs.test_conformance_cpu import TinyWeights, tensors

CALLS = [("copy", 1), ("record", 1), ("launch", 1), ("record", 2), ("copy", 2), ("record", 3), ("elapsed_ns", 1)]
"""The calls that a frame makes, in their order, and which of them."""


@pytest.fixture
def runtime() -> FakeRuntime:
    """One that does as it is told."""
    return FakeRuntime(checks=False)


@pytest.fixture
def host(runtime: FakeRuntime) -> Iterator[Host]:
    """A device on it, with its driver."""
    device = make_cuda(CATALOG, runtime=runtime)
    yield Host(device)
    device.close()


def two_rows(host: Host) -> tuple[Row, Row, list[int]]:
    """Two rows that decode, and what the second gives when it is alone."""
    alone = list(host.generate(host.admit(0, prompt_of(7, 2)), 6))
    rows = host.admit(1, prompt_of(5, 1)), host.admit(2, prompt_of(7, 2))
    for row in rows:
        host.prefill(row)
    return *rows, alone


@pytest.mark.parametrize(("call", "at"), CALLS)
def test_a_call_that_fails_fails_its_frame_alone(host: Host, runtime: FakeRuntime, call: str, at: int) -> None:
    doomed, other, alone = two_rows(host)
    runtime.fail(call, at)
    failed = host.run(DECODE[1], [decode_lane(doomed)])
    assert failed.results == () and not failed.lost
    assert failed.error is not None and f"{call}: cudaErrorInvalidValue" in failed.error
    host.decode([other], 6)
    assert other.tokens == alone
    again = host.admit(1, prompt_of(7, 2))
    assert host.generate(again, 6) == alone


@pytest.mark.parametrize(("call", "at"), CALLS[:-1])
def test_a_frame_behind_a_failed_one_serves_all_others(host: Host, runtime: FakeRuntime, call: str, at: int) -> None:
    doomed, other, alone = two_rows(host)
    runtime.fail(call, at)
    host.submit(DECODE[1], [decode_lane(doomed)])
    host.submit(DECODE[2], [decode_lane(doomed, 1), decode_lane(other)])
    assert host.wait().error is not None
    nothing, result = ok(host.wait())
    assert nothing == LaneResult(doomed.handle, nothing.committed)
    other.take(result)
    host.decode([other], 5)
    assert other.tokens == alone
    (nothing,) = ok(host.run(DECODE[1], [decode_lane(doomed, 1)]))
    assert nothing.tokens == ()


@pytest.mark.parametrize(("call", "at"), [*CALLS, ("wait", 1)])
@pytest.mark.parametrize("name", ["cudaErrorIllegalAddress", "cudaErrorECCUncorrectable"])
def test_a_lost_card_ends_everything(host: Host, runtime: FakeRuntime, call: str, at: int, name: str) -> None:
    doomed, other, _ = two_rows(host)
    runtime.fail(call, at, name)
    fences = [host.submit(DECODE[1], [decode_lane(doomed)])]
    with suppress(DeviceLost):
        fences.append(host.submit(DECODE[1], [decode_lane(other)]))
    for fence in fences:
        completion = host.wait()
        assert completion.fence == fence and completion.lost and completion.results == ()
        assert completion.error is not None
        assert name in completion.error and "restart the server" in completion.error
    with pytest.raises(DeviceLost, match=name):
        host.submit(DECODE[1], [decode_lane(other)])
    host.device.close()
    assert host.completions.empty()


def test_a_frame_in_flight_hears_of_the_loss(host: Host, runtime: FakeRuntime) -> None:
    doomed, other, _ = two_rows(host)
    runtime.hold()
    host.submit(DECODE[1], [decode_lane(other)])
    runtime.fail("launch", 1, "cudaErrorLaunchFailure")
    host.submit(DECODE[1], [decode_lane(doomed)])
    runtime.let_go()
    assert [host.wait().lost, host.wait().lost] == [True, True]


def test_a_wait_that_fails_is_a_loss_whatever_the_error(host: Host, runtime: FakeRuntime) -> None:
    doomed, _, _ = two_rows(host)
    runtime.fail("wait")
    assert host.run(DECODE[1], [decode_lane(doomed)]).lost


def test_a_failed_record_of_the_end_is_a_loss_if_it_fails_twice(host: Host, runtime: FakeRuntime) -> None:
    doomed, _, _ = two_rows(host)
    runtime.fail("record", 3)
    runtime.fail("record", 4)
    assert host.run(DECODE[1], [decode_lane(doomed)]).lost


@pytest.mark.parametrize(
    ("call", "at", "name", "kind", "said"),
    [
        ("pinned", 1, "cudaErrorMemoryAllocation", OutOfMemory, "out of memory while loading the model.*lower"),
        ("capture", 3, "cudaErrorMemoryAllocation", OutOfMemory, "while capturing decode/b4, graph 3 of 5.*lower"),
        ("capture", 1, "cudaErrorStreamCaptureUnsupported", DeviceFailure, "capturing prefill/t64.*dmesg"),
        ("event", 2, "cudaErrorUnknown", DeviceFailure, "while loading the model; check nvidia-smi"),
        ("launch", 1, "cudaErrorLaunchFailure", DeviceFailure, "first frame failed: the GPU is lost"),
        ("copy", 1, "cudaErrorInvalidValue", DeviceFailure, "first frame failed: a CUDA call failed"),
    ],
)
def test_preparing_fails_with_cause_and_remedy(
    runtime: FakeRuntime, call: str, at: int, name: str, kind: type[DeviceFailure], said: str
) -> None:
    device = make_cuda(CATALOG, runtime=runtime)
    runtime.fail(call, at, name)
    with pytest.raises(kind, match=said) as failed:
        device.prepare(CATALOG, lambda *_: None)
    assert failed.value.cause and failed.value.remedy
    device.close()


class Greedy(PlainDevice):
    """Asks torch for more than there is."""

    def _attention(self, positions: int) -> None:  # type: ignore[override]
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_torch_may_run_out_of_memory_too(runtime: FakeRuntime) -> None:
    device = make_cuda(CATALOG, runtime=runtime, kind=Greedy)
    runtime.fail("free_bytes", 2, "cudaErrorUnknown")
    with pytest.raises(OutOfMemory, match="while loading the model"):
        device.prepare(CATALOG, lambda *_: None)
    device.close()


def test_weights_that_give_no_numbers_are_told_apart(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.norm.weight"
    broken = torch.full_like(tensors()[name], float("nan"))
    given = TinyWeights.tensor
    monkeypatch.setattr(TinyWeights, "tensor", lambda self, asked: broken if asked == name else given(self, asked))
    device = make_cuda(CATALOG, runtime=runtime)
    with pytest.raises(ModelError, match="not finite"):
        device.prepare(CATALOG, lambda *_: None)
    device.close()


def test_more_graphs_than_were_planned_for_are_refused(runtime: FakeRuntime) -> None:
    device = make_cuda(CATALOG[:2], runtime=runtime)
    with pytest.raises(ValueError, match="not planned"):
        device.prepare(CATALOG, lambda *_: None)
    device.close()


def test_a_third_frame_is_refused(host: Host, runtime: FakeRuntime) -> None:
    row, other, _ = two_rows(host)
    runtime.hold()
    host.submit(DECODE[1], [decode_lane(row)])
    host.submit(DECODE[1], [decode_lane(row, 1)])
    host.submit(DECODE[1], [decode_lane(other)])
    runtime.let_go()
    assert [host.wait().error, host.wait().error] == [None, None]
    assert "2 frames are in flight" in (host.wait().error or "")


def test_a_device_serves_only_once_it_is_prepared() -> None:
    device = make_cuda(CATALOG)
    with pytest.raises(DeviceLost):
        device.start(lambda _: None)
    device.close()


def test_graphs_are_told_of_with_their_memory(runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]) -> None:
    device = make_cuda(CATALOG, runtime=runtime)
    runtime.graph_bytes = 1 << 28
    device.prepare(CATALOG, lambda *_: None)
    device.close()
    told = capsys.readouterr().out
    assert "captured prefill/t64 in" in told and "256.0 MiB" in told
    assert "5 graphs ready in" in told and "graphs take 1.25 GiB, more than the" in told

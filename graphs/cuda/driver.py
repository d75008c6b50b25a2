"""The runtime on a real card: torch captures and allocates; cuda-python launches, copies, records and waits.

Owns everything that needs cuda-python, and finding out whether there is a card to use. Does not own the words for what
is wrong (`failures`). Surprising rule: cuda-python is imported by name and only when a card is opened, so that all else
is imported, type-checked and tested where it is not installed. No function of ours is ever called by the driver
(`cudaLaunchHostFunc`): its thread and the interpreter's lock would wait for each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import failures
from .failures import LOST, MEMORY
from .runtime import CardFacts, CudaError, Event, Graph

WARM_RUNS = 2
"""Runs of a body before its capture: libraries choose and load their kernels in the first."""


def open_runtime() -> DriverRuntime:
    """The runtime on the first card that CUDA shows (CUDA_VISIBLE_DEVICES says which that is). Raises `NoDevice` with
    cause and remedy if there is none that can be used."""
    if torch.version.cuda is None:
        raise failures.no_torch_cuda(torch.__version__)
    try:
        cudart = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        raise failures.no_bindings() from None
    try:
        driver = _version(_call(cudart, "cudaDriverGetVersion"))
    except CudaError:
        driver = (0, 0)
    if driver == (0, 0):
        raise failures.no_driver()
    if driver[0] < int(torch.version.cuda.split(".")[0]):
        raise failures.old_driver(driver, torch.version.cuda)
    bindings = _version(_call(cudart, "cudaRuntimeGetVersion"))
    if driver[0] < bindings[0]:
        raise failures.new_bindings(driver, bindings)
    try:
        if not torch.cuda.is_available():
            raise failures.no_card()
        capability, name = torch.cuda.get_device_capability(0), torch.cuda.get_device_name(0)
        if not _runs_on(capability, torch.cuda.get_arch_list()):
            raise failures.wrong_architecture(name, capability, torch.cuda.get_arch_list())
        return DriverRuntime(cudart, driver)
    except (CudaError, RuntimeError) as error:
        if isinstance(error, failures.NoDevice):
            raise
        raise failures.unusable(error) from error


class _DriverGraph:
    """A captured graph, and the handle that is launched. The former keeps the memory of the latter."""

    def __init__(self, captured: torch.cuda.CUDAGraph, handle: Any) -> None:
        self.captured = captured
        self.handle = handle


class DriverRuntime:
    """See `Runtime`. A thread's current device is the first one unless it says otherwise; no thread here does."""

    def __init__(self, cudart: Any, driver: tuple[int, int]) -> None:
        self.torch_device = torch.device("cuda", 0)
        self._cudart = cudart
        self._driver = driver
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._stream, self._aside = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._queue = cudart.cudaStream_t(self._stream.cuda_stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._events: list[Any] = []
        self._closed = False
        with _translated("start"):
            torch.zeros(1, device=self.torch_device).cpu()

    def facts(self) -> CardFacts:
        """See `Runtime`."""
        return CardFacts(
            name=torch.cuda.get_device_name(0),
            capability=torch.cuda.get_device_capability(0),
            driver=self._driver,
            runtime=_version(_call(self._cudart, "cudaRuntimeGetVersion")),
            total_bytes=torch.cuda.get_device_properties(0).total_memory,
        )

    def free_bytes(self) -> int:
        """See `Runtime`. What torch holds and does not use counts as free."""
        with _translated("cudaMemGetInfo"):
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(0)[0]

    def settle(self) -> None:
        """See `Runtime`."""
        with _translated("cudaDeviceSynchronize"):
            torch.cuda.synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `Runtime`."""
        with _translated("cudaHostAlloc"):
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, body: Callable[[], None]) -> Graph:
        """See `Runtime`."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with _translated("capture"):
            torch.cuda.synchronize()
            with torch.cuda.stream(self._aside):
                for _ in range(WARM_RUNS):
                    body()
            self._aside.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._aside):
                body()
            graph.instantiate()
        return _DriverGraph(graph, self._cudart.cudaGraphExec_t(graph.raw_cuda_graph_exec()))

    def launch(self, graph: Graph) -> None:
        """See `Runtime`."""
        assert isinstance(graph, _DriverGraph)
        _call(self._cudart, "cudaGraphLaunch", graph.handle, self._queue)

    def run(self, body: Callable[[], None]) -> None:
        """See `Runtime`."""
        with _translated("run"), torch.cuda.stream(self._stream):
            body()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """See `Runtime`."""
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyDefault
        _call(self._cudart, "cudaMemcpyAsync", to.data_ptr(), source.data_ptr(), source.nbytes, kind, self._queue)

    def event(self, *, timed: bool) -> Event:
        """See `Runtime`."""
        cudart = self._cudart
        flags = cudart.cudaEventDefault if timed else cudart.cudaEventBlockingSync | cudart.cudaEventDisableTiming
        event = _call(cudart, "cudaEventCreateWithFlags", flags)
        self._events.append(event)
        made: Event = event
        return made

    def record(self, event: Event) -> None:
        """See `Runtime`."""
        _call(self._cudart, "cudaEventRecord", event, self._queue)

    def wait(self, event: Event) -> None:
        """See `Runtime`. cuda-python gives the interpreter's lock back around the call."""
        _call(self._cudart, "cudaEventSynchronize", event)

    def elapsed_ns(self, began: Event, ended: Event) -> int:
        """See `Runtime`."""
        milliseconds: float = _call(self._cudart, "cudaEventElapsedTime", began, ended)
        return round(milliseconds * 1e6)

    def close(self) -> None:
        """See `Runtime`. A lost card gives nothing back, and nothing is asked of it."""
        if self._closed:
            return
        self._closed = True
        try:
            _call(self._cudart, "cudaStreamSynchronize", self._queue)
            for event in self._events:
                _call(self._cudart, "cudaEventDestroy", event)
            torch.cuda.empty_cache()
        except (CudaError, RuntimeError):
            pass  # the process is about to end, and the card with it
        self._events.clear()


def _call(cudart: Any, name: str, *args: Any) -> Any:
    """Call a function of cuda-python: its result, if it has one. Raises `CudaError`."""
    error, *results = getattr(cudart, name)(*args)
    if error != cudart.cudaError_t.cudaSuccess:
        _, text = cudart.cudaGetErrorString(error)
        told = text.decode() if isinstance(text, bytes) else str(text)
        raise CudaError(name, error.name, told, lost=error.name in LOST, memory=error.name in MEMORY)
    return results[0] if results else None


@contextmanager
def _translated(call: str) -> Iterator[None]:
    """Torch's errors as ours."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        # Memory that lacks within a capture breaks it off, and its end fails in its turn.
        if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
            name = "cudaErrorMemoryAllocation"
        else:
            name = _name(importlib.import_module("cuda.bindings.runtime"), getattr(error, "error_code", None))
        text = str(error).splitlines()[0]
        raise CudaError(call, name, text, lost=name in LOST, memory=name in MEMORY) from error


def _name(cudart: Any, code: int | None) -> str:
    """What cuda-python calls an error of this number."""
    try:
        return str(cudart.cudaError_t(code).name)
    except ValueError:
        return "cudaErrorUnknown"


def _version(number: int) -> tuple[int, int]:
    """CUDA's way to write versions: 12040 for 12.4."""
    return number // 1000, number % 1000 // 10


def _runs_on(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether torch has code for a card: of its own major version and no newer minor one, or for any newer card."""
    major, minor = capability
    for kind, _, number in (arch.partition("_") for arch in built_for):
        digits = number.rstrip("af")
        made = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and made <= capability:
            return True
        if kind == "sm" and made[0] == major and made[1] <= minor and (number == digits or made == capability):
            return True
    return False

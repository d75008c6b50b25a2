"""What may go wrong with a card, in words: for each, its cause and what to do.

Owns the sentences, and which errors of CUDA mean that a card is lost. Does not own what a server does about it.
Surprising rule: whatever happens to a context that is lost, CUDA reports for every call from then on; so an error in
the table may have its origin long before the call that tells of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .runtime import CudaError

GIB = 1 << 30

LOST = frozenset(
    {
        "cudaErrorAssert",
        "cudaErrorContained",
        "cudaErrorContextIsDestroyed",
        "cudaErrorCudartUnloading",
        "cudaErrorDeviceUninitialized",
        "cudaErrorDevicesUnavailable",
        "cudaErrorECCUncorrectable",
        "cudaErrorExternalDevice",
        "cudaErrorHardwareStackError",
        "cudaErrorIllegalAddress",
        "cudaErrorIllegalInstruction",
        "cudaErrorInvalidAddressSpace",
        "cudaErrorInvalidPc",
        "cudaErrorLaunchFailure",
        "cudaErrorLaunchTimeout",
        "cudaErrorMisalignedAddress",
        "cudaErrorMpsClientTerminated",
        "cudaErrorMpsConnectionFailed",
        "cudaErrorMpsRpcFailure",
        "cudaErrorNoDevice",
        "cudaErrorNvlinkUncorrectable",
        "cudaErrorOperatingSystem",
        "cudaErrorTensorMemoryLeak",
        "cudaErrorUnknown",
    }
)
"""Errors after which a context runs nothing more; after all others a call has failed, and the next may succeed."""

MEMORY = frozenset({"cudaErrorMemoryAllocation"})


class DeviceFailure(RuntimeError):
    """The card cannot serve: the `cause`, and the `remedy`."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.cause = cause
        self.remedy = remedy


class NoDevice(DeviceFailure):
    """There is no card to be used. `found`: there is one, but not for us."""

    def __init__(self, cause: str, remedy: str, *, found: bool) -> None:
        super().__init__(cause, remedy)
        self.found = found


class OutOfMemory(DeviceFailure):
    """The card's memory does not hold what is to be served."""


def no_torch_cuda(version: str) -> NoDevice:
    """Torch is built for the CPU alone."""
    return NoDevice(
        f"torch {version} is built without CUDA",
        "install a build with CUDA (pip install torch on Linux takes one; pytorch.org has those for older drivers)",
        found=False,
    )


def no_bindings() -> NoDevice:
    """cuda-python is missing."""
    return NoDevice("cuda-python is not installed", "install it: pip install 'flare-serve[cuda]'", found=False)


def no_driver() -> NoDevice:
    """Nothing answers for the NVIDIA driver."""
    return NoDevice(
        "no NVIDIA driver answers",
        "install one (nvidia-smi must work); in a container, start it with --gpus all",
        found=False,
    )


def no_card() -> NoDevice:
    """The driver is there, and no card."""
    return NoDevice(
        "the NVIDIA driver finds no GPU",
        "check nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all",
        found=False,
    )


def old_driver(driver: tuple[int, int], built_for: str) -> NoDevice:
    """The driver does not know the CUDA that torch is built for."""
    has = ".".join(map(str, driver))
    return NoDevice(
        f"the NVIDIA driver is made for CUDA {has} at most, and torch for CUDA {built_for}",
        f"update the driver, or install a torch build for CUDA {has} or older",
        found=True,
    )


def new_bindings(driver: tuple[int, int], bindings: tuple[int, int]) -> NoDevice:
    """The driver does not know the CUDA that cuda-python is made for."""
    return NoDevice(
        f"the NVIDIA driver is made for CUDA {driver[0]}.{driver[1]}, and cuda-python for {bindings[0]}.{bindings[1]}",
        f"install an older one: pip install 'cuda-bindings<{driver[0] + 1}', or update the driver",
        found=True,
    )


def wrong_architecture(name: str, capability: tuple[int, int], built_for: list[str]) -> NoDevice:
    """Torch has no code for this card."""
    return NoDevice(
        f"torch has no code for {name} (sm_{capability[0]}{capability[1]}); it has {', '.join(built_for)}",
        "install a torch build for this card, or take another card",
        found=True,
    )


def unusable(error: BaseException) -> NoDevice:
    """The card is there and does not come up, for a reason of its own."""
    said = " ".join(str(error).split())[:300]
    return NoDevice(
        f"the GPU does not start: {said}", "check nvidia-smi, and that no other process holds it", found=True
    )


def out_of_memory(during: str, free_bytes: int | None = None) -> OutOfMemory:
    """An allocation failed `during` something."""
    left = "" if free_bytes is None else f", with {free_bytes / GIB:.1f} GiB free"
    return OutOfMemory(
        f"the GPU is out of memory while {during}{left}",
        "lower --gpu-memory-utilization or --kv-memory, --max-num-seqs or --max-prefill-tokens, or free the card",
    )


def does_not_fit(what: str, needed: int, available: int) -> OutOfMemory:
    """More is needed than there is."""
    return OutOfMemory(
        f"{what} take {needed / GIB:.2f} GiB of GPU memory, and {available / GIB:.2f} GiB may be used",
        "raise --gpu-memory-utilization, lower --max-model-len or --max-num-seqs, or free the card",
    )


def unfit(cause: str) -> DeviceFailure:
    """Something else failed before serving began."""
    return DeviceFailure(cause, "check nvidia-smi and dmesg, then start again; --eager does without captured graphs")


def in_use(utilization: float, share: int, free: int, total: int) -> OutOfMemory:
    """Others have taken so much that the share is not there."""
    most = int(free / total * 100) / 100
    return OutOfMemory(
        f"gpu_memory_utilization {utilization} is {share / GIB:.2f} GiB of the GPU, and {free / GIB:.2f} GiB are free",
        f"lower --gpu-memory-utilization to {most}, or free the card",
    )


def frame_failed(error: CudaError) -> str:
    """What a frame that could not be run says."""
    return f"a CUDA call failed: {error}; if it comes again, restart the server"


def lost(error: CudaError) -> str:
    """What everything in flight says once the card is gone."""
    return f"the GPU is lost: {error}; look for Xid errors in dmesg, check nvidia-smi, then restart the server"


@contextmanager
def telling_memory(during: str, free_bytes: Callable[[], int]) -> Iterator[None]:
    """Raise `OutOfMemory` in place of torch's and CUDA's own errors of that kind, and `DeviceFailure` for the rest."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(during, _perhaps(free_bytes)) from error
    except CudaError as error:
        if error.memory:
            raise out_of_memory(during, _perhaps(free_bytes)) from error
        raise unfit(f"{error}, while {during}") from error


def _perhaps(free_bytes: Callable[[], int]) -> int | None:
    try:
        return free_bytes()
    except CudaError:
        return None

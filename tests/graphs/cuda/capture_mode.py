"""What a graph cannot capture, found without a card.

Owns the list of operations that wait for the device, that give shapes which depend on data, or that copy from the host.
Surprising rule: on a real card most of these would raise only during capture; here they raise wherever they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FORBIDDEN = frozenset(
    {
        "_local_scalar_dense",
        "bincount",
        "equal",
        "histc",
        "is_nonzero",
        "lift_fresh",
        "lift_fresh_copy",
        "masked_scatter",
        "masked_select",
        "multinomial",
        "nonzero",
        "nonzero_numpy",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
    }
)
READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu})
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})


class ForbiddenInCapture(RuntimeError):
    """An operation that a graph cannot hold."""


class CaptureMode:
    """While it is entered, such an operation raises `ForbiddenInCapture`."""

    def __init__(self) -> None:
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(_Methods())
        self._entered.enter_context(_Operations())

    def __exit__(self, *error: object) -> None:
        self._entered.close()


class _Methods(TorchFunctionMode):
    """Sees what a tensor on the host does without an operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func in READS:
            raise ForbiddenInCapture(f"{func.__name__} cannot be captured")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        name = func._schema.name.split("::")[-1]
        if name in FORBIDDEN:
            raise ForbiddenInCapture(f"{name} cannot be captured")
        if name in INDEXING:
            indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                raise ForbiddenInCapture(f"{name} with a mask cannot be captured: its shape depends on data")
        return func(*args, **(kwargs or {}))

"""What the thread that submits frames must not do: wait for the card, or touch its memory.

Owns how that is noticed. Surprising rule: views of the card's memory are allowed, since they touch nothing; all else is
not, and neither are the ways out of torch that no dispatch sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.graphs.cuda.fake_runtime import FakeRuntime, Synchronized

VIEWS = frozenset({"alias", "as_strided", "detach", "select", "slice", "view"})
WAYS_OUT = ("cpu", "item", "numpy", "tolist", "__array__", "__bool__", "__float__", "__int__")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises for an operation on the card's memory."""

    def __init__(self, on_card: Callable[[object], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_card = on_card

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        name = func._schema.name.split("::")[-1]
        if name not in VIEWS and any(self._on_card(arg) for arg in (*args, *(kwargs or {}).values())):
            raise Synchronized(f"{name} of the card's memory on the loop's thread")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(runtime: FakeRuntime, memory: Sequence[torch.Tensor]) -> Iterator[None]:
    """Until the block ends, this thread raises `Synchronized` where it waits for the card or touches its `memory`."""
    here = threading.get_ident()
    storages = {tensor.untyped_storage().data_ptr() for tensor in memory if tensor.numel()}

    def on_card(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in storages

    def guarded(name: str) -> Callable[..., Any]:
        given = getattr(torch.Tensor, name)

        def guard(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here and on_card(tensor):
                raise Synchronized(f"{name} of the card's memory on the loop's thread")
            return given(tensor, *args, **kwargs)

        return guard

    with ExitStack() as stack:
        for name in WAYS_OUT:
            stack.enter_context(patch.object(torch.Tensor, name, guarded(name)))
        stack.enter_context(_Watch(on_card))
        runtime.loop_thread = here
        try:
            yield
        finally:
            runtime.loop_thread = None

"""What the simulated device keeps of a request: how far its row has come, and what a state row holds of it.

Owns the records of rows and the errors that refuse a frame. Does not own what a frame does to them (`prompts`,
`rounds`, `stages`). Surprising rule: tokens are not kept. A hash of the prompt and a few counters are a row's whole
state, and they decide all that it will ever draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flare.machines.ids import RequestHandle
from flare.machines.request import EndReason

from ..frames import Binding
from .tokens import DrawRules


class FrameRefused(Exception):
    """The frame cannot be run; its message becomes the error of the completion."""


class PageConflict(Exception):
    """A lane would write pages that have since been bound to another live row: the host gave a page twice."""


class Progress(NamedTuple):
    """How far a row has come. `prompt_done`: it decodes from here, or has ended."""

    consumed: int = 0
    prompt_hash: int = 0
    prompt_done: bool = False
    outputs: int = 0
    ended: EndReason | None = None

    @property
    def committed(self) -> int:
        """Context tokens: prompt tokens consumed and output tokens drawn, the pending one among them."""
        return self.consumed + self.outputs


class Setup(NamedTuple):
    """What state operations did for a row: whether it may begin, and how many `operations` of image window `window` are
    done (windows before it are behind the row)."""

    initialized: bool
    window: int = 0
    operations: int = 0


@dataclass(slots=True)
class Row:
    """One generation of a slot. `room` is the number of tokens that its pages hold."""

    handle: RequestHandle
    binding: Binding
    rules: DrawRules
    room: int
    setup: Setup
    progress: Progress
    robbed_by: RequestHandle | None = None
    retired: bool = False

    @property
    def live(self) -> bool:
        """Whether its pages are read when it is served."""
        return self.progress.ended is None

    def check_room(self, end: int) -> None:
        """Raises `FrameRefused` if its pages do not hold positions below `end`."""
        if end > self.room:
            raise FrameRefused(f"{self.handle} would write position {end - 1}; its pages hold {self.room} tokens")

    def check_initialized(self) -> None:
        """Raises `FrameRefused` before the initialization that its binding asks for."""
        if not self.setup.initialized:
            raise FrameRefused(f"{self.handle} has to be initialized first")


class Saved(NamedTuple):
    """What a state row holds: the exact state of the generation `handle`. `moved`: that row was retired with it, so
    that it can go on elsewhere."""

    handle: RequestHandle
    binding: Binding
    progress: Progress
    setup: Setup
    moved: bool


def fresh_row(handle: RequestHandle, binding: Binding, rules: DrawRules, page_tokens: int) -> Row:
    """A generation that has done nothing yet."""
    return Row(handle, binding, rules, len(binding.pages) * page_tokens, Setup(not binding.initialize), Progress())

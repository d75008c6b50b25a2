"""Work that would hold up the event loop.

Owns the choice between the loop and a worker thread. Surprising rule: small work stays on the loop, because the way to
a thread and back costs more than most requests need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import to_thread

Result = TypeVar("Result")


async def off_loop(work: Callable[[], Result], size: int, inline: int) -> Result:
    """Do `work` here if its input has at most `inline` bytes, else in a worker thread: streams must not wait for it."""
    return work() if size <= inline else await to_thread.run_sync(work)

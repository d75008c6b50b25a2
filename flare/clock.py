"""The engine's clock.

Owns the process's monotonic clock. Does not own timers. Surprising rule: nothing else in the engine reads a clock; each
machine is given its `now_ns`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], int]
"""Answers the present instant in integer nanoseconds; never goes back."""

monotonic_ns: Clock = time.monotonic_ns

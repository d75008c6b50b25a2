"""What a request of a world asks for, as far as the world's graphs can give it.

Owns the random choice of a request's record. Surprising rule: positions where consumption must stop are drawn first,
and spans then lie between them, so that every record is valid.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from flare.machines.graph import GraphKind, GraphShape
from flare.machines.request import ImageWindow, RequestSpec

PROMPT_TOKENS_MAX = 60
OUTPUT_TOKENS_MAX = 16


def draw_spec(rng: random.Random, catalog: Sequence[GraphShape], state_rows: int, client: str) -> RequestSpec:
    """A request of `client` that a server with this catalog can serve."""
    kinds = {shape.kind for shape in catalog}
    prompt = rng.randint(1, rng.choice((4, PROMPT_TOKENS_MAX)))
    scored = rng.random() < 0.2 and GraphKind.SCORED_PREFILL in kinds
    system_end = rng.choice((0, rng.randint(0, prompt)))
    restored = 0
    if GraphKind.RESTORE in kinds and not scored and prompt > 1 and rng.random() < 0.4:
        restored = rng.randrange(1, prompt)
    saves = GraphKind.SNAPSHOT in kinds and state_rows > 0
    windows = _windows(rng, prompt, restored, several=saves and GraphKind.RESTORE in kinds)
    windows = windows if GraphKind.VISION in kinds else ()
    checkpoints: tuple[int, ...] = ()
    if saves and rng.random() < 0.4:
        count = min(prompt - restored, rng.choice((1, 1, 2)))
        checkpoints = tuple(sorted(rng.sample(range(restored + 1, prompt + 1), count)))
    serving = {GraphKind.SCORED_PREFILL} if scored else {GraphKind.PREFILL, GraphKind.MIXED}
    capacity = max(shape.prefill_tokens for shape in catalog if shape.kind in serving)
    stops = {0, prompt, system_end, restored, *checkpoints, *(window.start for window in windows)}
    return RequestSpec(
        client=client,
        prompt_tokens=prompt,
        max_tokens=0 if scored and rng.random() < 0.5 else rng.randint(1, rng.choice((2, OUTPUT_TOKENS_MAX))),
        system_end=system_end,
        messages=tuple(sorted(rng.randint(0, prompt) for _ in range(rng.randrange(4)))),
        scored=scored,
        needs_feedback=rng.random() < 0.3,
        initialize=GraphKind.INITIALIZE in kinds and rng.random() < 0.4,
        restored_tokens=restored,
        windows=windows,
        spans=_spans(rng, sorted(stops), capacity),
        checkpoints=checkpoints,
    )


def _windows(rng: random.Random, prompt: int, restored: int, *, several: bool) -> tuple[ImageWindow, ...]:
    """Windows in order and apart, none of them cut by the restored prefix."""
    count = rng.choice((0, 1, 2, 3)) if several else rng.choice((0, 1))
    ends = sorted(rng.sample(range(prompt + 1), min(prompt + 1, 2 * count) // 2 * 2))
    pairs = zip(ends[::2], ends[1::2], strict=True)
    windows = [ImageWindow(start, end, rng.randint(1, 3)) for start, end in pairs]
    return tuple(window for window in windows if not window.start < restored < window.end)


def _spans(rng: random.Random, stops: Sequence[int], capacity: int) -> tuple[tuple[int, int], ...]:
    spans = []
    for start, end in itertools.pairwise(stops):
        length = min(capacity, end - start)
        if rng.random() < 0.2 and length > 1:
            size = rng.randint(2, length)
            first = rng.randint(start, end - size)
            spans.append((first, first + size))
    return tuple(spans)

"""Attention over pages: the protocol, and the choice among what is there.

Owns how a kernel is chosen: by its time on this card, among those that run and agree with plain torch. Does not own
kernels. Surprising rule: FlashInfer is not among them. Its paged wrappers plan each batch on the host, from lengths
that the host does not know yet while another frame is in flight; what it has without a plan is for few cards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..models.config import ModelConfig
from .pages import CudaPages
from .plain_attention import PlainAttention
from .spans import Packing, Spans
from .varlen_attention import BlockTableAttention, GatheredAttention

Timer = Callable[[Callable[[], None]], float]
"""Seconds of one run of a body, replayed as it will be served. Raises whatever the body raises."""

TOLERANCE = 0.02
"""How far two kernels may differ, relative to the largest of the values: a few roundings to bfloat16."""

BATCH, TOKENS = 8, 1 << 16
"""Lanes that a kernel is measured with, and how many tokens they have in all at most."""


class Attention(Protocol):
    """Causal attention of packed rows over the pages of their lanes."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: Spans, window: int | None
    ) -> torch.Tensor:
        """float32[R, heads, head_dim] over `[pages + 1, page_tokens, kv_heads, head_dim]` to float[R, heads * head_dim]
        of any kind. A row sees the keys up to its own position, the last `window` of them if that is not None. What an
        idle row gets is arbitrary."""
        ...


def choose_attention(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    page_tokens: int,
    positions: int,
    timer: Timer,
    log: Callable[[str], None],
    candidates: Sequence[Callable[[], Attention]] = (BlockTableAttention, GatheredAttention),
) -> Attention:
    """The fastest for decoding a batch and reading a prompt, in requests of up to `positions` tokens.

    A candidate that raises, or that differs from plain torch, is dropped and the log says why.
    """
    batch = max(1, min(BATCH, TOKENS // positions))
    problems = [
        _Problem(config, device, dtype, page_tokens, positions, lanes, rows) for lanes, rows in ((batch, 1), (1, 256))
    ]
    plain = PlainAttention()
    expected = [problem.run(plain) for problem in problems]
    best: Attention = plain
    best_s = _seconds(timer, plain, problems)
    log(f"attention: {plain.name} takes {best_s * 1e6:.0f} µs")
    for make in candidates:
        name = getattr(make, "__name__", "a kernel")
        try:
            kernel = make()
            name = kernel.name
            off = max(_distance(problem.run(kernel), right) for problem, right in zip(problems, expected, strict=True))
            if not off <= TOLERANCE:
                log(f"attention: {name} is not used: it differs from plain torch by {off:.3f}")
                continue
            seconds = _seconds(timer, kernel, problems)
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            log(f"attention: {name} is not used: {' '.join(str(error).split())[:200]}")
            continue
        log(f"attention: {name} takes {seconds * 1e6:.0f} µs")
        if seconds < best_s:
            best, best_s = kernel, seconds
    log(f"attention: {best.name} is used")
    return best


class _Problem:
    """Lanes of the longest request, `rows` new positions at the end of each, with keys and values of noise."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        page_tokens: int,
        positions: int,
        lanes: int,
        rows: int,
    ) -> None:
        rows = min(rows, positions)
        self._window = config.sliding_window
        each = -(-positions // page_tokens)
        with torch.device(device):
            one_layer = CudaPages.allocate(config, each * lanes, page_tokens, dtype)
            self._keys, self._values = one_layer.layer(0)
            noise = torch.Generator(device).manual_seed(1)
            for pages in (self._keys, self._values):
                pages.copy_(torch.randn(pages.shape, generator=noise))
            self._queries = torch.randn(lanes * rows, config.heads, config.head_dim, generator=noise)
            table = torch.arange(each * lanes, dtype=torch.int32).flip(0).view(lanes, each)
            length, start = torch.full((lanes,), rows), torch.full((lanes,), positions - rows)
        packing = Packing.of(length, lanes * rows)
        self._spans = Spans.of(packing, start, table, page_tokens=page_tokens, pages=each * lanes, longest=rows)

    def run(self, kernel: Attention) -> torch.Tensor:
        """What the kernel makes of it."""
        return kernel(self._queries, self._keys, self._values, self._spans, self._window)


def _seconds(timer: Timer, kernel: Attention, problems: Sequence[_Problem]) -> float:
    """For all problems together."""

    def body(problem: _Problem) -> Callable[[], None]:
        def run() -> None:
            problem.run(kernel)

        return run

    return sum(timer(body(problem)) for problem in problems)


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; NaN if it is none."""
    return float((got.float() - expected).abs().max() / expected.abs().max())

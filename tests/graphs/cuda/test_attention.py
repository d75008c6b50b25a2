"""Attention over pages, and how a kernel is chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flare.graphs.cuda import plain_attention
from flare.graphs.cuda.attention import Attention, choose_attention
from flare.graphs.cuda.plain_attention import PlainAttention
from flare.graphs.cuda.spans import Packing, Spans
from tests.tiny_models import tiny_config

CONFIG = tiny_config()
PAGE, PAGES = 8, 6
LENGTHS, STARTS = [3, 0, 1, 7], [5, 9, 39, 20]


def problem(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Spans]:
    """Four lanes over shuffled pages, whose last ones are no numbers."""
    noise = torch.Generator().manual_seed(3)
    queries = torch.randn(rows, CONFIG.heads, CONFIG.head_dim, generator=noise)
    keys, values = (
        torch.randn(len(LENGTHS) * PAGES + 1, PAGE, CONFIG.kv_heads, CONFIG.head_dim, generator=noise) for _ in range(2)
    )
    table = torch.randperm(len(LENGTHS) * PAGES, generator=noise).int().view(len(LENGTHS), PAGES)
    packing = Packing.of(torch.tensor(LENGTHS), rows)
    spans = Spans.of(packing, torch.tensor(STARTS), table, page_tokens=PAGE, pages=len(keys) - 1, longest=max(LENGTHS))
    for lane, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        for position in range(start + length, PAGES * PAGE):
            for pages in (keys, values):
                pages[table[lane, position // PAGE], position % PAGE] = float("nan")
    return queries, keys, values, spans


@pytest.mark.parametrize("window", [None, 1, 6, 11, 100])
@pytest.mark.parametrize("block", [1, 1 << 12, 1 << 24])
def test_plain_attention_is_that_of_each_row_alone(
    window: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_attention, "BLOCK_ELEMENTS", block)
    queries, keys, values, spans = problem(rows=14)
    got = PlainAttention()(queries, keys, values, spans, window)
    row = 0
    for lane, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        for position in range(start, start + length):
            first = 0 if window is None else max(0, position + 1 - window)
            seen = range(first, position + 1)
            pages, offsets = [int(spans.table[lane, p // PAGE]) for p in seen], [p % PAGE for p in seen]
            k, v = (part[pages, offsets].repeat_interleave(2, dim=1) for part in (keys, values))
            weights = (torch.einsum("hd,thd->ht", queries[row], k) * CONFIG.head_dim**-0.5).softmax(-1)
            torch.testing.assert_close(got[row], torch.einsum("ht,thd->hd", weights, v).flatten())
            row += 1
    assert row == sum(LENGTHS)


class Kernel:
    """Plain torch under a name, off by a factor, and failing if it is none."""

    def __init__(self, name: str, factor: float | None = 1.0) -> None:
        self.name = name
        self._factor = factor

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: Spans, window: int | None
    ) -> torch.Tensor:
        """See `Attention`."""
        if self._factor is None:
            raise RuntimeError("no kernel image\nfor this card")
        return PlainAttention()(queries, keys, values, spans, window) * self._factor


def chosen(seconds: dict[str, float], *candidates: Callable[[], Attention]) -> tuple[str, list[str]]:
    """What is chosen where bodies take so long in turn, and what is said."""
    said: list[str] = []
    times = iter([each for name in ("plain torch", *seconds) for each in (seconds.get(name, 1.0) / 2,) * 2])

    def timer(body: Callable[[], None]) -> float:
        body()
        return next(times)

    kernel = choose_attention(
        CONFIG,
        device=torch.device("cpu"),
        dtype=torch.float32,
        page_tokens=32,
        positions=100,
        timer=timer,
        log=said.append,
        candidates=candidates,
    )
    return kernel.name, said


def test_the_fastest_kernel_is_used_and_the_numbers_are_said() -> None:
    name, said = chosen({"a": 0.5, "b": 0.25, "c": 2.0}, *(lambda name=name: Kernel(name) for name in "abc"))
    assert name == "b"
    assert said == [
        "attention: plain torch takes 1000000 µs",
        "attention: a takes 500000 µs",
        "attention: b takes 250000 µs",
        "attention: c takes 2000000 µs",
        "attention: b is used",
    ]


def test_a_kernel_that_fails_or_differs_is_not_used() -> None:
    def absent() -> Attention:
        raise ImportError("No module named 'flash_attn_3'")

    name, said = chosen(
        {},
        absent,
        lambda: Kernel("failing", None),
        lambda: Kernel("wrong", 1.1),
        lambda: Kernel("wild", float("nan")),
    )
    assert name == "plain torch"
    assert said[1:] == [
        "attention: absent is not used: No module named 'flash_attn_3'",
        "attention: failing is not used: no kernel image for this card",
        "attention: wrong is not used: it differs from plain torch by 0.100",
        "attention: wild is not used: it differs from plain torch by nan",
        "attention: plain torch is used",
    ]


def test_a_machine_without_kernels_of_torch_serves_with_plain_torch() -> None:
    said: list[str] = []

    def timer(body: Callable[[], None]) -> float:
        body()
        return 1.0

    kernel = choose_attention(
        CONFIG,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        page_tokens=32,
        positions=64,
        timer=timer,
        log=said.append,
    )
    assert kernel.name == "plain torch"
    assert sum("is not used" in line for line in said) == 2

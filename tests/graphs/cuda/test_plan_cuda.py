"""What a card is said to take."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from flare.graphs.cuda.failures import OutOfMemory
from flare.graphs.cuda.plan import CudaPlan, plan_memory, torch_dtype
from flare.graphs.cuda.runtime import CardFacts
from flare.graphs.memory.pages import page_bytes
from flare.machines.graph import GraphKind, GraphShape
from tests.tiny_models import tiny_config

GIB = 1 << 30
LARGE = msgspec.structs.replace(
    tiny_config(), hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256
)
CATALOG = [
    *(GraphShape(GraphKind.DECODE, 1 << power) for power in range(7)),
    *(GraphShape(GraphKind.PREFILL, 4, 512 << power) for power in range(3)),
]


def plan(**more: Any) -> CudaPlan:
    """Of a model of 8 billion weights for 64 requests."""
    given = {"request_slots": 64, "max_model_len": 8192, "dtype": torch.bfloat16, **more}
    return plan_memory(LARGE, CATALOG, **given)


def test_pages_get_what_is_left_of_the_share() -> None:
    made = plan(total_bytes=140 * GIB, free_bytes=139 * GIB, gpu_memory_utilization=0.9)
    fixed = made.weights_bytes + made.state_bytes + made.buffers_bytes + made.capture_bytes
    page = page_bytes(LARGE, torch.bfloat16)
    assert made.weights_bytes == pytest.approx(8.03e9 * 2, rel=0.01)
    assert made.packed_rows == 2048
    assert 0 <= 126 * GIB - fixed - made.kv_bytes - page < page
    assert made.kv_bytes == made.pages * page
    assert made.capture_bytes < 5 * GIB


def test_pages_get_the_bytes_that_they_are_given() -> None:
    page = page_bytes(LARGE, torch.bfloat16)
    assert plan(kv_bytes=400 * page + 5).pages == 400


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({}, ValueError, "without a GPU, say how much"),
        ({"kv_bytes": 1 << 20}, ValueError, "one request of max_model_len 8192 needs 256"),
        ({"total_bytes": 140 * GIB, "free_bytes": 100 * GIB}, OutOfMemory, "126.00 GiB.*100.00 GiB.*to 0.71"),
        ({"total_bytes": 16 * GIB}, OutOfMemory, "of one request take .* GiB .* and 14.40 GiB may be used"),
        ({"kv_bytes": 20 * GIB, "free_bytes": 30 * GIB}, OutOfMemory, "and 30.00 GiB may be used"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(more: dict[str, int], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        plan(**more)


def test_a_draft_shares_the_pages() -> None:
    draft = msgspec.structs.replace(LARGE, layers=1)
    alone, both = plan(total_bytes=140 * GIB), plan(total_bytes=140 * GIB, draft=draft, rejects=True)
    assert both.pages < alone.pages and both.weights_bytes > alone.weights_bytes
    assert both.kv_bytes == both.pages * page_bytes(LARGE, torch.bfloat16, draft)


def test_the_cards_own_type_is_taken() -> None:
    def card(capability: tuple[int, int]) -> CardFacts:
        return CardFacts("a card", capability, (13, 0), (13, 0), GIB)

    assert torch_dtype("auto") is torch_dtype("auto", card((8, 0))) is torch.bfloat16
    assert torch_dtype("auto", card((7, 5))) is torch.float16
    assert torch_dtype("float32", card((7, 5))) is torch.float32

"""CUDA devices for tests: a tiny random model on the fake runtime, or on a real card if that is asked for.

Owns which runtime it is: FLARE_TEST_CUDA=1 in the environment takes the card. Surprising rule: on a card, every device
opens the runtime again, as a server does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import cast

import torch

from flare.graphs.cuda.attention import Attention
from flare.graphs.cuda.device import CudaDevice
from flare.graphs.cuda.driver import open_runtime
from flare.graphs.cuda.plain_attention import PlainAttention
from flare.graphs.cuda.runtime import Runtime
from flare.graphs.cuda.staging import Records
from flare.graphs.memory.pages import page_bytes
from flare.graphs.models.draft import DraftModel
from flare.graphs.models.source import WeightSource
from flare.graphs.programs.rows import StateRows
from flare.graphs.sim.acceptance import RandomAcceptance
from flare.graphs.sim.tokens import TokenSource
from flare.machines.graph import GraphShape
from tests.graphs.cuda.fake_runtime import FakeRuntime
from tests.graphs.cuda.tiny_step import TinyStep
from tests.graphs.test_conformance_cpu import TinyWeights
from tests.tiny_models import tiny_config

TINY = tiny_config(vocab=1 << 14)
"""What a device without a model is told of one."""


class PlainDevice(CudaDevice):
    """Without the choice among kernels, which takes longer than most tests."""

    def _attention(self, positions: int) -> Attention:
        return super()._attention(positions) if REAL else PlainAttention()


class TinyDevice(CudaDevice):
    """Without a model: its program draws from `tokens` (`TinyStep`). `on_card` is what the card's memory holds."""

    tiny: TinyStep
    on_card: list[torch.Tensor]

    def __init__(
        self,
        catalog: Sequence[GraphShape],
        runtime: FakeRuntime,
        *,
        slots: int,
        pages: int,
        max_model_len: int,
        tokens: TokenSource,
        acceptance: RandomAcceptance | None = None,
    ) -> None:
        super().__init__(
            TINY,
            cast(WeightSource, None),
            runtime=runtime,
            catalog=catalog,
            request_slots=slots,
            max_model_len=max_model_len,
            gpu_memory_utilization=0.9,
            kv_bytes=pages * page_bytes(TINY, torch.float32, TINY),
            dtype="float32",
            eager=False,
            warn=print,
            log=lambda _: None,
            draft=cast(DraftModel, SimpleNamespace(config=TINY, name="nothing")),
        )
        assert self.pages == pages
        self._tokens = tokens
        self._acceptance = acceptance or RandomAcceptance(0, 0.5)

    def _make_step(self, records: Records, rows: StateRows) -> Callable[[GraphShape], Callable[[], None]]:
        self.on_card = [self._inputs, self._outputs, *(getattr(rows, field.name) for field in fields(rows))]
        self.tiny = TinyStep(records, rows, pages=self.pages, tokens=self._tokens, acceptance=self._acceptance)
        return self.tiny.body


REAL = os.environ.get("FLARE_TEST_CUDA") == "1"


def make_runtime() -> Runtime:
    """A runtime of its own for each device."""
    return open_runtime() if REAL else FakeRuntime(checks=False)


def make_cuda(
    catalog: Sequence[GraphShape],
    draft: Callable[[], DraftModel | None] = lambda: None,
    *,
    rejects: bool = False,
    eager: bool = False,
    runtime: Runtime | None = None,
    kind: type[CudaDevice] = PlainDevice,
) -> CudaDevice:
    """A device of four slots and 8 MiB of pages."""
    return kind(
        tiny_config(),
        TinyWeights(),
        runtime=runtime or make_runtime(),
        catalog=catalog,
        request_slots=4,
        max_model_len=256,
        gpu_memory_utilization=0.9,
        kv_bytes=8 << 20,
        dtype="float32",
        eager=eager,
        warn=print,
        log=print,
        draft=draft(),
        rejects=rejects,
    )

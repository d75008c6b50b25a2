"""How fast this machine is, and how fast the CPU programs are on it: `python tools/bench_kernels.py`.

Owns two yardsticks, the time of all linear layers of the default model's shape without the output head, by kernels that
torch has (int4 at one row, bfloat16 at 512 rows), by which measurements of different machines can be compared; and the
time of every prepared graph on the default model, with what its device adds around the program, and of a long prompt
beside four decoding rows. Surprising rule: it means nothing on a busy machine.
"""

from __future__ import annotations

import os
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import typer
from torch.nn.functional import linear

from flare.cache import cache_dir
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.frames import Binding, Completion, Frame, LaneInput, Sampling
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence, PageId, RequestHandle
from flare.model import Model, open_model

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
REPEATS = 9
BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (64, 128, 256, 512)
MIXED_CHUNKS = (64, 128, 192, 256, 512)
MIXED = GraphShape(GraphKind.MIXED, 5, max(MIXED_CHUNKS), 1)
LONG_PROMPT = 1500
MAX_MODEL_LEN = 1600


def median_ms(work: Callable[[], object]) -> float:
    """Median of REPEATS runs after two warm ones."""
    work(), work()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def int4_one_row_ms() -> float:
    """All linear layers at one row with torch's int4 kernel, in groups of 32."""
    ops = torch.ops.aten
    layers = []
    for _ in range(LAYERS):
        for out, width in SHAPES:
            codes = ops._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (out, width), dtype=torch.int32), 1)
            layers.append((torch.randn(1, width).bfloat16(), codes, torch.rand(width // 32, out, 2).bfloat16()))
    return median_ms(lambda: [ops._weight_int4pack_mm_for_cpu(x, codes, 32, scales) for x, codes, scales in layers])


def bfloat16_ms(rows: int) -> float:
    """All linear layers at `rows` rows in bfloat16."""
    layers = [
        (torch.randn(rows, width).bfloat16(), torch.randn(out, width).bfloat16())
        for _ in range(LAYERS)
        for out, width in SHAPES
    ]
    return median_ms(lambda: [linear(x, weight) for x, weight in layers])


class Took(NamedTuple):
    """The program's own time, and that from submission to completion without it."""

    program_ms: float
    around_ms: float


def median(frames: Sequence[Took]) -> str:
    """The medians of some frames, in words."""
    program_ms, around_ms = (statistics.median(column) for column in zip(*frames, strict=True))
    return f"{program_ms:.2f} ms, and {around_ms:.2f} ms around it"


class Bench:
    """A prepared device, started here, whose frames are run one by one."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        device.start(self._done.put)

    def run(self, shape: GraphShape, lanes: Sequence[LaneInput]) -> Took:
        """One frame. Raises RuntimeError if it failed."""
        frame = Frame(Fence(1), shape, tuple(lanes))
        began_ns = time.perf_counter_ns()
        self.device.submit(frame)
        completion = self._done.get()
        took_ns = time.perf_counter_ns() - began_ns
        if completion.error is not None:
            raise RuntimeError(completion.error)
        return Took(completion.device_ns / 1e6, (took_ns - completion.device_ns) / 1e6)

    def prefill(self, kind: GraphKind, slot: int, tokens: int, capacity: int) -> Took:
        """A fresh prompt of random tokens."""
        each = MAX_MODEL_LEN // self.device.page_tokens
        pages = tuple(PageId(slot * each + i) for i in range(each))
        binding = Binding(pages, Sampling(temperature=0.0), (), 1 << 20)
        ids = np.random.default_rng(slot).integers(100, 40000, tokens).astype(np.int32)
        lane = LaneInput(RequestHandle(slot, 1), 0, True, ids, None, binding)
        return self.run(GraphShape(kind, 1, capacity), [lane])

    def long_prompt(self, chunk: int, generation: int, decoding: int) -> list[float]:
        """A prompt of LONG_PROMPT tokens in chunks beside the first slots, which decode; ms of each mixed frame."""
        slot, each = MIXED.batch - 1, MAX_MODEL_LEN // self.device.page_tokens
        pages = tuple(PageId(slot * each + i) for i in range(each))
        binding = Binding(pages, Sampling(temperature=0.0), (), 1 << 20)
        ids = np.random.default_rng(slot).integers(100, 40000, LONG_PROMPT).astype(np.int32)
        rows = [LaneInput(RequestHandle(slot, 1), 0, True) for slot in range(decoding)]
        times = []
        for start in range(0, LONG_PROMPT, chunk):
            part, last = ids[start : start + chunk], start + chunk >= LONG_PROMPT
            target, bound = None if last else int(ids[start + chunk]), None if start else binding
            lane = LaneInput(RequestHandle(slot, generation), start, last, part, target, bound)
            times.append(self.run(MIXED, [lane, *rows]).program_ms)
        return times

    def decode(self, batch: int) -> Took:
        """One step of the first `batch` slots."""
        lanes = [LaneInput(RequestHandle(slot, 1), 0, True) for slot in range(batch)]
        return self.run(GraphShape(GraphKind.DECODE, batch), lanes)


def prepared(model: Model, threads: int) -> Bench:
    """The default catalog on the default model."""
    device = CpuDevice(
        model.config,
        model.weights,
        request_slots=max(BATCHES),
        max_model_len=MAX_MODEL_LEN,
        kv_bytes=1 << 30,
        dtype="auto",
        threads=threads,
        eager=False,
        cache_dir=cache_dir(),
        warn=print,
    )
    decode = [GraphShape(GraphKind.DECODE, batch) for batch in BATCHES]
    prompt = [GraphShape(kind, 1, n) for kind in (GraphKind.PREFILL, GraphKind.SCORED_PREFILL) for n in CHUNKS]
    began = time.perf_counter()
    device.prepare([*decode, *prompt, MIXED], lambda *_: None)
    print(f"prepared in {time.perf_counter() - began:.1f} s")
    return Bench(device)


def main(threads: int = os.cpu_count() or 1) -> None:
    """Print the yardsticks and the median times of every graph, in ms."""
    torch.set_num_threads(threads)
    print(f"{threads} threads, torch {torch.__version__}")
    print(f"yardstick int4, 1 row: {int4_one_row_ms():.1f} ms")
    print(f"yardstick bfloat16, 512 rows: {bfloat16_ms(512):.0f} ms")
    bench = prepared(open_model(None, lambda *_: None), threads)
    for context in (64, 512):
        for slot in range(max(BATCHES)):
            bench.prefill(GraphKind.PREFILL, slot, context, 512)
        for batch in BATCHES:
            took = median([bench.decode(batch) for _ in range(20)])
            print(f"decode/b{batch} at {context} tokens: {took}")
    for kind in (GraphKind.PREFILL, GraphKind.SCORED_PREFILL):
        for tokens in CHUNKS:
            took = median([bench.prefill(kind, 0, tokens, tokens) for _ in range(5)])
            print(f"{kind}/t{tokens}: {took}")
    for slot in range(MIXED.batch - 1):
        bench.prefill(GraphKind.PREFILL, slot, 100, 512)
    for decoding in (0, MIXED.batch - 1):
        for chunk in MIXED_CHUNKS:
            runs = [bench.long_prompt(chunk, 2 + repeat, decoding) for repeat in range(3)]
            each = [statistics.median(times) for times in zip(*runs, strict=True)]
            shown = ", ".join(f"{each[i]:.0f}" for i in (0, len(each) // 2, LONG_PROMPT // chunk - 1))
            print(
                f"{LONG_PROMPT} tokens in chunks of {chunk}, {decoding} rows decoding: {sum(each):.0f} ms; each {shown}"
            )
    bench.device.close()


if __name__ == "__main__":
    typer.run(main)

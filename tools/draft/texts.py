"""Texts that a model writes itself, with the residual stream of every token it read.

Owns the loop that keeps the lanes of a native program full, and the shards on disk. Does not own prompts or training.
Surprising rule: a text depends on its prompt, seed and temperature alone, not on what ran beside it, so that a shard
which is written again after an interruption comes out the same bit for bit.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from flare.cache import cache_dir
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.cpu.native import NativeStep
from flare.graphs.frames import Binding, Completion, Frame, LaneInput, Sampling
from flare.graphs.memory.pages import PAGE_TOKENS, page_bytes
from flare.graphs.models.config import ModelConfig
from flare.graphs.models.source import WeightSource
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence, PageId, RequestHandle

LENGTH_MAX = 512
PROMPT_MAX = 256
OUTPUT_MAX = 256

SHARD_TEXTS = 50

_SHARD = "texts-{}.safetensors"


@dataclass(frozen=True, slots=True)
class Order:
    """One text to be written: its place in the corpus, the ids of its prompt, and how its tokens are drawn."""

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Text:
    """`tokens` int32[n], the first `prompt` of them asked and the others written; `residual` float16[n - 1, hidden] of
    all but the last, which the model never read."""

    tokens: torch.Tensor
    residual: torch.Tensor
    prompt: int
    temperature: float
    seed: int


@dataclass(slots=True)
class _Lane:
    order: Order
    handle: RequestHandle
    tokens: list[int]
    residual: list[torch.Tensor] = field(default_factory=list)


class Writer:
    """A model on the CPU that writes `lanes` texts at once."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, stops: tuple[int, ...], lanes: int, output_max: int
    ) -> None:
        self._stops = stops
        self._lanes = lanes
        self._output_max = output_max
        self._prefill = GraphShape(GraphKind.PREFILL, 1, PROMPT_MAX)
        self._decode = GraphShape(GraphKind.DECODE, lanes)
        self._table = -(-LENGTH_MAX // PAGE_TOKENS)
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._device = CpuDevice(
            config,
            weights,
            request_slots=lanes,
            max_model_len=LENGTH_MAX,
            kv_bytes=lanes * self._table * page_bytes(config, torch.bfloat16),
            dtype="auto",
            threads=torch.get_num_threads(),
            eager=False,
            cache_dir=cache_dir(),
            warn=print,
        )
        self._device.prepare([self._prefill, self._decode], lambda *_: None)
        program = self._device.program
        if not isinstance(program, NativeStep):
            raise RuntimeError("texts are written by the native program, which could not be built")
        self._residual = program.residual
        self._device.start(self._done.put)
        self._generation = 0

    def close(self) -> None:
        """Give the device back."""
        self._device.close()

    def write(self, orders: Iterator[Order], stop: Callable[[], bool]) -> Iterator[tuple[int, Text]]:
        """Texts with their places, as they end. When `stop` says so, what is not at its end is dropped."""
        running: dict[int, _Lane] = {}
        while not stop():
            for slot in range(self._lanes):
                if slot not in running and (order := next(orders, None)) is not None:
                    running[slot] = self._begin(slot, order)
            if not running:
                return
            lanes = [running[slot] for slot in sorted(running)]
            self._run(self._decode, [LaneInput(lane.handle, 0, True) for lane in lanes], lanes)
            for lane in lanes:
                if lane.tokens[-1] in self._stops or len(lane.tokens) == len(lane.order.prompt) + self._output_max:
                    del running[lane.handle.slot]
                    yield lane.order.index, self._text(lane)

    def _begin(self, slot: int, order: Order) -> _Lane:
        self._generation += 1
        lane = _Lane(order, RequestHandle(slot, self._generation), list(order.prompt))
        pages = tuple(PageId(slot * self._table + page) for page in range(self._table))
        binding = Binding(pages, order.sampling, (), self._output_max)
        tokens = np.array(order.prompt, np.int32)
        self._run(self._prefill, [LaneInput(lane.handle, 0, True, tokens, binding=binding)], [lane])
        return lane

    def _run(self, shape: GraphShape, inputs: list[LaneInput], lanes: list[_Lane]) -> None:
        """One frame; each lane takes the residuals of its rows and the token that was drawn."""
        self._device.submit(Frame(Fence(0), shape, tuple(inputs)))
        done = self._done.get()
        if done.error is not None:
            raise RuntimeError(done.error)
        first = 0
        for lane, given, result in zip(lanes, inputs, done.results, strict=True):
            rows = 1 if given.tokens is None else len(given.tokens)
            lane.residual.append(self._residual[first : first + rows].half())
            lane.tokens.extend(result.tokens)
            first += rows

    def _text(self, lane: _Lane) -> Text:
        sampling = lane.order.sampling
        tokens, residual = torch.tensor(lane.tokens, dtype=torch.int32), torch.cat(lane.residual)
        assert bool(residual.isfinite().all())
        return Text(tokens, residual, len(lane.order.prompt), sampling.temperature, sampling.seed)


def shard_path(folder: Path, index: int) -> Path:
    """Where the text of this index is kept."""
    return folder / _SHARD.format(f"{index // SHARD_TEXTS:05d}")


def write_shards(
    writer: Writer,
    folder: Path,
    orders: Iterable[Order],
    stop: Callable[[], bool],
    progress: Callable[[], None],
) -> None:
    """Write the texts whose shards are not there yet; `progress` is told of each text that is."""
    folder.mkdir(parents=True, exist_ok=True)
    there = {path.name for path in folder.glob(_SHARD.format("*"))}

    def missing() -> Iterator[Order]:
        for order in orders:
            if shard_path(folder, order.index).name in there:
                progress()
            else:
                yield order

    parts: dict[Path, dict[int, Text]] = {}
    for index, text in writer.write(missing(), stop):
        path = shard_path(folder, index)
        part = parts.setdefault(path, {})
        part[index] = text
        progress()
        if len(part) == SHARD_TEXTS:
            save_texts(path, [part[i] for i in sorted(part)])
            del parts[path]


def save_texts(path: Path, texts: list[Text]) -> None:
    """Keep texts in one file, which appears whole."""
    partial = path.with_suffix(".partial")
    save_file(
        {
            "tokens": torch.cat([text.tokens for text in texts]),
            "residual": torch.cat([text.residual for text in texts]),
            "length": torch.tensor([len(text.tokens) for text in texts]),
            "prompt": torch.tensor([text.prompt for text in texts]),
            "temperature": torch.tensor([text.temperature for text in texts]),
            "seed": torch.tensor([text.seed for text in texts]),
        },
        partial,
    )
    partial.replace(path)


def load_texts(path: Path) -> list[Text]:
    """What `save_texts` kept."""
    kept = load_file(path)
    lengths = kept["length"].tolist()
    parts = zip(
        torch.split(kept["tokens"], lengths),
        torch.split(kept["residual"], [length - 1 for length in lengths]),
        kept["prompt"].tolist(),
        kept["temperature"].tolist(),
        kept["seed"].tolist(),
        strict=True,
    )
    return [Text(*part) for part in parts]

"""Whether speculative rounds of the default model give what plain decode gives: `python -m tools.check_rounds`.

Owns the comparison on the CPU device, for both sources, every width, batches of 1, 4 and 8, two frames in flight where
rounds can be queued, greedy and sampled. Does not own what tiny models show (the tests). Surprising rule: a text that
differs is no fault where the exact model nearly ties, as the compiled program rounds to eight bits; the gap is shown.
"""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flare.cache import cache_dir
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.frames import Binding, Completion, Frame, LaneInput, Sampling
from flare.graphs.memory.pages import PAGE_TOKENS, KvPages
from flare.graphs.models.draft import DraftModel, load_draft_head, whole_model
from flare.graphs.programs.decoder import Decoder, Span
from flare.graphs.programs.noise import draw_key, gumbel
from flare.machines.graph import GraphKind, GraphShape, Source, rectangular
from flare.machines.ids import Fence, PageId, RequestHandle
from flare.model import Model, open_model

ROOT = Path(__file__).resolve().parents[1]
HEAD = ROOT / "graphs/models/drafts/smollm2-135m-instruct.safetensors"
WIDTHS = (1, 2, 3, 4, 6, 8)
BATCHES = {1: 8, 4: 16, 8: 24}
"""How many texts are asked for in batches of each size, at each width of each source; by and by it is all of them."""
MAX_MODEL_LEN = 384
PREFILL = GraphShape(GraphKind.PREFILL, 1, 128)
NEAR_TIE = 0.05
"""Gap of the exact model's logits, in nats, below which its choice may turn on rounding."""
TEXTS = ("1, 2, 3, 4, 5,", "Here is the English alphabet: ABC", "日本語" * 4)
QUESTIONS = (
    "Repeat exactly: alpha beta gamma",
    "What is 2+2?",
    "Write a Python function that reverses a string.",
    "Name five animals that live in the sea.",
    "Explain photosynthesis to a child in two sentences.",
    "Write a short poem about rain on a tin roof.",
    "Translate 'good morning, my friend' into French.",
    "What is the difference between a crocodile and an alligator?",
    "Give me a recipe for pancakes.",
    "List the planets of the solar system in order.",
    "Who wrote Romeo and Juliet?",
    "Summarize: The meeting moved to Tuesday. The room is the same. Bring the figures for March.",
    "Write an email that asks for a day off.",
    "What are the primary colors?",
    "Write a JSON object with a name, an age and a list of hobbies.",
    "How do I boil an egg?",
    "Count from one to twenty in words.",
    "Tell me a joke about computers.",
    "What is the capital of Australia, and how large is it?",
    "Write the first three lines of a mystery novel.",
    "Fix the grammar: she don't likes going to school yesterday.",
    "Why is the sky blue?",
    "Write an SQL query that counts orders by customer.",
    "Name three advantages of walking to work.",
    "What is 17 times 23? Show the steps.",
    "Make a table of three fruits with their colors, in Markdown.",
    "Say the word banana ten times.",
    "Give me a slogan for a bakery.",
    "What does HTTP stand for?",
    "Describe the taste of a lemon.",
    "Write a for loop in C that prints the even numbers below 20.",
)


@dataclass
class Row:
    """A request and what it has given; `tokens` ends with the model's end or the limit."""

    name: str
    prompt: list[int]
    sampling: Sampling
    limit: int
    handle: RequestHandle = field(default_factory=lambda: RequestHandle(0, 0))
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    rounds: int = 0

    def copies(self, most: int) -> list[int]:
        """What followed the same last words before: the longest of three, the latest of equals."""
        text = self.prompt + self.tokens
        for length in (3, 2, 1):
            for at in range(len(text) - length - 1, -1, -1):
                if text[at : at + length] == text[-length:]:
                    return text[at + length : at + length + most]
        return []


@dataclass(frozen=True)
class Difference:
    """Where a text first differs."""

    where: str
    prompt: str
    at: int
    gap: float


class Server:
    """A prepared device that serves groups of requests."""

    def __init__(self, model: Model, draft: DraftModel, threads: int, stop: tuple[int, ...]) -> None:
        self.device = CpuDevice(
            model.config,
            model.weights,
            request_slots=max(BATCHES),
            max_model_len=MAX_MODEL_LEN,
            kv_bytes=256 << 20,
            dtype="auto",
            threads=threads,
            eager=False,
            cache_dir=cache_dir(),
            warn=print,
            draft=draft,
        )
        plain = [GraphShape(GraphKind.DECODE, batch) for batch in BATCHES]
        wide = [
            rectangular(GraphKind.SPECULATIVE, batch, width, source=source)
            for source in Source
            for width in WIDTHS
            for batch in BATCHES
            if width > 1 or source is Source.DRAFT
        ]
        self.device.prepare([PREFILL, *plain, *wide], lambda *_: None)
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.device.start(self._done.put)
        self._stop = stop
        self._fence = 0

    def serve(self, rows: Sequence[Row], source: Source | None, width: int) -> None:
        """Serve requests together; `source` None: by plain decode."""
        for slot, row in enumerate(rows):
            self._prefill(row, slot)
        flying: deque[tuple[Row, ...]] = deque()
        ahead = 0  # of tokens that frames in flight may give each row
        while any(not row.ended for row in rows) or flying:
            live = [row for row in rows if not row.ended and row.limit - len(row.tokens) > ahead]
            window = 1 if source is Source.COPY else 2
            if live and len(flying) < window and not (flying and len(live) < len([r for r in rows if not r.ended])):
                self._submit(live, source, width, ahead)
                flying.append(tuple(live))
                ahead += width
                continue
            for row, result in zip(flying.popleft(), self._wait().results, strict=True):
                row.tokens += result.tokens
                row.ended |= result.ended is not None
                row.rounds += bool(result.tokens)
            ahead -= width

    def close(self) -> None:
        """Give it all back."""
        self.device.close()

    def _prefill(self, row: Row, slot: int) -> None:
        each = MAX_MODEL_LEN // PAGE_TOKENS
        pages = tuple(PageId(slot * each + page) for page in range(each))
        self._fence += 1
        row.handle = RequestHandle(slot, self._fence)
        binding = Binding(pages, row.sampling, self._stop, row.limit)
        for start in range(0, len(row.prompt), PREFILL.prefill_tokens):
            part = np.array(row.prompt[start : start + PREFILL.prefill_tokens], np.int32)
            end = start + len(part)
            target = row.prompt[end] if end < len(row.prompt) else None
            lane = LaneInput(row.handle, start, target is None, part, target, None if start else binding)
            self._frame(PREFILL, [lane])
            (result,) = self._wait().results
        row.tokens, row.ended = list(result.tokens), result.ended is not None

    def _submit(self, rows: Sequence[Row], source: Source | None, width: int, ahead: int) -> None:
        batch = next(batch for batch in BATCHES if batch >= len(rows))
        lanes = []
        for row in rows:
            most = min(width, row.limit - len(row.tokens) - ahead)
            copies = row.copies(most - 1) if source is Source.COPY else None
            given = np.array(copies, np.int32) if copies else None
            wide = most if copies is None else len(copies) + 1
            lanes.append(LaneInput(row.handle, 0, True, width=wide, proposals=given))
        shape = GraphShape(GraphKind.DECODE, batch)
        if source is not None and (width > 1 or source is Source.DRAFT):
            shape = rectangular(GraphKind.SPECULATIVE, batch, width, source=source)
        self._frame(shape, lanes)

    def _frame(self, shape: GraphShape, lanes: Sequence[LaneInput]) -> None:
        self._fence += 1
        self.device.submit(Frame(Fence(self._fence), shape, tuple(lanes)))

    def _wait(self) -> Completion:
        done = self._done.get()
        if done.error is not None:
            raise RuntimeError(done.error)
        return done


class Exact:
    """The model in float32, loaded once it is asked."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._decoder: Decoder | None = None

    @torch.inference_mode()
    def gap(self, row: Row, expected: Sequence[int], at: int) -> float:
        """How much more it likes the token `at` of plain decode than that of the rounds, noise included."""
        config = self._model.config
        self._decoder = self._decoder or Decoder(config, self._model.weights, MAX_MODEL_LEN, torch.float32)
        ids = torch.tensor([*row.prompt, *expected[:at]])
        pages = -(-len(ids) // PAGE_TOKENS)
        kv = KvPages.allocate(config, pages, torch.float32)
        hidden = self._decoder.forward(ids, [Span(0, len(ids), 0, torch.arange(pages))], kv)
        z = self._decoder.logits(hidden[-1:])[0]
        if row.sampling.temperature:
            z = z / row.sampling.temperature + gumbel(draw_key(row.sampling.seed, len(ids)), torch.arange(len(z)))
        return float(z[expected[at]] - z[row.tokens[at]])


def compare(
    server: Server, exact: Exact, rows: Sequence[Row], source: Source, width: int, batch: int
) -> tuple[int, int, int, list[Difference]]:
    """Serve copies of finished requests in groups: texts, tokens and rounds of them, and what differs."""
    texts = tokens = rounds = 0
    found = []
    for first in range(0, len(rows), batch):
        plain = rows[first : first + batch]
        served = [Row(row.name, row.prompt, row.sampling, row.limit) for row in plain]
        server.serve(served, source, width)
        for row, expected in zip(served, plain, strict=True):
            texts, tokens, rounds = texts + 1, tokens + len(row.tokens) - 1, rounds + row.rounds
            if row.tokens == expected.tokens:
                continue
            pairs = zip(row.tokens, expected.tokens, strict=False)
            at = next(i for i, (one, other) in enumerate(pairs) if one != other)
            gap = exact.gap(row, expected.tokens, at)
            found.append(Difference(f"{source}, width {width}, batch {batch}", row.name, at, gap))
    return texts, tokens, rounds, found


def draft_of(model: Model, layers: int) -> DraftModel:
    """The head that is shipped, if there is one and no cut is asked for; else the first layers of the model."""
    if not layers and HEAD.exists():
        return load_draft_head(HEAD, model.config, model.weights)
    config = msgspec.structs.replace(model.config, layers=layers or 4)
    return whole_model(f"the first {config.layers} layers", config, model.weights, model.config)


def requests(model: Model, limit: int) -> list[Row]:
    """All prompts, greedy and then sampled."""
    assert model.chat is not None
    prompts = [list(model.tokenizer.encode(text, False)) for text in TEXTS]
    prompts += [list(model.chat.render([{"role": "user", "content": each}]).tokens) for each in QUESTIONS]
    kinds = {"greedy": Sampling(temperature=0.0), "sampled": Sampling(temperature=0.8, top_p=0.95)}
    return [
        Row(f"prompt {i}, {kind}", prompt, replace(sampling, seed=i), limit)
        for kind, sampling in kinds.items()
        for i, prompt in enumerate(prompts)
    ]


def main(
    draft_layers: Annotated[int, typer.Option(help="Draft with so many layers of the model (0: the head).")] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 24,
    threads: Annotated[int, typer.Option(min=1, help="Threads to use.")] = os.cpu_count() or 1,
) -> None:
    """Compare, print a table, and fail if a text differs where the exact model does not nearly tie."""
    began, console, model = time.monotonic(), Console(markup=False), open_model(None, lambda *_: None)
    draft, exact = draft_of(model, draft_layers), Exact(model)
    server = Server(model, draft, threads, model.tokenizer.eos_ids)
    rows = requests(model, tokens)
    for row in rows:
        server.serve([row], None, 1)
    table = Table("source", "width", "batch", "texts", "equal", "tokens a round", title=f"Drafts: {draft.name}")
    different: list[Difference] = []
    turn = cycle(rows[::2] + rows[1::2])
    ways = [(source, width, batch) for source in Source for width in WIDTHS for batch in BATCHES]
    for source, width, batch in track(ways, console=console):
        if source is Source.COPY and width == 1:
            continue
        asked = [next(turn) for _ in range(BATCHES[batch])]
        texts, given, rounds, found = compare(server, exact, asked, source, width, batch)
        different += found
        equal = str(texts - len(found))
        table.add_row(str(source), str(width), str(batch), str(texts), equal, f"{given / rounds:.2f}")
    server.close()
    console.print(table)
    for each in different:
        kind = "a near tie" if abs(each.gap) < NEAR_TIE else "NO TIE"
        console.print(f"{each.where}: {each.prompt} differs at token {each.at}, gap {each.gap:+.4f}: {kind}")
    console.print(f"{len(different)} texts differ; {time.monotonic() - began:.0f} s")
    if any(abs(each.gap) >= NEAR_TIE for each in different):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""What one call of the tool does, over the folder that it works in.

Owns the folder's layout, the end of a slice of time, and what people see meanwhile. Does not own the command line or
any single part. Surprising rule: each part goes on where it was stopped, and none of its results depends on where that
was.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flare.default_model import DEFAULT_MODEL
from flare.graphs.frames import Sampling
from flare.graphs.models.draft import load_draft_head
from flare.model import Model, open_model

from .head import DraftHead
from .judge import Acceptance, acceptance
from .learner import Learner, Plan, first_head, most_used
from .prompts import ASKED, Messages, asked_prompts, drawn_prompts, held_out_prompts, kept_questions
from .texts import OUTPUT_MAX, PROMPT_MAX, SHARD_TEXTS, Order, Text, Writer, load_texts, write_shards
from .unroll import Target

LANES = 48
LEARNT, KEPT = 16384, 4096
"""Tokens that the head learns of, and that it proposes from when it is trained."""

ASKED_OUTPUT = 112
"""Tokens of an answer to a question that the model asked itself: many short answers teach more than few long ones."""

QUESTION_MAX = 80
ASKING = Sampling(temperature=0.9, top_p=0.95)
QUESTIONS_APART = 6_000
"""Seeds of questions between two seeds of the tool."""

FIRST_TEXTS = 500
"""Texts that the first head is fitted to."""

HELD_OUT_OUTPUT = 128
HELD_OUT_SEED = 1_000_000
WRITTEN = ("texts", "asked")
"""Folders of the texts to train on."""

TEMPERATURES = (0.0, 0.7)
"""Of the held-out texts."""

LOOK_STEPS = 50
"""Steps of training between two looks at the held-out texts, some of them; the checkpoint is kept then too."""

LOOK_TEXTS = 25


class OutOfTime(Exception):
    """The slice is over; the same call goes on."""


class Work:
    """One call: the model, the folder, and `slice_minutes` from now. `threads` cores are used."""

    def __init__(self, folder: Path, slice_minutes: float, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = open_model(None, lambda *_: None)
        self._folder = folder
        self._end = time.monotonic() + 60 * slice_minutes

    def ask(self, count: int, seed: int) -> None:
        """Let the model write up to `count` questions of its own, given nothing but the opening of a user's turn (Xu et
        al., 2024, arXiv:2406.08464), into the file of asked questions. Raises `OutOfTime`."""
        count += -count % SHARD_TEXTS
        opening = _opening(self._model)
        settings = (replace(ASKING, seed=seed * QUESTIONS_APART + i) for i in range(count))
        orders = (Order(i, opening, sampling) for i, sampling in enumerate(settings))
        self._write("questions", orders, count, QUESTION_MAX)
        ended = (text for text in self._texts("questions") if int(text.tokens[-1]) in self._model.tokenizer.eos_ids)
        decode = self._model.tokenizer.decode
        questions = kept_questions(decode(text.tokens[text.prompt : -1].tolist()) for text in ended)
        ASKED.write_text("".join(f"{question}\n" for question in questions), encoding="utf-8")

    def write(self, count: int, seed: int) -> None:
        """Let the model write `count` texts from drawn prompts, up to a whole shard, those from the questions that it
        asked itself, and the held-out ones. Raises `OutOfTime`."""
        count += -count % SHARD_TEXTS
        asked = [_rendered(self._model, messages) for messages in held_out_prompts()]
        for temperature in TEMPERATURES:
            settings = (Sampling(temperature=temperature, seed=HELD_OUT_SEED + i) for i in itertools.count())
            orders = (Order(*order) for order in zip(itertools.count(), asked, settings, strict=False))
            self._write(_held_out(temperature), orders, len(asked), HELD_OUT_OUTPUT)
        self._write(
            "texts", itertools.islice(_orders(self._model, drawn_prompts(seed), seed), count), count, OUTPUT_MAX
        )
        asks = list(_orders(self._model, asked_prompts(), seed))
        del asks[len(asks) - len(asks) % SHARD_TEXTS :]
        self._write("asked", iter(asks), len(asks), ASKED_OUTPUT)

    def train(self, plan: Plan) -> None:
        """Train the head on the texts. Raises `OutOfTime`, and ValueError if there are no texts or another plan's
        checkpoint."""
        learner = self._learner(plan)
        texts = self._texts(_held_out(0.0))[:LOOK_TEXTS]
        with _progress() as progress:
            bar = progress.add_task("training", total=plan.steps, completed=learner.step)
            while learner.step < plan.steps:
                losses = learner.advance()
                progress.advance(bar)
                if self._over() or learner.step % LOOK_STEPS == 0 or learner.step == plan.steps:
                    learner.save(self._checkpoint)
                    self._check()
                    found = acceptance(learner.head, learner.target, texts)
                    shown = " ".join(f"{loss:.3f}" for loss in losses)
                    progress.console.print(f"step {learner.step}: losses {shown}; accepted {_words(found)}")

    def deliver(self, plan: Plan, path: Path) -> None:
        """Write the trained head's file, and judge it. Raises ValueError if training is not complete."""
        learner = self._learner(plan)
        if learner.step < plan.steps:
            raise ValueError(f"{self._checkpoint}: step {learner.step} of {plan.steps}; train first")
        head = replace(learner.head, kept=most_used(learner.texts, KEPT, self._model.config.vocab))
        head.save(path, {})
        found = self.judge(path)
        facts = {
            "model": DEFAULT_MODEL.file_name,
            "sha256": DEFAULT_MODEL.sha256,
            "tokens": str(learner.tokens),
            "steps": str(plan.steps),
            "seed": str(plan.seed),
            "held_out": json.dumps({name: round(one.mean, 3) for name, one in found.items()}),
        }
        head.save(path, facts)

    def judge(self, path: Path) -> Mapping[str, Acceptance]:
        """Print and return how much of a file's proposals is accepted."""
        config, weights = self._model.config, self._model.weights
        head = DraftHead.of(load_draft_head(path, config, weights), config)
        target = Target(weights, head)
        found = {
            f"temperature {temperature}{note}": acceptance(one, target, self._texts(_held_out(temperature)))
            for one, note in ((head, ""), (head.in_bytes(), ", weights in bytes"))
            for temperature in TEMPERATURES
        }
        Console().print(_table(found))
        return found

    @property
    def _checkpoint(self) -> Path:
        return self._folder / "training.pt"

    def _over(self) -> bool:
        return time.monotonic() > self._end

    def _check(self) -> None:
        if self._over():
            raise OutOfTime("the slice is over; the same command goes on from here")

    def _write(self, folder: str, orders: Iterator[Order], count: int, output_max: int) -> None:
        model = self._model
        writer = Writer(model.config, model.weights, model.tokenizer.eos_ids, LANES, output_max)
        with _progress() as progress:
            bar = progress.add_task(folder, total=count)
            write_shards(writer, self._folder / folder, orders, self._over, lambda: progress.advance(bar))
        writer.close()
        self._check()

    def _texts(self, *folders: str) -> list[Text]:
        texts = []
        for folder in folders:
            paths = sorted((self._folder / folder).glob("*.safetensors"))
            if not paths:
                raise ValueError(f"{self._folder / folder}: there are no texts; generate them first")
            texts += [text for path in paths for text in load_texts(path)]
        return texts

    def _learner(self, plan: Plan) -> Learner:
        """A training, from where it stood."""
        texts, config, weights = self._texts(*WRITTEN), self._model.config, self._model.weights
        head = first_head(config, weights, most_used(texts, LEARNT, config.vocab), texts[:FIRST_TEXTS], plan.seed)
        learner = Learner(plan, head, Target(weights, head), texts)
        if self._checkpoint.exists():
            learner.resume(self._checkpoint)
        return learner


def _orders(model: Model, prompts: Iterable[Messages], seed: int) -> Iterator[Order]:
    """Texts to train on: every second greedy, the others drawn at temperatures of 0.7 to 1."""
    draw, index = random.Random(seed), 0
    for messages in prompts:
        prompt, temperature = _rendered(model, messages), draw.uniform(0.7, 1.0)
        if len(prompt) <= PROMPT_MAX:
            yield Order(index, prompt, Sampling(temperature=temperature if index % 2 else 0.0, seed=index))
            index += 1


def _opening(model: Model) -> tuple[int, ...]:
    """What stands before any user's first word."""
    one, other = (_rendered(model, (("user", content),)) for content in ("?", "!"))
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(token for token, _ in alike)


def _rendered(model: Model, messages: Messages) -> tuple[int, ...]:
    assert model.chat is not None
    return model.chat.render([{"role": role, "content": content} for role, content in messages]).tokens


def _held_out(temperature: float) -> str:
    return f"held-out-{temperature}"


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def _words(found: Acceptance) -> str:
    return f"{found.mean:.3f} ({', '.join(f'{rate:.3f}' for rate in found.rates)})"


def _table(found: Mapping[str, Acceptance]) -> Table:
    depth = next(iter(found.values())).mean_depth
    table = Table("", *(f"depth {d + 1}" for d in range(depth + 1)), f"mean of {depth}", "per round")
    for name, one in found.items():
        numbers = (*one.rates, one.mean, one.rounds)
        table.add_row(name, *(f"{number:.3f}" for number in numbers))
    return table

"""Train the draft head of the default model: `python -m tools.train_draft all --work FOLDER`.

Owns the command line. Does not own what the commands do (`tools/draft`). Surprising rule: a command that ends with exit
code 3 was stopped at the end of its slice of time, and goes on when it is given again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flare.failure import show_error
from tools.draft.learner import Plan
from tools.draft.work import OutOfTime, Work

HEAD = Path(__file__).parents[1] / "graphs" / "models" / "drafts" / "smollm2-135m-instruct.safetensors"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Folder = Annotated[Path, typer.Option("--work", help="Folder for texts and checkpoint; a few GB.")]
Texts = Annotated[int, typer.Option(min=1, help="Texts to train on, beside those of asked.txt.")]
Questions = Annotated[int, typer.Option(min=1, help="Questions to write; some are no use.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of training.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, texts and training.")]
Slice = Annotated[float, typer.Option("--slice-minutes", min=0, help="Stop after so long.")]
Threads = Annotated[int, typer.Option(min=1, help="Cores to use.")]
Head = Annotated[Path, typer.Option(help="File of the head.")]

TEXTS, QUESTIONS, STEPS, SEED, MINUTES, THREADS = 2350, 3700, 800, 1, 60.0, 2


@app.command()
def ask(
    work: Folder,
    questions: Questions = QUESTIONS,
    seed: Seed = SEED,
    minutes: Slice = MINUTES,
    threads: Threads = THREADS,
) -> None:
    """Let the model write the questions of asked.txt anew."""
    with _told():
        Work(work, minutes, threads).ask(questions, seed)


@app.command()
def generate(
    work: Folder, texts: Texts = TEXTS, seed: Seed = SEED, minutes: Slice = MINUTES, threads: Threads = THREADS
) -> None:
    """Let the model write the texts."""
    with _told():
        Work(work, minutes, threads).write(texts, seed)


@app.command()
def train(
    work: Folder, steps: Steps = STEPS, seed: Seed = SEED, minutes: Slice = MINUTES, threads: Threads = THREADS
) -> None:
    """Train a head on the texts."""
    with _told():
        Work(work, minutes, threads).train(Plan(steps, seed))


@app.command()
def export(
    work: Folder, steps: Steps = STEPS, seed: Seed = SEED, threads: Threads = THREADS, head: Head = HEAD
) -> None:
    """Write the file of the trained head, and judge it."""
    with _told():
        Work(work, MINUTES, threads).deliver(Plan(steps, seed), head)


@app.command()
def evaluate(work: Folder, threads: Threads = THREADS, head: Head = HEAD) -> None:
    """Judge a head's file on the held-out texts."""
    with _told():
        Work(work, MINUTES, threads).judge(head)


@app.command("all")
def everything(
    work: Folder,
    texts: Texts = TEXTS,
    steps: Steps = STEPS,
    seed: Seed = SEED,
    minutes: Slice = MINUTES,
    threads: Threads = THREADS,
    head: Head = HEAD,
) -> None:
    """Generate, train and export."""
    with _told():
        one, plan = Work(work, minutes, threads), Plan(steps, seed)
        one.write(texts, seed)
        one.train(plan)
        one.deliver(plan, head)


@contextmanager
def _told() -> Iterator[None]:
    """Says what went wrong in one line."""
    try:
        yield
    except OutOfTime as end:
        show_error(end)
        sys.exit(3)
    except (OSError, ValueError) as error:
        show_error(error)
        sys.exit(2)


if __name__ == "__main__":
    app()

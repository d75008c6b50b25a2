"""Everything that only a GPU can show, in one command of less than eight minutes: `python -m tools.gpu_check`.

Owns the order of the sections, what is printed, and the files: all findings as JSON, and the durations of graphs as a
table that `flare simulate` reads. Does not own a measurement (`tools/gpu`). Surprising rule: nothing is skipped. What
cannot be done is a row that says so, and the exit status is 1 if any row failed. The files are written after every
section, so that a machine that is taken away leaves what was found.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer
from rich.console import Console

from flare.config.schema import Settings
from flare.draft import open_draft
from flare.graphs.cuda.driver import open_runtime
from flare.graphs.cuda.failures import NoDevice
from flare.graphs.cuda.plan import DType, torch_dtype
from flare.graphs.cuda.runtime import CardFacts, Runtime
from flare.graphs.memory.pages import PAGE_TOKENS, page_bytes
from flare.model import open_model
from tools.gpu.capture import capture_findings
from tools.gpu.conformance import run_suites
from tools.gpu.costs import measure_costs
from tools.gpu.logits import compare_logits, compare_texts
from tools.gpu.mixed import serve_mixture
from tools.gpu.models import OpenRuntime, RandomWeights, Subject, on_gpu, planned, tiny
from tools.gpu.player import Player, playing
from tools.gpu.replay import Pace, around_a_frame, compared, paces
from tools.gpu.report import Finding, guarded, show
from tools.gpu.sizes import Sizes

TEXTS = 14
"""Reference texts, each in a slot of its own."""


class Result(msgspec.Struct):
    """All that was found. `costs` is empty where graphs could not be measured."""

    card: CardFacts
    torch: str
    findings: list[Finding] = []
    costs: dict[str, object] = {}


class Check:
    """The sections, on one card; each leaves its findings in `result`, and has `save` called with all so far."""

    def __init__(
        self, open_card: OpenRuntime, sizes: Sizes, console: Console, save: Callable[[Result], None] = lambda _: None
    ) -> None:
        self._began = time.monotonic()
        runtime = open_card()
        self.result = Result(runtime.facts(), str(torch.__version__))
        runtime.close()
        self._open = open_card
        self._sizes = sizes
        self._console = console
        self._save = save
        self._paces: dict[str, dict[int, Pace]] = {}

    def run(self, model: Callable[[], Subject], suites: Callable[[], Iterable[Finding]]) -> None:
        """All of it. `model` opens the default model, `suites` runs the conformance suites."""
        sizes = self._sizes
        kind = sizes.kind
        both: tuple[DType, ...] = ("float32", "bfloat16")
        self._section("conformance", suites)
        for family in sizes.families:
            config = tiny(family)
            subject = Subject(f"tiny {family}", config, RandomWeights(config, torch.device("cpu")), 4, 256)
            self._section("logits", partial(compare_logits, subject, self._open_card, ("float32",), kind))
        self._section("logits", lambda: compare_logits(model(), self._open_card, both, kind))
        self._section("greedy texts", lambda: compare_texts(model(), self._open_card, both, kind, sizes.references))
        self._section("large model", self._captured)
        self._section("large model, eager", self._eager)
        self._section("streams", lambda: compared(self._paces["two"], self._paces["one"], self._paces["eager"]))

    def _section(self, name: str, run: Callable[[], Iterable[Finding]]) -> None:
        passed = time.monotonic() - self._began
        if passed <= self._sizes.time_s:
            self.result.findings.extend(guarded(name, run, self._console))
        else:
            self.result.findings.append(Finding(name, "not begun", f"{passed:.0f} s have passed", "runs", ok=False))
        self._save(self.result)

    def _open_card(self) -> Runtime:
        """For one more device; the memory of those before goes with them."""
        gc.collect()
        return self._open()

    def _captured(self) -> Iterator[Finding]:
        """All that captured graphs of the large model are asked."""
        sizes, vocab = self._sizes, self._sizes.large.vocab
        with self._large(eager=False) as player:
            self._section("costs", lambda: self._costs(player))
            self._section("latency", lambda: around_a_frame(player, vocab, frames=sizes.frames))
            for name, in_flight in (("two", 2), ("one", 1)):
                self._section("pace", partial(self._pace, player, name, in_flight, sizes.frames))
            self._section("mixed", lambda: serve_mixture(player, vocab, sizes.load))
            yield Finding("large model", "graphs", f"{len(player.catalog)}, and all were captured")

    def _eager(self) -> Iterator[Finding]:
        """The yardstick."""
        with self._large(eager=True) as player:
            yield from self._pace(player, "eager", 2, self._sizes.frames // 4)

    def _pace(self, player: Player, name: str, in_flight: int, frames: int) -> Iterator[Finding]:
        self._paces[name] = measured = paces(player, self._sizes.large.vocab, frames=frames, in_flight=in_flight)
        yield Finding("pace", name, f"at {', '.join(map(str, measured))} streams")

    @contextmanager
    def _large(self, *, eager: bool) -> Iterator[Player]:
        sizes, catalog, runtime = self._sizes, self._sizes.catalog(), self._open_card()
        config, dtype = sizes.large, sizes.dtype
        subject = Subject(
            "large", config, RandomWeights(config, runtime.torch_device), sizes.slots, sizes.max_model_len
        )
        free, plan = runtime.free_bytes(), planned(subject, runtime, catalog, dtype)
        notes: list[str] = []
        device = on_gpu(subject, runtime, catalog, dtype, eager=eager, log=notes.append, kind=sizes.kind)
        with playing(device, catalog, sizes.max_model_len) as player:
            chosen = [note for note in notes if note.startswith("attention: ")]
            self.result.findings.extend(Finding("attention", "", note.removeprefix("attention: ")) for note in chosen)
            if not eager:
                taken = free - runtime.free_bytes()
                self._section("capture", lambda: capture_findings(player, plan, taken))
            yield player

    def _costs(self, player: Player) -> Iterator[Finding]:
        config, card = self._sizes.large, self.result.card
        dtype = torch_dtype(self._sizes.dtype, card)
        table = measure_costs(player, config.vocab, context=self._sizes.context, repeats=self._sizes.repeats)
        self.result.costs = {
            "gpu": card.name,
            "model": f"{config.architecture}, {config.hidden} x {config.layers}, random weights",
            "dtype": str(dtype).removeprefix("torch."),
            "kv_bytes_per_token": page_bytes(config, dtype) // PAGE_TOKENS,
            **table,
        }
        graphs = table["graphs"]
        assert isinstance(graphs, dict)
        for name, ms in graphs.items():
            yield Finding("costs", name, f"{ms:.3f} ms")


def default_subject(path: str | None) -> Subject:
    """The default model with the head that drafts for it; fetched, where no file is named."""
    model = open_model(path, lambda *_: None)
    draft = open_draft(Settings(), model, lambda *_: None)
    return Subject("SmolLM2-135M", model.config, model.weights, TEXTS, 256, draft)


def main(
    model: Annotated[str | None, typer.Option(help="The default model's file, where it cannot be fetched.")] = None,
    json_file: Annotated[Path, typer.Option("--json", help="All findings.")] = Path("gpu_check.json"),
    costs_file: Annotated[Path, typer.Option("--costs", help="The table for flare simulate.")] = Path("gpu_costs.json"),
) -> None:
    """Check one GPU."""
    console, began = Console(width=140, markup=False, emoji=False), time.monotonic()

    def save(result: Result) -> None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
        if result.costs:
            costs_file.write_bytes(msgspec.json.format(msgspec.json.encode(result.costs), indent=2) + b"\n")

    try:
        check = Check(open_runtime, Sizes(), console, save)
    except NoDevice as error:
        console.print(f"gpu_check: {error}")
        raise typer.Exit(2) from None
    check.run(lambda: default_subject(model), run_suites)
    result = check.result
    show(console, result.findings)
    card, failed = result.card, [each for each in result.findings if not each.ok]
    driver, runtime = (".".join(map(str, version)) for version in (card.driver, card.runtime))
    capability, gib = "".join(map(str, card.capability)), card.total_bytes / 2**30
    console.print(f"{card.name}, sm_{capability}, {gib:.0f} GiB; driver for CUDA {driver}; runtime {runtime}")
    took = f"{time.monotonic() - began:.0f} s"
    console.print(f"torch {result.torch}; {len(failed)} of {len(result.findings)} rows failed; {took}", highlight=False)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)

"""The command `flare`.

Owns the list of commands and `main`. Does not own what they do. Surprising rule: a command's module is imported only
when that command is called, so that `flare chat` does not wait for what `flare run` needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module, metadata
from typing import Annotated, NamedTuple, Protocol

import typer


class _Runnable(Protocol):
    """A command of click, or of the copy of it that is inside typer."""

    def main(self, args: list[str], prog_name: str) -> object: ...


class _Command(NamedTuple):
    name: str
    load: Callable[[], _Runnable]
    help: str


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments` (default: the process's own). Ends the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for command in _COMMANDS:
        if given[:1] == [command.name]:
            command.load().main(given[1:], prog_name=f"flare {command.name}")
    _overview()(given, prog_name="flare")


def _run() -> _Runnable:
    command: _Runnable = import_module(".run_command", __package__).command()
    return command


def _of(module: str, function: str) -> _Runnable:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(getattr(import_module(f".{module}", __package__), function))
    return typer.main.get_command(app)


_COMMANDS = (
    _Command("run", _run, "Serve a model over an OpenAI-compatible HTTP API."),
    _Command("chat", partial(_of, "chat_client", "chat"), "Talk to a running server."),
    _Command("bench", partial(_of, "bench.command", "bench"), "Put load on a server and report what clients see."),
    _Command("graphs", partial(_of, "graphs_command", "graphs"), "The prepared graphs, and their measured durations."),
    _Command(
        "simulate", partial(_of, "simulate.command", "simulate"), "Serve a trace in virtual time, by several rules."
    ),
    _Command("tune", partial(_of, "tune.command", "tune"), "Search a policy's coefficients by simulation."),
    _Command("explain", partial(_of, "explain", "explain"), "Take logged decisions again, and show why a plan won."),
)


def _overview() -> typer.Typer:
    """What answers `flare --help`, `flare --version` and names of no command."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_options)
    for command in _COMMANDS:
        app.command(command.name, help=command.help)(_listed)
    return app


def _listed() -> None:
    """Stands for a command in the overview; `main` has run it before it can come to this."""


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(metadata.version("flare-serve"))
        except metadata.PackageNotFoundError:
            typer.echo("not installed")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Flare serves language models through prepared graphs, each chosen by its measured value per millisecond."""

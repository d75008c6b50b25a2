"""The command `flare run`, its options made from the settings' schema.

Owns the mapping from a settings key to a flag. Does not own types, ranges or defaults (`flare/config` does). Surprising
rule: an option that is not given is None, so that the environment and the configuration file can still speak.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from msgspec.inspect import BoolType, VarTupleType

from flare.config.convert import described, fields_by_key, only_in_files
from flare.config.devices import default_texts
from flare.config.loader import flag_of
from flare.config.schema import ConfigError, Settings


def command() -> click.Command:
    """`flare run` with a flag for every key of `Settings`, and `--config`."""
    config = click.Option(
        ["--config", "config_file"],
        type=click.Path(dir_okay=False, path_type=Path),
        help="TOML file with any of these settings (docs/configuration.md).",
    )
    options = [_option(key) for key, field in fields_by_key(Settings).items() if not only_in_files(field)]
    return click.Command(
        "run",
        callback=_run,
        params=[config, *options],
        help="Serve a model over an OpenAI-compatible API.",
    )


def _option(key: str) -> click.Option:
    field = fields_by_key(Settings)[key]
    kind, text = described(field)
    flag = flag_of(key)
    if isinstance(kind, BoolType):
        return click.Option([f"{flag}/--no-{flag[2:]}", key], default=None, help=text)
    if isinstance(kind, VarTupleType):
        return click.Option([flag, key], multiple=True, metavar="TEXT", help=f"{text} May be repeated.")
    default = default_texts(field)
    return click.Option(
        [flag, key], default=None, metavar="VALUE", help=text if default == "unset" else f"{text}  [default: {default}]"
    )


def _run(config_file: Path | None, **given: object) -> None:
    from .device_choice import choose_device  # torch is imported by no other command

    overrides = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    try:
        choice = choose_device(config_file, {key: each for key, each in overrides.items() if each not in (None, [])})
    except ConfigError as error:
        print(f"flare run: {error}", file=sys.stderr)
        sys.exit(2)
    from .run import serve  # only now: it takes seconds

    sys.exit(serve(choice))

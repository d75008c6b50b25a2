"""Where settings come from: flags, the environment, a TOML file, defaults, in falling precedence.

Owns the sources and their precedence. Does not own types and ranges (`schema`) or the checks (`convert`).
Surprising rule: a policy file is an overlay: what it leaves out is taken from the balanced preset.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType

from .convert import build, checked_table, fields_by_key, nearest, only_in_files
from .schema import ConfigError, Policy, Recipe, Settings

ENVIRONMENT_PREFIX = "FLARE_"
RESERVED_ENVIRONMENT = frozenset({"FLARE_CACHE_DIR"})
"""Variables with the prefix that are no settings: where fetched models and compiled code are kept."""

BASE_POLICY = "balanced"


def load_settings(
    config_file: Path | None,
    overrides: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> Settings:
    """The settings of one server: `overrides` (flags), else environment, else file, else `defaults` (those of a
    device), else the schema's.

    Keys are those of docs/configuration.md. A flag's value may be text or of its type, and None means not given.
    Variables are `FLARE_` and the key in capitals (`environment` None: the process's own).
    Raises `ConfigError` naming the flag, variable or key at fault.
    """
    values = dict(defaults)
    if config_file is not None:
        values |= checked_table(Settings, _table(config_file), lambda key: f"{config_file}: {key}")
    values |= _from_environment(os.environ if environment is None else environment)
    given = {key: value for key, value in overrides.items() if value is not None}
    values |= checked_table(Settings, given, flag_of, text=True)
    settings = build(Settings, values, "settings")
    if settings.trace_views and settings.trace is None:
        raise ConfigError("trace_views: views are written to the trace file; set trace too")
    unknown = [index for index, key in enumerate(settings.client_weights, start=1) if key not in settings.api_key]
    if unknown:
        raise ConfigError(f"client_weights: the key of entry {unknown[0]} is not in api_key; add it there")
    return settings


def load_policy(
    name_or_path: str,
    terminal_value: float | None = None,
    terminal_age_price: float | None = None,
    verification_alpha: float | None = None,
) -> Policy:
    """The policy of a preset or of a file, with the terminal coefficients and the exponent replaced where given.

    Raises `ConfigError` naming the file and the key, or the presets if there is no such preset or file.
    """
    source = _find("policies", name_or_path)
    values = _policy_values(_find("policies", BASE_POLICY)) | _policy_values(source)
    given = {"terminal_value": terminal_value, "terminal_age_price": terminal_age_price}
    values |= checked_table(
        Policy, {key: value for key, value in given.items() if value is not None}, lambda key: f"scheduler_{key}"
    )
    if verification_alpha is not None:
        values["adaptive_verification_alpha"] = verification_alpha
    policy = build(Policy, values, str(source))
    if 0.0 < policy.first_output_growth_ms < 1.0:
        raise ConfigError(f"{source}: first_output_growth_ms: must be 0 (no growth) or at least 1")
    return policy


def load_recipe(name_or_path: str) -> Recipe:
    """The recipe of that name or path. Raises `ConfigError` naming the file and the key."""
    source = _find("recipes", name_or_path)
    return build(Recipe, checked_table(Recipe, _table(source), lambda key: f"{source}: {key}"), str(source))


def flag_of(key: str) -> str:
    """The command-line flag of a settings key: the key without its unit, as `--shutdown-timeout`."""
    return "--" + key.removesuffix("_s").replace("_", "-")


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    fields = fields_by_key(Settings).items()
    known = {ENVIRONMENT_PREFIX + key.upper(): key for key, field in fields if not only_in_files(field)}
    tables = {key for key, field in fields if only_in_files(field)}
    given: dict[str, object] = {}
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in RESERVED_ENVIRONMENT:
            continue
        if name.removeprefix(ENVIRONMENT_PREFIX).lower() in tables:
            raise ConfigError(f"environment variable {name}: is a table; set it in the file of --config")
        if name not in known:
            raise ConfigError(f"environment variable {name}: unknown setting; {nearest(name, known)}")
        given[known[name]] = environment[name]
    return checked_table(
        Settings, given, lambda key: f"environment variable {ENVIRONMENT_PREFIX}{key.upper()}", text=True
    )


def _policy_values(source: Traversable) -> dict[str, object]:
    return checked_table(Policy, _table(source), lambda key: f"{source}: {key}")


def _find(folder: str, name_or_path: str) -> Traversable:
    """The packaged file `folder`/`name_or_path`.toml, else the file at that path."""
    presets = files(__package__) / folder
    names = sorted(entry.name.removesuffix(".toml") for entry in presets.iterdir() if entry.name.endswith(".toml"))
    if name_or_path in names:
        return presets / f"{name_or_path}.toml"
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(f"{name_or_path}: neither a file nor one of the {folder} {', '.join(names)}")
    return path


def _table(source: Traversable) -> dict[str, object]:
    try:
        return tomllib.loads(source.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(f"{source}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None

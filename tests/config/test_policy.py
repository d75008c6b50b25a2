"""Policies: the presets' coefficients, files that overlay them, and refusals by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flare.config.loader import load_policy
from flare.config.schema import ConfigError, Policy
from flare.machines.selection.view import PolicyRow
from flare.scheduling import policy_row

BALANCED = Policy(
    output_token_value=64,
    token_fairness=16,
    delivery_fairness=4,
    decode_age_price=0.1,
    terminal_value=256,
    terminal_age_price=1,
    adaptation_ms=100,
    estimate_ttl_ms=30_000,
    newcomer_share=8,
)
SWITCHES = ("host_gap_pricing",)


def test_balanced_is_the_documented_set() -> None:
    assert load_policy("balanced") == BALANCED
    assert BALANCED.estimate_ttl_ns == 30_000_000_000


def test_throughput_drops_cadence_and_the_head_start_of_newcomers_alone() -> None:
    assert load_policy("throughput") == msgspec.structs.replace(
        BALANCED, delivery_fairness=0, decode_age_price=0, newcomer_share=1
    )


def test_interactive_prices_time_first_outputs_and_gaps() -> None:
    assert load_policy("interactive") == msgspec.structs.replace(
        BALANCED,
        output_token_value=1,
        token_fairness=0,
        output_time_price=100,
        prompt_time_price=400,
        first_output_value=1500,
        first_output_growth_ms=30_000,
        first_output_urgency=50,
        first_output_patience_ms=500,
        gap_price=200,
        gap_stretch=5,
    )


def test_what_only_interactive_prices_is_off_elsewhere() -> None:
    for name in ("balanced", "throughput"):
        policy = load_policy(name)
        assert policy.output_time_price == policy.prompt_time_price == policy.first_output_age_price == 0
        assert policy.first_output_value == policy.first_output_urgency == policy.gap_price == 0


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", ["1", "0.0", '"true"'])
def test_a_switch_is_true_or_false(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f"{key} = {value}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"bad\.toml: {key}"):
        load_policy(str(file))


def test_selection_reads_every_coefficient_of_its_row() -> None:
    names = [field.name for field in msgspec.structs.fields(PolicyRow)]
    values = {name: True if name in SWITCHES else 2.0 + place for place, name in enumerate(names)}
    policy = msgspec.structs.replace(BALANCED, **values)
    assert [getattr(policy_row(policy), name) for name in names] == list(values.values())


def test_growth_is_none_or_takes_a_while(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("first_output_growth_ms = 0.5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.toml: first_output_growth_ms: must be 0 \(no growth\) or at least 1"):
        load_policy(str(file))


def test_terminal_coefficients_replace_those_of_any_policy(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("terminal_value = 7\ntoken_fairness = 0\n", encoding="utf-8")
    assert load_policy(str(file)) == msgspec.structs.replace(BALANCED, terminal_value=7, token_fairness=0)
    policy = load_policy(str(file), terminal_value=0, terminal_age_price=2)
    assert (policy.terminal_value, policy.terminal_age_price) == (0, 2)


@pytest.mark.parametrize("key", [key for key in msgspec.structs.asdict(BALANCED) if key not in SWITCHES])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e300", "true", '"64"'])
def test_no_coefficient_takes_what_is_not_a_sane_number(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f"{key} = {value}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"bad\.toml: {key}"):
        load_policy(str(file))


@pytest.mark.parametrize("key", ["adaptation_ms", "estimate_ttl_ms", "newcomer_share"])
def test_times_and_shares_are_positive(tmp_path: Path, key: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f"{key} = 0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=key):
        load_policy(str(file))


def test_estimates_last_longer_than_the_graphs_they_are_of(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("estimate_ttl_ms = 0.5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.toml: estimate_ttl_ms: expected float of at least 1"):
        load_policy(str(file))


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, "x = " + "1" * 5000])
def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML"):
        load_policy(str(file))


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("\ufefftoken_fairness = 7\n", encoding="utf-8")
    assert load_policy(str(file)).token_fairness == 7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_bad_replacements_are_named(value: float) -> None:
    with pytest.raises(ConfigError, match="scheduler_terminal_value"):
        load_policy("balanced", terminal_value=value)
    with pytest.raises(ConfigError, match="scheduler_terminal_age_price"):
        load_policy("balanced", terminal_age_price=value)


def test_an_unknown_preset_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"fastest.*balanced, interactive, throughput"):
        load_policy("fastest")


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("token_fairnes = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"token_fairnes: unknown key; did you mean token_fairness"):
        load_policy(str(file))

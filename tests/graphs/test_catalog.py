"""The catalog: what a recipe gives a server, and recipes that are refused by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flare.config.loader import load_recipe
from flare.config.schema import ConfigError
from flare.graphs.catalog import Speculation, build_catalog, padded_concurrency
from flare.machines.graph import GraphKind, Source

CPU = load_recipe("cpu")


def names(max_num_seqs: int, max_prefill_tokens: int) -> list[str]:
    return [shape.name for shape in build_catalog(CPU, max_num_seqs, max_prefill_tokens)]


def test_padded_concurrency_is_the_next_power_of_two() -> None:
    for slots in range(1, 65):
        padded = padded_concurrency(slots)
        assert padded.bit_count() == 1
        assert padded // 2 < slots <= padded


@pytest.mark.parametrize("slots", [0, -1, 65])
def test_slots_out_of_range_are_refused(slots: int) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        padded_concurrency(slots)


def test_decode_batches_go_through_the_padded_concurrency() -> None:
    assert names(12, 64)[:5] == ["decode/b1", "decode/b2", "decode/b4", "decode/b8", "decode/b16"]
    assert names(12, 64)[5:] == ["prefill/t16", "prefill/t64", "scored_prefill/t16", "scored_prefill/t64"]
    assert names(1, 16) == ["decode/b1", "prefill/t16", "scored_prefill/t16"]
    assert "decode/b64" in names(33, 64)


def test_prefill_capacities_go_through_the_maximum() -> None:
    catalog = build_catalog(CPU, 16, 512)
    for kind in ("prefill", "scored_prefill"):
        assert [shape.prefill_tokens for shape in catalog if shape.kind == kind] == [16, 64, 128, 256, 512]
    assert len(set(catalog)) == len(catalog)


@pytest.mark.parametrize("tokens", [0, 63, 100, 500, 1 << 20])
def test_a_maximum_that_is_no_capacity_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match="max_prefill_tokens"):
        build_catalog(CPU, 16, tokens)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("decode_batches", (1, 2, 2), "decode_batches: 2 is listed twice"),
        ("decode_batches", (1, 4, 2), "decode_batches: 2 follows 4"),
        ("decode_batches", (1, 128), "decode_batches: 128 is not from 1 to 64"),
        ("decode_batches", (0, 1), "decode_batches: 0 is not"),
        ("decode_batches", (), "no decode graph"),
        ("decode_batches", (32,), "max_num_seqs: too small for .* no decode graph; raise it to 32$"),
        ("prefill_tokens", (64, 64), "prefill_tokens: 64 is listed twice"),
        ("prefill_tokens", (128, 64), "prefill_tokens: 64 follows 128"),
        ("prefill_tokens", (-64, 64), "prefill_tokens: -64 is not"),
        ("scored_prefill_tokens", (64, 64), "scored_prefill_tokens: 64 is listed twice"),
        ("scored_prefill_tokens", (), "no scored_prefill graph"),
        ("mixed_batches", (2, 2), "mixed_batches: 2 is listed twice"),
        ("mixed_batches", (1, 2), "mixed_batches: 1 is not from 2 to 64"),
        ("mixed_batches", (), "mixed_batches: empty, but mixed graphs need both"),
        ("mixed_prefill_tokens", (128, 64), "mixed_prefill_tokens: 64 follows 128"),
        ("mixed_prefill_tokens", (64, 100), "mixed_prefill_tokens: 100 is no multiple of 64; take 64"),
        ("mixed_prefill_tokens", (32,), "mixed_prefill_tokens: 32 is no multiple of 64; take 64"),
        ("mixed_prefill_tokens", (), "mixed_prefill_tokens: empty, but mixed graphs need both"),
        ("prompt_rows", 0, "prompt_rows: 0 is not at least 1"),
    ],
)
def test_a_bad_recipe_is_refused_by_name(key: str, values: tuple[int, ...] | int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_catalog(msgspec.structs.replace(CPU, **{key: values}), 16, 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nprefill_tokens = [64]\ndecode_batches = [1]', "missing scored_prefill_tokens"),
        ('name = "x"\nprefill_token = [64]', "prefill_token: unknown key; did you mean prefill_tokens"),
        ("decode_batches = [1, 128]", "decode_batches"),
        ("decode_batches = [1.5]", "decode_batches"),
        ("prefill_tokens = [0]", "prefill_tokens"),
        ("prefill_tokens = 64", "prefill_tokens"),
    ],
)
def test_a_bad_recipe_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_recipe(str(file))


def test_mixed_graphs_are_prepared_only_if_asked_for() -> None:
    plain = build_catalog(CPU, 4, 256)
    assert all(shape.kind is not GraphKind.MIXED for shape in plain)
    catalog = build_catalog(CPU, 4, 256, mixed_prefill=True)
    assert catalog[: len(plain)] == plain
    mixed = catalog[len(plain) :]
    assert {shape.batch for shape in mixed} == {2, 4}
    assert all(shape.kind is GraphKind.MIXED and shape.prompt_rows == 1 for shape in mixed)
    tokens = [shape.prefill_tokens for shape in mixed if shape.batch == 2]
    assert tokens[0] == 64 and tokens[-1] == 128 and all(n % 64 == 0 for n in tokens)


@pytest.mark.parametrize(
    ("slots", "changes", "told"),
    [
        (1, {}, "max_num_seqs: too small"),
        (4, {"mixed_batches": (), "mixed_prefill_tokens": ()}, "mixed_batches: empty"),
        (4, {"mixed_batches": (8,)}, "max_num_seqs: too small"),
        (4, {"mixed_prefill_tokens": (128,)}, "max_prefill_tokens: too small"),
    ],
)
def test_mixed_graphs_that_do_not_exist_are_refused(slots: int, changes: dict[str, tuple[int, ...]], told: str) -> None:
    with pytest.raises(ConfigError, match=f"{told}.*no mixed graph.*, or leave out --mixed-prefill"):
        build_catalog(msgspec.structs.replace(CPU, **changes), slots, 64, mixed_prefill=True)


def test_prompt_rows_widen_prefill_and_mixed_graphs_as_far_as_rows_go() -> None:
    recipe = msgspec.structs.replace(CPU, prompt_rows=4, prefill_tokens=(64,), scored_prefill_tokens=(64,))
    catalog = build_catalog(recipe, 2, 64, mixed_prefill=True)
    assert [shape.name for shape in catalog] == [
        "decode/b1",
        "decode/b2",
        "prefill/t64r2",
        "scored_prefill/t64",
        "mixed/b2t64",
    ]
    wide = build_catalog(recipe, 16, 64, mixed_prefill=True)
    assert [shape.name for shape in wide if "mixed" in shape.name] == [
        "mixed/b2t64",
        "mixed/b4t64r3",
        "mixed/b8t64r4",
        "mixed/b16t64r4",
    ]


def test_the_simulated_devices_recipe_gives_a_catalog_of_bounded_size() -> None:
    recipe = load_recipe("sim")
    catalog = build_catalog(recipe, 64, 512, mixed_prefill=True)
    assert len(set(catalog)) == len(catalog) <= 45
    assert {shape.kind for shape in catalog} >= {GraphKind.MIXED, GraphKind.DECODE, GraphKind.PREFILL}


def test_an_unknown_recipe_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"gpu.*cpu, cuda, sim"):
        load_recipe("gpu")


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("width", [None, 1, 4])
def test_speculation_replaces_decode_by_rounds_within_its_limits(drafts: bool, width: int | None) -> None:
    speculation = Speculation(drafts, width, 16)
    catalog = build_catalog(load_recipe("cpu"), 8, 256, mixed_prefill=True, speculation=speculation)
    kinds = {shape.kind for shape in catalog}
    assert GraphKind.DECODE not in kinds
    rounds = [shape for shape in catalog if shape.kind is GraphKind.SPECULATIVE]
    assert all(shape.width == 1 or shape.packed_targets <= 16 for shape in rounds)
    if width is not None:
        assert {shape.width for shape in rounds} == {width}
    sources = {shape.source for shape in rounds if shape.width > 1}
    assert sources == (set() if width == 1 else {Source.DRAFT, Source.COPY} if drafts else {Source.COPY})
    mixed = [shape for shape in catalog if shape.kind is GraphKind.MIXED]
    assert mixed
    assert all(shape.drafts for shape in mixed)
    if drafts and width is not None:
        assert {shape.width for shape in mixed} == {width}


def test_an_envelope_that_holds_no_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculative_token_capacity: 3 target rows hold no round of width 4"):
        build_catalog(load_recipe("cpu"), 8, 256, speculation=Speculation(True, 4, 3))

"""Settings: sources, precedence, and refusals that name what is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flare.config.loader import flag_of, load_settings
from flare.config.schema import ConfigError, Policy, Settings
from flare.config.sizes import parse_bytes, size_text


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_need_nothing() -> None:
    assert load_settings(None, {}, {}) == Settings()


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = write(tmp_path / "server.toml", "port = 1\nmax_num_seqs = 2\nmax_num_queued_reqs = 3\n")
    environment = {"FLARE_PORT": "11", "FLARE_MAX_NUM_SEQS": "12"}
    settings = load_settings(file, {"port": 21, "max_num_seqs": None}, environment)
    assert (settings.port, settings.max_num_seqs, settings.max_num_queued_reqs) == (21, 12, 3)
    assert settings.host == "127.0.0.1"


def test_flags_may_be_text_or_typed() -> None:
    text = {"port": "9000", "shutdown_timeout_s": "1.5", "max_model_len": "64", "eager": True, "api_key": ["a,b"]}
    typed = {"port": 9000, "shutdown_timeout_s": 1.5, "max_model_len": 64, "eager": True, "api_key": ("a,b",)}
    assert load_settings(None, text, {}) == load_settings(None, typed, {})
    assert load_settings(None, text, {}).api_key == ("a,b",)


def test_a_flag_gives_back_a_default_that_the_environment_changed() -> None:
    assert load_settings(None, {"eager": False}, {"FLARE_EAGER": "true"}).eager is False


def test_lists_are_arrays_in_files_and_commas_in_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "server.toml", 'api_key = ["a", "b"]\nserved_model_name = "one"\n')
    settings = load_settings(file, {"served_model_name": ["x,y", "z"]}, {"FLARE_ALLOWED_ORIGINS": "p,q"})
    assert settings.api_key == ("a", "b")
    assert settings.served_model_name == ("x,y", "z")
    assert settings.allowed_origins == ("p", "q")
    assert load_settings(file, {}, {}).served_model_name == ("one",)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5g", 3 << 29),
        ("4kb", 4000),
        ("1048576", 1 << 20),
        ("1000000000000001", 1000000000000001),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["3GiB", "1536MiB", "5KiB", "1000"])
def test_a_size_is_shown_as_it_may_be_written(text: str) -> None:
    assert size_text(parse_bytes(text)) == text


@pytest.mark.parametrize("text", ["", "GiB", "2 GiBs", "-1GiB", "1e9", "nan", "2,5GiB", "²GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


def test_sizes_from_every_source(tmp_path: Path) -> None:
    file = write(tmp_path / "server.toml", 'kv_memory = "1GiB"\nmax_body = 4096\n')
    assert load_settings(file, {}, {}).kv_memory_bytes == 1 << 30
    assert load_settings(file, {}, {}).max_body_bytes == 4096
    assert load_settings(file, {"kv_memory": "3MiB"}, {}).kv_memory_bytes == 3 << 20
    assert load_settings(file, {}, {"FLARE_KV_MEMORY": "64MiB"}).kv_memory_bytes == 64 << 20


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"max_num_seqs": -3}, "--max-num-seqs"),
        ({"max_num_seqs": 65}, "--max-num-seqs"),
        ({"port": 70000}, "--port: expected int of at most 65535$"),
        ({"api_key": ["a", ""]}, "--api-key: entry 2: expected str"),
        ({"port": "8000x"}, "--port"),
        ({"eager": "maybe"}, "--eager"),
        ({"dtype": "int4"}, "--dtype"),
        ({"shutdown_timeout_s": float("nan")}, "--shutdown-timeout"),
        ({"shutdown_timeout_s": float("inf")}, "--shutdown-timeout"),
        ({"sse_ping_interval_s": 0}, "--sse-ping-interval"),
        ({"sse_ping_interval_s": "0.3"}, "--sse-ping-interval"),
        ({"kv_memory": "2Gx"}, "--kv-memory"),
        ({"kv_memory": "0"}, "--kv-memory"),
        ({"scheduler_terminal_value": -1.0}, "--scheduler-terminal-value"),
        ({"dtype": "int8"}, "--dtype: must be one of auto, bfloat16, float16, float32"),
        ({"metrics_compat": "sglang"}, "--metrics-compat: must be one of vllm"),
        ({"trace_views": True}, "trace_views"),
        ({"max_num_seq": 4}, "max_num_seqs"),
    ],
)
def test_a_bad_flag_is_named(overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings(None, overrides, {})


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"FLARE_PROT": "1"}, "FLARE_PROT.*FLARE_PORT"),
        ({"FLARE_EAGER": "maybe"}, "FLARE_EAGER"),
        ({"FLARE_SHUTDOWN_TIMEOUT_S": "nan"}, "FLARE_SHUTDOWN_TIMEOUT_S"),
        ({"FLARE_SHUTDOWN_TIMEOUT_S": "inf"}, "FLARE_SHUTDOWN_TIMEOUT_S"),
        ({"FLARE_PORT": ""}, "FLARE_PORT"),
        ({"FLARE_CLIENT_WEIGHTS": "a=2"}, "FLARE_CLIENT_WEIGHTS: is a table; set it in the file of --config"),
    ],
)
def test_a_bad_variable_is_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings(None, {}, environment)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot = 1", "server.toml: prot: unknown key; did you mean port"),
        ("zebra = 1", "zebra: unknown key; known keys: .*port"),
        ("[policy]\ntoken_fairness = 1", "policy: unknown key"),
        ("port = -1", "server.toml: port"),
        ("shutdown_timeout_s = nan", "server.toml: shutdown_timeout_s.*finite"),
        ("shutdown_timeout_s = -inf", "server.toml: shutdown_timeout_s.*finite"),
        ("port = ", "server.toml: not valid TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings(write(tmp_path / "server.toml", text), {}, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_settings(tmp_path / "absent.toml", {}, {})


def test_messages_never_repeat_a_key_of_the_api() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_settings(None, {"api_key": ["secret-1", 2]}, {})
    assert "--api-key" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_variables_of_others_and_reserved_ones_are_left_alone() -> None:
    assert load_settings(None, {}, {"HOME": "/", "FLARE_CACHE_DIR": "/tmp/cache"}) == Settings()


@pytest.mark.parametrize("record", [Settings, Policy])
def test_every_knob_is_described(record: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(record):
        kind = msgspec.inspect.type_info(field.type)
        assert isinstance(kind, msgspec.inspect.Metadata), field.name
        assert "description" in (kind.extra_json_schema or {}), field.name


def test_flags_drop_the_unit_and_nothing_else() -> None:
    assert flag_of("shutdown_timeout_s") == "--shutdown-timeout"
    assert flag_of("max_num_seqs") == "--max-num-seqs"


def test_weights_of_clients_are_a_table_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "flare.toml"
    path.write_text('api_key = ["one", "two"]\n[client_weights]\ntwo = 2.5\n')
    assert load_settings(path, {}, {}).client_weights == {"two": 2.5}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('"three" = 2', "client_weights: the key of entry 1 is not in api_key"),
        ('"one" = 1\n"two" = 1e-4', "client_weights: entry 2: expected float of at least 0.001$"),
        ('"two" = 1e4', "client_weights: entry 1: expected float of at most 1000"),
        ('"two" = "much"', "client_weights: entry 1: expected float, got str"),
        ('"two" = nan', "client_weights: entry 1: expected float"),
    ],
)
def test_weights_that_cannot_be_are_refused_without_naming_a_key(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "flare.toml"
    path.write_text(f'api_key = ["one", "two"]\n[client_weights]\n{table}\n')
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(path, {}, {})
    assert "three" not in str(caught.value)

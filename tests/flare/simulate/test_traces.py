"""Traces: both formats as they are, the choice of a load, and what a bad line is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.simulate.traces import TraceError, TraceRequest, half_of, load, read_trace, two_clients

# From Azure's LLM inference trace 2023 (conversation), "Splitwise" (Patel et al., ISCA 2024), Azure Public Dataset,
# CC-BY-4.0; changed: timestamps rebased, columns renamed.
CONVERSATION = "arrival_s,prompt_tokens,output_tokens\n0,374,44\n4.314579,396,109\n4.541877,879,55\n"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_csv(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, "conv.csv", CONVERSATION))
    assert requests == (
        TraceRequest(0.0, 374, 44),
        TraceRequest(4.314579, 396, 109),
        TraceRequest(4.541877, 879, 55),
    )


def test_clients_and_the_order_of_arrival(tmp_path: Path) -> None:
    text = "client,arrival_s,prompt_tokens,output_tokens\n7,2.5,3,1\n8,0.5,4,2\n"
    requests = read_trace(written(tmp_path, "clients.csv", text))
    assert [(request.client, request.arrival_s) for request in requests] == [("8", 0.5), ("7", 2.5)]


def test_json_lines_with_other_keys(tmp_path: Path) -> None:
    text = '{"arrival_s":0.0,"prompt_tokens":6758,"output_tokens":0,"hash_ids":"0 14-27"}\n\n'
    assert read_trace(written(tmp_path, "trace.jsonl", text)) == (TraceRequest(0.0, 6758, 1),)


def test_a_byte_order_mark_blank_lines_and_spaces_are_no_part_of_the_heading(tmp_path: Path) -> None:
    text = "\ufeff\n \narrival_s, prompt_tokens, output_tokens\n0, 5, 6\n\n"
    assert read_trace(written(tmp_path, "conv.csv", text)) == (TraceRequest(0.0, 5, 6),)
    with pytest.raises(TraceError, match="line 5: output_tokens is missing"):
        read_trace(written(tmp_path, "conv.csv", text[:-1] + "7,8\n"))
    line = '\ufeff{"arrival_s":0,"prompt_tokens":5,"output_tokens":6}'
    assert read_trace(written(tmp_path, "conv.jsonl", line)) == (TraceRequest(0.0, 5, 6),)


def test_lines_end_at_a_newline_alone(tmp_path: Path) -> None:
    lines = [f'{{"arrival_s":0,"prompt_tokens":5,"output_tokens":{n},"client":"a\u2028b"}}\r\n' for n in (1, 2)]
    requests = read_trace(written(tmp_path, "conv.jsonl", "".join(lines)))
    assert [(request.output_tokens, request.client) for request in requests] == [(1, "a\u2028b"), (2, "a\u2028b")]
    text = 'arrival_s,prompt_tokens,output_tokens,client\n0,5,6,"a\nb\u2028"\n'
    assert read_trace(written(tmp_path, "conv.csv", text)) == (TraceRequest(0.0, 5, 6, "a\nb\u2028"),)


def test_no_client_is_no_name(tmp_path: Path) -> None:
    text = '{"arrival_s":0,"prompt_tokens":5,"output_tokens":6,"client":null}'
    assert read_trace(written(tmp_path, "conv.jsonl", text)) == (TraceRequest(0.0, 5, 6, ""),)


def test_sessions_start_apart_and_by_the_seed(tmp_path: Path) -> None:
    lines = [
        f'{{"session":"{name}","arrival_s":{at},"prompt_tokens":5,"output_tokens":6}}\n'
        for name in "ab"
        for at in (0, 9)
    ]
    path = written(tmp_path, "sessions.jsonl", "".join(lines))
    requests = read_trace(path, seed=3)
    starts = {request.client: request.arrival_s for request in reversed(requests)}
    assert starts["a"] == 0.0 and starts["b"] > 0.0
    assert sorted(r.arrival_s - starts[r.client] for r in requests) == pytest.approx([0, 0, 9, 9])
    assert read_trace(path, seed=3) == requests != read_trace(path, seed=4)


def test_speed_and_window(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, "conv.csv", CONVERSATION))
    assert [r.arrival_s for r in load(requests, speed=2.0)] == [0.0, 4.314579 / 2, 4.541877 / 2]
    assert len(load(requests, speed=2.0, window_s=2.2)) == 2
    assert len(load(requests, window_s=2.2)) == 1
    with pytest.raises(TraceError, match="--speed 0: must be above 0"):
        load(requests, speed=0)


def test_two_clients_ask_at_even_intervals() -> None:
    requests = two_clients(4.0, (1.5, 3.0), 256, 256)
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    assert [r.arrival_s for r in requests if r.client == "client-0"] == pytest.approx([i / 1.5 for i in range(6)])
    assert sum(request.client == "client-1" for request in requests) == 12


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "arrival_s,prompt_tokens\n0,5\n", "line 1: has no column output_tokens"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n0,5,5\nsoon,5,5\n", "line 3: arrival_s is 'soon'"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n0,5\n", "line 2: output_tokens is missing"),
        (
            "a.csv",
            "arrival_s,prompt_tokens,output_tokens\n0,0,5\n",
            "prompt_tokens is 0; it must be a whole number from 1 to",
        ),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n0,2.5,5\n", "prompt_tokens is 2.5"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n-1,2,5\n", "arrival_s is -1; it must be a number from 0"),
        (
            "a.csv",
            "arrival_s,prompt_tokens,output_tokens\n1e300,2,5\n",
            "line 2: arrival_s is 1e.300; it must be a number",
        ),
        (
            "a.csv",
            "arrival_s,prompt_tokens,output_tokens\n0,2,1e12\n",
            "line 2: output_tokens is 1e.12; it must be a whole",
        ),
        ("a.csv", f"arrival_s,prompt_tokens,output_tokens\n0,2,{'5' * 200_000}\n", "not valid CSV: field larger than"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n", "holds no request"),
        ("a.jsonl", '{"arrival_s": 0}\n', "line 1: prompt_tokens is missing"),
        ("a.jsonl", "[1]\n", "line 1: must be a JSON object"),
        ("a.jsonl", '{"arrival_s"\n', "line 1: not valid JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: not valid JSON: maximum recursion depth"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, name: str, text: str, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        read_trace(written(tmp_path, name, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "nowhere.csv")


def test_halves_are_split_by_time_and_both_begin_at_zero() -> None:
    requests = [TraceRequest(at, 1, place + 1) for place, at in enumerate((1.0, 2.0, 2.5, 6.0, 11.0))]
    assert half_of(requests, "first") == requests[:3]
    assert half_of(requests, "second") == [TraceRequest(0.0, 1, 4), TraceRequest(5.0, 1, 5)]
    assert half_of(requests[:1], "first") == [] and half_of(requests[:1], "second") == [TraceRequest(0.0, 1, 1)]

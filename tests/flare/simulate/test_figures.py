"""Figures of hand-made outcomes, and fairness against a second account of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.simulate.fairness import service_gaps
from flare.simulate.figures import Slo, is_good, measure, parse_slo
from flare.simulate.outcome import Outcome
from tests.flare.simulate.worlds import request

MS = 1_000_000


def outcome(
    arrival_ms: int = 0,
    tokens_ms: tuple[int, ...] = (),
    *,
    output: int | None = None,
    prompts: tuple[tuple[int, int], ...] = (),
    client: str = "",
) -> Outcome:
    made = Outcome(request(arrival_ms / 1e3, 8, len(tokens_ms) if output is None else output, client))
    made.tokens.extend(at * MS for at in tokens_ms)
    made.prompts.extend((at * MS, tokens) for at, tokens in prompts)
    return made


def test_good_is_finished_in_time_and_even() -> None:
    slo = Slo(100.0, 20.0)
    assert is_good(outcome(5, (105, 125, 145)), slo)
    assert not is_good(outcome(4, (105, 125, 145)), slo)
    assert not is_good(outcome(5, (105, 126, 145)), slo)
    assert not is_good(outcome(5, (105, 125), output=3), slo)
    assert not is_good(outcome(5, (), output=3), slo)
    assert is_good(outcome(5, (105,)), slo)


def test_one_long_gap_in_many_is_within_the_99th_percentile() -> None:
    even = [10 * place for place in range(1, 203)]
    late = [at + 1000 if place > 100 else at for place, at in enumerate(even)]
    assert is_good(outcome(0, tuple(late)), Slo(100.0, 20.0))
    assert not is_good(outcome(0, tuple(late[90:120])), Slo(5000.0, 20.0))


def test_the_rate_is_that_of_the_window_and_nobody_is_forgotten() -> None:
    refused = outcome(10, (), output=3)
    refused.refused = True
    runs = [outcome(0, (10, 20, 1500)), outcome(0, (100, 140)), outcome(0, (), output=2), refused]
    figures = measure(runs, Slo(50.0, 50.0), window_s=1.0)
    assert (figures.requests, figures.refused, figures.unfinished) == (4, 1, 2)
    assert figures.output_tokens_per_s == 4.0
    assert figures.simulated_s == 1.5
    assert figures.ttft_p50 == 55.0
    assert figures.gap_max == 1480.0
    assert figures.itl_p50 == 40.0
    assert figures.good == 0.0
    assert figures.service_gap is None and figures.timeline.service_gap == ()


def test_a_run_without_any_token() -> None:
    figures = measure([outcome(0, (), output=2)], Slo(), window_s=1.0)
    assert (figures.ttft_p50, figures.itl_p99, figures.gap_max) == (None, None, None)
    assert figures.output_tokens_per_s == 0.0 and figures.unfinished == 1


def test_the_timeline_counts_waiting_and_streaming() -> None:
    line = measure([outcome(0, (300, 600)), outcome(550, (1200,))], Slo(), window_s=1.2).timeline
    assert line.bin_s == pytest.approx(0.01)
    assert line.waiting[28] == 1 and line.waiting[31] == 0 and line.waiting[56] == 1 and line.waiting[-1] == 0
    assert line.streaming[28] == 0 and line.streaming[31] == 1 and line.streaming[61] == 0
    assert sum(line.output_tokens_per_s) * line.bin_s == pytest.approx(3)


def test_objectives_are_read_from_text() -> None:
    assert parse_slo("ttft=500,itl=25") == Slo(500.0, 25.0)
    assert parse_slo("itl=25") == Slo(1000.0, 25.0)
    for wrong in ("", "ttft", "ttft=soon", "itl=0", "gap=5"):
        with pytest.raises(ValueError, match="as ttft=1000,itl=50"):
            parse_slo(wrong)


def test_service_counts_only_while_both_wait() -> None:
    runs = [
        outcome(0, (20, 30), prompts=((20, 100),), client="a"),
        outcome(0, (50,), output=2, prompts=((50, 10),), client="a"),
        outcome(0, (40,), output=2, prompts=((40, 7),), client="b"),
        outcome(60, (), output=2, client="b"),
    ]
    _, gaps = service_gaps(runs)
    # Until 40 ms both wait: a had 100 prompt tokens and two outputs; at 40 b has 7 and one.
    assert max(gaps) == 100 + 2 * 2
    assert gaps[-1] == 0.0, "a's last request is being served: nobody is compared"
    assert service_gaps(runs[:2]) == ([], [])


def naive_gap(runs: list[Outcome]) -> float:
    """Every pair, every two instants between which both wait throughout."""
    instants = sorted(
        {o.arrival_ns for o in runs} | {at for o in runs for at in (*o.tokens, *(p[0] for p in o.prompts))}
    )

    def waits(client: str, after: int, until: int) -> bool:
        return any(
            o.request.client == client and o.arrival_ns <= after and (not o.prompts or o.prompts[0][0] >= until)
            for o in runs
        )

    def service(client: str, at: int) -> int:
        mine = [o for o in runs if o.request.client == client]
        return sum(n for o in mine for t, n in o.prompts if t <= at) + 2 * sum(t <= at for o in mine for t in o.tokens)

    worst = 0.0
    clients = sorted({o.request.client for o in runs})
    for a, b in itertools.combinations(clients, 2):
        for begin in range(len(instants)):
            for end in range(begin + 1, len(instants)):
                if not all(waits(c, instants[end - 1], instants[end]) for c in (a, b)):
                    break
                spans = [service(c, instants[end]) - service(c, instants[begin]) for c in (a, b)]
                worst = max(worst, abs(spans[0] - spans[1]))
    return worst


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.lists(st.integers(1, 12), max_size=4), st.integers(1, 9), st.sampled_from("abc")
        ),
        min_size=1,
        max_size=9,
    )
)
def test_the_gap_is_what_a_second_account_finds(rows: list[tuple[int, list[int], int, str]]) -> None:
    runs = []
    for arrival, gaps, prompt, client in rows:
        instants = tuple(itertools.accumulate(gaps, initial=arrival))[1:]
        prompts = ((instants[0], prompt),) if instants else ()
        runs.append(outcome(arrival, instants, output=len(instants) + 1, prompts=prompts, client=client))
    _, gaps_found = service_gaps(runs)
    assert max(gaps_found, default=0.0) == naive_gap(runs)

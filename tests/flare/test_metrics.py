"""Metrics: names, meanings, and the second set of names."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from flare.machines.request import EndReason
from flare.metrics import Execution, Metrics

VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens",
    "generation_tokens",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "request_success",
    "admission_rejections",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
}


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample as `name{label=value,...}`, labels in order of name; without those of the process itself."""
    return {
        f"{sample.name}{{{','.join(f'{key}={value}' for key, value in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if not sample.name.startswith("process_")
    }


def busy() -> Metrics:
    metrics = Metrics("small", compat_vllm=True)
    metrics.set_gauges(running=3, waiting=2, kv_cache_usage=0.25)
    metrics.request_admitted(0.02)
    metrics.first_token(0.08, 0.06)
    metrics.token_gap(0.010)
    metrics.token_gap(0.011)
    metrics.frame_completed(Execution.DISCOVERY, "prefill/t64", 30_000_000, 60, 1)
    metrics.frame_completed(Execution.ORDINARY, "decode/b2", 8_000_000, 0, 2)
    metrics.frame_completed(Execution.ORDINARY, "decode/b2", 8_000_000, 0, 2)
    metrics.graph_estimated("decode/b2", 8_000_000)
    metrics.request_finished(
        EndReason.LENGTH, prompt_tokens=60, generation_tokens=5, e2e_seconds=0.12, decode_seconds=0.04
    )
    metrics.request_aborted()
    metrics.request_failed()
    metrics.rejected("queue_full")
    metrics.rejected("queue_full")
    return metrics


def test_counts_and_gauges_say_what_happened() -> None:
    found = samples(busy())
    model = "model_name=small"
    assert found[f"flare:num_requests_running{{{model}}}"] == 3
    assert found[f"flare:num_requests_waiting{{{model}}}"] == 2
    assert found[f"flare:kv_cache_usage_perc{{{model}}}"] == 0.25
    assert found[f"flare:prompt_tokens_total{{{model}}}"] == 60
    assert found[f"flare:generation_tokens_total{{{model}}}"] == 5
    ends = {reason: found[f"flare:request_success_total{{finished_reason={reason},{model}}}"] for reason in ENDS}
    assert ends == {"stop": 0, "length": 1, "abort": 1, "error": 1}
    assert found[f"flare:admission_rejections_total{{{model},reason=queue_full}}"] == 2


ENDS = ("stop", "length", "abort", "error")


def test_execution_is_told_by_account_and_by_graph() -> None:
    metrics = busy()
    found = samples(metrics)
    counts = {kind: found[f"flare_scheduler_executions_total{{execution={kind}}}"] for kind in Execution}
    times = {kind: found[f"flare_scheduler_execution_nanoseconds_total{{execution={kind}}}"] for kind in Execution}
    assert list(counts.values()) == [2, 1, 0, 0]
    assert list(times.values()) == [16_000_000, 30_000_000, 0, 0]
    assert found["flare_graph_executions_total{graph=decode/b2}"] == 2 == metrics.executions("decode/b2")
    assert found["flare_graph_duration_seconds{graph=decode/b2}"] == 0.008
    assert metrics.executions("decode/b4") == 0


def test_histograms_hold_each_value_in_its_bucket_with_the_bound_inclusive() -> None:
    found = samples(busy())
    gaps = "flare:inter_token_latency_seconds"
    assert found[f"{gaps}_bucket{{le=0.01,model_name=small}}"] == 1
    assert found[f"{gaps}_bucket{{le=0.025,model_name=small}}"] == 2
    assert found[f"{gaps}_bucket{{le=+Inf,model_name=small}}"] == 2 == found[f"{gaps}_count{{model_name=small}}"]
    assert abs(found[f"{gaps}_sum{{model_name=small}}"] - 0.021) < 1e-12
    assert found["flare:iteration_tokens_total_sum{model_name=small}"] == 65
    assert found["flare:request_time_per_output_token_seconds_sum{model_name=small}"] == 0.01
    for name in ("request_queue_time", "request_prefill_time", "time_to_first_token", "e2e_request_latency"):
        assert found[f"flare:{name}_seconds_count{{model_name=small}}"] == 1


def test_a_single_output_token_has_no_time_per_later_token() -> None:
    metrics = Metrics("small")
    metrics.request_finished(EndReason.STOP, prompt_tokens=6, generation_tokens=1, e2e_seconds=0.1, decode_seconds=0.0)
    found = samples(metrics)
    assert found["flare:request_time_per_output_token_seconds_count{model_name=small}"] == 0
    assert found["flare:request_decode_time_seconds_count{model_name=small}"] == 1


def test_other_names_are_exported_only_when_asked_for_and_with_the_same_values() -> None:
    found = samples(busy())
    renamed = {name.replace("vllm:", "flare:"): value for name, value in found.items() if name.startswith("vllm:")}
    assert renamed == {name: value for name, value in found.items() if name.startswith("flare:")}
    assert not any(name.startswith("vllm:") for name in samples(Metrics("small")))


def test_all_names_that_dashboards_know_are_there() -> None:
    families = {family.name for family in text_string_to_metric_families(busy().render().decode())}
    assert {f"{prefix}:{name}" for prefix in ("flare", "vllm") for name in VLLM_NAMES} <= families


def test_two_servers_in_a_process_do_not_share_counts() -> None:
    busy()
    assert samples(Metrics("small"))["flare:prompt_tokens_total{model_name=small}"] == 0


def test_a_model_name_may_hold_anything() -> None:
    name = 'a "quoted"\nname\\'
    found = samples(Metrics(name))
    assert f"flare:prompt_tokens_total{{model_name={name}}}" in found

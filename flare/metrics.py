"""Prometheus metrics (docs/observability.md, "Metrics").

Owns the counts and how they are exported: vLLM's meanings under `flare:` names, and under `vllm:` names too where asked
for. Does not own when something is counted: the engine says what happened. Surprising rule: what happens is added to
plain numbers of this object, by the event loop alone; names, labels and cumulative buckets are made when somebody reads
them, so that an event costs a microsecond and the second set of names costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from flare.machines.request import EndReason

from .speculative_metrics import SpeculativeCounts

_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
_REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_FRAME_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)

_ABORT, _ERROR = "abort", "error"
"""vLLM's words for requests that ended otherwise than `EndReason` says."""

_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first output token.", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Time between two steps of a request's output.", _TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean time per output token after the first.", _TOKEN_S),
    "e2e_request_latency_seconds": ("Arrival to the end of the request.", _REQUEST_S),
    "request_queue_time_seconds": ("Arrival to admission to a slot.", _REQUEST_S),
    "request_prefill_time_seconds": ("Admission to first output token.", _REQUEST_S),
    "request_decode_time_seconds": ("First to last output token.", _REQUEST_S),
    "iteration_tokens_total": ("Prompt and output tokens of one frame.", _FRAME_TOKENS),
    "request_prompt_tokens": ("Prompt tokens of a finished request.", _REQUEST_TOKENS),
    "request_generation_tokens": ("Output tokens of a finished request.", _REQUEST_TOKENS),
}


class Execution(StrEnum):
    """Which account a frame's time goes to (docs/scheduling.md, "Discovery, staleness, exploration")."""

    ORDINARY = "ordinary"
    DISCOVERY = "discovery"
    TIMING_REFRESH = "timing_refresh"
    ACCEPTANCE_LEARNING = "acceptance_learning"


class _Histogram:
    """Counts per bucket, not cumulative; the last bucket has no upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return [(bound, float(count)) for bound, count in zip(bounds, accumulate(self.counts), strict=True)]


class Metrics(Collector):
    """What happened so far, for the model `model_name`. Called on the event loop alone; times are seconds."""

    def __init__(self, model_name: str, *, compat_vllm: bool = False) -> None:
        self._model_name = model_name
        self._prefixes = ("flare", "vllm") if compat_vllm else ("flare",)
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._first_token = self._histograms["time_to_first_token_seconds"].observe
        self._token_gap = self._histograms["inter_token_latency_seconds"].observe
        self._iteration = self._histograms["iteration_tokens_total"].observe
        self._running = self._waiting = 0
        self._kv_cache_usage = 0.0
        self._prompt_tokens = self._generation_tokens = 0
        self._finished = dict.fromkeys((*EndReason, _ABORT, _ERROR), 0)
        self._rejections: dict[str, int] = {}
        self._executions = dict.fromkeys(Execution, 0)
        self._execution_ns = dict.fromkeys(Execution, 0)
        self.speculative = SpeculativeCounts()
        self._graph_executions: dict[str, int] = {}
        self._graph_duration_ns: dict[str, int] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def request_admitted(self, queue_seconds: float) -> None:
        """A request was given a slot, `queue_seconds` after it arrived."""
        self._histograms["request_queue_time_seconds"].observe(queue_seconds)

    def first_token(self, since_arrival_seconds: float, since_admission_seconds: float) -> None:
        """A request's first output token came."""
        self._first_token(since_arrival_seconds)
        self._histograms["request_prefill_time_seconds"].observe(since_admission_seconds)

    def token_gap(self, seconds: float) -> None:
        """A request's output advanced, `seconds` after its last advance (however many tokens either brought)."""
        self._token_gap(seconds)

    def request_finished(
        self,
        reason: EndReason,
        *,
        prompt_tokens: int,
        generation_tokens: int,
        e2e_seconds: float,
        decode_seconds: float,
    ) -> None:
        """A request reached its end; `decode_seconds` is from its first output token to its last."""
        self._finished[reason] += 1
        histograms = self._histograms
        histograms["e2e_request_latency_seconds"].observe(e2e_seconds)
        histograms["request_decode_time_seconds"].observe(decode_seconds)
        histograms["request_prompt_tokens"].observe(prompt_tokens)
        histograms["request_generation_tokens"].observe(generation_tokens)
        if generation_tokens > 1:
            per_token = decode_seconds / (generation_tokens - 1)
            histograms["request_time_per_output_token_seconds"].observe(per_token)

    def request_aborted(self) -> None:
        """A request was cancelled. It enters no histogram: it says nothing of the server."""
        self._finished[_ABORT] += 1

    def request_failed(self) -> None:
        """A request ended with an error of ours."""
        self._finished[_ERROR] += 1

    def rejected(self, reason: str) -> None:
        """A request was refused at the door (such as `queue_full`)."""
        self._rejections[reason] = self._rejections.get(reason, 0) + 1

    def frame_completed(
        self, execution: Execution, graph: str, device_ns: int, prompt_tokens: int, generation_tokens: int
    ) -> None:
        """A frame of the graph named `graph` ended well and committed that many tokens."""
        self._executions[execution] += 1
        self._execution_ns[execution] += device_ns
        self._graph_executions[graph] = self._graph_executions.get(graph, 0) + 1
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += generation_tokens
        self._iteration(prompt_tokens + generation_tokens)

    def graph_estimated(self, graph: str, duration_ns: int) -> None:
        """The estimate of a graph's duration is now `duration_ns`."""
        self._graph_duration_ns[graph] = duration_ns

    def executions(self, graph: str) -> int:
        """Completed frames of a graph so far."""
        return self._graph_executions.get(graph, 0)

    def set_gauges(self, running: int, waiting: int, kv_cache_usage: float) -> None:
        """Requests with a slot, requests without one, and the share of pages in use (0 to 1), as they are now."""
        self._running, self._waiting, self._kv_cache_usage = running, waiting, kv_cache_usage

    def render(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """The collector's side: called by the registry when somebody reads."""
        for prefix in self._prefixes:
            yield from self._serving(f"{prefix}:")
            yield from self.speculative.serving(f"{prefix}:", [self._model_name])
        yield from self._scheduling()
        yield from self.speculative.scheduling()

    def _serving(self, prefix: str) -> Iterator[Metric]:
        model = [self._model_name]
        for name, gauge, help_text in (
            ("num_requests_running", self._running, "Requests that have a slot."),
            ("num_requests_waiting", self._waiting, "Accepted requests that wait for a slot."),
            ("kv_cache_usage_perc", self._kv_cache_usage, "Share of KV-cache pages in use; 1 is all of them."),
        ):
            family = GaugeMetricFamily(prefix + name, help_text, labels=["model_name"])
            family.add_metric(model, gauge)
            yield family
        for name, count, help_text in (
            ("prompt_tokens", self._prompt_tokens, "Prompt tokens consumed."),
            ("generation_tokens", self._generation_tokens, "Output tokens drawn."),
        ):
            counter = CounterMetricFamily(prefix + name, help_text, labels=["model_name"])
            counter.add_metric(model, count)
            yield counter
        counter = CounterMetricFamily(
            prefix + "request_success", "Ended requests.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished.items():
            counter.add_metric([*model, reason], count)
        yield counter
        counter = CounterMetricFamily(
            prefix + "admission_rejections", "Requests refused at the door.", labels=["model_name", "reason"]
        )
        for why, count in self._rejections.items():
            counter.add_metric([*model, why], count)
        yield counter
        for name, histogram in self._histograms.items():
            distribution = HistogramMetricFamily(prefix + name, _HISTOGRAMS[name][0], labels=["model_name"])
            distribution.add_metric(model, histogram.cumulative(), histogram.total)
            yield distribution

    def _scheduling(self) -> Iterator[Metric]:
        nanoseconds = CounterMetricFamily(
            "flare_scheduler_execution_nanoseconds", "Device time of completed frames.", labels=["execution"]
        )
        executions = CounterMetricFamily("flare_scheduler_executions", "Completed frames.", labels=["execution"])
        for execution in Execution:
            nanoseconds.add_metric([execution], self._execution_ns[execution])
            executions.add_metric([execution], self._executions[execution])
        graphs = CounterMetricFamily("flare_graph_executions", "Completed frames of a graph.", labels=["graph"])
        for graph, count in self._graph_executions.items():
            graphs.add_metric([graph], count)
        durations = GaugeMetricFamily("flare_graph_duration_seconds", "Estimated duration.", labels=["graph"])
        for graph, duration_ns in self._graph_duration_ns.items():
            durations.add_metric([graph], duration_ns / 1e9)
        yield from (nanoseconds, executions, graphs, durations)

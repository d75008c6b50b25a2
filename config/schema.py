"""Every knob of the server, with its type, range and default.

Owns the frozen records `Settings` (one server), `Policy` (scheduling coefficients) and `Recipe` (the graphs that a
device prepares). Does not own where values come from (`loader`). Surprising rule: the descriptions here are the
only ones; the tables of docs/configuration.md are generated from them, so no knob goes undocumented.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

REQUEST_SLOTS_MAX = 64
"""Request slots that selection is bounded to."""

PREFILL_TOKENS_MAX = 65_536
"""The largest prompt capacity that a recipe may declare."""

WIDTH_MAX = 8
"""Target positions of one request in a speculative program, the pending token among them."""

COEFFICIENT_MAX = 1e9
"""Coefficients beyond this say nothing more and would let products overflow."""

Coefficient = Annotated[float, Meta(ge=0, le=COEFFICIENT_MAX)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
PositiveInt = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]
Width = Annotated[int, Meta(ge=2, le=WIDTH_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=PREFILL_TOKENS_MAX)]


class ConfigError(ValueError):
    """A value that cannot be used. The message names the source, the key and the fix."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduling coefficients (docs/scheduling.md, "Policy").

    Values are in units of one uncached prompt token, times in milliseconds. They are preferences, neither timing
    measurements nor latency guarantees; a coefficient of zero removes its preference.
    """

    output_token_value: Annotated[Coefficient, Meta(description="Value of an output token, in prompt tokens.")]
    token_fairness: Annotated[Coefficient, Meta(description="Weight of log token rate, value/ms.")]
    delivery_fairness: Annotated[Coefficient, Meta(description="Weight of log delivery rate, value/ms.")]
    decode_age_price: Annotated[Coefficient, Meta(description="Price of a decoding stream's waiting, value/ms².")]
    terminal_value: Annotated[Coefficient, Meta(description="Value of retiring a finished request, in prompt tokens.")]
    terminal_age_price: Annotated[Coefficient, Meta(description="Price of a finished request's waiting, value/ms².")]
    first_output_age_price: Annotated[
        Coefficient, Meta(description="Price of waiting for a first output, value/ms².")
    ] = 0.0
    output_time_price: Annotated[
        Coefficient, Meta(description="Value of the device time that a round of output costs a stream, value/ms.")
    ] = 0.0
    prompt_time_price: Annotated[
        Coefficient, Meta(description="Value of the device time that a prompt token costs, value/ms.")
    ] = 0.0
    first_output_value: Annotated[
        Coefficient, Meta(description="Value of a whole prompt, shared among the tokens that it has left.")
    ] = 0.0
    first_output_growth_ms: Annotated[
        float,
        Meta(ge=0, le=1e9, description="Wait in which first_output_value grows by itself once; 0: it never grows."),
    ] = 0.0
    first_output_urgency: Annotated[
        Coefficient, Meta(description="What prompt_time_price rises by as the patience runs out, value/ms.")
    ] = 0.0
    first_output_patience_ms: Annotated[
        float, Meta(ge=1, le=1e9, description="Wait at which a first output is the most urgent.")
    ] = 500.0
    gap_price: Annotated[
        Coefficient, Meta(description="Price of a gap in the streams, at gap_stretch reference intervals, value/ms.")
    ] = 0.0
    gap_stretch: Annotated[
        float, Meta(ge=1, le=1e6, description="Gap at which a frame pays gap_price, in reference intervals.")
    ] = 5.0
    host_gap_pricing: Annotated[
        bool, Meta(description="Add the host's measured time to that of frames which wait for feedback.")
    ] = False
    adaptation_ms: Annotated[
        float, Meta(gt=0, le=1e7, description="Time over which service prices follow the measured rates.")
    ]
    estimate_ttl_ms: Annotated[
        float, Meta(ge=1, le=1e9, description="Age beyond which a graph's duration estimate is stale.")
    ]
    adaptive_verification_alpha: Annotated[
        float,
        Meta(gt=0, le=100, description="Exponent on survival estimates in the scores of speculative rounds."),
    ] = 1.0
    newcomer_share: Annotated[
        float, Meta(gt=0, le=COEFFICIENT_MAX, description="A newcomer starts as one that had 1/this of its fair share.")
    ]

    @property
    def estimate_ttl_ns(self) -> int:
        """`estimate_ttl_ms` as integer nanoseconds."""
        return round(self.estimate_ttl_ms * 1e6)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The prepared graphs that a device may be asked for; `flare.graphs.catalog` checks and builds the catalog."""

    name: Text
    prefill_tokens: tuple[TokenCount, ...]
    """Prompt capacities of the prefill graphs, rising."""
    scored_prefill_tokens: tuple[TokenCount, ...]
    """Prompt capacities of the graphs that also report prompt log-probabilities, rising."""
    decode_batches: tuple[Annotated[int, Meta(ge=1, le=REQUEST_SLOTS_MAX)], ...]
    """Request rows of the decode graphs, rising."""
    mixed_batches: tuple[Annotated[int, Meta(ge=2, le=REQUEST_SLOTS_MAX)], ...] = ()
    """Request rows of the mixed graphs, rising; none: the recipe has no mixed graphs."""
    mixed_prefill_tokens: tuple[TokenCount, ...] = ()
    """Prompt capacities of the mixed graphs, rising, multiples of 64."""
    draft_widths: tuple[Width, ...] = ()
    """Target positions of each request in programs that propose themselves, rising."""
    copy_widths: tuple[Width, ...] = ()
    """The same of programs that are given copied proposals, rising."""
    ragged: bool = False
    """Whether there are programs that propose themselves and whose requests share fewer target rows than their widths
    come to."""
    prompt_rows: Annotated[int, Meta(ge=1, le=REQUEST_SLOTS_MAX)] = 1
    """Prompt rows that one prefill or mixed graph may pack into its capacity (fewer where the batch is smaller)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One server (docs/configuration.md). Names carry their unit; sizes are bytes, whatever unit they were given in."""

    model: Annotated[
        Text | None,
        Meta(description="A GGUF file, a Hugging Face directory or a hub id; unset: SmolLM2-135M-Instruct."),
    ] = None
    served_model_name: Annotated[
        tuple[Text, ...], Meta(description="Names that the API answers to, the first in responses; unset: the model's.")
    ] = ()
    host: Annotated[Text, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[
        tuple[Text, ...],
        Meta(description="Keys of which a client must present one; unset: open to all."),
    ] = ()
    client_weights: Annotated[
        # A key of far less weight than others could bring its service to where what they get no longer counts.
        dict[str, Annotated[float, Meta(ge=1e-3, le=1e3)]],
        Meta(
            description="Shares of free slots by API key, 0.001 to 1000, as a table in the file; "
            "1 for keys that it leaves out."
        ),
    ] = msgspec.field(default_factory=dict)
    allowed_origins: Annotated[
        tuple[Text, ...], Meta(description="Origins whose pages may call the API (CORS); unset: none.")
    ] = ()

    device: Annotated[
        Literal["auto", "cpu", "cuda", "sim"],
        Meta(
            description="What runs the model: auto takes cuda where an NVIDIA GPU can be used, else cpu; "
            "sim serves tokens without meaning, at the pace of sim_costs."
        ),
    ] = "auto"
    max_model_len: Annotated[
        PositiveInt | None, Meta(description="Context length in tokens; unset: the model's own.")
    ] = None
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=REQUEST_SLOTS_MAX, description="Requests that run at once (request slots).")
    ] = 16
    kv_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Memory of the KV cache, such as 3GiB; unset, on cuda: what gpu_memory_utilization leaves."),
    ] = msgspec.field(name="kv_memory", default=3 << 30)
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1, description="Share of the GPU's memory for all of the server (cuda, kv_memory unset)."),
    ] = 0.9
    max_num_queued_reqs: Annotated[
        int, Meta(ge=0, description="Requests that may wait for a slot; more are refused with 503.")
    ] = 256
    max_num_queued_tokens: Annotated[
        PositiveInt | None, Meta(description="Prompt tokens that may wait for a slot; unset: no limit.")
    ] = None
    shutdown_timeout_s: Annotated[
        Seconds, Meta(description="Time that running requests have to end after SIGTERM.")
    ] = 30.0

    scheduler_policy: Annotated[
        Text, Meta(description="A preset (balanced, interactive, throughput) or the path of a policy file.")
    ] = "balanced"
    scheduler_terminal_value: Annotated[
        Coefficient | None, Meta(description="Replaces the policy's terminal_value.")
    ] = None
    scheduler_terminal_age_price: Annotated[
        Coefficient | None, Meta(description="Replaces the policy's terminal_age_price.")
    ] = None

    recipe: Annotated[
        Text, Meta(description="The recipe of prepared graphs: a name (cpu, cuda, sim) or the path of a file.")
    ] = "cpu"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(
            description="Weight formats: auto mixes the fastest of equal quality (cpu), or takes bfloat16, and float16 "
            "where a GPU lacks it (cuda); float16 is for cuda alone; float32 is the exact reference."
        ),
    ] = "auto"
    eager: Annotated[
        bool, Meta(description="Run without compiled code or captured graphs: ready sooner, slower afterwards.")
    ] = False
    threads: Annotated[PositiveInt | None, Meta(description="Compute threads of cpu; unset: one for each core.")] = None
    sim_costs: Annotated[
        Text | None,
        Meta(description="JSON table of what graphs take on sim (docs/simulation.md); unset: 5 ms, and 20 µs a row."),
    ] = None
    max_prefill_tokens: Annotated[
        TokenCount, Meta(description="The largest prefill graph, one of the recipe's capacities.")
    ] = 256
    mixed_prefill: Annotated[
        bool, Meta(description="Prepare graphs that consume a prompt and decode other requests in one pass.")
    ] = False

    speculative: Annotated[
        str,
        Meta(
            pattern=r"^(off|adaptive|fixed:[1-8])$",
            description="Several tokens a round: off, adaptive (by measured value), or fixed:W, W target positions.",
        ),
    ] = "adaptive"
    speculative_token_capacity: Annotated[
        int, Meta(ge=1, le=REQUEST_SLOTS_MAX * WIDTH_MAX, description="Target rows that a wide round may have in all.")
    ] = 64
    speculative_sampling: Annotated[
        Literal["match", "rejection"],
        Meta(description="What accepts proposals: equal draws (seeds reproduce), or probability (more are accepted)."),
    ] = "match"
    mtp_adaptive_verification_alpha: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        Meta(description="Replaces the policy's adaptive_verification_alpha."),
    ] = None
    draft_model: Annotated[
        Text | None,
        Meta(description="A smaller model of the same tokenizer that proposes tokens; unset: a trained head, if any."),
    ] = None

    trace: Annotated[Text | None, Meta(description="File that takes every event as a JSON line.")] = None
    trace_views: Annotated[
        bool, Meta(description="Add to each plan in the trace all that the decision read (for flare explain).")
    ] = False
    log_json: Annotated[bool, Meta(description="Log JSON lines instead of text for people.")] = False
    metrics_compat: Annotated[
        Literal["vllm"] | None, Meta(description="Export metrics under this server's names too (vllm).")
    ] = None

    sse_ping_interval_s: Annotated[
        int, Meta(ge=1, le=86_400, description="Time between comments that keep a silent stream open.")
    ] = 15
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest request body, such as 4MiB.")] = msgspec.field(
        name="max_body", default=4 << 20
    )

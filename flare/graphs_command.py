"""`flare graphs`: the catalog of prepared graphs.

Owns two tables: the graphs of a running server with their measured durations, and, with --plan, those that a server
would prepare and their memory. Does not own either answer: the first comes from GET /graphs, the second from the
catalog and the device's own arithmetic. Surprising rule: --plan prepares nothing, but it opens the model, because the
memory of weights depends on how they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flare.graphs.programs.extents import packed_rows
from flare.machines.graph import GraphShape

from .client import base_url
from .failure import show_error


class GraphStatus(msgspec.Struct, frozen=True):
    """A graph as GET /graphs tells of it. `duration_ms` and `age_s` are None while it is not measured."""

    graph: str
    batch: int
    prefill_tokens: int
    duration_ms: float | None
    age_s: float | None
    stale: bool
    executions: int


def graphs(
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="What `flare run` would prepare, without preparing.")] = False,
    config: Annotated[Path | None, typer.Option(help="Of --plan: the file for `flare run --config`.")] = None,
    model: Annotated[str | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    device: Annotated[str | None, typer.Option(help="Of --plan: as for `flare run`; it need not be here.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    max_prefill_tokens: Annotated[int | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    mixed_prefill: Annotated[
        bool | None, typer.Option("--mixed-prefill/--no-mixed-prefill", help="Of --plan: as for `flare run`.")
    ] = None,
    speculative: Annotated[str | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    speculative_token_capacity: Annotated[int | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Of --plan: as for `flare run`.")] = None,
) -> None:
    """The prepared graphs, and their measured durations."""
    console = Console()
    given: dict[str, object] = {
        "model": model,
        "device": device,
        "max_num_seqs": max_num_seqs,
        "max_prefill_tokens": max_prefill_tokens,
        "max_model_len": max_model_len,
        "kv_memory": kv_memory,
        "gpu_memory_utilization": gpu_memory_utilization,
        "dtype": dtype,
        "recipe": recipe,
        "mixed_prefill": mixed_prefill,
        "speculative": speculative,
        "speculative_token_capacity": speculative_token_capacity,
        "draft_model": draft_model,
    }
    try:
        if plan:
            from .graph_plan import plan_graphs  # torch, which the other table has no need of

            show_plan(console, *plan_graphs(config, given))
        else:
            show_running(console, running_graphs(base_url(url), api_key))
    except (httpx.InvalidURL, ValueError) as error:
        show_error(error)
        raise typer.Exit(1) from error


def running_graphs(server: str, api_key: str | None) -> list[GraphStatus]:
    """The graphs of the server at that address. Raises ValueError where it cannot be reached or has no such answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{server}/graphs", headers=headers)
    except httpx.HTTPError as error:
        raise ValueError(f"cannot reach {server}: {error}; start it with `flare run`, or name it with --url") from error
    if response.status_code == 401:
        raise ValueError(f"{server} asks for a key; give one of its api_key with --api-key or OPENAI_API_KEY")
    if response.status_code != 200:
        raise ValueError(f"{server}/graphs answered with HTTP {response.status_code}: is it a Flare server?")
    return msgspec.json.decode(response.content, type=list[GraphStatus])


def show_running(console: Console, statuses: Sequence[GraphStatus]) -> None:
    """Print graphs with what was measured of them."""
    table = _table("rows", "tokens", "ms", "measured", "frames")
    for status in statuses:
        table.add_row(
            status.graph,
            str(status.batch),
            str(status.prefill_tokens or "-"),
            "unknown" if status.duration_ms is None else f"{status.duration_ms:.2f}",
            "never" if status.age_s is None else f"{status.age_s:.0f} s ago{', stale' if status.stale else ''}",
            str(status.executions),
            style="dim" if status.duration_ms is None else None,
        )
    console.print(table)


def show_plan(console: Console, catalog: Sequence[GraphShape], memory: Sequence[tuple[str, int]]) -> None:
    """Print graphs that would be prepared, and their memory as bytes by purpose."""
    table = _table("rows", "tokens")
    for shape in catalog:
        table.add_row(shape.name, str(shape.batch), str(shape.prefill_tokens or "-"))
    console.print(table)
    packed = max(map(packed_rows, catalog))
    console.print(f"{len(catalog)} graphs, the largest of {packed} packed rows.", highlight=False)
    console.print("Memory, shared by all of them:", highlight=False)
    for purpose, size_bytes in (*memory, ("total", sum(size_bytes for _, size_bytes in memory))):
        console.print(f"  {purpose:<28}{size_bytes / 2**20:>10,.1f} MiB", highlight=False)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("graph", *headings):
        table.add_column(heading, justify="left" if heading == "graph" else "right", no_wrap=True)
    return table

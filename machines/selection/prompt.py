"""What a graph that consumes one prompt can do for a request.

Owns the logical work of prefill: tokens up to the boundary, and the output token that ends a prompt
(docs/scheduling.md, "Value"). Does not own its price. Surprising rule: capacity beyond the boundary earns nothing, so a
large graph on a short tail is priced by the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .lanes import Bools, Floats, Graphs, Ints
from .view import RequestRow


@dataclass(frozen=True, slots=True)
class PromptWork:
    """For each row [m] and graph [g]: prompt tokens consumed, whether an output token follows, and both together.

    `reach` [m] is the distance to the boundary, `endpoint` [m] that to the next message or prompt endpoint.
    """

    tokens: Ints
    emits: Bools
    expected: Floats
    reach: Ints
    endpoint: Ints


def prompt_work(requests: Sequence[RequestRow], graphs: Graphs) -> PromptWork:
    """The work of every prepared capacity for every prompt row; rows have `position` < `boundary`."""
    position = np.array([row.position for row in requests], np.int64)
    reach = np.array([row.boundary for row in requests], np.int64) - position
    endpoint = np.array([row.next_endpoint for row in requests], np.int64) - position
    # A request that only scores its prompt has no output left and ends without a token.
    ends = np.array([row.prompt_tokens if row.output_left > 0 else -1 for row in requests], np.int64)
    tokens = np.minimum(reach[:, None], graphs.prefill_tokens)
    emits = position[:, None] + tokens == ends[:, None]
    return PromptWork(tokens, emits, (tokens + emits).astype(np.float64), reach, endpoint)

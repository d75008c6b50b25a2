"""Speculation with vLLM's scheduler: so many proposals for every request that decodes, fixed or by batch size.

Owns how a controller joins the rule of `vllm`, and the two that look at nothing but the batch. Does not own acceptance
or costs. Surprising rule: nobody is made more proposals than it may still produce tokens, which vLLM does not look at;
that leans to the rules' side.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..iteration import Batch, Job, Pool
from .vllm import VllmRule

BUDGET = 2_048
"""Tokens of an iteration."""

TABLE = ((1, 64, 3), (65, 128, 1), (129, 512, 0))
"""vLLM's documented example: from how many requests to how many, so many proposals."""


class DraftingRule(VllmRule):
    """Makes `depth` proposals for each decoding request, and verifies all of them. Controllers move `depth`."""

    def __init__(self, depth: int) -> None:
        super().__init__(BUDGET)
        self.depth = depth

    def proposals(self, job: Job) -> int:
        """All that it can use."""
        return min(self.depth, job.output - job.produced - 1)

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """What vLLM's rule schedules, and the proposals of all that decode."""
        batch = super().schedule(pool, now_ms)
        most = max((self.proposals(job) for job, _ in batch.works if job.decoding), default=0)
        return batch._replace(proposals=most)


class TableRule(DraftingRule):
    """vLLM's `num_speculative_tokens_per_batch_size`: the proposals of the next step follow the number of requests of
    this one; beyond the table those of its last row."""

    def __init__(self, table: Sequence[tuple[int, int, int]] = TABLE) -> None:
        super().__init__(table[0][2])
        self._table = table

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """As many proposals as the step before called for."""
        batch = super().schedule(pool, now_ms)
        if batch.works:
            rows = [depth for least, _, depth in self._table if least <= len(batch.works)]
            self.depth = rows[-1] if rows else self._table[0][2]
        return batch

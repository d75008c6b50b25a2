"""How the rows of a pass lie over lanes, as tensors of fixed shape.

Owns the packing: the rows of all lanes follow one another, and rows that no lane needs come last. Does not own what the
rows mean. Surprising rule: an idle row is not skipped, since a captured graph cannot branch; it reads any token at
position 0 and writes its key and value to the page of nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Packing:
    """R rows over N lanes: of each row its `lane`, its `offset` within that and whether it is `live` [R]; of each lane
    its `first` row and its `length` [N]; and `ends` int32[N + 1], where lanes begin and end. int64 else."""

    lane: torch.Tensor
    offset: torch.Tensor
    live: torch.Tensor
    first: torch.Tensor
    length: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, length: torch.Tensor, rows: int) -> Packing:
        """Pack lanes of int64[N] rows, `rows` in all at most."""
        ends = length.cumsum(0)
        first = ends - length
        row = torch.arange(rows, device=length.device)
        lane = torch.searchsorted(ends, row, right=True).clamp(max=len(length) - 1)
        bounds = torch.cat((torch.zeros_like(ends[:1]), ends)).int()
        return cls(lane, row - first[lane], row < ends[-1], first, length, bounds)

    @classmethod
    def one_each(cls, live: torch.Tensor) -> Packing:
        """Row i is lane i's only one, live bool[N] or not."""
        row = torch.arange(len(live) + 1, device=live.device)
        return cls(row[:-1], torch.zeros_like(row[:-1]), live, row[:-1], live.long(), row.int())


@dataclass(frozen=True, slots=True)
class Spans:
    """A packing at its positions in the cache.

    Of each row its `lane` and `position` int64[R], and its `place` among the tokens of all pages, one after the other.
    For attention over variable lengths: `ends` int32[N + 1]; the keys of each lane, its own rows included, `keys`
    int32[N]; the pages of each lane, `table` int32[N, pages]; the most rows (`longest`) and keys (`reach`) of a lane.
    """

    lane: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor
    ends: torch.Tensor
    keys: torch.Tensor
    table: torch.Tensor
    longest: int
    reach: int

    @classmethod
    def of(
        cls, packing: Packing, start: torch.Tensor, table: torch.Tensor, *, page_tokens: int, pages: int, longest: int
    ) -> Spans:
        """Lanes whose first rows are at positions `start` int64[N]. `pages`: the number of the page of nobody.

        A lane without rows is said to have one key, which no kernel trips over; what it gives is not read.
        """
        position = torch.where(packing.live, start[packing.lane] + packing.offset, 0)
        page = torch.where(packing.live, table[packing.lane, position // page_tokens].long(), pages)
        keys = torch.where(packing.length > 0, start + packing.length, 1)
        return cls(
            lane=packing.lane,
            position=position,
            place=page * page_tokens + position % page_tokens,
            ends=packing.ends,
            keys=keys.int(),
            table=table,
            longest=longest,
            reach=table.shape[1] * page_tokens,
        )

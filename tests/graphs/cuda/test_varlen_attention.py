"""How torch's attention over variable lengths is called, shown on a stand-in that does what its documentation says."""

from __future__ import annotations

import pytest
import torch

from flare.graphs.cuda.attention import Attention
from flare.graphs.cuda.plain_attention import PlainAttention
from flare.graphs.cuda.varlen_attention import BlockTableAttention, GatheredAttention
from tests.graphs.cuda.test_attention import LENGTHS, problem


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row i of n sees the keys up to the (n - i)-th from the end, `window_size` before and behind that."""
    out = torch.full_like(query, float("nan"))  # rows of nobody are left as they were allocated
    assert enable_gqa and query.dtype == key.dtype and seqused_k.dtype == cu_seq_q.dtype == torch.int32
    for lane, used in enumerate(seqused_k.tolist()):
        first, end = cu_seq_q[lane : lane + 2].tolist()
        assert end - first <= max_q and used <= max_k
        if block_table is not None:
            assert cu_seq_k is None and block_table.dtype == torch.int32
            k, v = (pages[block_table[lane].long()].flatten(0, 1)[:used] for pages in (key, value))
        else:
            assert cu_seq_k is not None and cu_seq_k.dtype == torch.int32
            begin = int(cu_seq_k[lane])
            k, v = key[begin : begin + used], value[begin : begin + used]
        k, v = (part.repeat_interleave(query.shape[1] // key.shape[-2], dim=1) for part in (k, v))
        for row in range(first, end):
            middle = used - (end - row)
            before, behind = window_size
            seen = slice(0 if before < 0 else max(0, middle - before), used if behind < 0 else middle + behind + 1)
            weights = (torch.einsum("hd,thd->ht", query[row], k[seen]) * query.shape[-1] ** -0.5).softmax(-1)
            out[row] = torch.einsum("ht,thd->hd", weights, v[seen])
    return out


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("make", [BlockTableAttention, GatheredAttention])
def test_it_is_called_as_it_is_documented(
    make: type[BlockTableAttention] | type[GatheredAttention], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    activated: list[str] = []
    monkeypatch.setattr("flare.graphs.cuda.varlen_attention.varlen_attn", varlen_attn)
    monkeypatch.setattr("flare.graphs.cuda.varlen_attention.activate_flash_attention_impl", activated.append)
    queries, keys, values, spans = problem(rows=14)
    kernel: Attention = make()
    got, expected = (each(queries, keys, values, spans, window) for each in (kernel, PlainAttention()))
    served = sum(LENGTHS)
    torch.testing.assert_close(got[:served], expected[:served])
    assert activated == (["FA3"] if make is BlockTableAttention else [])

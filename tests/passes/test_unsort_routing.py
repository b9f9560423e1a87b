"""Tokens that were sorted by expert, worked on and put back, stay in the samples' own order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from fxgrad.passes.unsort_routing import unsort_routing
from tests.passes.pictures import around


class Experts(nn.Module):
    """Three experts, one for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, 8, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        ids, order = chosen.sort()
        ends = torch.histc(ids.float(), bins=3, min=0, max=2).cumsum(0, dtype=torch.int32)
        out = F.grouped_mm(tokens[order], self.experts, offs=ends)
        return out[order.argsort()]


def test_tokens_sorted_by_expert() -> None:
    args = torch.randn(5, 8, dtype=torch.bfloat16), torch.randint(3, (5,))
    assert_expected_inline(
        around(unsort_routing, Experts(), *args),
        """\
before:
inputs:
  chosen: i64[B]
  tokens: bf16[B, 8]
  experts: bf16[3, 8, 8]                                          trainable
graph:
  sort = sort(chosen)                                             (i64[B], i64[B])
  getitem = getitem(sort, 0)                                      i64[B]
  getitem_2 = getitem(sort, 1)                                    i64[B]
  float = float(getitem)                                          f32[B]
  histc = histc(float, bins=3, min=0, max=2)                      f32[3]
  cumsum = cumsum(histc, 0, dtype=torch.int32)                    i32[3]
  getitem_3 = getitem(tokens, getitem_2)                          bf16[B, 8]
  _grouped_mm = _grouped_mm(getitem_3, experts, offs=cumsum, bias=None, out_dtype=None)  bf16[B, 8]
  argsort = argsort(getitem_2)                                    i64[B]
  getitem_4 = getitem(_grouped_mm, argsort)                       bf16[B, 8]
return (getitem_4,)

after unsort_routing:
graph:
  arange = arange(B, device=device(type='cpu'))                   i64[B]
  getitem = getitem(tokens, arange)                               bf16[B, 8]
  grouped_rows = grouped_rows(getitem, experts, chosen)           bf16[B, 8]
  getitem_2 = getitem(grouped_rows, arange)                       bf16[B, 8]
return (getitem_2,)
""",
    )

"""A row that an index picks for each sample is looked up among that sample's own rows."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.split_lookups import split_lookups
from tests.passes.pictures import Program, around


def last_of_each(m: Program, x: Tensor, lengths: Tensor) -> Tensor:
    samples, steps, _ = x.shape
    flat = (x @ m.w).reshape(samples * steps, 4)
    return flat[torch.arange(samples) * steps + lengths - 1]


def test_the_last_step_of_each_sample() -> None:
    args = torch.randn(3, 5, 4), torch.tensor([5, 2, 3])
    assert_expected_inline(
        around(split_lookups, Program(last_of_each), *args),
        """\
before:
inputs:
  args[0]: f32[B, 5, 4]
  w: f32[4, 4]                                                    trainable
  args[1]: i64[B]
graph:
  matmul = matmul(args[0], w)                                     f32[B, 5, 4]
  reshape = reshape(matmul, 5*B, 4)                               f32[5*B, 4]
  arange = arange(B)                                              i64[B]
  mul = mul(arange, 5)                                            i64[B]
  add = add(mul, args[1])                                         i64[B]
  sub = sub(add, 1)                                               i64[B]
  getitem = getitem(reshape, sub)                                 f32[B, 4]
return (getitem,)

after split_lookups:
graph:
  matmul = matmul(args[0], w)                                     f32[B, 5, 4]
  reshape = reshape(matmul, 5*B, 4)                               f32[5*B, 4]
  arange = arange(B)                                              i64[B]
  mul = mul(arange, 5)                                            i64[B]
  add = add(mul, args[1])                                         i64[B]
  sub = sub(add, 1)                                               i64[B]
  unflatten = unflatten(reshape, 0, (B, -1))                      f32[B, 5, 4]
  arange_2 = arange(B, device=device(type='cpu'))                 i64[B]
  mul_2 = mul(arange_2, 5)                                        i64[B]
  sub_2 = sub(sub, mul_2)                                         i64[B]
  ge = ge(sub_2, 0)                                               b8[B]
  lt = lt(sub_2, 5)                                               b8[B]
  logical_and = logical_and(ge, lt)                               b8[B]
  all = all(logical_and)                                          b8[]
  _assert_async = _assert_async(all, 'an index leaves the rows of its own sample, for those of another: test_split_lookups.py:#   return flat[torch.arange(samples) * steps + lengths - 1]')
  getitem = getitem(unflatten, (arange_2, sub_2))                 f32[B, 4]
return (getitem,)
""",
    )

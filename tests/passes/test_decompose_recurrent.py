"""A recurrent layer is one recurrence for each layer and direction."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import nn

from fxgrad.passes.decompose_recurrent import decompose_recurrent
from tests.passes.pictures import around


def test_both_directions() -> None:
    model = nn.RNN(3, 4, bidirectional=True, bias=False, batch_first=True)
    assert_expected_inline(
        around(decompose_recurrent, model, torch.randn(2, 5, 3)),
        """\
before:
inputs:
  input: f32[s, 5, 3]
  weight_ih_l0: f32[4, 3]                                         trainable
  weight_hh_l0: f32[4, 4]                                         trainable
  weight_ih_l0_reverse: f32[4, 3]                                 trainable
  weight_hh_l0_reverse: f32[4, 4]                                 trainable
graph:
  transpose = transpose(input, 0, 1)
  new_zeros = new_zeros(transpose, (2, s, 4))
  recurrent_layers = recurrent_layers(transpose, None, None, 0, [new_zeros], [weight_ih_l0, weight_hh_l0, weight_ih_l0_reverse, weight_hh_l0_reverse], 'RNN_TANH', False, 1, 0.0, True, True)
  getitem = getitem(recurrent_layers, 0)
  getitem_2 = getitem(recurrent_layers, 1)
  transpose_2 = transpose(getitem, 0, 1)
return (transpose_2, getitem_2)

after decompose_recurrent:
graph:
  transpose = transpose(input, 0, 1)
  new_zeros = new_zeros(transpose, (2, s, 4))
  getitem = getitem(new_zeros, 0)
  recurrence = recurrence('RNN_TANH', transpose, None, getitem, None, weight_ih_l0, None, weight_hh_l0, None, None, False)
  getitem_2 = getitem(recurrence, 0)
  getitem_3 = getitem(getitem_2, 1:)
  getitem_4 = getitem(getitem_2, -1)
  getitem_5 = getitem(new_zeros, 1)
  recurrence_2 = recurrence('RNN_TANH', transpose, None, getitem_5, None, weight_ih_l0_reverse, None, weight_hh_l0_reverse, None, None, True)
  getitem_6 = getitem(recurrence_2, 0)
  getitem_7 = getitem(getitem_6, :-1)
  getitem_8 = getitem(getitem_6, 0)
  cat = cat([getitem_3, getitem_7], -1)
  stack = stack([getitem_4, getitem_8])
  transpose_2 = transpose(cat, 0, 1)
return (transpose_2, stack)
""",
    )

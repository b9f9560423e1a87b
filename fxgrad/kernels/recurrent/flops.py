"""Flops of the recurrences, two for a multiplication and an addition, as PyTorch's flop counter takes them."""

from __future__ import annotations

from typing import Any


def _forward(mode: str, x: Any, lengths: Any, h0: Any, c0: Any, *others: Any, **_: Any) -> Any:
    """``W_ih x``, ``W_hh h`` and, of an LSTM that projects its states, ``R h``, at all steps."""
    w_ih, _b_ih, w_hh, _b_hh, w_hr, _reverse = others
    return _products(x[0], x[1], w_ih, w_hh, w_hr)


def _backward(mode: str, dhs: Any, dc: Any, lengths: Any, w_hh: Any, w_hr: Any, *_: Any, **__: Any) -> Any:
    """The gradients of the states: those of weights and inputs are other products."""
    return _products(dhs[0] - 1, dhs[1], w_hh, w_hr)


def _input_gradient(g: Any, w: Any, **_: Any) -> Any:
    return _products(g[0], g[1], w)


def _products(length: Any, batch: Any, *weights: Any) -> Any:
    return 2 * length * batch * sum(rows * columns for rows, columns in (w for w in weights if w is not None))


FLOPS = {
    "fxgrad::recurrence": _forward,
    "fxgrad::recurrence_backward": _backward,
    "fxgrad::input_gradient": _input_gradient,
}
"""By an operator's name: a function of its arguments, of which each tensor is given by its shape."""

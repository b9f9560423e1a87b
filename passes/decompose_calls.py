"""Write what nobody classified in terms of ATen ops that somebody did."""

from __future__ import annotations

from torch import fx

from fxgrad.context import Context


def decompose_calls(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    return gm

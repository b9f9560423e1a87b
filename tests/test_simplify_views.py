"""Chains of views, with and without the pass that simplifies them."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxgrad
from fxgrad.ops.calls import op_name
from fxgrad.testing import assert_per_sample_grads

B, T, E = 5, 4, 12


def views_of(gm: fx.GraphModule) -> list[str]:
    return [op_name(node.target) for node in gm.graph.nodes if op_name(node.target) in ("view", "permute", "transpose")]


def graph_of(model: nn.Module) -> fx.GraphModule:
    return fxgrad.trace(model, torch.randn(B, T, E)).graph_module


class Heads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        heads = x.transpose(0, 1).contiguous().view(t, b * 3, e // 3).transpose(0, 1).view(b, 3, t, e // 3)
        return heads.softmax(-1)


def test_heads_are_one_view_and_one_permutation() -> None:
    model = nn.Sequential(nn.Linear(E, E), Heads())
    assert views_of(graph_of(model)) == ["transpose", "view", "permute"]
    assert_per_sample_grads(model.double(), torch.randn(B, T, E, dtype=torch.float64))


@st.composite
def chains(draw: st.DrawFn) -> list[list[str]]:
    """A chain of shapes and permutations of the letters of [b, t, heads, d], in groups."""
    letters, chain = list("bthd"), []
    for _ in range(draw(st.integers(1, 3))):
        letters = draw(st.permutations(letters))
        chain.append(letters)
    return chain


class Shuffled(nn.Module):
    """Splits, permutes, merges neighbours and splits them again."""

    def __init__(self, chain: list[list[str]], merge: int) -> None:
        super().__init__()
        self.layer, self.chain, self.merge = nn.Linear(E, E), chain, merge

    def forward(self, x: Tensor) -> Tensor:
        sizes = {"b": x.shape[0], "t": x.shape[1], "h": 3, "d": E // 3}
        h, now = self.layer(x).unflatten(-1, (3, E // 3)), list("bthd")
        for letters in self.chain:
            h = h.permute([now.index(letter) for letter in letters])
            now = letters
            h = h.flatten(self.merge, self.merge + 1).unflatten(
                self.merge, (sizes[now[self.merge]], sizes[now[self.merge + 1]])
            )
        return h.permute([now.index(letter) for letter in "bthd"]).sin()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), merge=st.integers(0, 2))
def test_any_chain_computes_the_same(chain: list[list[str]], merge: int) -> None:
    torch._dynamo.reset()
    model = Shuffled(chain, merge).double()
    assert_per_sample_grads(model, torch.randn(B, T, E, dtype=torch.float64), backend="eager")


def test_a_copy_in_between_stays() -> None:
    class Copies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x.transpose(0, 1).contiguous().view(-1, E).view(T, -1, E).transpose(0, 1)
            h.add_(1)
            return h.relu()

    model = nn.Sequential(nn.Linear(E, E), Copies())
    gm = graph_of(model)
    assert any(op_name(node.target) == "contiguous" for node in gm.graph.nodes)
    assert_per_sample_grads(model.double(), torch.randn(B, T, E, dtype=torch.float64))


def test_the_pass_leaves_what_merges() -> None:
    model = nn.Sequential(nn.Linear(E, E), nn.Flatten(0, 1), nn.Linear(E, E), nn.Unflatten(0, (-1, T)))
    assert views_of(graph_of(model)) == []

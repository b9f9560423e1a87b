"""Joint graphs on a CUDA device that is not there, for tests/test_cuda_graphs.py.

    python -m tests.fake_cuda LIBRARY MODEL,QUANTITY ..

LIBRARY, made of fake_cuda.cpp, is loaded before PyTorch. Models and inputs are fake tensors, so nothing is computed:
one line of JSON for each pair says which operators the joint graph has, what in it would wait for the device, and
which values lie on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # before PyTorch asks for CUDA's hooks
    os.environ["FXGRAD_MACHINE"] = "reference"

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._library.custom_ops import _maybe_get_opdef
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fxgrad
from fxgrad.kernels.fusible import opened
from fxgrad.kernels.on_gpu import form_of
from fxgrad.kernels.operators import BODIES
from fxgrad.quantities.clipping import _constants

B, T, D = 4, 12, 16
WAITS = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.nonzero", "aten.equal", "aten.masked_select")


class Reader(nn.Module):
    """An embedding, attention, norms, a convolution and a table that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, D), nn.LayerNorm(D)
        self.layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.1, batch_first=True)
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.layer(self.norm(self.table(ids)))
        h = self.conv(h.mT).mT
        loss: Tensor = (h @ self.table.weight.t()).logsumexp(2).sum(1)
        return loss


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.gru = nn.Embedding(50, D), nn.LSTM(D, D, batch_first=True), nn.GRU(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.lstm(self.table(ids))[0]
        out: Tensor = self.gru(h.transpose(0, 1))[0]
        return out.square().sum((0, 2))


class Cells(nn.Module):
    """Cells in a loop: on a GPU, PyTorch has fused operators for them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(D, D), nn.GRUCell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        state, h = self.lstm(x), x
        for _ in range(2):
            state = self.lstm(h, state)
            h = self.gru(state[0], h)
        return h.square().sum(1)


def images() -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.MaxPool2d(2)
    )
    return nn.Sequential(body, nn.Flatten(), nn.Linear(288, 10))


def words() -> Tensor:
    return torch.randint(0, 50, (B, T))


MODELS: dict[str, Any] = {
    "linear": (lambda: nn.Sequential(nn.Linear(D, 3 * D), nn.Tanh(), nn.Linear(3 * D, 5)), lambda: torch.randn(B, D)),
    "images": (images, lambda: torch.randn(B, 3, 16, 16)),
    "reader": (Reader, words),
    "recurrent": (Recurrent, words),
    "cells": (Cells, lambda: torch.randn(B, D)),
}
QUANTITIES: dict[str, Any] = {
    "clipped": lambda: fxgrad.ClippedGrad(max_grad_norm=1.0),
    "norms": fxgrad.NormSample,
    "rows": fxgrad.GradSample,
    "variance": fxgrad.GradVariance,
    "projection": lambda: fxgrad.GradProjection(dim=4, seed=0),
}


@contextlib.contextmanager
def fakes_allowed() -> Iterator[None]:
    """Let fake tensors be parameters, and gradient placeholders be fake."""
    with contextlib.ExitStack() as stack:
        for name in ("fxgrad.api", "fxgrad.capture.checks", "fxgrad.compile.compiler"):
            stack.enter_context(mock.patch(f"{name}.check_parameters", lambda parameters: None))
        for name in ("runtime.deliveries", "quantities.clipping"):
            stack.enter_context(mock.patch(f"fxgrad.{name}.disable_current_modes", contextlib.nullcontext))
        stack.enter_context(mock.patch("fxgrad.quantities.clipping._constants", _constants.__wrapped__))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # PyTorch looks for cuDNN
        yield


def joint_graph(model: nn.Module, x: Tensor, quantity: Any) -> fx.GraphModule:
    """The graph of forward and backward that AOTAutograd traces."""
    graphs: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        graphs.append(joint)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda gm, inputs: gm, partition_fn=partition)
    transformed = fxgrad.transform(model, backend=backend, quantity=quantity, memory_limit=None)
    transformed(x).sum().backward()
    fxgrad.zero_grad(model)
    return graphs[-1]


def waits(node: fx.Node) -> str:
    """What makes the host wait for the device in this node, "" if nothing does.

    fxgrad's own operators are run on fake tensors: a number that is read of one raises an error.
    """
    name = str(node.target)
    if name.startswith(WAITS):
        return name
    if not name.startswith("fxgrad."):
        return ""
    args, kwargs = tree_map_only(fx.Node, lambda arg: arg.meta["val"], (node.args, node.kwargs))
    try:
        body_of(node.target)(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        return f"{name}: {error}"
    return ""


def body_of(overload: Any) -> Any:
    """Return what an operator runs on a device."""
    if overload in BODIES:
        return BODIES[overload]
    definition = _maybe_get_opdef(overload)
    assert definition is not None, overload
    return definition._init_fn


def on_cpu(node: fx.Node) -> bool:
    return any(value.device.type == "cpu" for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor))


def report(name: str, kind: str) -> dict[str, Any]:
    build, draw = MODELS[name]
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes_allowed(), fakes, torch.device("cuda"):
        joint = joint_graph(build(), draw(), QUANTITIES[kind]())
        before, found = described(joint), {"model": name, "quantity": kind}
    joint = opened(joint, form_of)  # as Inductor gets it
    with fakes:
        after = described(joint)
    waits, cpu = before["waits"] + after["waits"], before["cpu"] + after["cpu"]
    return {**found, "operators": before["operators"], "left": after["operators"], "waits": waits, "cpu": cpu}


def described(gm: fx.GraphModule) -> dict[str, list[str]]:
    """A graph's operators of fxgrad, what makes the host wait, and values on the CPU."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return {
        "operators": sorted({str(node.target) for node in calls if str(node.target).startswith("fxgrad.")}),
        "waits": [found for node in calls if (found := waits(node))],
        "cpu": [node.name for node in gm.graph.nodes if node.op != "output" and on_cpu(node)],
    }


if __name__ == "__main__":
    for pair in sys.argv[2:]:
        print(json.dumps(report(*pair.split(","))), flush=True)

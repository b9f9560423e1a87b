"""A per-sample compiler in 300 lines: what fxgrad does, for linear layers alone. See docs/from_scratch.md.

Run this file: it compares with a loop over single samples in float64.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx


class Refused(RuntimeError):
    """The model is not understood; a wrong number would be worse."""


# 1. Capture
class Tracer(fx.Tracer):
    """Trace into every module, so that nn.Linear becomes F.linear with its parameters as arguments."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def capture(model: nn.Module) -> fx.GraphModule:
    """Return the model as one graph: `placeholder`, `get_attr` (a parameter), `call_function`, `call_method`."""
    return fx.GraphModule(model, Tracer().trace(model))


# 2. Where are the samples?


@dataclass(frozen=True)
class Batched:
    """A value with one part per sample, along ``dim`` of ``ndim`` dimensions."""

    dim: int
    ndim: int


UNIFORM = None  # a value without samples: a parameter, a number, or a function of these
Samples = Batched | None
Family = Callable[[fx.Node, list[Samples]], Samples]


def linear_samples(node: fx.Node, operands: list[Samples]) -> Samples:
    """linear(x, w, b): rows are independent, so the samples must not be the features."""
    x, *parameters = operands
    if any(parameter is not UNIFORM for parameter in parameters):
        raise Refused(f"{node.name}: a weight that depends on samples")
    if x is not UNIFORM and x.dim == x.ndim - 1:
        raise Refused(f"{node.name}: the features of this linear layer are the samples")
    return x


def elementwise_samples(node: fx.Node, operands: list[Samples]) -> Samples:
    """An elementwise op: all operands have the samples in the same place, counted from the end as broadcasting does."""
    batched = [operand for operand in operands if operand is not UNIFORM]
    if len({operand.ndim - operand.dim for operand in batched}) > 1:
        raise Refused(f"{node.name}: sample i meets other samples")
    return max(batched, key=lambda operand: operand.ndim, default=UNIFORM)


def reduction_samples(node: fx.Node, operands: list[Samples]) -> Samples:
    """x.mean(dim): refused over the samples; a dimension in front of them goes away."""
    x, dim = operands[0], node.args[1] if len(node.args) == 2 else None
    if x is UNIFORM or not isinstance(dim, int) or node.kwargs:
        raise Refused(f"{node.name}: this small compiler knows x.mean(dim) and x.sum(dim) of samples only")
    if dim % x.ndim == x.dim:
        raise Refused(f"{node.name}: it reduces over the samples")
    return Batched(x.dim - (dim % x.ndim < x.dim), x.ndim - 1)


def transposed_samples(node: fx.Node, operands: list[Samples]) -> Samples:
    """x.transpose(a, b): the samples move along."""
    x, dims = operands[0], node.args[1:]
    if x is UNIFORM or len(dims) != 2:
        raise Refused(f"{node.name}: this small compiler knows x.transpose(a, b) of samples only")
    first, second = (dim % x.ndim for dim in dims if isinstance(dim, int))
    return Batched({first: second, second: first}.get(x.dim, x.dim), x.ndim)


ELEMENTWISE = (operator.add, operator.sub, operator.mul, torch.relu, F.relu, torch.tanh, F.gelu, torch.sigmoid)
FAMILIES: dict[Any, Family] = {
    F.linear: linear_samples,
    **dict.fromkeys(ELEMENTWISE, elementwise_samples),
    **dict.fromkeys(("mean", "sum"), reduction_samples),
    "transpose": transposed_samples,
}


def infer_samples(gm: fx.GraphModule, inputs: Mapping[str, Batched]) -> dict[fx.Node, Samples]:
    """Return where each value has its samples; refuse an op without a family."""
    places: dict[fx.Node, Samples] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            places[node] = inputs[node.name] if node.op == "placeholder" else UNIFORM
        elif node.op == "output":
            if places[node.args[0]] is UNIFORM:
                raise Refused("the output does not depend on the samples")
        elif node.target not in FAMILIES:
            raise Refused(f"{node.name}: nothing is known about {node.target}")
        else:
            arguments = [*node.args, *node.kwargs.values()]
            operands = [places[argument] if isinstance(argument, fx.Node) else UNIFORM for argument in arguments]
            places[node] = FAMILIES[node.target](node, operands)
    return places


# 3. Terms, the tape, and taps


@dataclass(frozen=True)
class Term:
    """The gradients ``Σ_k g[n, k] ⊗ x[n, k]`` of one weight, not multiplied out."""

    g: Tensor  # [n, k, o]
    x: Tensor  # [n, k, i]

    def squared_norms(self) -> Tensor:
        """``‖Σ_k g_k ⊗ x_k‖² = Σ_kl (g_k · g_l) (x_k · x_l)``: two Gram matrices, no gradient."""
        return ((self.g @ self.g.mT) * (self.x @ self.x.mT)).sum((1, 2))

    def weighted(self, c: Tensor) -> Tensor:
        """``Σ_n c_n Σ_k g_nk ⊗ x_nk``: one product, no gradient of a single sample."""
        return torch.einsum("nko,nki->oi", self.g * c[:, None, None], self.x)

    def dense(self) -> Tensor:
        """Every sample's gradient, ``[n, o, i]``."""
        return torch.einsum("nko,nki->noi", self.g, self.x)


@dataclass
class Tape:
    """The uses of each parameter, in the order in which the backward reached them."""

    uses: dict[str, list[Term]] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def record(self, name: str, term: Term) -> None:
        self.uses.setdefault(name, []).append(term)

    def merge_terms(self, name: str) -> Term:
        """Return the uses of one parameter as one term: tied weights only make k longer."""
        terms = self.uses[name]
        return Term(torch.cat([term.g for term in terms], 1), torch.cat([term.x for term in terms], 1))

    def grad_sample(self, name: str) -> Tensor:
        dense = self.merge_terms(name).dense()
        return dense.reshape(len(dense), *self.shapes[name])

    def norms(self) -> Tensor:
        """Return the norm of each sample's gradient over all parameters, ``[n]``."""
        squares = [self.merge_terms(name).squared_norms() for name in self.uses]
        return torch.stack(squares).sum(0).clamp(min=0).sqrt()

    def clipped_sum(self, bound: float) -> dict[str, Tensor]:
        """Return ``Σ_n min(1, bound / ‖g_n‖) g_n`` for each parameter."""
        weights = (bound / self.norms().clamp(min=1e-12)).clamp(max=1)
        return {name: self.merge_terms(name).weighted(weights).reshape(self.shapes[name]) for name in self.uses}


class Identity(torch.autograd.Function):
    """The identity behind a linear layer; its backward hands the layer's factors to the tap."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, tap: Tap) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tap = tap
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        ctx.tap.record(g.detach(), *ctx.saved_tensors)
        return g, None, None


class Tap(nn.Module):
    """One linear layer's place in the graph, and its rule: ``dW_n = Σ_k g_nk ⊗ x_nk``, ``db_n = Σ_k g_nk``."""

    def __init__(self, tape: Tape, weight: str, bias: str | None, dim: int) -> None:
        super().__init__()
        self.tape, self.weight, self.bias, self.dim = tape, weight, bias, dim

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        y = y if y.requires_grad else y.detach().requires_grad_()  # the first layer's input requires no gradient
        return Identity.apply(y, x.detach(), self)

    def record(self, g: Tensor, x: Tensor) -> None:
        g, x = (v.movedim(self.dim, 0).unsqueeze(1).flatten(1, -2) for v in (g, x))  # samples, positions, features
        self.tape.record(self.weight, Term(g, x))
        if self.bias is not None:
            self.tape.record(self.bias, Term(g, torch.ones_like(g[..., :1])))


def attach_taps(gm: fx.GraphModule, samples: Mapping[fx.Node, Samples], tape: Tape) -> None:
    """Replace ``linear(x, w, b)`` by ``tap(linear(x, w.detach(), b.detach()), x)``."""
    for number, node in enumerate([node for node in gm.graph.nodes if node.target is F.linear]):
        x, weight, bias = (*node.args, *node.kwargs.values(), None)[:3]
        where, parameters = samples[node], [each for each in (weight, bias) if each is not None]
        if where is UNIFORM or any(parameter.op != "get_attr" for parameter in parameters):
            raise Refused(f"{node.name}: this small compiler knows linear(samples, parameter, parameter) only")
        gm.add_submodule(f"tap_{number}", Tap(tape, weight.target, bias and bias.target, where.dim))
        with gm.graph.inserting_after(node):
            tapped = gm.graph.call_module(f"tap_{number}", (node, x))
        node.replace_all_uses_with(tapped, delete_user_cb=lambda user, tapped=tapped: user is not tapped)
        with gm.graph.inserting_before(node):
            for parameter in parameters:
                node.replace_input_with(parameter, gm.graph.call_method("detach", (parameter,)))


def prove_coverage(gm: fx.GraphModule) -> None:
    """Refuse a parameter that reaches anything but ``detach``: its gradient would be missing in silence."""
    for node in gm.graph.nodes:
        for user in node.users if node.op == "get_attr" else ():
            if user.target != "detach":
                raise Refused(f"{user.name} uses {node.target!r}, and there is no rule for it")


def transform(model: nn.Module, inputs: Mapping[str, Batched]) -> tuple[fx.GraphModule, Tape]:
    """Return the model with taps, and the tape on which its backward writes."""
    gm = capture(model)
    tape = Tape(shapes={name: p.shape for name, p in model.named_parameters(remove_duplicate=False)})
    attach_taps(gm, infer_samples(gm, inputs), tape)
    prove_coverage(gm)
    gm.recompile()
    return gm, tape


# 4. One step as one graph, and the check


def step_graph(model: nn.Module, x: Tensor, dim: int = 0, bound: float = 1.0) -> fx.GraphModule:
    """Trace forward, backward and clipped sum into one graph of ATen ops, which a compiler could take."""

    def step(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        private, tape = transform(model, {"x": Batched(dim, x.dim())})
        private(x).square().sum().backward()
        return tape.norms(), tape.clipped_sum(bound)

    return make_fx(step)(x)


def loop(model: nn.Module, x: Tensor, dim: int) -> dict[str, Tensor]:
    """Return every sample's gradient, one sample at a time by plain autograd."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for sample in x.split(1, dim):
        grads = torch.autograd.grad(model(sample).square().sum(), list(model.parameters()))
        for name, grad in zip(rows, grads, strict=True):
            rows[name].append(grad)
    return {name: torch.stack(grads) for name, grads in rows.items()}


class Example(nn.Module):
    """A residual block whose layer is used twice, on ``[time, samples, features]``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.inner(x))
        x = x + F.gelu(self.inner(x))
        return self.head(x.transpose(0, 1).mean(1))


def main() -> int:
    """Compare gradients, norms and clipped sum with the loop; return 0 if all agree to 1e-10."""
    torch.manual_seed(0)
    model, x = Example().double(), torch.randn(5, 4, 6, dtype=torch.float64)
    truth = loop(model, x, dim=1)
    norms = torch.cat([rows.flatten(1) for rows in truth.values()], 1).norm(dim=1)
    bound = float(norms.median())
    weights = (bound / norms).clamp(max=1)
    private, tape = transform(model, {"x": Batched(1, 3)})
    print(private.graph)
    private(x).square().sum().backward()
    clipped = tape.clipped_sum(bound)
    errors = {"norms": float((tape.norms() - norms).abs().max())}
    for name, rows in truth.items():
        errors[name] = float((tape.grad_sample(name) - rows).abs().max())
        wanted = torch.einsum("n,n...->...", weights, rows)
        errors[f"{name}, clipped"] = float((clipped[name] - wanted).abs().max())
    for name, error in errors.items():
        print(f"{name:24} {error:.1e}")
    good = all(error <= 1e-10 for error in errors.values())
    print("good" if good else "wrong")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

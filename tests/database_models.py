"""Samples of PyTorch's test databases, turned into models with parameters and batched inputs."""

from __future__ import annotations

import copy
import linecache
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.databases import Case
from tests.independence import choices_of_dims, different_copies, sample_dims_of_output, tensors_of

NEW = -1
"""The batch as a new leading dim, beside the dims that a tensor of the sample has already."""

PADDED = -2
"""The batch as a new leading dim in front of the widest tensor of the sample, so that broadcasting lines it up."""

_serial = count()


@dataclass(frozen=True)
class Plan:
    """The role of each tensor of a sample: batched along `dim`, a parameter, or a parameter shared along `dim`."""

    batched: tuple[int, ...]
    dim: int
    tied: bool = False

    def __str__(self) -> str:
        along = {NEW: "a new dim", PADDED: "a new broadcast dim"}.get(self.dim, f"dim {self.dim}")
        return f"tensor {', '.join(map(str, self.batched))} batched along {along}{', the rest shared' * self.tied}"


def op_cases(op: Callable[..., Any], name: str, sample: Any) -> Iterator[Case]:
    """Cases of one sample of `op_db`, the most natural first for each batched tensor.

    Every tensor of the sample in turn is the batched input, along each of its dims and along a new one, with all other
    floating tensors as parameters, or with parameters shared along the batch dim; where none of that is possible, all
    tensors but one are batched. Where nothing is, the case says that no batch exists.
    """
    call = Call(op, name, (sample.input, *sample.args), sample.kwargs)
    done: set[Plan] = set()
    for x in call.tensors:
        if not call.parameters((x,)) or (call.leaves[x].is_floating_point() and x not in call.differentiable):
            continue
        inner = range(1, call.leaves[x].dim())
        plans = [Plan((x,), 0), Plan((x,), NEW), Plan((x,), PADDED), *(Plan((x,), dim) for dim in inner)]
        found = call.cases(plans)
        if not any(plan.dim == 0 for plan in found):
            found |= call.cases([Plan((x,), 0, tied=True)])
        found = found or call.cases(_last_resorts(call, x))
        for rank, (plan, case) in enumerate(found.items()):
            if plan not in done:
                yield replace(case, natural=rank == 0)
        done |= found.keys()
        if not found:
            yield call.illegal(x)


def _last_resorts(call: Call, x: int) -> Iterator[Plan]:
    dims = (*range(call.leaves[x].dim()), NEW, PADDED)
    for parameter in call.parameters((x,)):
        yield from (Plan(tuple(k for k in call.tensors if k != parameter), dim) for dim in dims)
    yield from (Plan((x,), dim, tied=True) for dim in dims)


def uniform_case(op: Callable[..., Any], name: str, sample: Any, copies: int = 3) -> Case | None:
    """x ⊙ op(parameters): every tensor of the sample is a parameter, and the result meets the samples afterwards."""
    call = Call(op, name, (sample.input, *sample.args), sample.kwargs)
    if not call.parameters(()):
        return None
    expression, module = call.expression((), None)
    try:
        output = op(sample.input, *sample.args, **sample.kwargs)
    except Exception:  # the sample is one that the op refuses
        return None
    tensors = tensors_of(output)
    names = [f"x{k}" for k in range(len(tensors))]
    if not isinstance(output, Tensor):
        expression = f"[x * y for x, y in zip([{', '.join(names)}], {expression})]"
    else:
        expression = f"x0 * {expression}"
    if not all(isinstance(y, Tensor) for y in ([output] if isinstance(output, Tensor) else output)):
        return None
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(copies, *y.shape, generator=generator, dtype=torch.float64) for y in tensors)
    model = compiled_module(module, expression, names, {"op": op})
    if not _trains(model, inputs):
        return None
    return Case(f"{name}: all tensors are parameters", model, inputs, (0,) * len(inputs), [0] * len(inputs))


def layout_cases(op: Callable[..., Any], name: str, sample: Any) -> Iterator[Case]:
    """op(x) ⊙ w with the samples along each dim of x in turn, for samples whose only tensor is x.

    Where `op` treats the slices along that dim alone, the layout of what it returns must be known; where it does not,
    the product with w has no per-sample gradient and must be refused.
    """
    call = Call(op, name, (sample.input, *sample.args), sample.kwargs)
    if call.tensors != [0] or not call.leaves[0].is_floating_point():
        return
    for dim in range(call.leaves[0].dim()):
        x = call.batched(0, dim)
        outputs = _repeatable(op, (x, *sample.args), sample.kwargs)
        if x is None or not outputs or not all(y.is_floating_point() for y in outputs):
            continue
        dims = sample_dims_of_output(call.model((0,), None), [x], [dim])
        if dims is None or not {"sum", "mean"} & {*dims}:
            model = _weighted(call, outputs, dims)
            yield Case(f"{name} along dim {dim}", model, (x,), (dim,), dims)


def _repeatable(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The outputs of a call that neither fails nor draws random numbers, else nothing."""
    copies = [pytree.tree_map_only(Tensor, torch.clone, (args, kwargs)) for _ in range(2)]  # op may work in place
    try:
        once, again = (tensors_of(op(*own_args, **own_kwargs)) for own_args, own_kwargs in copies)
        same = all(torch.allclose(a, b, equal_nan=True) for a, b in zip(once, again, strict=True))
    except Exception:  # the sample is one that the op refuses, or gives no dense tensor
        return []
    return [y.detach() for y in once] if same else []


def _weighted(call: Call, outputs: list[Tensor], dims: list[int | str] | None) -> nn.Module:
    """op(x) ⊙ w, with w the size of one sample's output."""
    expression, module = call.expression((0,), None)
    weights = []
    for index, y in enumerate(outputs):
        size = [1 if dims and k == dims[index] else n for k, n in enumerate(y.shape)]
        weights.append(torch.linspace(0.5, 1.5, math.prod(size), dtype=y.dtype).reshape(size))
    module.w = nn.ParameterList(weights)
    names = {"op": call.op, "outputs_of": _outputs_of}
    return compiled_module(module, f"[y * w for y, w in zip(outputs_of({expression}), self.w)]", ["x0"], names)


def _outputs_of(output: Any) -> Any:
    return [output] if isinstance(output, Tensor) else output


def module_case(model: nn.Module, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Case:
    """A module of `module_db` with one of its inputs, the samples along the first dims that keep them independent."""
    model(*args, **kwargs)  # lazy modules learn their shapes
    if kwargs:
        call = Call(model, name, args, kwargs)
        expression, wrapper = call.expression(tuple(call.tensors), None)
        wrapper.inner = model
        args, names = [call.leaves[k] for k in call.tensors], [f"x{n}" for n in range(len(call.tensors))]
        model = compiled_module(wrapper, expression.replace("op(", "self.inner(", 1), names, {})
    for dims in choices_of_dims(args):
        grown = [x if d is None or x.shape[d] else different_copies(x, 3, d) for x, d in zip(args, dims, strict=True)]
        out_dims = sample_dims_of_output(model, grown, dims)
        if out_dims is not None:
            return Case(name, model, tuple(args), dims, out_dims)
    if getattr(model, "reduction", "") == "mean":
        summed: Any = copy.deepcopy(model)
        summed.reduction = "sum"
        case = module_case(summed, name, args, {})
        if case.out_dims == ["sum"]:
            return replace(case, model=model, out_dims=["share"], summed=summed)
    return Case(f"{name}, where no batch exists", model, tuple(args), None, None)


class Call:
    """`op` with the arguments of one sample, and the models that can be made of it."""

    def __init__(self, op: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op, self.name = op, name
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), kwargs))
        self.differentiable = {k for k, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.requires_grad}
        self.leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in self.leaves]
        self.tensors = [k for k, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.layout is torch.strided]

    def parameters(self, batched: tuple[int, ...]) -> list[int]:
        """The tensors that can be parameters when these are batched: those that the database differentiates."""
        return [k for k in self.tensors if k not in batched and k in self.differentiable]

    def cases(self, plans: Iterable[Plan]) -> dict[Plan, Case]:
        """The models in which the tensors have the roles that a plan says, for the plans that the op accepts."""
        made = {plan: self._case(plan) for plan in dict.fromkeys(plans)}
        return {plan: case for plan, case in made.items() if case is not None}

    def _case(self, plan: Plan) -> Case | None:
        if not self.parameters(plan.batched):
            return None
        inputs = [self.batched(k, plan.dim) for k in plan.batched]
        if any(x is None for x in inputs):
            return None
        model = self.model(plan.batched, plan)
        in_dims = tuple(max(plan.dim, 0) for _ in inputs)
        out_dims = sample_dims_of_output(model, inputs, in_dims)
        if out_dims is None or not _trains(model, inputs):
            return None
        if plan.dim >= 0 and all(self.leaves[k].shape[plan.dim] == 0 for k in plan.batched):
            inputs = [self.leaves[k] for k in plan.batched]  # legal for any number of samples, so for none too
        return Case(f"{self.name}: {plan}", model, tuple(inputs), in_dims, out_dims)

    def illegal(self, x: int) -> Case:
        """The call with tensor x as a batched input although no dim of it is one of samples."""
        in_dims = (0 if self.leaves[x].dim() else None,)
        name = f"{self.name}: tensor {x} batched where no batch exists"
        return Case(name, self.model((x,), None), (self.leaves[x],), in_dims, None)

    def batched(self, k: int, dim: int, copies: int = 3) -> Tensor | None:
        x: Tensor = self.leaves[k]
        if dim in (NEW, PADDED):
            padding = (max(self.leaves[t].dim() for t in self.tensors) - x.dim()) * (dim == PADDED)
            if dim == PADDED and not padding:
                return None
            return different_copies(x.reshape(1, *(1,) * padding, *x.shape), copies, 0)
        if x.dim() <= dim:
            return None
        return x if x.shape[dim] > 1 else different_copies(x, copies, dim)

    def model(self, batched: tuple[int, ...], plan: Plan | None) -> nn.Module:
        """A module whose forward is the call, written out as source: errors then show a line of it."""
        expression, module = self.expression(batched, plan)
        return compiled_module(module, expression, [f"x{n}" for n in range(len(batched))], {"op": self.op})

    def _batched_term(self, k: int, term: str, module: nn.Module, plan: Plan | None) -> str:
        """What stands for the batched tensor k in the source."""
        return term

    def expression(self, batched: tuple[int, ...], plan: Plan | None) -> tuple[str, nn.Module]:
        module, place, parameters = nn.Module(), {k: f"x{n}" for n, k in enumerate(batched)}, self.parameters(batched)
        terms = []
        for k, leaf in enumerate(self.leaves):
            term = f"self.c{k}"
            if k in place:
                term = self._batched_term(k, place[k], module, plan)
            elif isinstance(leaf, (bool, int, str, type(None))) or (isinstance(leaf, float) and math.isfinite(leaf)):
                term = repr(leaf)
            elif k in parameters:
                value, term = leaf, f"self.p{k}"
                if plan is not None and plan.tied:
                    value, term = _shared(leaf, plan.dim, term)
                setattr(module, f"p{k}", nn.Parameter(value.clone()))
            elif isinstance(leaf, Tensor):
                module.register_buffer(f"c{k}", leaf)
            else:
                setattr(module, f"c{k}", leaf)
            terms.append(term)
        args, kwargs = pytree.tree_unflatten([_Source(term) for term in terms], self.spec)
        words = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        return f"op({', '.join(words)})", module


class _Source(str):
    """Text that shows as itself inside a printed list or dict."""

    __repr__ = str.__str__


def _shared(p: Tensor, dim: int, term: str) -> tuple[Tensor, str]:
    """One slice of p along `dim`, and the source that expands it to the batch."""
    if dim < 0:
        return p, f"{term}.expand({', '.join(['x0.shape[0]', *(str(size) for size in p.shape)])})"
    if p.dim() <= dim or p.shape[dim] == 0:
        return p, term
    sizes = ", ".join(f"x0.shape[{dim}]" if k == dim else "-1" for k in range(p.dim()))
    return p.narrow(dim, 0, 1), f"{term}.expand({sizes})"


def compiled_module(module: nn.Module, expression: str, arguments: Iterable[str], names: dict[str, Any]) -> nn.Module:
    """`module` with `forward(self, *arguments)` returning `expression`, whose source tracebacks can show."""
    filename = f"<database model {next(_serial)}>"
    source = f"def forward(self, {', '.join(arguments)}):\n    return {expression}\n"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = dict(names)
    exec(compile(source, filename, "exec"), namespace)
    module.__class__ = type("DatabaseModel", (nn.Module,), {"forward": namespace["forward"], "source": expression})
    return module


def _trains(model: nn.Module, inputs: Sequence[Any]) -> bool:
    """Whether some output depends on a parameter, in a way that the plain model can differentiate."""
    leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in inputs]
    with torch.enable_grad():
        trained = [y for y in tensors_of(model(*inputs)) if y.requires_grad]
        outputs = [y for y in tensors_of(model(*leaves)) if y.requires_grad]
    sources = [*model.parameters(), *(x for x in leaves if x.requires_grad)]
    if not trained:
        return False
    try:  # bilinear takes a weight of four dims and then has no backward
        torch.autograd.grad(outputs, sources, [torch.ones_like(y) for y in outputs], allow_unused=True)
    except RuntimeError:
        return False
    return True

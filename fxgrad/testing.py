"""The oracle: per-sample gradients as a loop over single samples with plain autograd, and the comparison with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxgrad

__all__ = [
    "assert_graph_snapshot",
    "assert_per_sample_grads",
    "check_rule",
    "default_loss",
    "per_sample_grads",
    "relative_error",
]

LossFn = Callable[[Any], Tensor]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest accepted `relative_error`, by dtype of the parameters (the coarsest of them decides)."""

NEGLIGIBLE = 1e-3
"""A gradient smaller than this share of the model's largest is measured against that share: some are exactly zero."""


def default_loss(output: Any, sample_dim: int = 0) -> Tensor:
    """L = Σ_n Σ_k sin(y_nk + φ_k), a sum over samples whose gradient cos(y_nk + φ_k) differs in every element.

    The phase φ_k depends on the position within one sample alone, never on the sample's index or on how many there
    are, so the loss of a batch is the sum of the losses of its samples. `output` is any pytree; its floating and
    complex tensors take part, each `[..., B, ...]` with the samples along `sample_dim` (the last dim, if it has
    fewer); those without dims are losses themselves, sums over samples already, and enter linearly.

    >>> y = torch.randn(3, 4, dtype=torch.float64)
    >>> torch.allclose(default_loss(y), sum(default_loss(y[i : i + 1]) for i in range(3)))
    True
    """
    total: Tensor | None = None
    for index, leaf in enumerate(pytree.tree_leaves(output)):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        y = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        y = y.float() if y.dtype in (torch.float16, torch.bfloat16) else y
        if leaf.dim() == 0:
            total = _plus(total, y.sum() * (0.3 + index))
            continue
        y = y.movedim(min(sample_dim, leaf.dim() - 1), 0)
        size = y.shape[1:]  # one sample
        phase = torch.arange(size.numel(), device=y.device, dtype=y.dtype).mul(0.7).add(0.3 + index).reshape(size)
        total = _plus(total, (y + phase).sin().sum())
    if total is None:
        raise TypeError("the model's output holds no floating-point tensor: pass loss_fn")
    return total


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total + term.to(total.device, total.dtype)


def per_sample_grads(
    model: nn.Module,
    loss_fn: LossFn,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    in_dims: Any = None,
    batch_first: bool = True,
    batch_size: int | None = None,
    seed: int | None = None,
) -> dict[str, Tensor]:
    """Gradient of every sample's own loss, by one forward and one backward of the plain model per sample.

    G[name][n] = d loss_fn(model(x[n:n+1])) / d parameter          shape [B, *parameter.shape]

    Every batched tensor of `args` and `kwargs` (pytrees) is cut to one sample along its sample dim; the rest is shared.
    Which is which: `in_dims` as in `torch.vmap`, a pytree prefix of `args` with None for what is shared; otherwise dim
    0 (dim 1 if not `batch_first`) of all tensors that have it, and with `batch_size` of those where it has that size.
    Trainable parameters that the loss does not reach get zeros; frozen ones are left out. B = 0 gives `[0, *shape]`.
    Parameters, buffers and their `.grad` are as before when it returns.

    With `seed` the model may draw random numbers: then every sample takes one forward of the full batch under that seed
    and differentiates the loss of its own slice of the output, along dim 0 (dim 1 if not `batch_first`).

    >>> model, x = nn.Linear(3, 2), torch.randn(5, 3)
    >>> {name: tuple(g.shape) for name, g in per_sample_grads(model, default_loss, (x,)).items()}
    {'weight': (5, 2, 3), 'bias': (5, 2)}
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    dims = _sample_dims(leaves, args, kwargs or {}, in_dims, batch_first, batch_size)
    size = _number_of_samples(leaves, dims)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: p.new_zeros((size, *p.shape)) for name, p in parameters.items()}
    for n in range(size):
        inputs = _fresh(leaves) if seed is not None else _fresh(_take_sample(leaves, dims, n))
        own_args, own_kwargs = pytree.tree_unflatten(inputs, spec)
        with _state_restored(model), torch.enable_grad():
            if seed is not None:
                torch.manual_seed(seed)
            output = model(*own_args, **own_kwargs)
            if seed is not None:
                output = _take_output(output, n, 0 if batch_first else 1)
            for name, g in _grad(loss_fn(output), parameters).items():
                grads[name][n] = g
    return grads


def relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """max over names of  max|a - b| / max(max|b|, 1e-3 · the largest |b| over all names).

    A tensor whose true value is exactly zero is thus measured against the others. Raises AssertionError, naming the
    tensor, where the names, shapes, dtypes or devices differ, and where a value that is not finite in one of the two
    is not the same in the other. Empty tensors have error 0.

    >>> relative_error({"w": torch.tensor([1.0, 2.5])}, {"w": torch.tensor([1.0, 2.0])})
    0.25
    """
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    if missing or extra:
        raise AssertionError(f"names differ: missing {missing}, unexpected {extra}")
    largest = max((_largest(b) for b in expected.values()), default=0.0)
    errors = [0.0]
    for name, b in expected.items():
        a = actual[name]
        if a.shape != b.shape:
            raise AssertionError(f"shape of '{name}': {list(a.shape)} instead of {list(b.shape)}")
        if a.dtype != b.dtype or a.device != b.device:
            raise AssertionError(f"'{name}' is {a.dtype} on {a.device} instead of {b.dtype} on {b.device}")
        a, b = _wide(a), _wide(b)
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
            raise AssertionError(f"'{name}' is not finite where it should be, or the reverse")
        difference = _largest(a[finite] - b[finite])
        if difference:
            scale = max(_largest(b), NEGLIGIBLE * largest)
            errors.append(difference / scale if scale else float("inf"))
    return max(errors)


def assert_per_sample_grads(
    model: nn.Module,
    *args: Any,
    loss_fn: LossFn | None = None,
    backend: str | Callable[..., Any] = "aot_eager",
    tolerance: float | None = None,
    batch_size: int | None = None,
    in_dims: Any = None,
    batch_first: bool = True,
    seed: int | None = None,
    check_sum: bool = True,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """Transforms `model`, runs it forward and backward on `args` and `kwargs`, and compares with the loop over samples.

    Checks, each within `tolerance` (by dtype, see `TOLERANCE`): the output is the plain model's; `p.grad_sample` is
    `per_sample_grads`, contiguous, of p's dtype, and `p.grad` stays None; frozen parameters have none; the gradients of
    the inputs that require grad are the plain model's; `grad_sample.sum(0)` is the plain gradient of the whole batch
    (unless `check_sum` is False). `loss_fn` takes the output and gives a sum over samples (`default_loss`).
    `options` go to `fxgrad.transform` as they are. The model's gradients, buffers and `grad_sample` are cleared
    afterwards. Returns the largest error found; raises AssertionError with what differs, and fxgrad's own errors.

    >>> assert_per_sample_grads(nn.Linear(3, 2), torch.randn(5, 3), backend="eager") < 1e-4
    True
    """
    sample_dim = 0 if batch_first else 1
    loss = loss_fn or (lambda output: default_loss(output, sample_dim))
    how: dict[str, Any] = {"in_dims": in_dims, "batch_first": batch_first, "batch_size": batch_size}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if tolerance is None:
        tolerance = max((TOLERANCE.get(p.dtype, 0.0) for p in parameters.values()), default=1e-10)

    leaves, spec = pytree.tree_flatten((args, kwargs))
    expected = per_sample_grads(model, loss, args, kwargs, seed=seed, **how)
    transformed = fxgrad.transform(model, backend=backend, **how, **(options or {}))
    try:
        with _state_restored(model):
            plain = _run(model, parameters, _fresh(leaves), spec, loss, seed)
        with _state_restored(model):
            actual = _run(transformed, None, _fresh(leaves), spec, loss, seed)
        grad_sample = _grad_sample(model, trains=bool(plain["trains"]))
        pairs: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {
            "forward output": (actual["output"], plain["output"]),
            "input gradient": (actual["inputs"], plain["inputs"]),
        }
        if plain["trains"]:
            pairs["grad_sample"] = (grad_sample, expected)
            if check_sum:
                pairs["grad_sample.sum(0)"] = ({name: g.sum(0) for name, g in grad_sample.items()}, plain["grads"])
        return max(_assert_close(what, a, b, tolerance) for what, (a, b) in pairs.items())
    finally:
        fxgrad.zero_grad(model)


def _assert_close(what: str, actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> float:
    try:
        error = relative_error(actual, expected)
    except AssertionError as reason:
        raise AssertionError(f"{what}: {reason}") from None
    if error > tolerance:
        each = {name: relative_error({name: actual[name]}, {name: b}) for name, b in expected.items()}
        worst = max(each, key=each.__getitem__)
        raise AssertionError(f"{what} is off by {error:.2e} (tolerance {tolerance:.0e}), most in '{worst}'")
    return error


def _run(
    model: nn.Module,
    parameters: Mapping[str, Tensor] | None,
    inputs: list[Any],
    spec: pytree.TreeSpec,
    loss_fn: LossFn,
    seed: int | None,
) -> dict[str, Any]:
    """One forward and backward; with `parameters` their gradients are returned instead of stored."""
    if seed is not None:
        torch.manual_seed(seed)
    args, kwargs = pytree.tree_unflatten(inputs, spec)
    output = model(*args, **kwargs)
    loss = loss_fn(output)
    sources = {f"input {k}": x for k, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
    grads: dict[str, Tensor] = {}
    if parameters is not None:
        both = _grad(loss, {**sources, **parameters})
        grads = {name: both[name] for name in parameters}
        of_inputs = {name: both[name] for name in sources}
    else:
        if loss.requires_grad:
            loss.backward()
        of_inputs = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in sources.items()}
    tensors = [leaf.detach() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    named = {f"output {k}": leaf for k, leaf in enumerate(tensors)}
    return {"output": named, "inputs": of_inputs, "grads": grads, "trains": loss.requires_grad}


def _grad_sample(model: nn.Module, *, trains: bool) -> dict[str, Tensor]:
    """`grad_sample` of every trainable parameter, after checking what can be checked without knowing its value."""
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        g = getattr(p, "grad_sample", None)
        if p.grad is not None:
            raise AssertionError(f"'{name}'.grad was set")
        if not (p.requires_grad and trains):
            if g is not None:
                raise AssertionError(f"'{name}' is frozen or out of the loss's reach and has a grad_sample")
            continue
        if not isinstance(g, Tensor):
            raise AssertionError(f"'{name}' has no grad_sample")
        if not g.is_contiguous():
            raise AssertionError(f"grad_sample of '{name}' is not contiguous")
        if g.requires_grad:
            raise AssertionError(f"grad_sample of '{name}' requires grad")
        found[name] = g
    return found


def _grad(loss: Tensor, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """d loss / d source for each, dense; zeros for those that the loss does not depend on."""
    grads: Sequence[Tensor | None] = [None] * len(sources)
    if sources and loss.requires_grad:
        grads = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
    found = zip(sources.items(), grads, strict=True)
    return {name: torch.zeros_like(x) if g is None else g.to_dense() for (name, x), g in found}


def _sample_dims(
    leaves: list[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    in_dims: Any,
    batch_first: bool,
    batch_size: int | None,
) -> list[int | None]:
    """The sample dim of every leaf of (args, kwargs); None for what all samples share."""
    dim = 0 if batch_first else 1

    def default(leaf: Any) -> int | None:
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim:
            return None
        return dim if batch_size is None or leaf.shape[dim] == batch_size else None

    if in_dims is None:
        return [default(leaf) for leaf in leaves]
    spec = pytree.tree_structure(tuple(args))
    prefix = tuple(in_dims) if isinstance(in_dims, list) else in_dims
    given = pytree._broadcast_to_and_flatten(prefix, spec)
    if given is None:
        raise ValueError(f"in_dims={in_dims!r} is not a prefix of the structure of the arguments")
    return [*given, *(default(leaf) for leaf in pytree.tree_leaves(dict(kwargs)))]


def _number_of_samples(leaves: list[Any], dims: list[int | None]) -> int:
    sizes = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        raise ValueError(f"the batched inputs must agree on one number of samples, they have {sorted(sizes)}")
    return int(sizes.pop())


def _take_sample(leaves: list[Any], dims: list[int | None], n: int) -> list[Any]:
    pairs = zip(leaves, dims, strict=True)
    return [leaf if dim is None else leaf.narrow(dim, n, 1) for leaf, dim in pairs]


def _take_output(output: Any, n: int, dim: int) -> Any:
    return pytree.tree_map(lambda y: y.narrow(dim, n, 1) if isinstance(y, Tensor) and y.dim() > dim else y, output)


def _fresh(leaves: Sequence[Any]) -> list[Any]:
    """Copies that a model may change in place, leaves of the autograd graph where the originals require grad."""
    return [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Puts back parameters and buffers that a forward changes (running statistics, an embedding's max_norm)."""
    state = [*model.parameters(), *model.buffers()]
    before = [t.detach().clone() for t in state]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in zip(state, before, strict=True):
                if not torch.equal(t, value):
                    t.copy_(value)


def _wide(t: Tensor) -> Tensor:
    """Real and in double precision."""
    t = t.detach()
    return torch.view_as_real(t.to(torch.complex128)) if t.is_complex() else t.to(torch.float64)


def _largest(t: Tensor) -> float:
    """max|t| over finite values, 0 if there are none."""
    t = _wide(t).abs()
    return float(torch.where(t.isfinite(), t, 0.0).max()) if t.numel() else 0.0


class _OneOp(nn.Module):
    """A model of one op: its nn.Parameter arguments are its parameters, the other tensors its inputs."""

    def __init__(self, op: Callable[..., Any], leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.op, self.leaves, self.spec = op, list(leaves), spec
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(f"argument_{i}", leaf)

    def forward(self, *inputs: Tensor) -> Any:
        given = iter(inputs)
        filled = [
            getattr(self, f"argument_{i}") if isinstance(leaf, nn.Parameter)
            else next(given) if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(self.leaves)
        ]
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        return self.op(*args, **kwargs)


def check_rule(
    op: Callable[..., Any],
    *args: Any,
    in_dims: Any = 0,
    backend: str = "aot_eager",
    tolerance: float | None = None,
    **kwargs: Any,
) -> float:
    """Try an op's rule on numbers: per-sample gradients by it against the loop over single samples.

    Arguments that are `nn.Parameter` are differentiated by; every other tensor is batched along dim 0
    (`in_dims`, one entry per such tensor, says otherwise; None for one that all samples share). The op
    runs on the whole batch, on batches of one, and with each parameter frozen in turn. Raises
    `fxgrad.errors.RuleError` where the rule is wrong by more than `tolerance` (by dtype, see
    `TOLERANCE`). Returns the largest error.

    >>> check_rule(torch.nn.functional.linear, torch.randn(5, 3), nn.Parameter(torch.randn(2, 3))) < 1e-4
    True
    """
    from fxgrad.errors import RuleError

    leaves, spec = pytree.tree_flatten((args, kwargs))
    model = _OneOp(op, leaves, spec)
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]
    how: dict[str, Any] = {"in_dims": in_dims, "backend": backend, "tolerance": tolerance}
    errors = []
    for frozen in (None, *([p for p in model.parameters()] if len(list(model.parameters())) > 1 else [])):
        if frozen is not None:
            frozen.requires_grad_(False)
        try:
            errors.append(assert_per_sample_grads(model, *inputs, **how))
        except AssertionError as reason:
            raise RuleError(
                f"the rule of {getattr(op, '__name__', op)} is wrong: {reason}",
                advice="Compare it, term by term, with the op's own derivative.",
            ) from None
        finally:
            if frozen is not None:
                frozen.requires_grad_(True)
    return max(errors)


def assert_graph_snapshot(trace: Any, expected: str) -> None:
    """The text of a trace is the expected one, indentation and blank ends aside; else shows the difference.

    >>> assert_graph_snapshot("  graph:\\n    x", "graph:\\n  x")
    """
    import difflib
    from textwrap import dedent

    actual, wanted = (dedent(str(text)).strip().splitlines() for text in (trace, expected))
    actual, wanted = [line.rstrip() for line in actual], [line.rstrip() for line in wanted]
    if actual != wanted:
        changes = "\n".join(difflib.unified_diff(wanted, actual, "expected", "actual", lineterm=""))
        raise AssertionError(f"the graph is another one:\n{changes}")

"""The oracle: per-sample gradients as a loop over single samples with plain autograd, and the distance from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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
        y = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
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
        inputs = fresh(leaves) if seed is not None else fresh(take_sample(leaves, dims, n))
        own_args, own_kwargs = pytree.tree_unflatten(inputs, spec)
        with state_restored(model), torch.enable_grad():
            if seed is not None:
                torch.manual_seed(seed)
            output = model(*own_args, **own_kwargs)
            if seed is not None:
                output = _take_output(output, n, 0 if batch_first else 1)
            for name, g in grads_of(loss_fn(output), parameters).items():
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
    return max(relative_errors(actual, expected).values(), default=0.0)


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """What `relative_error` is the largest of: one error for each name."""
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    if missing or extra:
        raise AssertionError(f"names differ: missing {missing}, unexpected {extra}")
    smallest_scale = NEGLIGIBLE * max((largest(b) for b in expected.values()), default=0.0)
    return {name: _error_of(name, actual[name], b, smallest_scale) for name, b in expected.items()}


def _error_of(name: str, a: Tensor, b: Tensor, smallest_scale: float) -> float:
    if a.shape != b.shape:
        raise AssertionError(f"shape of '{name}': {list(a.shape)} instead of {list(b.shape)}")
    if a.dtype != b.dtype or a.device != b.device:
        raise AssertionError(f"'{name}' is {a.dtype} on {a.device} instead of {b.dtype} on {b.device}")
    a, b = wide(a), wide(b)
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        raise AssertionError(f"'{name}' is not finite where it should be, or the reverse")
    difference = largest(a[finite] - b[finite])
    scale = max(largest(b), smallest_scale)
    return 0.0 if difference == 0 else difference / scale if scale else float("inf")


def grads_of(loss: Tensor, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def take_sample(leaves: list[Any], dims: list[int | None], n: int) -> list[Any]:
    pairs = zip(leaves, dims, strict=True)
    return [leaf if dim is None else leaf.narrow(dim, n, 1) for leaf, dim in pairs]


def _take_output(output: Any, n: int, dim: int) -> Any:
    return pytree.tree_map(lambda y: y.narrow(dim, n, 1) if isinstance(y, Tensor) and y.dim() > dim else y, output)


def fresh(leaves: Sequence[Any]) -> list[Any]:
    """Copies that a model may change in place, leaves of the autograd graph where the originals require grad."""
    return [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
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


def wide(t: Tensor) -> Tensor:
    """Real and in double precision."""
    t = t.detach()
    return torch.view_as_real(t.to(torch.complex128).resolve_conj()) if t.is_complex() else t.to(torch.float64)


def largest(t: Tensor) -> float:
    """max|t| over finite values, 0 if there are none."""
    t = wide(t).abs()
    return float(torch.where(t.isfinite(), t, 0.0).max()) if t.numel() else 0.0

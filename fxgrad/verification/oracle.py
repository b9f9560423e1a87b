"""The oracle: per-sample gradients by a loop over single samples with plain autograd, and errors against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.first_batch.compared_rows import difference, largest
from fxgrad.host import pytree

LossFn = Callable[[Any], Tensor]
Grads = dict[str, Tensor]  # of each parameter

NEGLIGIBLE = 1e-3
"""The least scale of errors, as a share of the model's largest gradient: some true gradients are exactly zero."""


def default_loss(output: Any, sample_dim: int = 0) -> Tensor:
    """Return L = Σ_n Σ_k sin(y_nk + φ_k), a sum over samples with the gradient cos(y_nk + φ_k).

    The phase φ_k depends only on the position within one sample, not on the sample's index or the batch size. So the
    loss of a batch is the sum of its samples' losses. `output` is any pytree, of which floating and complex tensors
    enter. Each is ``[..., B, ...]`` with the samples along `sample_dim` (or the last dim, if it has fewer). Tensors
    without dims are losses already summed over samples, and enter linearly.

    >>> y = torch.randn(3, 4, dtype=torch.float64)
    >>> torch.allclose(default_loss(y), sum(default_loss(y[i : i + 1]) for i in range(3)))
    True
    """
    terms: list[Tensor] = []
    for index, leaf in enumerate(pytree.tree_leaves(output)):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        y = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        y = y.float() if y.dtype in (torch.float16, torch.bfloat16) else y
        if leaf.dim() == 0:
            terms.append(y.sum() * (0.3 + index))
            continue
        y = y.movedim(min(sample_dim, leaf.dim() - 1), 0)
        size = y.shape[1:]  # one sample
        phase = torch.arange(size.numel(), device=y.device, dtype=y.dtype).mul(0.7).add(0.3 + index).reshape(size)
        terms.append((y + phase).sin().sum())
    if not terms:
        raise TypeError("the model's output holds no floating-point tensor: pass loss_fn")
    return sum((term.to(terms[0]) for term in terms[1:]), terms[0])


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
    """Return the gradient of each sample's loss, by one forward and one backward of the plain model per sample.

    ``G[name][n] = d loss_fn(model(x[n:n+1])) / d parameter``, of shape ``[B, *parameter.shape]``.

    Each batched tensor of `args` and `kwargs` (pytrees) is sliced to one sample along its sample dim; other tensors are
    shared. `in_dims` names the sample dims as in `torch.vmap`, as a pytree prefix of `args` with None for shared
    inputs. Without it, the sample dim is dim 0 (dim 1 if not `batch_first`) of each tensor that has it. With
    `batch_size`, tensors of another size there are shared. Trainable parameters that the loss does not reach get zeros;
    frozen ones are omitted. B = 0 gives ``[0, *shape]``. Parameters, buffers and their `.grad` are restored.

    With `seed` the model may draw random numbers. For each sample, one forward of the full batch then runs under that
    seed. The loss of the sample's slice of the output, along dim 0 (dim 1 if not `batch_first`), is differentiated.

    >>> model, x = nn.Linear(3, 2), torch.randn(5, 3)
    >>> {name: tuple(g.shape) for name, g in per_sample_grads(model, default_loss, (x,)).items()}
    {'weight': (5, 2, 3), 'bias': (5, 2)}
    """
    sample_dim = 0 if batch_first else 1
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    dims = [_sample_dim(leaf, sample_dim, batch_size) for leaf in leaves]
    if in_dims is not None:
        prefix = tuple(in_dims) if isinstance(in_dims, list) else in_dims
        dims_of_args = pytree.broadcast_to_and_flatten(prefix, pytree.tree_structure(tuple(args)))
        if dims_of_args is None:
            raise ValueError(f"in_dims={in_dims!r} is not a prefix of the structure of the arguments")
        dims[: len(dims_of_args)] = dims_of_args
    size = _number_of_samples(leaves, dims)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: p.new_zeros((size, *p.shape)) for name, p in parameters.items()}
    for n in range(size):
        sample = [_take(leaf, dim, n) for leaf, dim in zip(leaves, dims, strict=True)]
        inputs = fresh(sample if seed is None else leaves)
        sample_args, sample_kwargs = pytree.tree_unflatten(inputs, spec)
        with state_restored(model), torch.enable_grad():
            if seed is not None:
                torch.manual_seed(seed)
            output = model(*sample_args, **sample_kwargs)
            if seed is not None:
                output = pytree.tree_map(lambda y, n=n: _take(y, _sample_dim(y, sample_dim, None), n), output)
            for name, g in grads_of(loss_fn(output), parameters).items():
                grads[name][n] = g
    return grads


def relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the maximum over names of ``max|a - b| / max(max|b|, 1e-3 · the largest |b| over all names)``.

    A tensor with true value zero is thus measured against the others. Raises AssertionError, naming the tensor, if
    names, shapes, dtypes or devices differ, or if a value that is not finite in one differs in the other. Empty tensors
    have error 0.

    >>> relative_error({"w": torch.tensor([1.0, 2.5])}, {"w": torch.tensor([1.0, 2.0])})
    0.25
    """
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    if missing or extra:
        raise AssertionError(f"names differ: missing {missing}, unexpected {extra}")
    for name, b in expected.items():
        a = actual[name]
        if a.shape != b.shape:
            raise AssertionError(f"shape of '{name}': {list(a.shape)} instead of {list(b.shape)}")
        if not _alike(a, b):
            raise AssertionError(f"'{name}' is {a.dtype} on {a.device} instead of {b.dtype} on {b.device}")
        if difference(a, b).isinf().any():
            raise AssertionError(f"'{name}' is not finite where it should be, or the reverse")
    return max(relative_errors(actual, expected).values(), default=0.0)


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of each name, of which `relative_error` is the largest; inf where that raises."""
    smallest_scale = NEGLIGIBLE * max((largest(b) for b in expected.values()), default=0.0)
    errors = dict.fromkeys(expected, float("inf"))
    for name, b in expected.items():
        if name in actual and _alike(actual[name], b):
            most = float(difference(actual[name], b).max()) if b.numel() else 0.0
            scale = max(largest(b), smallest_scale)
            errors[name] = 0.0 if most == 0 else most / scale if scale else float("inf")
    return errors


def distance(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest of `relative_errors`."""
    return max(relative_errors(actual, expected).values(), default=0.0)


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def grads_of(loss: Tensor, sources: Mapping[str, Tensor]) -> Grads:
    """Return the dense d loss / d source of each source; zeros for those that the loss does not depend on."""
    return dense(gradients([loss], sources), sources)


def gradients(
    outputs: Sequence[Tensor], sources: Mapping[Any, Tensor], by_output: Sequence[Tensor | None] | None = None
) -> dict[Any, Tensor | None]:
    """Pull gradients by outputs, or scalar losses, back to each source; None for a source without influence on them."""
    if by_output is None:
        pairs: list[tuple[Tensor, Tensor | None]] = [(y, None) for y in outputs if y.requires_grad]
    else:
        pairs = [(y, g) for y, g in zip(outputs, by_output, strict=True) if g is not None]
    if not pairs or not sources:
        return dict.fromkeys(sources)
    ys, gs = zip(*pairs, strict=True)
    by_source = torch.autograd.grad(ys, list(sources.values()), gs, allow_unused=True, retain_graph=True)
    return dict(zip(sources, by_source, strict=True))


def dense(grads: Mapping[str, Tensor | None], sources: Mapping[str, Tensor]) -> Grads:
    """Return gradients as dense tensors, zeros for None."""
    return {name: torch.zeros_like(sources[name]) if g is None else g.detach().to_dense() for name, g in grads.items()}


def _sample_dim(leaf: Any, dim: int, batch_size: int | None) -> int | None:
    """Return the default sample dim of an input; None if all samples share it."""
    if not isinstance(leaf, Tensor) or leaf.dim() <= dim:
        return None
    return dim if batch_size is None or leaf.shape[dim] == batch_size else None


def _number_of_samples(leaves: list[Any], dims: list[int | None]) -> int:
    sizes = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        raise ValueError(f"the batched inputs must agree on one number of samples, they have {sorted(sizes)}")
    return int(sizes.pop())


def _take(value: Any, dim: int | None, n: int) -> Any:
    """Return sample n of a value with samples along ``dim``; the value itself if all samples share it."""
    return value if dim is None else value.narrow(dim, n, 1)


def fresh(leaves: Sequence[Any]) -> list[Any]:
    """Copy tensors, so that a model may change them in place; keep their requires_grad."""
    return [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers that a forward changes (running statistics, an embedding's max_norm)."""
    state = [*model.parameters(), *model.buffers()]
    before = [t.detach().clone() for t in state]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in zip(state, before, strict=True):
                if not torch.equal(t, value):
                    t.copy_(value)

"""What the tests of a model or a rule assert: agreement with the oracle."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.api import transform, zero_grad
from fxgrad.errors import OptionError, RuleError
from fxgrad.host import pytree
from fxgrad.kernels.precision import TOLERANCE
from fxgrad.verification.oracle import (
    LossFn,
    default_loss,
    fresh,
    grads_of,
    per_sample_grads,
    relative_error,
    state_restored,
)

__all__ = [
    "assert_graph_snapshot",
    "assert_per_sample_grads",
    "check_rule",
    "default_loss",
    "per_sample_grads",
    "relative_error",
]


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
    """Assert that a transformed model agrees with the loop over single samples.

    Checked, each within ``tolerance``: the output is the plain model's; ``p.grad_sample`` is `per_sample_grads`,
    contiguous, of p's dtype, and ``p.grad`` stays None; frozen parameters have none; the gradients of the inputs that
    require grad are the plain model's; ``grad_sample.sum(0)`` is the plain gradient of the whole batch. The model's
    gradients, buffers and ``grad_sample`` are cleared afterwards.

    Args:
        model: the model, not transformed.
        args: as the model takes them.
        loss_fn: takes the output and returns a sum over samples; None: `default_loss`.
        backend: as in `fxgrad.transform`.
        tolerance: the largest accepted `relative_error`; None: by dtype, see `TOLERANCE`.
        batch_size: as in `fxgrad.transform`.
        in_dims: as in `fxgrad.transform`.
        batch_first: as in `fxgrad.transform`.
        seed: set before each forward, for models that draw random numbers.
        check_sum: whether the sum over samples is compared with the plain gradient.
        options: further options of `fxgrad.transform`.
        kwargs: as the model takes them.

    Returns:
        The largest error.

    Raises:
        AssertionError: with what differs.
        FxgradError: what the transformed model raises. OptionError: `default_loss` is no sum over the samples of an
            output, as they lie along another dimension, such as those of a recurrent layer's last states.

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
    transformed = transform(model, backend=backend, **how, **(options or {}))
    try:
        with state_restored(model):
            plain = _run(model, parameters, fresh(leaves), spec, loss, seed)
        if loss_fn is None:
            _check_samples_of_outputs(plain["reached"], sample_dim, expected)
        with state_restored(model):
            actual = _run(transformed, None, fresh(leaves), spec, loss, seed)
        trains = bool(plain["trains"])
        grad_sample = _grad_sample(model, trains=trains)
        errors = [
            _assert_close("forward output", actual["output"], plain["output"], tolerance),
            _assert_close("input gradient", actual["inputs"], plain["inputs"], tolerance),
        ]
        if trains:
            errors.append(_assert_close("grad_sample", grad_sample, expected, tolerance))
        if trains and check_sum:
            sums = {name: g.sum(0) for name, g in grad_sample.items()}
            errors.append(_assert_close("grad_sample.sum(0)", sums, plain["grads"], tolerance))
        return max(errors)
    finally:
        zero_grad(model)


def _check_samples_of_outputs(
    shapes: Mapping[str, torch.Size], sample_dim: int, expected: Mapping[str, Tensor]
) -> None:
    """Refuse an output with a gradient and no samples where `default_loss` looks for them: it would mix them."""
    size = next((len(g) for g in expected.values()), 0)
    for name, shape in shapes.items():
        dim = min(sample_dim, len(shape) - 1)
        if size and dim >= 0 and shape[dim] % size:
            raise OptionError(
                f"{name}, {list(shape)}, does not have the {size} samples along dimension {dim}, so the default loss "
                "is no sum over them",
                advice="Pass loss_fn=, a function of the output that returns a sum over samples.",
            )


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
    """Return one forward and backward; with `parameters` their gradients are returned instead of stored."""
    if seed is not None:
        torch.manual_seed(seed)
    args, kwargs = pytree.tree_unflatten(inputs, spec)
    output = model(*args, **kwargs)
    loss = loss_fn(output)
    sources = {f"input {k}": x for k, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
    grads: dict[str, Tensor] = {}
    if parameters is not None:
        both = grads_of(loss, {**sources, **parameters})
        grads = {name: both[name] for name in parameters}
        of_inputs = {name: both[name] for name in sources}
    else:
        if loss.requires_grad:
            loss.backward()
        of_inputs = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in sources.items()}
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    named = {f"output {k}": leaf.detach() for k, leaf in enumerate(tensors)}
    reached = {f"output {k}": leaf.shape for k, leaf in enumerate(tensors) if leaf.requires_grad}
    return {"output": named, "reached": reached, "inputs": of_inputs, "grads": grads, "trains": loss.requires_grad}


def _grad_sample(model: nn.Module, *, trains: bool) -> dict[str, Tensor]:
    """`grad_sample` of every trainable parameter, after checking what can be checked without knowing its value."""
    grads: dict[str, Tensor] = {}
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
        grads[name] = g
    return grads


class _OneOp(nn.Module):
    """A model of one op: its nn.Parameter arguments are its parameters, the other tensors its inputs."""

    def __init__(self, op: Callable[..., Any], leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.op, self.leaves, self.spec = op, list(leaves), spec
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(f"argument_{i}", leaf)

    def forward(self, *inputs: Tensor) -> Any:
        leaves, next_input = list(self.leaves), iter(inputs)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, nn.Parameter):
                leaves[i] = getattr(self, f"argument_{i}")
            elif isinstance(leaf, Tensor):
                leaves[i] = next(next_input)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.op(*args, **kwargs)


def check_rule(
    op: Callable[..., Any],
    *args: Any,
    in_dims: Any = 0,
    backend: str = "aot_eager",
    tolerance: float | None = None,
    **kwargs: Any,
) -> float:
    """Check an op's rule on numbers: per-sample gradients by it against the loop over single samples.

    The op runs on the whole batch, on batches of one, and with each parameter frozen in turn.

    Args:
        op: the op, called as ``op(*args, **kwargs)``.
        args: its arguments. Those that are `nn.Parameter` are differentiated by; every other tensor is batched.
        in_dims: the sample dimension of the batched tensors, one for all or an entry for each; None for one that all
            samples share.
        backend: as in `fxgrad.transform`.
        tolerance: the largest accepted `relative_error`; None: by dtype, see `TOLERANCE`.
        kwargs: as the op takes them.

    Returns:
        The largest error.

    Raises:
        RuleError: the rule is wrong by more than the tolerance, or no argument is an `nn.Parameter`.

    >>> check_rule(torch.nn.functional.linear, torch.randn(5, 3), nn.Parameter(torch.randn(2, 3))) < 1e-4
    True
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    model = _OneOp(op, leaves, spec)
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]
    parameters = list(model.parameters())
    if not parameters:
        raise RuleError(
            f"no argument of {getattr(op, '__name__', op)} is an nn.Parameter: there is nothing to differentiate by",
            advice="Pass nn.Parameter(w) for each w of the rule's of=. Every other tensor holds samples.",
        )
    errors = []
    for frozen in (None, *(parameters if len(parameters) > 1 else ())):
        if frozen is not None:
            frozen.requires_grad_(False)
        try:
            errors.append(
                assert_per_sample_grads(model, *inputs, in_dims=in_dims, backend=backend, tolerance=tolerance)
            )
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
    actual, wanted = (dedent(str(text)).strip().splitlines() for text in (trace, expected))
    actual, wanted = [line.rstrip() for line in actual], [line.rstrip() for line in wanted]
    if actual != wanted:
        changes = "\n".join(difflib.unified_diff(wanted, actual, "expected", "actual", lineterm=""))
        raise AssertionError(f"the graph is another one:\n{changes}")

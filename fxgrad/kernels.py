"""The opaque operators: work that is done at run time, behind one node of the compiled graph.

Three kinds of work live here. Large products go into fresh memory on huge pages. The weight gradient of a
convolution per sample is a native kernel called once per sample (CPU) or once with the samples as groups
(elsewhere): faster than unfolding the batch, and right for every argument a convolution takes. The generic
rule's vmap of a vjp runs here where
tracing it would turn the batch symbol into a constant.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from fxgrad.memory import fresh

if TYPE_CHECKING:
    from fxgrad.terms import Patches


LARGE = 64 << 10  # bytes of one sample's gradient from which fresh memory decides the time on CPU


def products(g: Tensor, x: Tensor) -> Tensor:
    """``Σ_k g[n, k, o] x[n, k, i]`` as ``[n, o, i]``."""
    size = g.shape[-1] * x.shape[-1] * g.element_size()
    if g.device.type == "cpu" and isinstance(size, int) and size >= LARGE:
        large: Tensor = _products(g, x)
        return large
    one_position = isinstance(g.shape[1], int) and g.shape[1] == 1
    return g.mT * x if one_position else g.mT @ x


@torch.library.custom_op("fxgrad::products", mutates_args=())
def _products(g: Tensor, x: Tensor) -> Tensor:
    out = fresh(g, (g.shape[0], g.shape[2], x.shape[2]))
    return torch.mul(g.mT, x, out=out) if g.shape[1] == 1 else torch.bmm(g.mT, x, out=out)


@_products.register_fake
def _(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[2], x.shape[2])


def conv_weight_grad(g: Tensor, patches: Patches) -> Tensor:
    """``[n, *weight.shape]`` from g ``[n, k, out, *space]`` and the windows of the input."""
    grad: Tensor = _conv_weight_grad(
        g,
        patches.input,
        patches.kernel,
        patches.stride,
        patches.padding,
        patches.dilation,
        patches.transposed,
        patches.output_padding or (0,) * len(patches.stride),
        patches.groups,
    )
    return grad


@torch.library.custom_op("fxgrad::conv_weight_grad", mutates_args=())
def _conv_weight_grad(
    g: Tensor,
    input: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    n = g.shape[0]
    out = fresh(g, (n, *kernel))

    def backward(g: Tensor, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        settings = (stride, padding, dilation, transposed, output_padding, groups)
        mask = (False, True, False)
        grad: Tensor = torch.ops.aten.convolution_backward(g, x, weight, None, *settings, mask)[1]
        return grad

    if g.device.type == "cpu" or transposed:
        weight = g.new_empty(()).expand(tuple(kernel))
        for i in range(n):
            out[i] = backward(g[i], input[i], weight, groups)
        return out
    # The samples as groups of one convolution: channels of all samples side by side.
    weight = g.new_empty(()).expand(n * kernel[0], *kernel[1:])
    g, x = (t.transpose(0, 1).flatten(1, 2) for t in (g, input))
    return out.copy_(backward(g, x, weight, n * groups).view_as(out))


@_conv_weight_grad.register_fake
def _(
    g: Tensor,
    input: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    return g.new_empty(g.shape[0], *kernel)


# Closures cannot be op arguments. The key names what the closure computes, in full, so that a compiled
# artefact that PyTorch's caches keep for another process finds the same computation there.
_PROGRAMS: dict[str, Callable[..., Any]] = {}


def register_program(key: str, program: Callable[..., Any]) -> None:
    """Make ``program(batched, shared, sizes) -> output``, one sample's call, known under ``key``."""
    _PROGRAMS[key] = program


def _plain_vjp(call: Callable[..., Tensor], weights: Sequence[Tensor], g: Tensor) -> Sequence[Tensor]:
    """The vjp by plain autograd: not every custom op that has a backward has one for torch.func."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    below = torch._C.DispatchKey.AutogradFunctionality  # where the body of an operator runs
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded.remove(below)), torch.enable_grad():
        leaves = [weight.detach().requires_grad_() for weight in weights]
        return torch.autograd.grad(call(*leaves), leaves, g, materialize_grads=True)


@torch.library.custom_op("fxgrad::per_sample_vjp", mutates_args=())
def per_sample_vjp(
    key: str,
    g: Tensor,
    batched: Sequence[Tensor],
    shared: Sequence[Tensor],
    wrt: Sequence[int],
    sizes: Sequence[int],
) -> list[Tensor]:
    """Per sample n: the gradient of ``<g_n, program(batched_n, shared)>`` by ``shared[i], i in wrt``."""
    program = _PROGRAMS[key]
    n = g.shape[0]
    if n == 0:
        return [shared[i].new_zeros(0, *shared[i].shape) for i in wrt]

    weights = [shared[i] for i in wrt]

    def sample(rows: Sequence[Tensor]) -> Callable[..., Tensor]:
        def call(*weights: Tensor) -> Tensor:
            values = list(shared)
            for i, weight in zip(wrt, weights, strict=True):
                values[i] = weight
            return program(rows, values, sizes)  # type: ignore[no-any-return]

        return call

    try:
        with warnings.catch_warnings():  # an op that vmap itself loops over is slow, not wrong
            warnings.simplefilter("ignore")
            grads = vmap(lambda g, *rows: vjp(sample(rows), *weights)[1](g))(g, *batched)
    except (RuntimeError, NotImplementedError):  # an op without a batching rule: one sample at a time
        rows = [_plain_vjp(sample([t[i] for t in batched]), weights, g[i]) for i in range(n)]
        grads = tuple(torch.stack(column) for column in zip(*rows, strict=True))
    return [grad.clone(memory_format=torch.contiguous_format) for grad in grads]


@per_sample_vjp.register_fake
def _(
    key: str,
    g: Tensor,
    batched: Sequence[Tensor],
    shared: Sequence[Tensor],
    wrt: Sequence[int],
    sizes: Sequence[int],
) -> list[Tensor]:
    return [shared[i].new_empty(g.shape[0], *shared[i].shape) for i in wrt]

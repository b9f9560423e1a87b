"""A torch model as a JAX function: its exported graph, op by op, in JAX's own operations.

High-level ops become what a JAX user would write: `lax.conv_general_dilated`, `jax.nn` functions,
`lax.scan` for recurrent layers. XLA compiles the whole.
"""

import importlib
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_arg

OPS: dict[str, Callable[..., Any]] = {}


def op(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what the ATen ops of these names are in JAX."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS.update(dict.fromkeys(names, function))
        return function

    return register


def convert(model: nn.Module, *example: Tensor, prefix: str = "") -> Callable[..., Any]:
    """A function of (parameters by name without `prefix`, *inputs), for inputs shaped as in `example`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about nn.LSTM's flat weights
        program = torch.export.export(model, example, strict=False)
    signature, graph = program.graph_signature, program.graph_module.graph
    names = {k: v.removeprefix(prefix) for k, v in signature.inputs_to_parameters.items()}
    # tied parameters come under each of their names; JAX gets them under the first
    first = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    tied = {name: first[id(p)].removeprefix(prefix) for name, p in model.named_parameters(remove_duplicate=False)}
    names = {node: tied.get(prefix + name, name) for node, name in names.items()}
    nodes = list(graph.nodes)
    if missing := sorted({_name(n) for n in nodes if n.op == "call_function"} - OPS.keys()):
        raise NotImplementedError(f"no JAX operation for {missing}")

    def run(params: Any, *inputs: Any) -> Any:
        values: dict[Any, Any] = {}
        remaining = iter(inputs)
        for node in nodes:
            if node.op == "placeholder":
                values[node] = params[names[node.name]] if node.name in names else next(remaining)
            elif node.op == "output":
                return values[node.args[0][0]]
            else:
                args = map_arg(node.args, values.__getitem__)
                kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "dtype")}
                values[node] = OPS[_name(node)](*args, **map_arg(kwargs, values.__getitem__))
        raise AssertionError("no output")

    return run


def _name(node: torch.fx.Node) -> str:
    """The op's name without namespace and overload."""
    if node.target is operator.getitem:
        return "getitem"
    return str(node.target).removeprefix("aten.").split(".")[0]


def _jax() -> tuple[Any, Any, Any]:
    return importlib.import_module("jax"), importlib.import_module("jax.numpy"), importlib.import_module("jax.lax")


OPS |= {
    "getitem": operator.getitem,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "square": lambda x: x * x,
    "relu": lambda x: _jax()[0].nn.relu(x),
    "gelu": lambda x, approximate="none": _jax()[0].nn.gelu(x, approximate=approximate == "tanh"),
    "linear": lambda x, w, b=None: x @ w.T if b is None else x @ w.T + b,
    "embedding": lambda w, ids, *_: w[ids],
    "transpose": lambda x, a, b: x.swapaxes(a, b),
    "permute": lambda x, dims: x.transpose(dims),
    "contiguous": lambda x: x,
    "expand": lambda x, size: _expand(x, size),
    "expand_as": lambda x, other: _expand(x, other.shape),
    "unsqueeze": lambda x, dim: _jax()[1].expand_dims(x, dim),
    "squeeze": lambda x, dim: x.squeeze(dim),
    "select": lambda x, dim, index: _jax()[2].index_in_dim(x, index, dim, keepdims=False),
    "unbind": lambda x, dim=0: [_jax()[2].index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])],
    "cat": lambda xs, dim=0: _jax()[1].concatenate(xs, dim),
    "arange": lambda *bounds: _jax()[1].arange(*bounds),
    "zeros": lambda size: _jax()[1].zeros(size),
}


@op("view", "reshape")
def reshape(x: Any, size: Any) -> Any:
    return x.reshape(tuple(size))


@op("flatten")
def flatten(x: Any, start: int = 0, end: int = -1) -> Any:
    start, end = start % x.ndim, end % x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


@op("unflatten")
def unflatten(x: Any, dim: int, sizes: Any) -> Any:
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


@op("slice")
def slice_(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    length = x.shape[dim]
    index = slice(*slice(start, end, step).indices(length))
    return x[(slice(None),) * (dim % x.ndim) + (index,)]


def _expand(x: Any, size: Any) -> Any:
    full = (1,) * (len(size) - x.ndim) + x.shape
    return _jax()[1].broadcast_to(x, tuple(old if new == -1 else new for old, new in zip(full, size, strict=True)))


def _reduction(name: str) -> Callable[..., Any]:
    def reduce(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        axis = tuple(dim) if isinstance(dim, list | tuple) else dim
        return getattr(_jax()[1], name)(x, axis=axis, keepdims=keepdim)

    return reduce


OPS |= {"sum": _reduction("sum"), "mean": _reduction("mean")}


@op("conv1d", "conv2d")
def convolution(
    x: Any, w: Any, b: Any = None, stride: Any = (1,), padding: Any = (0,), dilation: Any = (1,), groups: int = 1
) -> Any:
    dims = w.ndim - 2
    letters = "HW"[:dims]
    y = _jax()[2].conv_general_dilated(
        x,
        w,
        _each(stride, dims),
        [(p, p) for p in _each(padding, dims)],
        rhs_dilation=_each(dilation, dims),
        feature_group_count=groups,
        dimension_numbers=(f"NC{letters}", f"OI{letters}", f"NC{letters}"),
    )
    return y if b is None else y + b.reshape(-1, *[1] * dims)


@op("max_pool2d")
def max_pool2d(x: Any, kernel_size: Any, stride: Any = ()) -> Any:
    _, jnp, lax = _jax()
    window = (1, 1, *_each(kernel_size, 2))
    return lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 1, *_each(stride or kernel_size, 2)), "VALID")


@op("avg_pool2d")
def avg_pool2d(x: Any, kernel_size: Any, stride: Any = ()) -> Any:
    lax = _jax()[2]
    height, width = _each(kernel_size, 2)
    strides = (1, 1, *_each(stride or kernel_size, 2))
    return lax.reduce_window(x, 0.0, lax.add, (1, 1, height, width), strides, "VALID") / (height * width)


@op("adaptive_avg_pool2d")
def adaptive_avg_pool2d(x: Any, output_size: Any) -> Any:
    assert list(output_size) == [1, 1], "only the mean over all places"
    return x.mean((2, 3), keepdims=True)


@op("layer_norm")
def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    x = _standardized(x, tuple(range(-len(normalized_shape), 0)), eps)
    return x if weight is None else x * weight + bias


@op("group_norm")
def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    shape = (-1, *[1] * (x.ndim - 2))
    grouped = x.reshape(x.shape[0], groups, -1)
    x = _standardized(grouped, (-1,), eps).reshape(x.shape)
    return x if weight is None else x * weight.reshape(shape) + bias.reshape(shape)


@op("scaled_dot_product_attention")
def attention(q: Any, k: Any, v: Any, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False) -> Any:
    assert mask is None and dropout_p == 0
    jax, jnp, _ = _jax()
    scores = jnp.einsum("...td,...sd->...ts", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("...ts,...sd->...td", jax.nn.softmax(scores, -1), v)


@op("cross_entropy_loss")
def cross_entropy(logits: Any, y: Any, weight: Any = None, reduction: int = 1) -> Any:
    assert weight is None and reduction == 0
    jax, jnp, _ = _jax()
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, 1), y[:, None], 1)[:, 0]


@op("lstm")
def lstm(x: Any, states: Any, weights: Any, *options: Any) -> Any:
    jax, jnp, _ = _jax()

    def step(carry: Any, projected: Any, w: Any, b: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(projected + h @ w.T + b, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return _recurrence(step, x, (states[0][0], states[1][0]), weights, options)


@op("gru")
def gru(x: Any, state: Any, weights: Any, *options: Any) -> Any:
    jax, jnp, _ = _jax()

    def step(h: Any, projected: Any, w: Any, b: Any) -> Any:
        r, z, n = jnp.split(projected, 3, -1)
        r_h, z_h, n_h = jnp.split(h @ w.T + b, 3, -1)
        r, z = jax.nn.sigmoid(r + r_h), jax.nn.sigmoid(z + z_h)
        h = (1 - z) * jnp.tanh(n + r * n_h) + z * h
        return h, h

    return _recurrence(step, x, state[0], weights, options)


@op("rnn_tanh")
def rnn_tanh(x: Any, state: Any, weights: Any, *options: Any) -> Any:
    jnp = _jax()[1]

    def step(h: Any, projected: Any, w: Any, b: Any) -> Any:
        h = jnp.tanh(projected + h @ w.T + b)
        return h, h

    return _recurrence(step, x, state[0], weights, options)


def _recurrence(step: Callable[..., Any], x: Any, start: Any, weights: Any, options: Any) -> Any:
    """One layer in one direction, batch first: the input's products at once, then a scan over time."""
    _, layers, dropout, _, bidirectional, batch_first = options
    assert layers == 1 and not dropout and not bidirectional and batch_first
    w_in, w, b_in, b = weights
    projected = (x @ w_in.T + b_in).swapaxes(0, 1)
    last, outputs = _jax()[2].scan(lambda carry, p: step(carry, p, w, b), start, projected)
    return outputs.swapaxes(0, 1), last, last


def _each(value: Any, dims: int) -> list[int]:
    """One number per dimension from a number, a list of one or a list of all."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * dims if len(values) == 1 else values


def _standardized(x: Any, axes: tuple[int, ...], eps: float) -> Any:
    return (x - x.mean(axes, keepdims=True)) * _jax()[2].rsqrt(x.var(axes, keepdims=True) + eps)

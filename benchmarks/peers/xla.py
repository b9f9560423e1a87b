"""JAX: jit(vmap(grad)) of the same model with the same weights, and jax_privacy's clipped_grad."""

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.engine import EPSILON, NORMS, CannotError, Engine, Results
from benchmarks.peers.jax_ops import convert
from benchmarks.tasks import Quantity, Task, Training


def jax_vmap(task: Task, quantity: Quantity) -> Engine:
    """One jitted function from parameters and batch to the quantity."""
    jax, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")
    sample_loss = _sample_loss(task)
    per_sample = jax.vmap(jax.grad(lambda p, x, y: sample_loss(p, x[None], y[None])), (None, 0, 0))
    limit = task.max_grad_norm

    def compute(params: Any, x: Any, y: Any) -> Any:
        grads = per_sample(params, x, y)
        if quantity == "G":
            return grads
        squares = [jnp.sum(jnp.square(g.reshape(len(g), -1)), 1) for g in grads.values()]
        norms = jnp.sqrt(sum(squares))
        if quantity == "N":
            return {NORMS: norms}
        factors = jnp.minimum(limit / (norms + EPSILON), 1)
        return {name: jnp.tensordot(factors, g, 1) for name, g in grads.items()}

    return _engine(task, compute)


def jax_privacy(task: Task, quantity: Quantity) -> Engine:
    """clipped_grad; N are the norms that it returns beside the sum."""
    if quantity == "G":
        raise CannotError("clipped_grad returns no per-sample gradients")
    clipping = importlib.import_module("jax_privacy.clipping")
    clipped = clipping.clipped_grad(
        _sample_loss(task),
        l2_clip_norm=task.max_grad_norm,
        batch_argnums=(1, 2),
        return_grad_norms=quantity == "N",
    )
    if quantity == "C":
        return _engine(task, clipped)
    return _engine(task, lambda params, x, y: {NORMS: clipped(params, x, y)[1].grad_norms})


def _sample_loss(task: Task) -> Any:
    """The loss of a batch of one as a JAX function of (params, x, y)."""
    return convert(Training(task.model, task.losses), task.x[:1], task.y[:1], prefix="model.")


def _engine(task: Task, function: Any) -> Engine:
    jax = importlib.import_module("jax")
    if task.x.is_cuda and jax.default_backend() == "cpu":
        raise CannotError("this JAX has no CUDA")
    params = {name: _to_jax(p) for name, p in task.model.named_parameters()}
    arguments = (params, _to_jax(task.x), _to_jax(task.y))
    compiled: list[Any] = []
    found: dict[str, Any] = {}

    def step() -> None:
        found.clear()
        if not compiled:  # in the first step, as for every other engine
            compiled.append(jax.jit(function).lower(*arguments).compile())
        found.update(jax.block_until_ready(compiled[0](*arguments)))

    def results() -> Results:
        return {name: torch.from_numpy(np.array(value)) for name, value in found.items()}

    def peak() -> int:
        """What XLA says of the compiled function: results and temporaries."""
        memory = compiled[0].memory_analysis()
        return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)

    return Engine(step, found.clear, results, peak)


def _to_jax(tensor: Tensor) -> Any:
    array = tensor.detach().cpu().numpy()
    return importlib.import_module("jax.numpy").array(array.astype(np.int32) if array.dtype == np.int64 else array)

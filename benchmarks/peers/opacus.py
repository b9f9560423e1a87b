"""Opacus: its hooks, functorch for every layer, expanded weights, and ghost clipping.

Layers that Opacus has to replace (nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention) become its own, with the
same weights; `_originals` finds the results under the original parameters' names again.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.engine import (
    NORMS,
    CannotError,
    Engine,
    Results,
    copies,
    grad_sample_engine,
    reduce_grads,
)
from benchmarks.tasks import Quantity, Task

# for each original parameter: the parameters whose results stand one after another along a dim of its own
Originals = dict[str, list[nn.Parameter]]


def hooks(task: Task, quantity: Quantity) -> Engine:
    """Hooks with a rule for each layer; they compute p.grad as well. C by Opacus' own optimizer."""
    return _hooked(task, quantity, force_functorch=False)


def functorch(task: Task, quantity: Quantity) -> Engine:
    """Hooks with vmap(grad) for each layer."""
    return _hooked(task, quantity, force_functorch=True)


def expanded_weights(task: Task, quantity: Quantity) -> Engine:
    """Opacus' wrapper of PyTorch's expanded weights."""
    library = importlib.import_module("opacus.grad_sample")
    model, x, y = copies(task)
    wrapped = library.GradSampleModuleExpandedWeights(model, loss_reduction="sum")
    params = dict(model.named_parameters())
    return grad_sample_engine(task, quantity, params, lambda: task.losses(wrapped(x), y).sum().backward())


def ghost(task: Task, quantity: Quantity) -> Engine:
    """Norms without gradients, then a second backward for the clipped sum."""
    if quantity == "G":
        raise CannotError("ghost clipping computes no per-sample gradients")
    library = importlib.import_module("opacus.grad_sample")
    model, x, y, originals = _prepared(task)
    wrapped = library.GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=task.max_grad_norm, use_ghost_clipping=True
    )
    found: Results = {}

    def clear() -> None:
        found.clear()
        _clear(model)

    def step() -> None:
        clear()
        losses = task.losses(wrapped(x), y)
        if quantity == "N":
            losses.sum().backward()
            found[NORMS] = wrapped.get_norm_sample()
            return
        losses.sum().backward(retain_graph=True)  # as DPTensorFastGradientClipping.backward does
        model.zero_grad(set_to_none=True)
        factors = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (factors * losses).sum().backward()
        wrapped.enable_hooks()

    def results() -> Results:
        return found if quantity == "N" else _joined(originals, lambda p: _tensor(p.grad), 0)

    return Engine(step, clear, results)


def _hooked(task: Task, quantity: Quantity, force_functorch: bool) -> Engine:
    library = importlib.import_module("opacus")
    model, x, y, originals = _prepared(task)
    wrapped = library.GradSampleModule(model, loss_reduction="sum", force_functorch=force_functorch)
    optimizer = _clipper(model, task.max_grad_norm) if quantity == "C" else None
    found: Results = {}

    def clear() -> None:
        found.clear()
        _clear(model)

    def step() -> None:
        clear()
        task.losses(wrapped(x), y).sum().backward()
        if optimizer is not None:
            optimizer.clip_and_accumulate()
        elif quantity == "N":
            grads = {name: p.grad_sample for name, p in model.named_parameters()}  # type: ignore[attr-defined]
            found.update(reduce_grads("N", grads, task.max_grad_norm))

    def results() -> Results:
        if quantity == "N":
            return found
        attribute, dim = ("summed_grad", 0) if quantity == "C" else ("grad_sample", 1)
        return _joined(originals, lambda p: getattr(p, attribute), dim)

    return Engine(step, clear, results)


def _clipper(model: nn.Module, max_grad_norm: float) -> Any:
    """Opacus' optimizer, whose clipping fills p.summed_grad."""
    optimizers = importlib.import_module("opacus.optimizers")
    return optimizers.DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        expected_batch_size=None,
        loss_reduction="sum",
    )


def _clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad_sample = p.summed_grad = None  # type: ignore[attr-defined]


def _prepared(task: Task) -> tuple[nn.Module, Tensor, Tensor, Originals]:
    """A copy of the model in which Opacus' own layers stand for those that it cannot hook."""
    validator = importlib.import_module("opacus.validators").ModuleValidator
    model, x, y = copies(task)
    names = list(dict(model.named_parameters()))
    replaceable = (nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention)
    if any(isinstance(module, replaceable) for module in model.modules()):
        model = validator.fix(model)
        _replace_recurrent(model)
        model.to(x.device)
    return model, x, y, _originals(names, model)


def _replace_recurrent(model: nn.Module) -> None:
    """nn.GRU and nn.RNN, which Opacus' own fixer leaves as they are."""
    layers = importlib.import_module("opacus.layers")
    for path, module in list(model.named_modules()):
        if type(module) not in (nn.GRU, nn.RNN):
            continue
        assert isinstance(module, nn.RNNBase)
        own = getattr(layers, f"DP{type(module).__name__}")(
            module.input_size,
            module.hidden_size,
            module.num_layers,
            bias=module.bias,
            batch_first=module.batch_first,
            bidirectional=module.bidirectional,
        )
        own.load_state_dict(module.state_dict())
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, own)


def _originals(names: list[str], model: nn.Module) -> Originals:
    found = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        renamed: Mapping[str, str] = getattr(module, "old_to_new", {})  # DPLSTM and its like
        for old, new in renamed.items():
            path = f"{prefix}." if prefix else ""
            found[path + new] = module.get_parameter(old)
    originals: Originals = {}
    for name in names:
        if name in found:
            originals[name] = [found[name]]
        else:  # DPMultiheadAttention has three layers for one
            path, kind = name.rsplit("in_proj_", 1)
            originals[name] = [found[f"{path}{letter}linear.{kind}"] for letter in "qkv"]
    return originals


def _joined(originals: Originals, of: Callable[[nn.Parameter], Tensor], dim: int) -> Results:
    return {
        name: of(parts[0]) if len(parts) == 1 else torch.cat([of(p) for p in parts], dim)
        for name, parts in originals.items()
    }


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None, "no gradient"
    return value

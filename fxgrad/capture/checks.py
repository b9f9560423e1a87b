"""What is looked at in every call before anything is computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from fxgrad.capture.distributed import check_whole
from fxgrad.errors import BatchSizeError, OptionError, OutsideGraph, UnknownArgument
from fxgrad.host.functorch import forward_level, innermost_transform, is_batched
from fxgrad.host.modules import FSDP_FLAT
from fxgrad.host.pytree import tree_leaves
from fxgrad.host.tensors import hooks_of, unchanged_since
from fxgrad.quantities import Quantity
from fxgrad.runtime.autograd_graph import used_outside
from fxgrad.runtime.slot import Slot

_PLAIN = _PARAMETERS, _STRIDED = {nn.Parameter}, {torch.strided}
_is_leaf, _layout = attrgetter("is_leaf"), attrgetter("layout")  # for `map`, which adds no Python frame


def are_ordinary(inputs: Sequence[Any]) -> bool:
    """Return whether `check_call` has nothing to refuse in a call's inputs, and PyTorch's modes."""
    if innermost_transform() is not None or forward_level() >= 0:
        return False
    for value in inputs:
        if type(value) is not Tensor or value.grad_fn is not None or value.is_nested or is_batched(value):
            return False
    return True


class LastParameters:
    """The trainable parameters of the last call; all that was asked about them holds as long as they are unchanged.

    PyTorch does not say when a parameter changes, so each call looks, without a Python frame for a parameter.
    """

    def __init__(self) -> None:
        self.every: Mapping[str, Tensor] = {}
        self.trainable: Mapping[str, Tensor] = {}
        self.unchanged: Callable[..., bool] | None = None

    def of(self, every: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return those among a model's parameters, the same object each time; None where something changed."""
        tensors = every.values()
        same = every is self.every and self.unchanged is not None and self.unchanged(*tensors)
        if same and all(map(_is_leaf, tensors)):
            return self.trainable
        self.unchanged = None
        return None

    def are_ordinary(self, every: Mapping[str, Tensor], trainable: Mapping[str, Tensor]) -> bool:
        """Return whether `check_call` has nothing to refuse in parameters; if so, they are known from now on."""
        tensors, self.unchanged = trainable.values(), None
        if set(map(type, tensors)) != _PARAMETERS or set(map(_layout, tensors)) != _STRIDED:
            return False
        if any(map(is_batched, tensors)) or any(map(Tensor.is_complex, tensors)) or not all(map(_is_leaf, tensors)):
            return False
        if FSDP_FLAT in "".join(trainable):
            return False
        self.every, self.trainable = every, trainable
        if trainable is every or (set(map(type, every.values())), set(map(_layout, every.values()))) == _PLAIN:
            self.unchanged = unchanged_since(every.values())
        return True


def check_call(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Sequence[Any]) -> None:
    """Refuse parameters and inputs for which there are no per-sample gradients, in a call that is not ordinary."""
    _check_shaped(parameters)
    check_whole(model, parameters, inputs)
    check_parameters(parameters)
    _check_reverse_mode([*parameters.values(), *inputs])
    _check_dense(inputs)
    _check_inputs(inputs, parameters)


def _check_dense(inputs: Sequence[Any]) -> None:
    """The samples of a nested tensor have no common shape."""
    if any(isinstance(value, Tensor) and value.is_nested for value in inputs):
        raise BatchSizeError(
            "an input is a nested tensor, whose samples have different numbers of rows",
            advice="Pad it, by torch.nested.to_padded_tensor(x, 0.0), and give the padding no part of the loss. "
            "Recurrent layers take a PackedSequence.",
        )


def _check_shaped(parameters: Mapping[str, Tensor]) -> None:
    """A lazy module's parameters have no shape before its first call; the model may be transformed before it."""
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise OptionError(
                f"parameter '{name}' has no shape yet: a lazy module makes it in its first call",
                advice="Call the model once under torch.no_grad(), then transform it.",
            )


def check_parameters(parameters: Mapping[str, Tensor]) -> None:
    """Only ordinary tensors have a ``grad_sample`` of their shape and dtype."""
    for name, parameter in parameters.items():
        special = type(parameter) is not nn.Parameter
        kind = (
            f"a tensor subclass, {type(parameter.data).__name__}"
            if special and type(parameter.data) is not Tensor  # .data makes a tensor
            else "a plain tensor that stands in a Parameter's place (functional_call)"
            if special and not isinstance(parameter, nn.Parameter)
            else "sparse"
            if parameter.layout is not torch.strided
            else "complex"
            if parameter.is_complex()
            else ""
        )
        if kind:
            raise OptionError(
                f"parameter '{name}' is {kind}: it has no per-sample gradient here",
                advice="Call the original model there."
                if "functional_call" in kind
                else "Freeze it with requires_grad_(False), or make it a dense, real nn.Parameter.",
            )


def check_numbers(parameters: Mapping[str, Tensor]) -> None:
    """Refuse a call of a model on the meta device, which may be transformed before it has numbers."""
    name = next((name for name, parameter in parameters.items() if parameter.is_meta), None)
    if name is not None:
        raise OptionError(
            f"parameter '{name}' is on the meta device, where no step is computed",
            advice="Give it numbers first: model.to_empty(device=..), and initial values.",
        )


def _check_inputs(values: Sequence[Any], parameters: Mapping[str, Tensor]) -> None:
    """An input that was computed from the model's own parameters has gradients for them that no graph sees."""
    computed = [value for value in values if isinstance(value, Tensor) and value.grad_fn is not None]
    names = used_outside(computed, {id(p): name for name, p in parameters.items()}) if computed else ()
    if names:
        raise OutsideGraph(
            "an input was computed from the model's own parameters, outside of the transformed call: "
            f"{', '.join(names)}",
            advice="Compute it in forward, in a method named in methods=, or under torch.no_grad().",
        )


def check_frozen_outputs(outputs: Any, inputs: Any) -> None:
    """Of a model without trainable parameters, a gradient can reach its inputs alone."""
    if not torch.is_grad_enabled() or any(_requires_grad(value) for value in tree_leaves(inputs)):
        return
    if any(_requires_grad(value) for value in tree_leaves(outputs)):
        raise OutsideGraph(
            "the model has no trainable parameters, and what it returns requires a gradient: it computes with "
            "Parameters that model.parameters() does not have",
            advice="Register them: as attributes of a module, in an nn.ParameterList or nn.ModuleList. A plain list, a "
            "closure and a global are none of these.",
        )


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def check_hooks(parameters: Mapping[str, Tensor]) -> None:
    """A hook sees the gradient for p.grad, of which some quantities leave none."""
    for name, parameter in parameters.items():
        hooks: Any = hooks_of(parameter)
        if hooks and any(type(hook) is not Slot for hook in hooks.values()):
            raise OptionError(
                f"parameter '{name}' has a hook (register_hook), and there is no gradient for it: p.grad stays as it "
                "is",
                advice="Remove the hook (forward may set it), or ask for a gradient beside the others: "
                "quantity=[.., fxgrad.Grad()].",
            )


def check_groups(quantities: Sequence[Quantity], size: int) -> None:
    """Refuse a batch that is not made of whole groups of samples."""
    for quantity in quantities:
        if size % quantity.group_size:
            raise BatchSizeError(
                f"{size} rows cannot be groups of {quantity.group_size}, as {quantity} has them",
                advice="Fill the batch up, or leave out the last rows.",
            )


def check_sample_weight(weight: Any, size: int) -> None:
    """One number, not negative, for each sample."""
    if not isinstance(weight, Tensor) or tuple(weight.shape) != (size,) or weight.is_complex():
        kind = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise OptionError(
            f"sample_weight has to be a tensor of {size} numbers, one for each sample, not {kind}",
            advice="Pass a tensor of shape [B]; of groups of rows, one number for each group.",
        )
    if size and not bool((weight >= 0).all()):
        raise OptionError(
            "sample_weight has to be 0 or more for every sample",
            advice="Leave a sample out with the weight 0, such as weight.clamp_min(0).",
        )


def check_takes_sample_weight(method: Callable[..., Any], quantities: Sequence[Quantity]) -> None:
    """Refuse ``sample_weight=`` where neither a quantity nor the model's own method takes it."""
    takes = inspect.signature(method).parameters.values()
    if not any(one.name == "sample_weight" or one.kind is inspect.Parameter.VAR_KEYWORD for one in takes):
        raise UnknownArgument(
            f"the call has sample_weight=, which {' and '.join(map(str, quantities))} does not use",
            advice="Transform the model for quantity=fxgrad.ClippedGrad(.., sample_weight=True), or weight the loss of "
            "each sample.",
        )


def _check_reverse_mode(values: Sequence[Any]) -> None:
    """Per-sample gradients come from one reverse pass, not from within another transform."""
    func = innermost_transform() is not None
    if func or any(isinstance(v, Tensor) and is_batched(v) for v in values):
        raise OptionError(
            "a transformed model does not run inside of torch.func's transforms (grad, jvp, vmap)",
            advice="Call the original model there.",
        )
    if forward_level() < 0:
        return
    dual = [v for v in values if isinstance(v, Tensor) and forward_ad.unpack_dual(v).tangent is not None]
    if dual:
        raise OptionError(
            "forward-mode AD does not go through a transformed model",
            advice="Call the original model on dual tensors.",
        )

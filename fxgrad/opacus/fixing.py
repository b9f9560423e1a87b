"""`fix`: replace the layers that Opacus's validator refuses, and Opacus's own recurrent and attention layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import Tensor, nn, optim

from fxgrad.api import engine_of
from fxgrad.errors import OptionError
from fxgrad.host.modules import BatchNorm
from fxgrad.opacus.fixers import fixer_of
from fxgrad.opacus.validating import advice, objections

RECURRENT = {DPRNN: nn.RNN, DPLSTM: nn.LSTM, DPGRU: nn.GRU}
FIRST = "Call model = fxgrad.opacus.fix(model), and make the optimizer of model.parameters(); leave out fix=True."

# Note [Parameters of a replaced layer]
# The optimizer holds the parameters of the old layers. GroupNorm has the scale and shift of BatchNorm, and nn.LSTM the
# matrices of DPLSTM: equal names and shapes. So the new layer gets the old layer's Parameter objects, with the values
# that Opacus's fixer gives to its own. The optimizer then holds the parameters of the fixed model. One matrix of
# nn.MultiheadAttention is three of DPMultiheadAttention: there, the optimizer has to be made of the fixed model's
# parameters.


def fix(module: nn.Module) -> nn.Module:
    """Return a copy of a model that `validate` accepts: Opacus's fixers replace the layers that it refuses.

    BatchNorm becomes GroupNorm, and InstanceNorm tracks no running statistics. Up to 32 channels, the GroupNorm in the
    place of BatchNorm1d has one channel in each group. fxgrad warns: for inputs ``[B, C]`` the output is constant.

    Opacus's DPRNN, DPLSTM, DPGRU and DPMultiheadAttention become layers of torch.nn that compute the same.
    DPMultiheadAttention with ``batch_first=True`` stays, as it computes another function than nn.MultiheadAttention.
    Parameters that are frozen stay frozen. Make the optimizer of the copy's parameters.

    Subclasses of BatchNorm that inherit its forward are replaced like it, and timm's ``BatchNormAct2d`` by timm's
    ``GroupNormAct``, with the same activation.

    Raises:
        OptionError: the validator refuses a layer of another class, such as a subclass with a forward of its own.

    >>> [type(layer).__name__ for layer in fix(nn.Sequential(DPLSTM(3, 4), nn.BatchNorm2d(8)))]
    ['LSTM', 'GroupNorm']
    """
    fixed = copy.deepcopy(module)
    return _replace(fixed, _replacements(fixed))


def fix_in_place(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Replace the layers of a model as `fix` does, and keep the parameters that the optimizer holds.

    See Note [Parameters of a replaced layer].

    Raises:
        OptionError: as `fix`; the model itself would be replaced, or is transformed; the optimizer holds parameters
            that the fixed model does not have, or has a state of a replaced BatchNorm. The model is then as it was.
    """
    replacements = _replacements(module)
    if not replacements:
        return
    if engine_of(module) is not None or module in replacements:
        kind = "is transformed" if engine_of(module) is not None else f"itself is a {type(module).__name__}"
        raise OptionError(f"fix=True replaces layers inside the model, and the model {kind}", advice=FIRST)
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for old, new in replacements.items():
        held = [p for p in old.parameters() if id(p) in stepped]
        if held and not _alike(old, new):
            raise OptionError(
                f"{type(new).__name__} has other parameters than {type(old).__name__}, and the optimizer holds a "
                f"replaced one, of shape {list(held[0].shape)}",
                advice=FIRST,
            )
        if isinstance(old, BatchNorm) and any(optimizer.state.get(p) for p in held):
            raise OptionError(
                f"the optimizer has stepped parameters of a {type(old).__name__}, which fix=True would replace: its "
                "state is of another function",
                advice=FIRST,
            )
    _replace(module, replacements)


def _replacements(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the new layer for each layer that `fix` replaces; a layer may have several names."""
    found = {part: new for part in module.modules() if (new := _replacement(part)) is not None}
    for name, part in module.named_modules():
        _warn_of_constant(name, part, found.get(part))
    shared = {id(p) for part in module.modules() if part not in found for p in part.parameters(recurse=False)}
    for old in found:
        if isinstance(old, BatchNorm) and any(id(p) in shared for p in old.parameters(recurse=False)):
            raise OptionError(
                f"a {type(old).__name__} shares a parameter with another layer: GroupNorm begins with other values",
                advice="Replace it yourself.",
            )
    return found


def _warn_of_constant(name: str, old: nn.Module, new: nn.Module | None) -> None:
    """Warn of a group norm that has one number in each group if the inputs have no dimension behind the channels."""
    if isinstance(old, nn.BatchNorm1d) and isinstance(new, nn.GroupNorm) and new.num_groups == new.num_channels:
        warnings.warn(
            f"GroupNorm takes the place of BatchNorm1d '{name}', with one channel in each group: of inputs "
            f"[B, {new.num_channels}] its output is constant. For these, use nn.LayerNorm({new.num_channels}).",
            stacklevel=4,
        )


def _replacement(old: nn.Module) -> nn.Module | None:
    """Return the layer to put in place of another; None if that stays."""
    kind: Any = type(old)
    flags = {p.requires_grad for p in old.parameters()}
    if objections(old):
        fixer = fixer_of(old)
        if fixer is None:
            raise OptionError(f"no fixer knows {kind}, which Opacus's validator refuses", advice=advice(old).strip())
        new = fixer(old)
    elif kind in RECURRENT:
        new = _recurrent(old)
    elif kind is DPMultiheadAttention and not old.batch_first and len(flags) == 1:
        new = _attention(old)
    else:
        return None
    like = next(chain(old.parameters(), old.buffers()), None)
    new = (new if like is None else new.to(like.device, like.dtype)).train(old.training)
    if kind is DPMultiheadAttention:
        new.requires_grad_(*flags)
    return new


def _recurrent(old: Any) -> nn.Module:
    options = dict(batch_first=old.batch_first, dropout=old.dropout, bidirectional=old.bidirectional)
    new: nn.Module = RECURRENT[type(old)](
        old.input_size, old.hidden_size, old.num_layers, bias=old.bias, **options, **old.cell_params
    )
    new.load_state_dict({name: p.detach() for name, p in old.named_parameters()})
    return new


def _attention(old: Any) -> nn.Module:
    new = nn.MultiheadAttention(
        old.embed_dim,
        old.num_heads,
        dropout=old.dropout.p,
        bias=old.qlinear.bias is not None,
        add_bias_kv=old.add_bias_kv,
        add_zero_attn=old.add_zero_attn,
        kdim=old.kdim,
        vdim=old.vdim,
    )
    new.load_state_dict(old.state_dict())
    return new


def _alike(old: nn.Module, new: nn.Module) -> bool:
    """Decide whether two layers have parameters of the same names and shapes."""
    shapes = [{name: p.shape for name, p in part.named_parameters()} for part in (old, new)]
    return shapes[0] == shapes[1]


def _replace(module: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put the new layers in place, with the old Parameter objects if the layers are alike; return the fixed model."""
    for old, new in replacements.items():
        for name, parameter, value in _carried(old, new):
            with torch.no_grad():
                parameter.copy_(value)
            setattr(new, name, parameter)
        if isinstance(new, nn.RNNBase):
            new.flatten_parameters()
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if name and part in replacements:
            module.set_submodule(name, replacements[part])
    return replacements.get(module, module)


def _carried(old: nn.Module, new: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield the name of each parameter that the layers have in common, the old Parameter and the new value."""
    if _alike(old, new):
        values = dict(new.named_parameters())
        own = list(old.named_parameters(recurse=not isinstance(old, BatchNorm)))  # its activation moves as a whole
        yield from ((name, parameter, values[name]) for name, parameter in own)

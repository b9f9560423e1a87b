"""Properties of modules' classes that gather a DTensor: which a model has, and the proof that they do nothing else.

A property may be any code of the user's, so it is read, and its result is looked at: autograd has noted how it was
made, and this process's part of it is compared with the DTensor's, bit for bit.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxgrad.capture.distributed import AROUND
from fxgrad.errors import OptionError
from fxgrad.host.dtensors import Chain, chain_of, dtensor_type
from fxgrad.host.modules import held_by, own_parameter
from fxgrad.host.tensor_parallel import is_distributed, style_hooks
from fxgrad.host.tensors import hooks_of

ADVICE = (
    "Let the property of the module's class return parameter.redistribute(placements=[Replicate()]).to_local("
    f"grad_placements=[Partial('avg')]), as SimpleFSDP does, and compute all else in forward. {AROUND}"
)
_HOUSEKEEPING = {*vars(type("_Empty", (), {})), "__annotations__", "__firstlineno__", "__static_attributes__"}


class Place(NamedTuple):
    """Where a module has a DTensor: the DTensor's name in the model, the module, and the name in the module."""

    name: str
    module: nn.Module
    key: str


class Whole(NamedTuple):
    """What a property made of a DTensor."""

    source: Any  # a leaf with the DTensor's values, from which the property started
    value: Tensor  # with its graph
    chain: Chain


def is_gathering(model: nn.Module) -> bool:
    """Return whether a module has a DTensor where its class has a property."""
    kind = dtensor_type()
    return kind is not None and any(
        isinstance(parameter, kind) and _has_property(type(module), key)
        for module in model.modules()
        for key, parameter in held_by(module)[0].items()
    )


def read(shard: Any, place: Place, compares: bool) -> Whole:
    """Read a property, and prove that its value is the whole DTensor's and goes back to it by a reduction."""
    held = held_by(place.module)[0]
    source = nn.Parameter(shard.detach())
    held[place.key] = source
    try:
        value = getattr(place.module, place.key)
    finally:
        held[place.key] = shard
    if type(value) is not Tensor:
        raise refused(place, f"its property returns a {type(value).__name__}, not an ordinary tensor")
    chain = chain_of(value)
    if chain is None or chain.source is not source:
        raise refused(place, "its property computes something else than redistribute and to_local")
    if not all(one.is_replicate() for one in chain.placements):
        raise refused(place, f"its property makes a part of it local, {chain.placements}")
    if not chain.grad_placements or not all(map(_adds_up, chain.grad_placements)):
        raise refused(place, f"its property has grad_placements={chain.grad_placements or None}")
    if hooks_of(value):
        raise refused(place, "its property sets a hook on what it returns")
    if compares and not _has_values_of(value, shard):
        raise refused(place, "its property returns other values than the parameter's")
    return Whole(source, value, chain)


def without(kind: type, keys: frozenset[str]) -> type:
    """Return a class without these properties: the one below, or a class of our own where it has more in it."""
    own = vars(kind).keys() - _HOUSEKEEPING
    plain = kind.__bases__[0] if own and own <= keys and len(kind.__bases__) == 1 else kind
    if not any(_has_property(plain, key) for key in keys):
        return plain
    return type(kind.__name__, (kind,), {"__module__": kind.__module__} | {key: own_parameter(key) for key in keys})


def _has_property(kind: type, key: str) -> bool:
    return isinstance(inspect.getattr_static(kind, key, None), property)


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _adds_up(placement: Any) -> bool:
    """Return whether gradients are added up or averaged over the processes; a subclass may do anything else."""
    partial = sys.modules["torch.distributed.tensor"].Partial
    return type(placement) is partial and placement.reduce_op in ("sum", "avg")


def refused(place: Place, why: str) -> OptionError:
    where = f"in {type(place.module).__name__}.{place.key}"
    return OptionError(f"parameter '{place.name}' is a DTensor, and {why}", where=where, advice=ADVICE)


def places_of(model: nn.Module) -> list[tuple[Any, list[Place]]]:
    """Return every DTensor with its places; raise for one that no property gathers."""
    kind = dtensor_type()
    found: dict[int, tuple[Any, list[Place]]] = {}
    for path, module in model.named_modules():
        before, after, _ = style_hooks(module)
        if before or after or is_distributed(module):
            raise OptionError(
                f"'{path}' is divided by tensor parallelism, and properties gather parameters of other modules",
                advice="Use one of them alone.",
            )
        held = held_by(module)[0]
        for key, tensor in [*held.items(), *module.named_buffers(recurse=False)]:
            if not isinstance(tensor, kind):
                continue
            place = Place(f"{path}.{key}".lstrip("."), module, key)
            if key not in held or not _has_property(type(module), key):
                raise refused(place, "no property of its module's class gathers it")
            if not all(one.is_shard() or one.is_replicate() for one in tensor.placements):
                raise refused(place, f"its placements are {tensor.placements}")
            if not tensor.is_floating_point():
                raise refused(place, f"its dtype is {tensor.dtype}")
            found.setdefault(id(tensor), (tensor, []))[1].append(place)
    return list(found.values())


@torch.no_grad()
def _has_values_of(value: Tensor, shard: Any) -> bool:
    """Compare this process's part, bit for bit and without a collective."""
    tensors = sys.modules["torch.distributed.tensor"]
    mesh, replicated = shard.device_mesh, [tensors.Replicate()] * shard.device_mesh.ndim
    whole = tensors.DTensor.from_local(value.detach(), mesh, replicated, run_check=False)
    part = whole.redistribute(placements=shard.placements).to_local()
    return same_bits(part, shard.detach().to_local().to(value.dtype))


def same_bits(one: Tensor, other: Tensor) -> bool:
    if kind_of(one) != kind_of(other):
        return False
    return torch.equal(*(each.detach().contiguous().flatten().view(torch.uint8) for each in (one, other)))


def shares_memory(value: Tensor, shard: Any) -> bool:
    """Return whether a value lies in memory of the DTensor's own: it is not divided, and nothing was gathered."""
    own = shard.detach().to_local()
    return bool(value.untyped_storage().data_ptr() == own.untyped_storage().data_ptr())

"""Tensor parallelism: in a call a model that ``parallelize_module`` divided is an ordinary one of local tensors.

    local       every DTensor parameter's own part stands in its place, and in the place of each style's hooks the
                operators of kernels/collectives.py, which say what the hooks do to local tensors
    call        the passes see an ordinary model; `prove_replicas` proves that the operators stand where they have to
    reduce      at the end of the backward, p.grad of the local parts becomes p.grad of the DTensors, with no collective

Every process has the same batch: the first call compares the processes' inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn

from fxgrad.capture.distributed import AROUND
from fxgrad.capture.division import Division, check_unhooked
from fxgrad.capture.gathering_properties import is_gathering
from fxgrad.capture.options import Options
from fxgrad.capture.parallel_layers import Layer, layer_of
from fxgrad.capture.sharded_hooks import is_cast
from fxgrad.capture.sharded_results import move_local
from fxgrad.costs.machines import machine_of
from fxgrad.errors import OptionError
from fxgrad.host.dtensors import dtensor_type
from fxgrad.host.fsdp import manages
from fxgrad.host.modules import held_by, wrapped_by_ddp
from fxgrad.host.pytree import tree_leaves
from fxgrad.host.tensor_parallel import is_distributed, style_hooks
from fxgrad.kernels.collectives import name_group
from fxgrad.quantities.regional import Region, regional
from fxgrad.runtime.guard import Guard

_KINDS = ("sharded", "partial", "replicated")
ADVICE = (
    f"{AROUND} Or divide it by parallelize_module with ColwiseParallel, RowwiseParallel and SequenceParallel, as "
    "docs/devices.md lists them."
)


class Pair(NamedTuple):
    """A DTensor parameter, the name it has in the model, and its part on this process as a Parameter."""

    name: str
    whole: Any
    local: nn.Parameter


def is_parallel(model: nn.Module) -> bool:
    """Return whether a model has DTensors, or modules that ``parallelize_module`` divided."""
    kind = dtensor_type()
    if kind is None:
        return False
    tensors = [one for part in model.modules() for one in [*held_by(part)[0].values(), *part.buffers(recurse=False)]]
    return has_layers(model) or any(isinstance(one, kind) for one in tensors)


def has_layers(model: nn.Module) -> bool:
    """Return whether a model has modules that ``parallelize_module`` divided."""
    return any(is_distributed(part) or any(style_hooks(part)[:2]) for part in model.modules())


def check_not_parallel(model: nn.Module, what: str) -> None:
    """Refuse what calls a model in other ways than a training step does."""
    if is_gathering(model):
        raise OptionError(
            f"{what} does not know models whose parameters a property gathers (SimpleFSDP)",
            advice="Use the model before it is divided, in one process or under DistributedDataParallel.",
        )
    if is_parallel(model):
        raise OptionError(
            f"{what} does not know tensor-parallel models",
            advice="Use the model before parallelize_module, in one process or under DistributedDataParallel.",
        )


def refuse_private() -> NoReturn:
    """Refuse a private step, whose noise is drawn shard by shard."""
    raise OptionError(
        "make_private does not know tensor-parallel models: each process would draw its own noise for what is "
        "replicated",
        advice="Use DistributedDataParallel or FSDP2 with make_private.",
    )


class Layers(Division):
    """The parallel layers of one model.

    Args:
        model: the model, divided by ``parallelize_module``.
        around: the mesh of FSDP2's units that hold its DTensors and reduce their p.grad; None for no units.
    """

    one_program = True

    def __init__(self, model: nn.Module, around: Any = None) -> None:
        self.model, self.around = model, around
        self.layers = _layers(model)
        meshes = {id(layer.mesh): layer.mesh for layer in self.layers.values()}
        groups = {name_group(mesh.get_group()) for mesh in meshes.values()}
        if len(groups) != 1:
            raise OptionError("parallel layers lie on different meshes", advice="Divide all of them over one mesh.")
        (self.group,) = groups
        self.mesh: Any = next(iter(meshes.values()))
        self.locals: dict[int, Pair] = {}  # by id() of the DTensor
        self.grads: dict[int, tuple[Any, Tensor]] = {}  # p.grad as this set it last, and that of the local part
        self.kinds = self._kinds(self._pairs())
        by_kind = {kind: tuple(name for name, one in self.kinds.items() if one == kind) for kind in _KINDS}
        self.region = Region(self.group, by_kind["sharded"], by_kind["partial"])
        self.varying = frozenset((*self.region.sharded, *self.region.partial))  # values or gradients differ

    def settle(self, options: Options, policy: str) -> Options:
        return replace(options, quantities=regional(options.quantities, self.region), varying=self.varying)

    def outdated(self) -> bool:
        """Return whether FSDP2 has sharded a layer: its parameters then lie on further dimensions of a mesh."""
        every = [parameter for layer in self.layers.values() for parameter in layer.parameters()]
        return self.around is None and any(len(getattr(parameter, "placements", ())) > 1 for parameter in every)

    def _kinds(self, pairs: Sequence[Pair]) -> dict[str, str]:
        """Return how each parameter's gradient lies on the processes, by its name."""
        sums: dict[int, set[bool]] = {}  # of each parameter: whether its layers' gradients are sums over the processes
        for layer in self.layers.values():
            for parameter in layer.parameters():
                sums.setdefault(id(parameter), set()).add(layer.partial)
        kinds: dict[str, str] = {}
        for name, whole, _ in pairs:
            partial, (placement, *others) = sums.get(id(whole), set()), whole.placements
            if not partial or others:
                raise OptionError(
                    f"parameter '{name}' became a DTensor after the model was transformed",
                    advice="Divide the model first, and transform it then.",
                )
            if len(partial) > 1:
                raise OptionError(
                    f"'{name}' is tied to a parameter of a SequenceParallel layer, and not every use of it is in one",
                    advice="Give each layer a parameter of its own.",
                )
            kinds[name] = "sharded" if placement.is_shard() else "partial" if True in partial else "replicated"
        return kinds

    @contextlib.contextmanager
    def whole(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Let the model be an ordinary one of local tensors for a call; yields the call's arguments."""
        self._check_alone()
        self._agree(args, kwargs)
        undo: list[Callable[[], None]] = []
        try:
            pairs = self._pairs()
            if self._kinds(pairs) != self.kinds:
                raise OptionError(
                    "parallel layers have changed since the model was transformed",
                    advice="Divide the model first, and transform it then.",
                )
            for pair in pairs:
                self._enter(pair)
            for module in self.model.modules():
                held = held_by(module)[0]
                for name, parameter in held.items():
                    if id(parameter) in self.locals:
                        undo.append(partial(held.__setitem__, name, parameter))
                        held[name] = self.locals[id(parameter)].local
            for layer in self.layers.values():
                undo.append(layer.localise(self.group))
            yield args, kwargs
        finally:
            for act in reversed(undo):
                act()

    def _check_alone(self) -> None:
        """Refuse what waits for gradients of the DTensors by autograd: it would reduce nothing."""
        managed = self.around is None and manages(pair.whole for pair in self.locals.values())
        if managed or wrapped_by_ddp() is not None:
            raise OptionError(
                "DistributedDataParallel or FSDP2 around a tensor-parallel model is not supported",
                advice="Use one of them alone.",
            )

    def _pairs(self) -> list[Pair]:
        """Return every DTensor parameter and its local part, which is a leaf of its own on the same memory."""
        kind, found = dtensor_type(), {}
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, kind):
                continue
            with torch.no_grad():
                data = parameter.detach().to_local()
            known = self.locals.get(id(parameter))
            if known is None or known.whole is not parameter or not _same_memory(known.local, data):
                known = Pair(name, parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))
            found[id(parameter)] = known
        self.locals = found
        return list(found.values())

    def _enter(self, pair: Pair) -> None:
        """Give a local part what the user may have changed on its DTensor since the last call."""
        pair.local.requires_grad_(pair.whole.requires_grad)
        check_unhooked(pair.name, pair.whole)
        move_local(pair.whole, pair.local)
        grad, known = pair.whole.grad, self.grads.get(id(pair.whole))
        if grad is None:
            pair.local.grad = None
        elif known is None or known[0] is not grad:
            if tuple(grad.placements) != self._placements(pair):
                raise OptionError(
                    f"p.grad of '{pair.name}' has the placements {tuple(grad.placements)}, to which nothing can be "
                    "added",
                    advice="Call zero_grad() of the optimizer before the forward.",
                )
            with torch.no_grad():
                pair.local.grad = grad.to_local()
        else:
            pair.local.grad = known[1]

    def _placements(self, pair: Pair) -> tuple[Any, ...]:
        """Return how p.grad lies on the processes, as PyTorch leaves it."""
        if self.kinds[pair.name] == "partial":
            return (sys.modules["torch.distributed.tensor"].Partial(),)
        return tuple(pair.whole.placements)

    def _agree(self, args: Any, kwargs: Any) -> None:
        """Compare what every process has to have alike, in the first call; every process raises where one differs."""
        if self.machine is not None:
            return
        varying = self.varying
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if not callable(leaf)]
        others = [p.detach() for name, p in self.model.named_parameters() if name not in varying]
        others = [p.to_local() if isinstance(p, dtensor_type()) else p for p in others]
        digests = tuple(map(digest, (inputs, others, list(self.model.buffers()))))
        device = next(self.model.parameters()).device
        found: list[Any] = [None] * self.mesh.size()
        torch.distributed.all_gather_object(found, (digests, machine_of(device)), self.mesh.get_group())
        kinds = ("inputs", "replicated parameters", "buffers")
        different = [what for i, what in enumerate(kinds) if len({one[0][i] for one in found}) > 1]
        for dim in range(0 if self.around is None else self.around.ndim):  # those with other batches raise, too
            of_all: list[Any] = [None] * self.around.size(dim)
            torch.distributed.all_gather_object(of_all, different, self.around.get_group(dim))
            different = [what for what in kinds if any(what in one for one in of_all)]
        if different:
            raise OptionError(
                f"the processes of tensor parallelism have different {different[0]}",
                advice="Give every process of one tensor-parallel group the same batch, and all processes the same "
                "seed before the model is made.",
            )
        self.machine = found[0][1]

    def check_graph(self, gm: fx.GraphModule) -> None:
        """Raise on every process where their graphs differ: a rank may be a number in it."""
        parts = [part for part in gm.modules() if isinstance(part, fx.GraphModule)]
        code = [re.sub("0x[0-9a-f]+", "", str(part.code)) for part in parts]
        found: list[Any] = [None] * self.mesh.size()
        mine = digest([*code, *gm.state_dict().values()])
        torch.distributed.all_gather_object(found, mine, self.mesh.get_group())
        if len(set(found)) > 1:
            raise OptionError(
                "the processes of tensor parallelism run different programs: the model's forward depends on the rank",
                advice="Leave the rank out of forward: parallel layers divide what has to be divided.",
            )

    def parameters(self) -> list[nn.Parameter]:
        return [one for pair in self.locals.values() for one in (pair.whole, pair.local)]

    def shards(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        of = {id(pair.local): pair.whole for pair in self.locals.values()}
        return {name: of.get(id(parameter), parameter) for name, parameter in parameters.items()}

    def guard(self, guard: Guard, parameters: Mapping[str, Tensor]) -> None:
        for name, whole in self.shards(parameters).items():
            guard.join(name, whole)

    def replaced(self) -> Collection[int]:
        return self.locals.keys()

    def all_shards(self) -> list[Tensor]:
        return [pair.whole for pair in self.locals.values()]

    def check_averages(self) -> None:
        refuse_private()

    def processes(self) -> frozenset[int]:
        """Return the ranks of the processes that have one batch."""
        return frozenset(torch.distributed.get_process_group_ranks(self.mesh.get_group()))

    # At the end of a backward

    def drop_grads(self) -> None:
        """Forget gradients of local parts whose DTensors have none: FSDP2 has reduced them."""
        for pair in self.locals.values():
            if pair.whole.grad is None:
                pair.local.grad = None
                self.grads.pop(id(pair.whole), None)

    @torch.no_grad()
    def reduce(self, task: int, adds: bool, parameters: Mapping[str, Tensor], rows: int) -> None:
        """Give the DTensors what the backward left on their local parts."""
        for pair in self.locals.values():
            move_local(pair.local, pair.whole)
            grad, known = pair.local.grad, self.grads.get(id(pair.whole))
            if grad is None or (known is not None and known[0] is pair.whole.grad and known[1] is grad):
                continue
            pair.whole.grad = type(pair.whole.data).from_local(
                grad,
                self.mesh,
                self._placements(pair),
                run_check=False,
                shape=pair.whole.shape,
                stride=pair.whole.stride(),
            )
            self.grads[id(pair.whole)] = pair.whole.grad, grad


def _same_memory(local: Tensor, data: Tensor) -> bool:
    kinds = [(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in (local, data)]
    return kinds[0] == kinds[1]


def digest(values: Sequence[Any]) -> str:
    """Return a hash of values, by their bytes."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            own = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # numpy would fix a shard's size
            found.update(f"{value.dtype} {tuple(value.shape)} ".encode())
            found.update(own.flatten().view(torch.uint8).numpy().tobytes() if own.numel() else b"")
        else:
            found.update(re.sub("0x[0-9a-f]+", "", repr(value)).encode())
    return found.hexdigest()


def _layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Return the parallel layers; raise for a DTensor in any other module."""
    layers: dict[nn.Module, Layer] = {}
    kind = dtensor_type()
    for name, module in model.named_modules():
        before, after, others = style_hooks(module, is_cast)
        if before or after:
            layers[module] = layer_of(name, module, before, after, others)
        for key, tensor in [*held_by(module)[0].items(), *module.named_buffers(recurse=False)]:
            layer = layers.get(module)
            if isinstance(tensor, kind) and (layer is None or key not in layer.names):
                full = f"{name}.{key}".lstrip(".")
                raise OptionError(
                    f"parameter '{full}' is a DTensor that no parallel layer known to fxgrad has made",
                    advice=ADVICE,
                )
        if is_distributed(module) and module not in layers:
            raise OptionError(f"'{name}' was divided by distribute_module in a way of its own", advice=ADVICE)
    return layers

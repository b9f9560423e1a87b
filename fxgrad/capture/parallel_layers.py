"""What each style of ``parallelize_module`` does, said for local tensors.

ColwiseParallel, of Linear and Embedding
    input   copy_to_region, or gather_from_sequence of Shard(d); ids as they are
    layer   on its rows of W and b; of an Embedding on its columns
    output  as it is, or gather_from_region for Replicate
RowwiseParallel, of Embedding
    layer   on its rows of W; 0 for other rows
    output  reduce_from_region, or reduce_scatter_to_sequence for Shard(d)
RowwiseParallel, of Linear
    input   as it is, or scatter_to_region of Replicate
    layer   on its columns of W, without b
    output  reduce_from_region, + b, and scatter_to_region for Shard(d); or reduce_scatter_to_sequence without b
SequenceParallel, of LayerNorm and RMSNorm
    the layer on its part of the sequence
PrepareModuleInput, PrepareModuleOutput, of any module
    gather_from_region of Shard(d) for Replicate, and scatter_to_region of Replicate for Shard(d)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxgrad.capture.sharded_hooks import replace_hooks
from fxgrad.errors import OptionError
from fxgrad.host.fsdp import forward_hooks
from fxgrad.host.modules import held_by
from fxgrad.host.tensor_parallel import StyleHook, style_hook
from fxgrad.kernels.collectives import (
    copy_to_region,
    gather_from_region,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
    rows_of_region,
    scatter_to_region,
)

Hook = Callable[..., Any] | None
REPLICATED = "Replicate()"


@dataclass(frozen=True, eq=False)
class Layer:
    """One parallel layer: what stands in a call in the place of its hooks, and of its class."""

    module: nn.Module
    mesh: Any
    names: frozenset[str] = frozenset()  # of its parameters that are DTensors
    partial: bool = False  # whether a replicated parameter's gradient is a sum over the processes
    before: Callable[[str], Hook] = lambda group: None
    after: Callable[[str], Hook] = lambda group: None
    kind: Callable[[str], type[nn.Module]] | None = None

    def parameters(self) -> list[Any]:
        return [held_by(self.module)[0].get(name) for name in self.names]

    def localise(self, group: str) -> Callable[[], None]:
        """Put local operators in the place of the hooks; returns what puts the hooks back."""
        undo = [
            replace_hooks(hooks, lambda hook: style_hook(hook) is not None, replacement)
            for hooks, replacement in zip(
                forward_hooks(self.module), (self.before(group), self.after(group)), strict=True
            )
        ]
        if self.kind is not None:
            undo.append(partial(setattr, self.module, "__class__", type(self.module)))
            self.module.__class__ = self.kind(group)

        def put_back() -> None:
            for act in undo:
                act()

        return put_back


def layer_of(
    name: str, module: nn.Module, before: Sequence[StyleHook], after: Sequence[StyleHook], others: bool
) -> Layer:
    """Return the layer that a module's hooks make of it; raise for what is not known."""
    styles = {hook.style for hook in (*before, *after)}
    what = f"{'/'.join(sorted(styles)) or 'a style'} of {type(module).__name__} '{name}'"

    def refuse(why: str, advice: str) -> OptionError:
        return OptionError(f"{what}: {why}", advice=advice)

    prepares = styles <= {"PrepareModuleInput", "PrepareModuleOutput"}
    if len(before) > 1 or len(after) > 1 or (len(styles) > 1 and not prepares):
        raise refuse("several styles of one module are not supported", "Give each module one style.")
    if others:
        raise refuse("other forward hooks on the module are not supported", "Remove the hooks.")
    mesh = (*before, *after)[0].mesh
    known = prepares or (len(styles) == 1 and styles <= _MAKERS.keys() and len(before) == len(after) == 1)
    if not known:
        raise refuse(
            "this style is not supported",
            "Use ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput or PrepareModuleOutput, or "
            "leave the module as it is.",
        )
    if mesh.ndim != 1:
        raise refuse("a mesh of several dimensions is not supported", "Pass a mesh of one dimension, mesh['tp'].")
    if prepares:
        return _prepared(module, mesh, before, after, refuse)
    (style,) = styles
    names = frozenset(key for key, parameter in held_by(module)[0].items() if parameter is not None)
    layer = _MAKERS[style](module, mesh, names, before[0].arguments, after[0].arguments, refuse)
    _check_placements(layer, _DIVIDED[style].get(type(module), {}), refuse)
    return layer


def _check_placements(layer: Layer, dims: dict[str, int], refuse: Refuse) -> None:
    """Refuse parameters that do not lie as the style places them."""
    mesh = layer.mesh
    for key in sorted(layer.names):
        parameter: Any = held_by(layer.module)[0][key]
        placements: tuple[Any, ...] = getattr(parameter, "placements", ())
        if len(placements) != 1 or parameter.device_mesh != mesh:
            raise refuse(
                f"{key} does not lie on the mesh of the style alone",
                "Call parallelize_module before fully_shard, and put no other parameter in place.",
            )
        (placement,) = placements
        if (placement.dim if placement.is_shard() else None) != dims.get(key):
            raise refuse(
                f"{key} is placed as {placement}, and not as the style places it",
                "Tie a parameter only to one that is divided along the same dimension.",
            )
        if placement.is_shard() and parameter.shape[placement.dim] % mesh.size():
            raise refuse(
                f"{key} of shape {list(parameter.shape)} is divided into parts of different sizes",
                f"Make the size a multiple of {mesh.size()}.",
            )


_DIVIDED: dict[str, dict[type[nn.Module], dict[str, int]]] = {
    "ColwiseParallel": {nn.Linear: {"weight": 0, "bias": 0}, nn.Embedding: {"weight": 1}},
    "RowwiseParallel": {nn.Linear: {"weight": 1}, nn.Embedding: {"weight": 0}},
    "SequenceParallel": {},
}
"""By style and layer: the dimension along which a parameter is divided; all others are replicated."""

Refuse = Callable[[str, str], OptionError]
Move = tuple[str, int] | None
"""How a value is redistributed: gathered or scattered along a dimension, or left as it is."""
_LOCAL = "Leave use_local_output=True: the model's code then sees local tensors."


def _colwise(
    module: nn.Module, mesh: Any, names: frozenset[str], before: Sequence[Any], after: Sequence[Any], refuse: Refuse
) -> Layer:
    ((source,), _), ((target,), local) = before, after
    if type(module) not in (nn.Linear, nn.Embedding):
        raise refuse("a subclass is not supported", "Use nn.Linear or nn.Embedding itself.")
    if not local:
        raise refuse("use_local_output=False is not supported", _LOCAL)
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        raise refuse("max_norm is not supported", "Leave out max_norm.")
    if not source.is_replicate() and not source.is_shard():
        raise refuse(f"input_layouts={source} is not supported", "Pass Replicate() or Shard(1).")
    if not target.is_replicate() and not (target.is_shard() and target.dim == -1):
        raise refuse(f"output_layouts={target} is not supported", "Pass Shard(-1) or Replicate().")
    if isinstance(module, nn.Embedding):
        if not source.is_replicate():
            raise refuse(f"input_layouts={source} is not supported", "Pass Replicate().")
        entrance: Callable[[str], Hook] = lambda group: None  # noqa: E731 - ids have no gradient
    else:
        entrance = partial(_copied, dim=None if source.is_replicate() else source.dim)
    return Layer(
        module,
        mesh,
        names,
        before=entrance,
        after=_gathered if target.is_replicate() else lambda group: None,
    )


def _rowwise(
    module: nn.Module, mesh: Any, names: frozenset[str], before: Sequence[Any], after: Sequence[Any], refuse: Refuse
) -> Layer:
    ((source,), _), ((target,), local) = before, after
    if type(module) not in (nn.Linear, nn.Embedding):
        raise refuse("a subclass is not supported", "Use nn.Linear or nn.Embedding itself.")
    if not local:
        raise refuse("use_local_output=False is not supported", _LOCAL)
    if not target.is_replicate() and not (target.is_shard() and target.dim != -1):
        raise refuse(f"output_layouts={target} is not supported", "Pass Replicate() or Shard(1).")
    dim = None if target.is_replicate() else target.dim
    if isinstance(module, nn.Embedding):
        if not source.is_replicate():
            raise refuse(f"input_layouts={source} is not supported", "Pass Replicate().")
        if module.max_norm is not None or module.padding_idx is not None or module.scale_grad_by_freq or module.sparse:
            raise refuse(
                "max_norm, padding_idx, scale_grad_by_freq and sparse are not supported",
                "Leave them out, or use ColwiseParallel(output_layouts=Replicate()).",
            )
        return Layer(module, mesh, names, kind=partial(_table_rows, dim=dim))
    if not source.is_replicate() and not (source.is_shard() and source.dim == -1):
        raise refuse(f"input_layouts={source} is not supported", "Pass Shard(-1) or Replicate().")
    return Layer(
        module,
        mesh,
        names,
        before=_scattered if source.is_replicate() else lambda group: None,
        kind=partial(_rows, dim=dim),
    )


def _sequence(
    module: nn.Module, mesh: Any, names: frozenset[str], before: Sequence[Any], after: Sequence[Any], refuse: Refuse
) -> Layer:
    ((source,),), (local,) = before, after
    if type(module) not in (nn.LayerNorm, nn.RMSNorm) or len(module.normalized_shape) != 1:  # type: ignore[arg-type]
        raise refuse("only nn.LayerNorm and nn.RMSNorm over the last dimension are supported", "Use one of them.")
    if not local:
        raise refuse("use_local_output=False is not supported", "Pass SequenceParallel(use_local_output=True).")
    return Layer(module, mesh, names, partial=True, before=partial(_within, dim=source.dim))


def _prepared(
    module: nn.Module, mesh: Any, before: Sequence[StyleHook], after: Sequence[StyleHook], refuse: Refuse
) -> Layer:
    """Return the layer of a module whose inputs or outputs are redistributed."""
    layer = Layer(module, mesh)
    for hook in before:
        sources, targets, with_kwargs, named, wanted, local = hook.arguments
        names = tuple(named)
        by_name = _moves([named[name] for name in names], [wanted.get(name) for name in names], local, refuse)
        entrance = partial(
            _prepared_inputs,
            moves=None if sources is None else _moves(sources, targets, local, refuse),
            named=tuple(zip(names, by_name, strict=True)) if with_kwargs else None,
        )
        layer = replace(layer, before=entrance)
    for hook in after:
        sources, targets, local = hook.arguments
        layer = replace(layer, after=partial(_prepared_outputs, moves=_moves(sources, targets, local, refuse)))
    return layer


def _moves(sources: Sequence[Any], targets: Sequence[Any], local: bool, refuse: Refuse) -> tuple[Move, ...]:
    """Return how each value goes from its layout to the one that is asked for."""
    moves: list[Move] = []
    for source, target in zip(sources, targets, strict=True):
        wanted = source if target is None else target
        if source is None or source == wanted:
            moves.append(None)
        elif source.is_shard() and wanted.is_replicate():
            moves.append(("gather", source.dim))
        elif source.is_replicate() and wanted.is_shard():
            moves.append(("scatter", wanted.dim))
        else:
            raise refuse(f"from {source} to {wanted} is not supported", "Go from Shard to Replicate, or back.")
        if source is not None and not local and not wanted.is_replicate():
            raise refuse(f"values that stay DTensors of {wanted} are not supported", _LOCAL)
    return tuple(moves)


_MAKERS = {"ColwiseParallel": _colwise, "RowwiseParallel": _rowwise, "SequenceParallel": _sequence}

# One object for the same arguments, as Dynamo guards on hooks and classes


@functools.cache
def _copied(group: str, dim: int | None) -> Hook:
    def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
        x, *others = args
        x = copy_to_region(x, group) if dim is None else gather_from_sequence(x, dim, group)
        return (x, *others)

    return before


@functools.cache
def _gathered(group: str) -> Hook:
    return lambda module, args, output: gather_from_region(output, -1, group)


@functools.cache
def _scattered(group: str) -> Hook:
    return lambda module, args: (scatter_to_region(args[0], -1, group), *args[1:])


@functools.cache
def _within(group: str, dim: int) -> Hook:
    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        rank = args[0].dim()
        if dim % rank == rank - 1:
            raise OptionError(
                "SequenceParallel divides the dimension that the layer normalises over",
                advice="Pass sequence_dim=1 and values [B, T, features].",
            )

    return before


@functools.cache
def _rows(group: str, dim: int | None) -> type[nn.Module]:
    class RowwiseLinear(nn.Linear):
        """A Linear on its columns of W, whose processes' results are added up before the bias."""

        def forward(self, input: Tensor) -> Tensor:
            y = F.linear(input, self.weight)
            if dim is not None and self.bias is None:
                return reduce_scatter_to_sequence(y, dim, group)
            y = reduce_from_region(y, group)
            y = y if self.bias is None else y + self.bias.to(y.dtype)  # autocast leaves the bias wide
            return y if dim is None else scatter_to_region(y, dim, group)

    return RowwiseLinear


@functools.cache
def _table_rows(group: str, dim: int | None) -> type[nn.Module]:
    class RowwiseEmbedding(nn.Embedding):
        """An Embedding on its rows of W: each index is looked up by the process that has its row."""

        def forward(self, input: Tensor) -> Tensor:
            own = rows_of_region(input, len(self.weight), group)
            y = F.embedding(own.clamp(min=0), self.weight)
            y = torch.where((own >= 0).unsqueeze(-1), y, 0)
            return reduce_from_region(y, group) if dim is None else reduce_scatter_to_sequence(y, dim, group)

    return RowwiseEmbedding


def _moved(x: Any, move: Move, group: str) -> Any:
    if move is None:
        return x
    how, dim = move
    return gather_from_region(x, dim, group) if how == "gather" else scatter_to_region(x, dim, group)


@functools.cache
def _prepared_inputs(group: str, moves: tuple[Move, ...] | None, named: tuple[tuple[str, Move], ...] | None) -> Hook:
    def positional(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if moves is None:
            return args
        return tuple(_moved(x, move, group) for x, move in zip(args, moves, strict=True))

    if named is None:
        return lambda module, args: positional(args)
    by_name = dict(named)
    return lambda module, args, kwargs: (
        positional(args),
        {name: _moved(x, by_name.get(name), group) for name, x in kwargs.items()},
    )


@functools.cache
def _prepared_outputs(group: str, moves: tuple[Move, ...]) -> Hook:
    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        several = output if isinstance(output, tuple) else (output,)
        moved = tuple(_moved(x, move, group) for x, move in zip(several, moves, strict=True))
        return moved[0] if len(moved) == 1 else moved

    return after

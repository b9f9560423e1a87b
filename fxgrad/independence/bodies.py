"""Calls that hold graphs of their own: bodies of cond, scan, map and while_loop, and pairs of autograd.Function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from fxgrad.control_flow import Cond, ControlFlow, Map, Scan, WhileLoop
from fxgrad.independence.calls import Origins
from fxgrad.independence.following import LONGEST
from fxgrad.independence.origins import NONE, compact, folded, joined, no_samples
from fxgrad.independence.values import Met, Values
from fxgrad.user_functions import UserFunction


def function(values: Values, n: fx.Node, function: UserFunction, args: Sequence[Any]) -> Any:
    """A user's autograd.Function: what its backward gives for an argument is that argument's samples' own."""
    outs, saved = fx.Interpreter(function.fwd).run(*args)
    outs = [values.behind_ends(out, None) for out in outs]  # its backward need not be zero where a number stands
    grads = [values.like(out, joined) if isinstance(out, FunctionalTensor) else out for out in outs]
    found = fx.Interpreter(function.bwd).run(*grads, *saved)
    for arg, grad in zip(args, found, strict=True):
        if not isinstance(arg, FunctionalTensor) or not isinstance(grad, FunctionalTensor):
            continue
        own, given = values.origins(arg), values.origins(grad)
        if own.traced and own.padded and not _silent(own, given):
            raise Met(f"an autograd.Function's backward{LONGEST}", n, given)
        if own.traced and not own.alone and not _within(given, own):
            raise Met("an autograd.Function lets samples influence each other in its backward", n, given)
    return list(outs)


def _silent(own: Origins, given: Origins) -> bool:
    """Whether zeros behind the ends are sent back where zeros come in."""
    return own.padded.keys() == given.padded.keys() and all(one.number == 0 for one in given.padded.values())


def control(values: Values, n: fx.Node, flow: ControlFlow, args: Sequence[Any]) -> Any:
    run = [fx.Interpreter(body).run for body in flow.bodies]
    if not isinstance(flow, Cond) and any(map(values.follow.padding.along, _sizes(args))):
        raise Met(f"a loop{LONGEST}", n, Origins(()))
    if isinstance(flow, Cond):
        if isinstance(args[0], torch.SymBool) and args[0].node.expr.free_symbols & values.follow.numbers.keys():
            raise Met("cond lets a number of samples decide", n, Origins(()))
        sides = [_listed(one(*args[1:])) for one in run]
        return [_either(values, n, i, pair, args[:1]) for i, pair in enumerate(zip(*sides, strict=True))]
    if isinstance(flow, Scan):
        return _scan(values, n, flow, args, run[0])
    if isinstance(flow, WhileLoop):
        return _while(values, n, flow, args, run)
    assert isinstance(flow, Map)
    return _map(values, n, flow, args, run[0])


def _sizes(args: Sequence[Any]) -> list[Any]:
    return [size for value in args if isinstance(value, Tensor) for size in value.shape]


def _either(
    values: Values,
    n: fx.Node,
    i: int,
    several: Sequence[Any],
    which: Sequence[Any] = (),
    lift: int = 0,
) -> Any:
    """An output that is one of these values, as others decide; ``lift`` new dimensions stand in front."""
    fake = n.meta["fake"][i]
    known = [values.origins(value) for value in several]
    deciding = [values.origins(value) for value in which if isinstance(value, FunctionalTensor)]
    with _disable_current_modes():
        ids = tuple(_any_of(known, deciding, place, lift, fake.dim()) for place in range(len(values.follow.trials)))
    blame = next((one for one in (*known, *deciding) if one.blame), Origins(()))
    what = blame.blame or f"{n.target} lets samples decide about each other"
    return values.fresh(fake, Origins(ids, blame=what, where=blame.where or n))


def _settle(values: Values, carry: list[Any], step: Callable[[list[Any]], Any]) -> tuple[list[Any], list[Any]]:
    """Run a body until what it carries depends on no more samples."""
    while True:
        found = _listed(step(carry))
        grown = [_grown(values, old, new) for old, new in zip(carry, found, strict=False)]
        if all(one is None for one in grown):
            return carry, found
        carry = [old if new is None else new for old, new in zip(carry, grown, strict=True)]


def _grown(values: Values, old: Any, new: Any) -> Any:
    """A value that may be either of two, None where that is the first."""
    if not isinstance(old, FunctionalTensor):
        return None
    a, b = values.origins(old), values.origins(new)
    with _disable_current_modes():
        ids = tuple(compact(joined(x, y)) for x, y in zip(a.ids, b.ids, strict=True))
        same = all(torch.equal(x, compact(joined(y))) for x, y in zip(ids, a.ids, strict=True))
    return None if same else values.fresh(values.inner(old), Origins(ids, blame=a.blame or b.blame))


def _sliced(values: Values, value: Any) -> Any:
    """One step of a value that is run over along dimension 0: any of them."""
    if not isinstance(value, FunctionalTensor):
        return value
    origins = values.origins(value)
    inner = values.inner(value)
    with _disable_current_modes():
        ids = tuple(folded(one, [0]).squeeze(0) for one in origins.ids)
        step = inner[0]
    return values.fresh(step, replace(origins, ids=ids, known=None, padded={}))


def _any_value(values: Values, value: Any) -> Any:
    """What a step begins with: of the same samples, with another value each time."""
    if not isinstance(value, FunctionalTensor):
        return value
    origins = values.origins(value)
    kept = Origins(origins.ids, origins.traced, blame=origins.blame, where=origins.where)
    return values.fresh(values.inner(value), kept)


def _scan(values: Values, n: fx.Node, flow: Scan, args: Sequence[Any], body: Any) -> Any:
    init, xs, rest = flow.groups(args)
    init = [_any_value(values, one) for one in init]
    slices = [_sliced(values, x) for x in xs]
    carry, found = _settle(values, list(init), lambda values: body(*values, *slices, *rest))
    last = [_either(values, n, i, [value]) for i, value in enumerate(carry)]
    return [
        *last,
        *(_either(values, n, i, [found[i]], (), 1) for i in range(len(init), len(found))),
    ]


def _while(values: Values, n: fx.Node, flow: WhileLoop, args: Sequence[Any], run: Sequence[Any]) -> Any:
    carried, rest = flow.groups(args)
    carry, _ = _settle(values, [_any_value(values, one) for one in carried], lambda values: run[1](*values, *rest))
    decides = _listed(run[0](*carry, *rest))
    return [_either(values, n, i, [value], decides) for i, value in enumerate(carry)]


def _map(values: Values, n: fx.Node, flow: Map, args: Sequence[Any], body: Any) -> Any:
    """Each row alone: where rows are samples, a body sees one of them, with what all share."""
    xs, rest = flow.groups(args)
    shared = all(values.origins(one).alone for one in rest if isinstance(one, FunctionalTensor))
    with _disable_current_modes():
        rows = _sample_of_each_row([values.origins(x) for x in xs]) if shared else None
    if rows is None:
        found = _listed(body(*(_sliced(values, x) for x in xs), *rest))
        return [_either(values, n, i, [value], (), 1) for i, value in enumerate(found)]
    slices = [_one_row(values, x) for x in xs]
    return [_of_rows(values, n, i, value, rows) for i, value in enumerate(_listed(body(*slices, *rest)))]


def _one_row(values: Values, x: Any) -> Any:
    """A row of a value, as sample 1's where rows are samples."""
    origins, inner = values.origins(x), values.inner(x)
    with _disable_current_modes():
        step = inner[0]
        one = torch.full([1] * step.dim(), 0 if origins.alone else 1, dtype=torch.int32)
    return values.fresh(step, Origins(tuple(one for _ in values.follow.trials)))


def _of_rows(values: Values, n: fx.Node, i: int, value: Any, rows: list[Tensor]) -> Any:
    """What a body makes of one row, for all of them."""
    fake, known = n.meta["fake"][i], values.origins(value)
    with _disable_current_modes():
        whole = [own.reshape([-1, *[1] * (fake.dim() - 1)]) for own in rows]
        pairs = [(own, one.unsqueeze(0)) for own, one in zip(whole, known.ids, strict=True)]
        ids = tuple(torch.where(one == 1, own, one) for own, one in pairs)
    return values.fresh(fake, Origins(ids, blame=known.blame, where=known.where))


def _within(given: Origins, own: Origins) -> bool:
    """Whether elements depend on no other sample than that of another value does, which is one."""
    with _disable_current_modes():
        pairs = zip(given.ids, own.ids, strict=True)
        return all(a.dim() == b.dim() and bool(((a == NONE) | ((a == b) & (a > NONE))).all()) for a, b in pairs)


def _any_of(known: Sequence[Origins], deciding: Sequence[Origins], place: int, lift: int, rank: int) -> Tensor:
    own = [one.ids[place].reshape([*[1] * lift, *one.ids[place].shape]) for one in known]
    which = [folded(one.ids[place], range(one.ids[place].dim())).reshape([]) for one in deciding]
    return joined(no_samples(rank), *own, *which)


def _sample_of_each_row(several: Sequence[Origins]) -> list[Tensor] | None:
    """The sample of each row along dimension 0, where every row of every value is one sample's."""
    found: list[Tensor] | None = None
    for origins in several:
        if origins.alone:
            continue
        rows = [folded(ids, range(1, ids.dim())).reshape(-1) for ids in origins.ids]
        if any(bool((one <= NONE).any()) or len(one) == 1 for one in rows):
            return None
        if found is not None and not all(torch.equal(a, b) for a, b in zip(found, rows, strict=True)):
            return None
        found = rows
    return found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]

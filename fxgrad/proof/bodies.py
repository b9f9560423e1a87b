"""Rules for calls with subgraphs: cond, scan, map, while_loop, and the forward and backward of autograd.Function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.fake import FunctionalTensor
from fxgrad.ops.facts import FAKE
from fxgrad.ops.user_functions import UserFunction
from fxgrad.proof.calls import Blame, Origins
from fxgrad.proof.following import LONGEST
from fxgrad.proof.origins import NONE, along_dim, compact, folded, joined, no_samples, whole
from fxgrad.proof.trials import symbols_of
from fxgrad.proof.values import Met, Values
from fxgrad.samples.control_flow import Cond, ControlFlow, Map, Scan, WhileLoop


def function(values: Values, n: fx.Node, function: UserFunction, args: Sequence[Any]) -> Any:
    """Follow a user's autograd.Function; each gradient may depend only on the samples of its own argument."""
    outs, saved = fx.Interpreter(function.fwd).run(*args)
    # even where the padding is one number, the backward need not return zeros there
    outs = [values.hide_padding(out) for out in outs]
    grads = [values.like(out, joined) if isinstance(out, FunctionalTensor) else out for out in outs]
    arg_grads = fx.Interpreter(function.bwd).run(*grads, *saved)
    for arg, grad in zip(args, arg_grads, strict=True):
        if not isinstance(arg, FunctionalTensor) or not isinstance(grad, FunctionalTensor):
            continue
        arg_origins, grad_origins = values.origins(arg), values.origins(grad)
        if arg_origins.traced and arg_origins.padded and not _silent(arg_origins, grad_origins):
            raise Met(f"an autograd.Function's backward{LONGEST}", n, grad_origins)
        if arg_origins.traced and not arg_origins.alone and not _within(grad_origins, arg_origins):
            raise Met("an autograd.Function lets samples influence each other in its backward", n, grad_origins)
    return list(outs)


def _silent(arg: Origins, grad: Origins) -> bool:
    """Decide whether a backward returns zeros in the padding where it receives zeros there."""
    return arg.padded.keys() == grad.padded.keys() and all(steps.number == 0 for steps in grad.padded.values())


def control(values: Values, n: fx.Node, flow: ControlFlow, args: Sequence[Any]) -> Any:
    """Follow a cond, scan, map or while_loop through its bodies."""
    run = [fx.Interpreter(body).run for body in flow.bodies]
    sizes = [size for value in args if isinstance(value, Tensor) for size in value.shape]
    if not isinstance(flow, Cond) and any(map(values.follow.padding.along, sizes)):
        raise Met(f"a loop{LONGEST}", n)
    if isinstance(flow, Cond):
        if symbols_of(args[0]) & values.follow.numbers.keys():
            raise Met("cond lets a number of samples decide", n)
        sides = [_listed(run_body(*args[1:])) for run_body in run]
        return [_either(values, n, i, pair, args[:1]) for i, pair in enumerate(zip(*sides, strict=True))]
    if isinstance(flow, Scan):
        return _scan(values, n, flow, args, run[0])
    if isinstance(flow, WhileLoop):
        return _while(values, n, flow, args, run)
    assert isinstance(flow, Map)
    return _map(values, n, flow, args, run[0])


def _either(
    values: Values, n: fx.Node, i: int, several: Sequence[Any], which: Sequence[Any] = (), *, stacked: bool = False
) -> Any:
    """Return an output that is one of ``several`` values, chosen by ``which``; or slices of that kind, stacked."""
    fake = FAKE.of(n)[i]
    known = [values.origins(value) for value in several]
    deciding = [values.origins(value) for value in which if isinstance(value, FunctionalTensor)]
    with disable_current_modes():
        ids = []
        for place in range(len(values.follow.trials)):
            parts = [origins.ids[place] for origins in known]
            parts = [part.unsqueeze(0) for part in parts] if stacked else parts
            decide = [whole(origins.ids[place]) for origins in deciding]
            ids.append(joined(no_samples(fake.dim()), *parts, *decide))
    blame = next((origins.blame for origins in (*known, *deciding) if origins.blame), None)
    blame = blame or Blame(f"{n.target} lets samples decide about each other")
    return values.fresh(fake, Origins(tuple(ids), blame=replace(blame, where=blame.where or n)))


def _settle(values: Values, carry: list[Any], step: Callable[[list[Any]], Any]) -> tuple[list[Any], list[Any]]:
    """Run a body until the ids of its carry reach a fixpoint."""
    while True:
        results = _listed(step(carry))
        grown = [_grown(values, old, new) for old, new in zip(carry, results, strict=False)]
        if all(ids is None for ids in grown):
            return carry, results
        carry = [old if new is None else new for old, new in zip(carry, grown, strict=True)]


def _grown(values: Values, old: Any, new: Any) -> Any:
    """Join the ids of two values; return None if they are those of the first."""
    if not isinstance(old, FunctionalTensor):
        return None
    a, b = values.origins(old), values.origins(new)
    with disable_current_modes():
        ids = tuple(compact(joined(x, y)) for x, y in zip(a.ids, b.ids, strict=True))
        same = all(torch.equal(x, compact(joined(y))) for x, y in zip(ids, a.ids, strict=True))
    return None if same else values.fresh(values.inner(old), Origins(ids, blame=a.blame or b.blame))


def _sliced(values: Values, value: Any) -> Any:
    """Return a slice along dimension 0 that stands for every slice."""
    if not isinstance(value, FunctionalTensor):
        return value
    origins = values.origins(value)
    inner = values.inner(value)
    with disable_current_modes():
        ids = tuple(folded(one, [0]).squeeze(0) for one in origins.ids)
        step = inner[0]
    return values.fresh(step, replace(origins, ids=ids, known=None, padded={}))


def _any_value(values: Values, value: Any) -> Any:
    """Drop the value that is known of a carry, which changes with each step; keep its ids."""
    if not isinstance(value, FunctionalTensor):
        return value
    origins = values.origins(value)
    return values.fresh(values.inner(value), Origins(origins.ids, origins.traced, blame=origins.blame))


def _scan(values: Values, n: fx.Node, flow: Scan, args: Sequence[Any], body: Any) -> Any:
    init, xs, rest = flow.groups(args)
    init = [_any_value(values, start) for start in init]
    slices = [_sliced(values, x) for x in xs]
    carry, results = _settle(values, list(init), lambda values: body(*values, *slices, *rest))
    last = [_either(values, n, i, [value]) for i, value in enumerate(carry)]
    stacked = [_either(values, n, i, [results[i]], stacked=True) for i in range(len(init), len(results))]
    return [*last, *stacked]


def _while(values: Values, n: fx.Node, flow: WhileLoop, args: Sequence[Any], run: Sequence[Any]) -> Any:
    carried, rest = flow.groups(args)
    carry, _ = _settle(values, [_any_value(values, one) for one in carried], lambda values: run[1](*values, *rest))
    decides = _listed(run[0](*carry, *rest))
    return [_either(values, n, i, [value], decides) for i, value in enumerate(carry)]


def _map(values: Values, n: fx.Node, flow: Map, args: Sequence[Any], body: Any) -> Any:
    """Follow a map; where rows are samples, the body sees one row and the shared operands."""
    xs, rest = flow.groups(args)
    shared = all(values.origins(operand).alone for operand in rest if isinstance(operand, FunctionalTensor))
    with disable_current_modes():
        rows = _sample_of_each_row([values.origins(x) for x in xs]) if shared else None
    if rows is None:
        results = _listed(body(*(_sliced(values, x) for x in xs), *rest))
        return [_either(values, n, i, [value], stacked=True) for i, value in enumerate(results)]
    slices = [_one_row(values, x) for x in xs]
    return [_of_rows(values, n, i, value, rows) for i, value in enumerate(_listed(body(*slices, *rest)))]


def _one_row(values: Values, x: Any) -> Any:
    """Return a row of a value; where rows are samples, as that of sample 1."""
    origins, inner = values.origins(x), values.inner(x)
    with disable_current_modes():
        step = inner[0]
        row_ids = torch.full([1] * step.dim(), 0 if origins.alone else 1, dtype=torch.int32)
    return values.fresh(step, Origins(values.follow.everywhere(row_ids)))


def _of_rows(values: Values, n: fx.Node, i: int, value: Any, rows: list[Tensor]) -> Any:
    """Extend the body's output for one row to all rows."""
    fake, known = FAKE.of(n)[i], values.origins(value)
    with disable_current_modes():
        pairs = [(along_dim(a, 0, fake.dim()), b.unsqueeze(0)) for a, b in zip(rows, known.ids, strict=True)]
        ids = tuple(torch.where(step_ids == 1, row_ids, step_ids) for row_ids, step_ids in pairs)
    return values.fresh(fake, Origins(ids, blame=known.blame))


def _within(grad: Origins, arg: Origins) -> bool:
    """Decide whether each element of ``grad`` depends on no sample, or on the one sample of that element in ``arg``."""
    with disable_current_modes():
        pairs = zip(grad.ids, arg.ids, strict=True)
        return all(a.dim() == b.dim() and bool(((a == NONE) | ((a == b) & (a > NONE))).all()) for a, b in pairs)


def _sample_of_each_row(several: Sequence[Origins]) -> list[Tensor] | None:
    """Return the sample of each row along dimension 0; None unless each row of each value depends on one sample."""
    samples: list[Tensor] | None = None
    for origins in several:
        if origins.alone:
            continue
        rows = [folded(ids, range(1, ids.dim())).reshape(-1) for ids in origins.ids]
        if any(bool((ids_of_rows <= NONE).any()) or len(ids_of_rows) == 1 for ids_of_rows in rows):
            return None
        if samples is not None and not all(torch.equal(a, b) for a, b in zip(samples, rows, strict=True)):
            return None
        samples = rows
    return samples


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]

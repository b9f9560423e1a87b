"""The walk: interprets the graph that attach_taps wrote, and checks the origins at each tap and output."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context
from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.fake import FunctionalTensor
from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.families import believed
from fxgrad.ops.user_functions import UserFunction
from fxgrad.proof.bodies import control, function
from fxgrad.proof.calls import Origins
from fxgrad.proof.following import LONGEST, Follow
from fxgrad.proof.origins import MANY, NONE, any_samples, no_samples
from fxgrad.proof.sharing import Sharing, form_of
from fxgrad.proof.trials import ROWS
from fxgrad.proof.values import Met, Values
from fxgrad.runtime.targets import (
    CollectTarget,
    DeriveTarget,
    NewTape,
    OwnTapTarget,
    TapSeveralTarget,
    TapTarget,
)
from fxgrad.samples.control_flow import ControlFlow
from fxgrad.samples.layouts import SAMPLES, Kind, Layout, Samples

log = logging.getLogger(__name__)

_PACKED = "how sequences are packed (batch_sizes, sorted_indices) depends on the lengths of all samples"


class Walk(fx.Interpreter):
    """An FX interpreter on functional tensors that wrap fake tensors."""

    def __init__(self, gm: fx.GraphModule, ctx: Context, follow: Follow, *, share: bool = True) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.extra_traceback = False
        self.ctx, self.follow, self.values = ctx, follow, Values(follow)
        self.sharing = Sharing(gm.graph, follow.trials[0].values, off=not share)
        self.constants: dict[int, Any] = {}  # `id()` -> buffer or parameter, before any write to it
        self.right: set[tuple[int, Any]] = set()  # kinds of values with the layouts that they were checked against

    def inputs(self) -> list[Any]:
        """Return the values of the placeholders."""
        for name, rows in self.ctx.packed.items():
            if rows is not None and rows[0] not in self.values.packs:
                self.values.packs[rows[0]] = self.values.packs[rows[1]] = len(self.follow.packs)
                with disable_current_modes():
                    self.follow.note_packed(self.ctx.inputs[name], self.ctx.inputs[rows[0]], len(self.follow.packs))
                self.follow.packs.append(self._each_sample())
        return [self._placeholder(node) for node in self.graph.find_nodes(op="placeholder")]

    def _placeholder(self, n: fx.Node) -> Any:
        """Return an input's value; parameters of equal form share one."""
        fake: Any = self.ctx.inputs.get(n.name)
        plain = isinstance(fake, Tensor) and n.name not in self.ctx.sample_dims and n.name not in self.ctx.packed
        if not plain:
            return self._input(n.name)
        if self.sharing.own(n):
            return self._constant(self._input(n.name))
        key = ("input", form_of(fake), n.name in self.ctx.by_node)
        if key not in self.sharing.results:
            self.sharing.results[key] = self._constant(self._input(n.name))
        return self.sharing.results[key]

    def _constant(self, value: Any) -> Any:
        self.constants[id(value)] = value
        return value

    def _shared(self, n: fx.Node, value: Any) -> Any:
        """Return the first value that is equal to this one."""
        kind = None if self.sharing.own(n) or not isinstance(value, FunctionalTensor) else self.kind(value)
        return value if kind is None else self.sharing.results.setdefault(kind, value)

    def kind(self, value: Any) -> int | None:
        return self.sharing.kind(value, self.values.origins(value))

    def _input(self, name: str) -> Any:
        fake = self.ctx.inputs.get(name)
        if not isinstance(fake, Tensor):
            return fake
        dim = self.ctx.sample_dims.get(name)
        counted = not fake.dtype.is_floating_point and not fake.dtype.is_complex
        if name in self.ctx.packed:
            rows = self.ctx.packed[name]
            if rows is not None:
                return self.values.fresh(fake, self._rows(fake, self.values.packs[rows[0]]))
            with disable_current_modes():
                ids = tuple(any_samples(fake.dim()) for _ in self.follow.trials)
            return self.values.fresh(
                fake,
                Origins(ids, counted=counted, blame=_PACKED, pack=self.values.packs.get(name)),
            )
        layout = None if dim is None else Layout(dim)
        return self.values.fresh(fake, Origins(self.values.expected(fake, layout), name in self.ctx.by_node, counted))

    def _each_sample(self) -> list[Tensor]:
        with disable_current_modes():
            return [torch.arange(1, trial.batch + 1, dtype=torch.int32) for trial in self.follow.trials]

    def _rows(self, fake: Tensor, pack: int) -> Origins:
        ids = []
        with disable_current_modes():
            for trial in self.follow.trials:
                (count, *rest) = trial.shape(fake.shape)
                row_ids = torch.arange(count, dtype=torch.int32) + ROWS * (pack + 1)
                ids.append(row_ids.reshape([-1, *[1] * len(rest)]))
        return Origins(tuple(ids))

    def traced(self, value: Any, n: fx.Node) -> Any:
        """Return the value, marked as one that gradients flow through."""
        origins = self.values.origins(value)
        if origins.traced:
            return value
        changed = replace(origins, traced=True)
        if self.sharing.own(n) or self.kind(value) is None:  # no other node shares it
            self.follow.set(self.values.inner(value), changed)
            return value
        return self._shared(n, self.values.fresh(self.values.inner(value), changed))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        with disable_current_modes():
            fake = self.ctx.symbols.mode.from_tensor(value)
        return self.values.fresh(fake, Origins(self.values.expected(fake, None)))

    def run_node(self, n: fx.Node) -> Any:
        self.follow.node = n
        if n.op == "output":
            self._check_outputs(n)
            return None
        if n.op == "placeholder":
            return super().run_node(n)
        if n.op == "get_attr":
            return self._shared(n, super().run_node(n))
        self.sharing.check(n, self.env)
        key = self.sharing.key(n, self.fetch_args_kwargs_from_env(n), self.kind)
        if key is not None and key in self.sharing.results:
            return self.sharing.results[key]
        packs = len(self.follow.packs)
        try:
            value = self._value(n)
        except Met:
            raise
        except Exception as error:
            value, key = self._unfollowed(n, error), None
        self.sharing.check(n, self.env)
        if len(self.follow.packs) > packs:
            self.values.packs[f"{n.name}[1]"], key = packs, None
        if isinstance(value, FunctionalTensor) and TRACED.get(n) is True:
            value = self.traced(value, n)
        if key is not None and self._alike(value):
            self.sharing.results[key] = value
        return value

    def _alike(self, value: Any) -> bool:
        """Decide whether other calls may share this value."""
        leaves = value if isinstance(value, tuple | list) else [value]
        numbers = [one for one in leaves if not isinstance(one, FunctionalTensor)]
        plain = all(isinstance(one, int | float | torch.SymInt | torch.SymFloat | torch.SymBool) for one in numbers)
        alike = all(self.kind(one) is not None for one in leaves if isinstance(one, FunctionalTensor))
        return plain and alike and self.sharing.from_sizes(*numbers)

    def _value(self, n: fx.Node) -> Any:
        args: Any = self.map_nodes_to_values(n.args, n) if n.op.startswith("call_") else ()
        if isinstance(n.target, NewTape | CollectTarget | DeriveTarget):
            return None
        if isinstance(n.target, TapTarget):
            use = n.target.strategy.use
            self._check(args[2], use.output, n)
            self._check_operands(use, args[3 + n.target.handles :], n)
            return self.traced(args[2], n)
        if isinstance(n.target, TapSeveralTarget):
            use = n.target.strategy.use
            outputs = args[2 : 2 + len(use.several)]
            for value, (_, layout) in zip(outputs, use.several, strict=True):
                self._check(value, layout, n)
            self._check_operands(use, args[2 + len(outputs) + n.target.handles :], n)
            return [self.traced(value, n) for value in outputs]
        if isinstance(n.target, OwnTapTarget):
            use = n.target.strategy.use
            operands = args[2 + n.target.handles :]
            self._check_operands(use, operands, n)
            return use.rerun(operands)
        call = CALL.get(n)
        if call is not None and believed(call.op):
            return self._believed(n)
        if isinstance(n.target, UserFunction):
            return function(self.values, n, n.target, args)
        if isinstance(n.target, ControlFlow):
            return control(self.values, n, n.target, args)
        return super().run_node(n)

    def _unfollowed(self, n: fx.Node, error: Exception) -> Any:
        """Return a value for a call that fails on functional tensors: MANY if an operand depends on samples."""
        log.debug("%s does not run on functional tensors: %s", n.target, error)
        values = [self.env.get(arg) for arg in n.all_input_nodes]
        operands = [self.values.origins(value) for value in values if isinstance(value, FunctionalTensor)]
        alone = all(origins.alone for origins in operands)
        call = CALL.get(n)
        blame = f"{n.target if call is None else call.op} is used in a way that is not known"
        if call is None or call.inplace or call.get("out") is not None:
            raise Met(blame, n, Origins((), blame=blame))

        def one(fake: Any) -> Any:
            if not isinstance(fake, Tensor):
                return fake
            with disable_current_modes():
                ids = tuple((no_samples if alone else any_samples)(fake.dim()) for _ in self.follow.trials)
            return self.values.fresh(fake, Origins(ids, blame="" if alone else blame, where=n))

        fake = FAKE.of(n)
        return [one(item) for item in fake] if isinstance(fake, tuple | list) else one(fake)

    def _check_operands(self, use: Any, operands: Sequence[Any], n: fx.Node) -> None:
        for value, layout in zip(operands, use.layouts, strict=True):
            if not isinstance(value, FunctionalTensor) or (layout is None and id(value) in self.constants):
                continue
            pack = self.values.origins(value).pack
            if pack is None or layout is not None or pack not in self._packs_of(use):
                self._check(value, layout, n)

    def _packs_of(self, use: Any) -> set[int]:
        """Return the packed sequences whose rows a use works on; such a use may read their batch sizes and order."""
        layouts = [layout for layout in (*use.layouts, use.output) if layout is not None and layout.rows is not None]
        return {self.values.packs[layout.rows[0]] for layout in layouts if layout.rows[0] in self.values.packs}

    def _check(self, value: Any, layout: Layout | None, n: fx.Node) -> None:
        """Check that a value's samples are where the layout places them, or absent."""
        origins, kind = self.values.origins(value), self.kind(value)
        if kind is not None and (kind, layout) in self.right:
            return
        wanted = self.values.expected(self.values.inner(value), layout)
        with disable_current_modes():
            pairs = zip(origins.ids, wanted, strict=True)
            there = all(bool(((ids == NONE) | (ids == sample)).all()) for ids, sample in pairs)
        if not there:
            raise Met("its samples are not where they were taken to be", n, origins)
        if kind is not None:
            self.right.add((kind, layout))

    def _check_outputs(self, n: fx.Node) -> None:
        for node in n.all_input_nodes:
            value, samples = self.env.get(node), SAMPLES.get(node)
            if not isinstance(value, FunctionalTensor) or not isinstance(samples, Samples):
                continue
            self._check_ends(value, node)
            if samples.kind is Kind.BATCHED:
                self._check(value, samples.layout, node)
            elif samples.kind is not Kind.MIXED:
                self._check(value, None, node)
            elif samples.traced and len(self.ctx.symbols.batch_dims(value.shape)) < 2:
                origins = self.values.origins(value)
                with disable_current_modes():
                    more = any(bool((ids == MANY).any()) for ids in origins.ids)
                    loose = any(bool((ids > NONE).any()) for ids in origins.ids)
                if more:
                    raise Met("it is more than a sum over samples", node, origins)
                if loose:
                    raise Met("samples are where they cannot be followed", node, origins)

    def _check_ends(self, value: Any, node: fx.Node) -> None:
        """Check, under per-sample clipping, that the padding of an output is one known number; a loss may add it up."""
        padded = self.values.origins(value).padded
        if self.follow.clips and any(steps.number is None for steps in padded.values()):
            what = f"what is returned{LONGEST}: something made of parameters stands behind the ends of shorter ones"
            raise Met(what, node, Origins((), blame=what))

    def _believed(self, n: fx.Node) -> Any:
        """Return the value of a call whose sample dimensions the user declared."""
        fake, samples = FAKE.of(n), SAMPLES.of(n)

        def one(value: Any, known: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            layout = known.layout if isinstance(known, Samples) and known.kind is Kind.BATCHED else None
            mixed = isinstance(known, Samples) and known.kind is Kind.MIXED
            with disable_current_modes():
                unknown = tuple(any_samples(value.dim()) for _ in self.follow.trials)
            return self.values.fresh(value, Origins(unknown if mixed else self.values.expected(value, layout)))

        if isinstance(fake, tuple | list):
            return [one(value, known) for value, known in zip(fake, samples, strict=True)]
        return one(fake, samples)

"""The walk: interprets the graph that attach_taps wrote, and checks the origins at each tap and output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
from fxgrad.proof.calls import Blame, Origins, Reason
from fxgrad.proof.following import LONGEST, Follow
from fxgrad.proof.origins import MANY, NONE, any_samples
from fxgrad.proof.sharing import Sharing, form_of
from fxgrad.proof.trials import Symbolic
from fxgrad.proof.values import Met, Values
from fxgrad.runtime.targets import CollectTarget, DeriveTarget, NewTape, OwnTapTarget, TapSeveralTarget, TapTarget
from fxgrad.samples.control_flow import ControlFlow
from fxgrad.samples.layouts import SAMPLES, Kind, Layout, Samples

log = logging.getLogger(__name__)

_PACKED = Blame("how sequences are packed (batch_sizes, sorted_indices) depends on the lengths of all samples")


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
                with disable_current_modes():
                    samples = [torch.arange(1, trial.batch + 1, dtype=torch.int32) for trial in self.follow.trials]
                    pack = self.follow.note_packed(self.ctx.inputs[name], self.ctx.inputs[rows[0]], samples)
                self.values.packs |= dict.fromkeys(rows, pack)
        return [self._placeholder(node) for node in self.graph.find_nodes(op="placeholder")]

    def _placeholder(self, n: fx.Node) -> Any:
        """Return an input's value; parameters of equal form share one."""
        fake: Any = self.ctx.inputs.get(n.name)
        if not isinstance(fake, Tensor) or n.name in self.ctx.sample_dims or n.name in self.ctx.packed:
            return self._input(n.name)
        own = self.sharing.own(n)
        value = None if own else self.sharing.results.get(key := ("input", form_of(fake), n.name in self.ctx.by_node))
        if value is None:
            value = self._input(n.name)
            self.constants[id(value)] = value
        if not own:
            self.sharing.results[key] = value
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
        dim, rows = self.ctx.sample_dims.get(name), self.ctx.packed.get(name)
        counted = not fake.dtype.is_floating_point and not fake.dtype.is_complex
        if rows is not None:
            return self.values.fresh(fake, Origins(self.values.expected(fake, Layout(0, rows=rows))))
        if name in self.ctx.packed:
            pack = self.values.packs.get(name)
            return self.values.fresh(fake, Origins(self._unknown(fake), counted=counted, blame=_PACKED, pack=pack))
        layout = None if dim is None else Layout(dim)
        return self.values.fresh(fake, Origins(self.values.expected(fake, layout), name in self.ctx.by_node, counted))

    def _unknown(self, fake: Tensor) -> tuple[Tensor, ...]:
        with disable_current_modes():
            return self.follow.everywhere(any_samples(fake.dim()))

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
        plain = all(isinstance(one, int | float | Symbolic) for one in numbers)
        alike = all(self.kind(one) is not None for one in leaves if isinstance(one, FunctionalTensor))
        return plain and alike and self.sharing.from_sizes(*numbers)

    def _value(self, n: fx.Node) -> Any:
        args: Any = self.map_nodes_to_values(n.args, n) if n.op.startswith("call_") else ()
        if isinstance(n.target, NewTape | CollectTarget | DeriveTarget):
            return None
        if isinstance(n.target, TapTarget | TapSeveralTarget | OwnTapTarget):
            return self._tap(n, n.target, args)
        call = CALL.get(n)
        if call is not None and believed(call.op):
            return self._believed(n)
        if isinstance(n.target, UserFunction):
            return function(self.values, n, n.target, args)
        if isinstance(n.target, ControlFlow):
            return control(self.values, n, n.target, args)
        return super().run_node(n)

    def _tap(self, n: fx.Node, tap: TapTarget | TapSeveralTarget | OwnTapTarget, args: Sequence[Any]) -> Any:
        """Check the outputs and the operands of a use of parameters; return the outputs."""
        use = tap.strategy.use
        layouts = [layout for _, layout in use.several] if isinstance(tap, TapSeveralTarget) else [use.output]
        end = 2 if isinstance(tap, OwnTapTarget) else 2 + len(layouts)  # a tap of its own has no outputs before it
        outputs, operands = args[2:end], args[end + tap.handles :]
        for value, layout in zip(outputs, layouts, strict=False):
            self._check(value, layout, n)
        self._check_operands(use, operands, n)
        if isinstance(tap, OwnTapTarget):
            return use.rerun(operands)
        traced = [self.traced(value, n) for value in outputs]
        return traced if isinstance(tap, TapSeveralTarget) else traced[0]

    def _unfollowed(self, n: fx.Node, error: Exception) -> Any:
        """Return a value for a call that fails on functional tensors: MANY if an operand depends on samples."""
        log.debug("%s does not run on functional tensors: %s", n.target, error)
        values = [self.env.get(arg) for arg in n.all_input_nodes]
        alone = all(self.values.origins(value).alone for value in values if isinstance(value, FunctionalTensor))
        call = CALL.get(n)
        blame = Blame(f"{n.target if call is None else call.op} is used in a way that is not known", n)
        if call is None or call.inplace or call.get("out") is not None:
            raise Met(blame, n)

        def origins(fake: Tensor, _: int) -> Origins:
            return Origins(self.values.expected(fake, None)) if alone else Origins(self._unknown(fake), blame=blame)

        return self._outputs(n, origins)

    def _believed(self, n: fx.Node) -> Any:
        """Return the value of a call whose sample dimensions the user declared."""
        samples = SAMPLES.of(n)

        def origins(fake: Tensor, i: int) -> Origins:
            known = samples[i] if isinstance(samples, list) else samples
            if known is not None and known.kind is Kind.MIXED:
                return Origins(self._unknown(fake))
            return Origins(self.values.expected(fake, known.layout if known else None))

        return self._outputs(n, origins)

    def _outputs(self, n: fx.Node, origins: Callable[[Tensor, int], Origins]) -> Any:
        """Make the value, or values, of a call that the proof does not run."""
        fake = FAKE.of(n)
        several = fake if isinstance(fake, tuple | list) else [fake]
        values = [
            self.values.fresh(one, origins(one, i)) if isinstance(one, Tensor) else one for i, one in enumerate(several)
        ]
        return values if several is fake else values[0]

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
                    ids = torch.cat([ids.flatten() for ids in origins.ids])
                    more, loose = bool((ids == MANY).any()), bool((ids > NONE).any())
                if more:
                    raise Met("it is more than a sum over samples", node, origins)
                if loose:
                    raise Met("samples are where they cannot be followed", node, origins)

    def _check_ends(self, value: Any, node: fx.Node) -> None:
        """Check, under per-sample clipping, that the padding of an output is one known number; a loss may add it up."""
        padded = self.values.origins(value).padded
        if self.follow.clips and any(steps.number is None for steps in padded.values()):
            why = f"what is returned{LONGEST}: something made of parameters stands behind the ends of shorter ones"
            raise Met(Blame(why, reason=Reason.LONGEST), node)

"""Find out, for every value, whether it is constant, uniform, batched (and where) or mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.errors import LostLayout, MixedSamples, UnknownOp
from fxgrad.graph.context import Context, path_to, source_line, spoken
from fxgrad.ops.calls import CALL, Call, map_nodes
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.families import MOVEMENT, Family, family_of
from fxgrad.ops.forms import SHAPED_AS, reads_form_alone
from fxgrad.ops.user_functions import FUNCTION, HOOK, UserFunction
from fxgrad.ops.values import memory_of, tensors_of
from fxgrad.samples.control_flow import ControlFlow, Crossed
from fxgrad.samples.layouts import SAMPLES, Kind, Layout, Samples
from fxgrad.samples.numbers import Numbers
from fxgrad.samples.operands import Mixes, Op, Operand, by_shape
from fxgrad.samples.replay import Replay
from fxgrad.samples.symbols import expression
from fxgrad.samples.tracking import PICK_ADVICE, PICKS, counts_tokens, track
from fxgrad.samples.writes import after_write, written

_ADVICE = {
    "batch_norm": "Use GroupNorm, or put the layer in eval mode.",
    "fxgrad::recurrence": "Say where the inputs hold their samples: in_dims=(0, 1) for x [B, T, in] and a state "
    "[layers * directions, B, out].",
}

# What a mixed value may go through: sums, averages, scaling, moving about (see Note [Mixed values]).
_LINEAR = frozenset("add sub sum mean nansum neg mul div clone to float double half bfloat16".split()) | MOVEMENT


# Note [Mixed values]
# ~~~~~~~~~~~~~~~~~~~
# A loss inside the model has summed its samples away. Its gradient by each sample's values is still
# that sample's own share as long as nothing but a linear map follows; a nonlinear function of a sum
# over samples lets one sample's data decide about another's gradient. So a mixed value may be summed,
# averaged, scaled by what carries no gradient, moved, and returned. Everything else is refused. A value
# with two sample dims, such as x @ x.T, holds products of one sample's values with another's: it may be
# returned and nothing else.


# Note [Returned mixtures]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# A loss outside may be any function of what the model returns. Of ``h.mean(0)`` each sample's share is still defined:
# what the gradient by its own values is, the others held. Rows of that may be of use. A norm, or a clipped gradient,
# says something about one sample alone, which such a share does not; `Quantity.alone` marks the quantities that do.


def infer_samples(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: nodes have ``fake`` and ``call``. After: every tensor value has ``samples``.

    ``linear: f32[12*B, 4]`` gets ``batched(0, 12, 1)``; what lets samples reach each other is refused.
    """
    inference = _Inference(ctx)
    for node in gm.graph.nodes:
        inference.visit(node)
    inference.check_decided(gm.graph)
    inference.check_returned(gm.graph)
    return gm


class _Inference:
    """One walk over the graph. ``samples`` in node.meta is what a reader of the node sees right now."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.symbols = ctx.symbols
        self.replay = Replay(ctx.symbols, lambda node: SAMPLES.of(node))
        self.by_memory: dict[int | None, list[fx.Node]] = {}
        self.numbers = Numbers(ctx.symbols)
        self.clips = any(quantity.guards_grad for quantity in ctx.quantities)

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        self.numbers.read(node)
        SAMPLES.put(node, self.numbers.corrected(node, self._samples(node)))
        fake = FAKE.of(node)
        if isinstance(fake, Tensor):
            self.by_memory.setdefault(memory_of(fake), []).append(node)
        call: Call | None = CALL.get(node)
        if call is None:
            return
        if call.op == "setitem":
            self._check_assigned(node, call)
        for base, new in written(node, call):
            self._mutate(base, new)

    def _samples(self, node: fx.Node) -> Any:
        fake = FAKE.of(node)
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            return Samples(Kind.CONSTANT) if isinstance(fake, Tensor) else None
        call: Call = CALL.of(node)
        if call.op == "setitem":
            return None
        if "c10d" in call.op:
            raise self._collective(node, call)
        if not tensors_of(fake):
            return self.numbers.samples(call, self._operands(node, call))
        source = node.args[0] if node.args else None
        if call.op == "getitem" and isinstance(source, fx.Node) and isinstance(SAMPLES.of(source), list):
            index = node.args[1]
            assert isinstance(index, int)
            return SAMPLES.of(source)[index]
        answers = self._call(node, call)
        return answers if isinstance(fake, tuple | list) else answers[0]

    def _input(self, node: fx.Node) -> Samples | None:
        if not isinstance(FAKE.of(node), Tensor):
            return None
        if node.name in self.ctx.by_node:
            return Samples(Kind.UNIFORM, traced=True)
        if node.name in self.ctx.known:
            return self.ctx.known[node.name]  # type: ignore[no-any-return]
        if node.name in self.ctx.packed:
            rows = self.ctx.packed[node.name]
            return Samples(Kind.MIXED) if rows is None else Samples(Kind.BATCHED, Layout(0, rows=rows))
        dim = self.ctx.sample_dims.get(node.name)
        return Samples(Kind.CONSTANT) if dim is None else Samples(Kind.BATCHED, Layout(dim))

    def _call(self, node: fx.Node, call: Call) -> list[Samples | None]:
        fake = FAKE.of(node)
        outputs: Sequence[Any] = list(fake) if isinstance(fake, tuple | list) else [fake]
        flows = TRACED.of(node) if isinstance(fake, tuple | list) else [TRACED.of(node)]
        family = family_of(call.op) if not _read_as_another(node, call) else None
        operands = self._decided(node, call, self._operands(node, call))
        if call.op in SHAPED_AS and _constant(call.get("input")):
            return [self._constant(outputs[0])]
        if family is Family.FACTORY:
            return [self._made(out, operands) for out in outputs]
        if not operands:
            return [self._constant(out) for out in outputs]
        kinds = {operand.samples.kind for operand in operands}
        if family is Family.PACKED:
            op = Op(node, call, self._promoted(operands), self.symbols, self.replay)
            answers = zip(track(op, family), flows, strict=True)
            return [self._verdict(node, call, operands, answer, flow) for answer, flow in answers]
        if family is Family.FUNCTION and Kind.BATCHED in kinds and Kind.MIXED not in kinds:
            return self._function(node, call, operands, outputs, flows)
        if family is Family.CONTROL and Kind.BATCHED in kinds and Kind.MIXED not in kinds:
            return self._control(node, call, operands, flows)
        if Kind.MIXED in kinds:
            return self._mixed(node, call, operands, outputs, flows)
        if Kind.BATCHED not in kinds:
            if call.op == "as_strided" and self._beside(operands):
                raise self._unknown(node, call)
            return [self._shared(node, call, operands, out, t) for out, t in zip(outputs, flows, strict=True)]
        if family is None:
            raise self._unknown(node, call)
        if any(_undecided(operand.samples) for operand in operands):
            return [self._moved_copies(node, call, operands, fake)]
        op = Op(node, call, self._promoted(operands), self.symbols, self.replay)
        return [
            self._verdict(node, call, operands, answer, flow)
            for answer, flow in zip(track(op, family), flows, strict=True)
        ]

    def _beside(self, operands: Sequence[Operand]) -> bool:
        """Whether samples are in the memory of a value that holds none."""
        others = [node for operand in operands for node in self.by_memory.get(memory_of(operand.fake), ())]
        return any(SAMPLES.of(node).kind in (Kind.BATCHED, Kind.MIXED) for node in others if SAMPLES.of(node))

    def _operands(self, node: fx.Node, call: Call) -> list[Operand]:
        """What a call reads the values of: tensors, and numbers that are made of samples."""
        found = []

        def visit(name: str, arg: Any) -> None:
            if isinstance(arg, fx.Node):
                fake, samples = FAKE.of(arg), SAMPLES.of(arg)
                if isinstance(fake, Tensor):
                    found.append(Operand(name, arg, fake, samples))
                elif isinstance(samples, Samples):
                    found.append(Operand(name, arg, self.numbers.scalar, samples))
                elif isinstance(samples, list):
                    found.extend(Operand(name, arg, f, s) for f, s in zip(fake, samples, strict=True) if s is not None)
            elif isinstance(arg, tuple | list):
                for item in arg:
                    visit(name, item)
            elif isinstance(arg, slice):
                for item in (arg.start, arg.stop, arg.step):
                    visit(name, item)

        for name, arg in call.arguments.items():
            if not reads_form_alone(call.op, name):
                visit(name, arg)
        return found

    def _decided(self, node: fx.Node, call: Call, operands: list[Operand]) -> list[Operand]:
        """Copies of a parameter that fit any order of the samples take the order of what they meet."""
        undecided = [operand for operand in operands if _undecided(operand.samples)]
        merges = self._merges(operands)
        for operand in undecided:
            (dim,) = self.symbols.batch_dims(operand.fake.shape)
            merge = merges.get(expression(operand.fake.shape[dim]))
            if merge is not None:
                self._settle(operand.node, merge)
            elif call.op not in MOVEMENT and family_of(call.op) is not Family.ELEMENTWISE:
                raise self._lost_copies(operand.node)
        return self._operands(node, call) if undecided else operands

    def _settle(self, node: fx.Node, merge: Layout) -> None:
        """Give copies their order, and the copies they were made of."""
        (dim,) = self.symbols.batch_dims(FAKE.of(node).shape)
        SAMPLES.put(node, Samples(Kind.BATCHED, merge.at(dim), traced=True))
        for source in node.all_input_nodes:
            known = SAMPLES.of(source)
            if _undecided(known):
                self._settle(source, merge)
            elif _batched(known) and known.layout.at(0) != merge.at(0):  # other copies of it met another order
                raise self._lost_copies(source)

    def _moved_copies(self, node: fx.Node, call: Call, operands: list[Operand], output: Any) -> Samples:
        """Undecided copies, moved about: still copies, as long as their dim stays whole and in its order."""
        sizes = {expression(operand.fake.shape[d]) for operand in operands for d in self._dims(operand.fake)}
        whole = isinstance(output, Tensor) and {expression(output.shape[d]) for d in self._dims(output)} == sizes
        if not whole or len(sizes) > 1 or len(self._dims(output)) != 1:
            raise self._lost_copies(node)
        moved = family_of(call.op) is not Family.ELEMENTWISE
        if moved and not (len(operands) == 1 and self.replay.keeps_rows(node, operands[0].node)):
            raise self._lost_copies(node)
        return Samples(Kind.BATCHED, None, traced=True)

    def _dims(self, fake: Tensor) -> list[int]:
        return self.symbols.batch_dims(fake.shape)

    def check_returned(self, graph: fx.Graph) -> None:
        """See Note [Returned mixtures]."""
        if self.ctx.mixing == "allow" or not any(quantity.alone for quantity in self.ctx.quantities):
            return
        for node in graph.output_node().all_input_nodes:
            samples, fake = SAMPLES.of(node), FAKE.of(node)
            if isinstance(samples, Samples) and samples.kind is Kind.MIXED and samples.traced and fake.dim():
                raise self._met(
                    node,
                    f"the model returns values of shape {self.symbols.show_shape(fake.shape)} in which samples have "
                    "met, and what a loss outside does with them cannot be followed",
                    "Return each sample's own values, or a loss without dimensions.",
                )

    def check_decided(self, graph: fx.Graph) -> None:
        """No copies are left whose order nothing decided."""
        for node in graph.nodes:
            samples = SAMPLES.get(node)
            if _undecided(samples):
                raise self._lost_copies(node)

    def _merges(self, operands: list[Operand]) -> dict[Any, Layout]:
        """How the samples are merged in dims of a size, from the operands that hold samples."""
        return {
            expression(operand.fake.shape[operand.layout.dim]): operand.layout
            for operand in operands
            if operand.layout is not None
        }

    def _promoted(self, operands: list[Operand]) -> list[Operand]:
        """Constants with one dim of B's size line up with the samples: give them a layout to check."""
        merges = self._merges(operands)

        def promote(operand: Operand) -> Operand:
            dims = self.symbols.batch_dims(operand.fake.shape)
            if operand.samples.kind is not Kind.CONSTANT or len(dims) != 1:
                return operand
            merge = merges.get(expression(operand.fake.shape[dims[0]]))
            if merge is None:
                return operand
            return Operand(operand.name, operand.node, operand.fake, Samples(Kind.BATCHED, merge.at(dims[0])))

        return [promote(operand) for operand in operands]

    def _verdict(
        self, node: fx.Node, call: Call, operands: list[Operand], answer: Layout | Mixes | None, flow: bool
    ) -> Samples | None:
        if answer is None:
            return None
        if isinstance(answer, Layout):
            return Samples(Kind.BATCHED, answer, flow)
        if flow and self.clips and answer.linear and counts_tokens(call, operands):
            raise self._divided(node)
        if not flow or answer.linear:
            return Samples(Kind.MIXED, traced=flow)
        output = FAKE.of(node)
        if self.ctx.mixing == "allow" and isinstance(output, Tensor):
            return self._allowed(node, call, operands, output, flow)
        two = isinstance(output, Tensor) and len(self.symbols.batch_dims(output.shape)) > 1
        if two:
            return Samples(Kind.MIXED, traced=flow)
        raise self._refusal(node, call, answer.reason, answer.advice)

    def _allowed(self, node: fx.Node, call: Call, operands: list[Operand], output: Tensor, flow: bool) -> Samples:
        op = Op(node, call, operands, self.symbols, self.replay)
        answer = by_shape(op, output)
        if isinstance(answer, Layout) and call.op not in MOVEMENT:
            return Samples(Kind.BATCHED, answer, flow, met=family_of(call.op) is not Family.ELEMENTWISE)
        return Samples(Kind.MIXED, traced=flow)

    def _refusal(self, node: fx.Node, call: Call, reason: str, advice: str = "") -> MixedSamples:
        name = spoken(node, call.op).removeprefix("fxgrad::")
        whole = reason.startswith((name, FUNCTION, HOOK))
        sentence = reason if whole else f"{name} lets samples influence each other: {reason}"
        return self._met(node, sentence, advice or _ADVICE.get(call.op, self.ctx.keep_apart))

    def _collective(self, node: fx.Node, call: Call) -> MixedSamples:
        return self._met(
            node,
            f"{call.op.split('::')[-1]} brings in other processes' samples",
            "Leave collectives out of the model: DistributedDataParallel goes around the transformed model.",
        )

    def _met(self, node: fx.Node, sentence: str, advice: str) -> MixedSamples:
        return MixedSamples(sentence, where=source_line(node), path=path_to(node, self.ctx), advice=advice)

    def _unknown(self, node: fx.Node, call: Call) -> UnknownOp:
        return UnknownOp(
            f"nobody has said whether {call.op} treats samples alone",
            where=source_line(node),
            path=path_to(node, self.ctx),
            advice="Say it with fxgrad.register_op, or write the op in terms of PyTorch's own.",
        )

    def _constant(self, output: Any) -> Samples | None:
        return Samples(Kind.CONSTANT) if isinstance(output, Tensor) else None

    def _made(self, output: Any, operands: list[Operand]) -> Samples | None:
        """Return the samples of a new tensor: none, or mixed where an operand holds samples."""
        of_samples = any(operand.samples.kind in (Kind.BATCHED, Kind.MIXED) for operand in operands)
        return Samples(Kind.MIXED) if of_samples and isinstance(output, Tensor) else self._constant(output)

    def _shared(self, node: fx.Node, call: Call, operands: list[Operand], output: Any, flow: bool) -> Samples | None:
        """No operand holds samples: constant, uniform, or a parameter's value handed to every sample."""
        if not isinstance(output, Tensor):
            return None
        if not flow:
            return Samples(Kind.CONSTANT)
        dims = self.symbols.batch_dims(output.shape)
        if not dims:
            return Samples(Kind.UNIFORM, traced=True)
        layout: Layout | Mixes | None
        layout = by_shape(Op(node, call, self._promoted(operands), self.symbols, self.replay), output)
        if isinstance(layout, Mixes) and len(dims) == 1 and call.op in MOVEMENT:
            layout = self.replay.copies(node, output, dims[0])
            if layout is None and call.op in ("expand", "expand_as", "broadcast_to"):
                return Samples(Kind.BATCHED, None, traced=True)  # see _decided
        if isinstance(layout, Mixes) and len(dims) == 1 and family_of(call.op) is Family.ELEMENTWISE:
            return Samples(Kind.BATCHED, None, traced=True)  # every row has a copy of its own, as it had above
        if isinstance(layout, Layout):
            return Samples(Kind.BATCHED, layout, traced=True)
        raise self._lost_copies(node)

    def _lost_copies(self, node: fx.Node) -> LostLayout:
        return LostLayout(
            f"{CALL.of(node).op} gives a parameter's value to the samples in an order that cannot be followed",
            where=source_line(node),
            advice="Expand or repeat the parameter along a dimension of its own.",
        )

    def _mixed(
        self, node: fx.Node, call: Call, operands: list[Operand], outputs: Sequence[Any], flows: list[bool]
    ) -> list[Samples | None]:
        """See Note [Mixed values]."""
        traced = [operand for operand in operands if operand.samples.traced]
        if traced and self.ctx.mixing == "error":
            meets_others = any(operand.samples.kind is not Kind.MIXED for operand in traced)
            nonlinear = call.op not in _LINEAR or (call.op == "mul" and len(traced) > 1)
            divides = call.op == "div" and any(operand.name == "other" for operand in traced)
            batched = any(operand.samples.kind is Kind.BATCHED for operand in operands)
            if any(flows) and any(self._holds_pairs(operand) for operand in traced):
                raise self._refusal(node, call, "a value of pairs of samples may only be returned")
            if any(flows) and (meets_others or nonlinear or divides or batched):
                self._check_cut(operands)
                self._check_picked(operands)
                reason = "a value that depends on several samples may only be summed, scaled and returned"
                raise self._refusal(node, call, reason)
            if any(flows):
                self._check_factors(node, call, operands)
        results: list[Samples | None] = []
        for out, flow in zip(outputs, flows, strict=True):
            if not isinstance(out, Tensor):
                results.append(None)
            elif self.ctx.mixing == "allow":
                results.append(self._allowed(node, call, operands, out, flow))
            else:
                results.append(Samples(Kind.MIXED, traced=flow))
        return results

    def _check_cut(self, operands: list[Operand]) -> None:
        """Name the line that cuts values to a length made of all samples, where one did: later ops are not at fault."""
        node = self._first_cut(operands, ("getitem", "narrow", "slice"))
        if node is not None and any(_mixed_number(arg) for arg in node.all_input_nodes):
            raise self._met(
                node,
                f"{CALL.of(node).op} cuts each sample to a length that all samples of the batch decide",
                "Cut the inputs before the call, or leave the padding in and mask it.",
            )

    def _check_picked(self, operands: list[Operand]) -> None:
        """Name the line that takes one sample out of the batch, and not the first op that it was used in."""
        node = self._first_cut(operands, ("getitem", "select"))
        if node is not None and len(self.symbols.batch_dims(FAKE.of(node).shape)) == 0:
            raise self._met(node, f"{CALL.of(node).op} {PICKS}", PICK_ADVICE)

    def _first_cut(self, operands: list[Operand], ops: tuple[str, ...]) -> fx.Node | None:
        """The call of one of these ops in which a batched value became mixed."""
        stack = [operand.node for operand in operands if operand.samples.kind is Kind.MIXED]
        seen = set(stack)
        while stack:
            node = stack.pop()
            call = CALL.get(node)
            operand = node.args[0] if node.args else None
            whole = isinstance(operand, fx.Node) and _batched(SAMPLES.of(operand))
            if call is not None and call.op in ops and whole:
                return node
            fresh = [arg for arg in node.all_input_nodes if arg not in seen and _mixed(arg)]
            seen.update(fresh)
            stack.extend(fresh)
        return None

    def _check_factors(self, node: fx.Node, call: Call, operands: list[Operand]) -> None:
        """What scales a sum over samples may hold none of their data, with or without a gradient, but a count."""
        factors = [o for o in operands if o.samples.kind is Kind.MIXED and not o.samples.traced]
        if call.op in ("add", "sub"):
            factors = [o for o in factors if o.name not in ("input", "other")]
        if not factors:
            return
        if call.op == "div" and all(o.name == "other" and self._is_count(o.node) for o in factors):
            if self.clips:
                raise self._divided(node)
            return
        raise self._refusal(node, call, "one sample's data scale another's gradient, detached or not")

    def _is_count(self, node: fx.Node) -> bool:
        """Whether nothing but integer and bool inputs of the model is in a value: a number of tokens, not their data.

        What was written over, or drawn, is more than the operands of its node say.
        """
        stack, seen = [node], {node}
        while stack:
            one = stack.pop()
            samples, fake = SAMPLES.of(one), FAKE.of(one)
            if isinstance(samples, Samples) and samples.kind is not Kind.CONSTANT:
                floats = one.op == "placeholder" and fake.dtype.is_floating_point
                if floats or (one.op != "placeholder" and self.replay.changes(one)):
                    return False
            fresh = [source for source in one.all_input_nodes if source not in seen]
            seen.update(fresh)
            stack.extend(fresh)
        return True

    def _divided(self, node: fx.Node) -> MixedSamples:
        return self._met(
            node,
            "the number of tokens in the whole batch divides every sample's loss, so that each sample's clipped "
            "gradient depends on the others",
            'Take the sum (reduction="sum"), or a mean over each sample\'s own tokens: '
            "fxgrad.losses.token_mean(logits, labels).",
        )

    def _function(
        self, node: fx.Node, call: Call, operands: list[Operand], outputs: Sequence[Any], flows: list[bool]
    ) -> list[Samples | None]:
        """A user's autograd.Function: its forward and its backward have to keep the samples apart, both."""
        function: UserFunction = node.target  # type: ignore[assignment]
        args = self._pairs(node, operands)
        outs, saved = self._body(function.fwd, args)
        found: list[Samples | None] = []
        read = {user.args[1] for user in node.users}  # older versions return what the forward keeps as well
        for i, ((_, known), flow) in enumerate(zip(outs, flows, strict=True)):
            flow = flow and i in read
            if flow and (known is None or known.kind is not Kind.BATCHED):
                raise self._refusal(node, call, f"{function.what} lets samples influence each other in its forward")
            found.append(None if known is None else Samples(known.kind, known.layout, flow))
        grads = self._body(function.bwd, [*((out, known) for out, known in outs), *saved])
        for arg, (_, own), (_, known) in zip(node.args, args, grads, strict=True):
            traced = isinstance(arg, fx.Node) and TRACED.of(arg) is True
            if not traced or own is None or own.kind is not Kind.BATCHED or known is None:
                continue
            if known.kind in (Kind.MIXED, Kind.BATCHED) and known.layout != own.layout:
                raise self._refusal(node, call, f"{function.what} lets samples influence each other in its backward")
        return found

    def _control(self, node: fx.Node, call: Call, operands: list[Operand], flows: list[bool]) -> list[Samples | None]:
        """cond, scan, map, while_loop: as what their bodies do says."""
        flow_op: ControlFlow = node.target  # type: ignore[assignment]
        try:
            found = flow_op.samples(self._results, self._pairs(node, operands))
        except Crossed as crossed:
            raise self._refusal(node, call, str(crossed)) from None
        for samples, flow in zip(found, flows, strict=True):
            if flow and samples is not None and samples.kind is Kind.MIXED:
                raise self._refusal(node, call, "what its body returns depends on several samples")
        return [s and Samples(s.kind, s.layout, flow) for s, flow in zip(found, flows, strict=True)]

    def _results(self, gm: fx.GraphModule, inputs: Sequence[tuple[Any, Samples | None]]) -> Any:
        found = self._body(gm, inputs)
        return found if isinstance(found, list) else [found]

    def _pairs(self, node: fx.Node, operands: list[Operand]) -> list[tuple[Any, Samples | None]]:
        """The values of a call's arguments, each with its samples."""
        samples = {operand.node: operand.samples for operand in self._promoted(operands)}
        return [(FAKE.of(arg), samples.get(arg)) if isinstance(arg, fx.Node) else (arg, None) for arg in node.args]

    def _body(self, gm: fx.GraphModule, inputs: Sequence[tuple[Any, Samples | None]]) -> Any:
        """What a body returns for these inputs: a nest of (fake value, samples)."""
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        fakes = [value.detach() if isinstance(value, Tensor) else value for value, _ in inputs]
        known = [None if s is None else Samples(s.kind, s.layout) for _, s in inputs]
        ctx = Context(
            self.symbols,
            dict(zip(names, fakes, strict=True)),
            [],
            {},
            mixing=self.ctx.mixing,
            may_mix=self.ctx.may_mix,
            known=dict(zip(names, known, strict=True)),
        )
        assert self.ctx.analyse is not None
        output = self.ctx.analyse(gm, ctx).graph.output_node().args[0]
        return map_nodes(_as_lists(output), lambda value: (FAKE.of(value), SAMPLES.get(value)))

    def _holds_pairs(self, operand: Operand) -> bool:
        """``x @ x.T``: a product of one sample's values with another's, nothing linear."""
        return len(self.symbols.batch_dims(operand.fake.shape)) > 1

    def _mutate(self, base: fx.Node, new: Samples) -> None:
        """What is written changes what earlier nodes of the same memory hold."""
        if new == SAMPLES.of(base) and new.kind is not Kind.MIXED:  # other samples may have met in it
            return
        views = self.by_memory[memory_of(FAKE.of(base))]
        for view, samples in after_write(views, base, new, self.replay).items():
            SAMPLES.put(view, samples)

    def _check_assigned(self, node: fx.Node, call: Call) -> None:
        """An assignment that lower_assignments left: nothing that matters may be in it."""
        operands = self._operands(node, call)
        if any(operand.samples.kind is not Kind.CONSTANT or operand.samples.traced for operand in operands):
            raise LostLayout(
                "an assignment into a slice puts samples where they cannot be followed",
                where=source_line(node),
                path=path_to(node, self.ctx),
                advice="Use torch.cat, torch.where or masked_fill.",
            )


def _as_lists(output: Any) -> Any:
    """A nest of results with a pair, of no value and no samples, in the place of everything that is no value."""
    if isinstance(output, tuple | list):
        return [_as_lists(item) for item in output]
    return output if isinstance(output, fx.Node) else (None, None)


def _batched(samples: Any) -> bool:
    return isinstance(samples, Samples) and samples.kind is Kind.BATCHED


def _constant(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and SAMPLES.of(arg) == Samples(Kind.CONSTANT)


def _mixed(node: fx.Node) -> bool:
    samples = SAMPLES.get(node)
    return isinstance(samples, Samples) and samples.kind is Kind.MIXED


def _mixed_number(node: fx.Node) -> bool:
    return _mixed(node) and not isinstance(FAKE.of(node), Tensor)


def _undecided(samples: Any) -> bool:
    """Whether these are copies of a parameter's value that fit any order of the samples."""
    return _batched(samples) and samples.layout is None


def _read_as_another(node: fx.Node, call: Call) -> bool:
    """``x.view(torch.int32)``: memory read as numbers of another dtype."""
    return call.op == "view" and any(isinstance(arg, torch.dtype) for arg in (*node.args, *node.kwargs.values()))

"""Find out, for every value, whether it is constant, uniform, batched (and where) or mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from fxgrad.errors import FxgradError, LostLayout, MixedSamples, UnknownOp
from fxgrad.graph.context import Context, path_to, source_line, spoken
from fxgrad.ops.calls import CALL, Call, leaves, map_nodes
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.families import MOVEMENT, Family
from fxgrad.ops.forms import SHAPED_AS, reads_form_alone
from fxgrad.ops.user_functions import FUNCTION, HOOK
from fxgrad.ops.values import memory_of, tensors_of
from fxgrad.samples.control_flow import Pair
from fxgrad.samples.copies import LostCopies, copied, decide, is_undecided, moved
from fxgrad.samples.layouts import (
    SAMPLES,
    WITH_SAMPLES,
    Kind,
    Layout,
    Samples,
    holds_samples,
    last_kind,
    samples_of_outputs,
    taken_from,
)
from fxgrad.samples.mixed import BY_MASK, COUNTING, check_mixed, divided
from fxgrad.samples.numbers import Numbers
from fxgrad.samples.operands import Answer, Crossed, Op, Operand, by_shape
from fxgrad.samples.places import BY_OFFSETS
from fxgrad.samples.replay import Replay
from fxgrad.samples.tracking import counts_tokens, track, weighs_labels
from fxgrad.samples.writes import after_write, written

_ADVICE = {
    "batch_norm": "Use GroupNorm, or put the layer in eval mode.",
    "fxgrad::recurrence": "Say where the inputs hold their samples: fxgrad.transform(model, batch_first=False) for x "
    "[T, B, in]; in_dims=(0, 1) for x [B, T, in] and a state [layers * directions, B, out].",
}


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
        try:
            inference.visit(node)
        except (Crossed, LostCopies) as refusal:
            raise inference.error(node, refusal) from None
    return gm


class _Inference:
    """One walk over the graph. ``samples`` in node.meta is what a reader of the node sees right now."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.symbols = ctx.symbols
        self.replay = Replay(ctx.symbols)
        self.by_memory: dict[int | None, list[fx.Node]] = {}
        self.numbers = Numbers(ctx.symbols)
        self.alone = ctx.alone

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self._check_decided(node.graph)
            self._check_returned(node)
            return
        self.numbers.read(node)
        SAMPLES.put(node, self.numbers.corrected(node, self._samples(node)))
        fake = FAKE.of(node)
        if isinstance(fake, Tensor):
            self.by_memory.setdefault(memory_of(fake), []).append(node)
        call = CALL.get(node)
        if call is not None:
            for base, samples in written(node, call):
                self._mutate(base, samples)

    def error(self, node: fx.Node, refusal: Crossed | LostCopies) -> FxgradError:
        """Return the user's error for a refusal: its sentence, with the source line and the path."""
        if isinstance(refusal, LostCopies):
            return LostLayout(
                f"{CALL.of(refusal.node).op} gives a parameter's value to the samples in an order that cannot be "
                "followed",
                where=source_line(refusal.node),
                advice="Expand or repeat the parameter along a dimension of its own.",
            )
        sentence, advice, node = refusal.reason, refusal.advice, refusal.node or node
        if not refusal.whole:
            op = CALL.of(node).op
            name = spoken(node, op).removeprefix("fxgrad::")
            if not sentence.startswith((name, FUNCTION, HOOK)):
                sentence = f"{name} lets samples influence each other: {sentence}"
            advice = advice or _ADVICE.get(op, self.ctx.keep_apart)
        return MixedSamples(sentence, where=source_line(node), path=path_to(node, self.ctx), advice=advice)

    def _samples(self, node: fx.Node) -> Any:
        fake = FAKE.of(node)
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            return _constant(fake)
        call = CALL.of(node)
        op = Op(node, call, self._operands(call), self.replay)
        if call.op == "setitem":
            self._check_assigned(op)
            return None
        if "c10d" in call.op:
            raise Crossed(
                f"{call.op.split('::')[-1]} brings in other processes' samples",
                "Leave collectives out of the model: DistributedDataParallel goes around the transformed model.",
                whole=True,
            )
        if not tensors_of(fake):
            return self.numbers.samples(call, op.operands)
        taken = taken_from(node)
        if taken is not None:
            return samples_of_outputs(taken[0])[taken[1]]
        answers = self._call(op)
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

    def _operands(self, call: Call) -> list[Operand]:
        """Return what a call reads the values of: tensors, and numbers that are made of samples."""
        operands = []
        read = ((name, arg) for name, arg in call.arguments.items() if not reads_form_alone(call.op, name))
        for name, node in ((name, leaf) for name, arg in read for leaf in leaves(arg) if isinstance(leaf, fx.Node)):
            fake, samples = FAKE.of(node), SAMPLES.of(node)
            for value, one in zip(fake, samples, strict=True) if isinstance(samples, list) else [(fake, samples)]:
                if one is not None:
                    tensor = value if isinstance(value, Tensor) else self.numbers.scalar
                    operands.append(Operand(name, node, tensor, one))
        return operands

    def _call(self, op: Op) -> list[Samples | None]:
        """Return the samples of each output, by the op's family and by the kinds of its operands."""
        if decide(op):
            op = Op(op.node, op.call, self._operands(op.call), self.replay)
        shaped = op.call.get("input") if op.call.op in SHAPED_AS else None
        if isinstance(shaped, fx.Node) and SAMPLES.of(shaped) == Samples(Kind.CONSTANT):
            return [Samples(Kind.CONSTANT)]
        handler = _OF_ANY_KIND.get(op.family) or _OF_KIND[last_kind(op.kinds)]
        return handler(self, op)

    def _made(self, op: Op) -> list[Samples | None]:
        """Return what a factory makes: constants, or mixed values if it reads samples."""
        kind = Kind.MIXED if op.kinds & set(WITH_SAMPLES) else Kind.CONSTANT
        return [Samples(kind) if isinstance(out, Tensor) else None for out in op.outputs]

    def _batched(self, op: Op) -> list[Samples | None]:
        if op.family is None:
            raise self._unknown(op)
        if op.family in _WITH_BODIES:
            return _WITH_BODIES[op.family](self, op)
        return [moved(op)] if any(is_undecided(operand.samples) for operand in op.operands) else self._tracked(op)

    def _tracked(self, op: Op) -> list[Samples | None]:
        answers = track(op.promoted)
        return [self._verdict(op, answer, flow) for answer, flow in zip(answers, op.flows, strict=True)]

    def _verdict(self, op: Op, answer: Answer | None, flow: bool) -> Samples | None:
        if answer is None:
            return None
        if isinstance(answer, Layout):
            return Samples(Kind.BATCHED, answer, flow)
        if flow and self.alone and answer.linear and weighs_labels(op):
            raise divided(counts_tokens(op))
        output = FAKE.of(op.node)
        if flow and not answer.linear:
            if self.ctx.mixing == "allow" and isinstance(output, Tensor):
                return self._allowed(op, output, flow)
            if not isinstance(output, Tensor) or len(self.symbols.batch_dims(output.shape)) < 2:
                raise Crossed(answer.reason, answer.advice)
        return Samples(Kind.MIXED, traced=flow)

    def _allowed(self, op: Op, output: Tensor, flow: bool) -> Samples:
        by_offsets = op.call.op == "embedding_bag" and op.call.get("offsets") is not None
        if flow and by_offsets:  # its rule counts on one bag each
            raise Crossed(BY_OFFSETS.reason, BY_OFFSETS.advice)
        answer = by_shape(op, output)
        if isinstance(answer, Layout) and op.call.op not in MOVEMENT:
            return Samples(Kind.BATCHED, answer, flow, met=op.family is not Family.ELEMENTWISE)
        return Samples(Kind.MIXED, traced=flow)

    def _shared(self, op: Op) -> list[Samples | None]:
        """No operand holds samples: constant, uniform, or a parameter's value handed to every sample."""
        if op.call.op == "as_strided" and self._beside(op.operands):
            raise self._unknown(op)

        def samples_of(output: Any, flow: bool) -> Samples | None:
            if not flow or not isinstance(output, Tensor):
                return _constant(output)
            return copied(op, output) if self.symbols.batch_dims(output.shape) else Samples(Kind.UNIFORM, traced=True)

        return [
            samples_of(output, flow and bool(op.operands)) for output, flow in zip(op.outputs, op.flows, strict=True)
        ]

    def _mixed(self, op: Op) -> list[Samples | None]:
        allow = self.ctx.mixing == "allow"
        if not allow and any(op.flows):
            check_mixed(op, self.alone)

        def samples_of(output: Any, flow: bool) -> Samples | None:
            if not isinstance(output, Tensor):
                return None
            return self._allowed(op, output, flow) if allow else Samples(Kind.MIXED, traced=flow)

        return [samples_of(output, flow) for output, flow in zip(op.outputs, op.flows, strict=True)]

    def _beside(self, operands: Sequence[Operand]) -> bool:
        """Decide whether samples are in the memory of a value that holds none."""
        others = [node for operand in operands for node in self.by_memory.get(memory_of(operand.fake), ())]
        return any(holds_samples(SAMPLES.of(node)) for node in others)

    def _unknown(self, op: Op) -> UnknownOp:
        sentence = f"fxgrad does not know whether {op.call.op} treats samples alone"
        advice = "If it does, declare that by fxgrad.register_op. Or write it in terms of PyTorch's own ops."
        if op.call.op in COUNTING:
            sentence, advice = f"{op.call.op}: how many elements it finds, all samples decide together", BY_MASK
        return UnknownOp(sentence, where=source_line(op.node), path=path_to(op.node, self.ctx), advice=advice)

    def _function(self, op: Op) -> list[Samples | None]:
        """Follow a user's autograd.Function; its forward and its backward have to keep the samples apart, both."""
        function: Any = op.node.target
        args = self._pairs(op)
        outs, saved = self._body(function.fwd, args)
        results: list[Samples | None] = []
        read = {user.args[1] for user in op.node.users}  # older versions return what the forward keeps as well
        for i, ((_, samples), flow) in enumerate(zip(outs, op.flows, strict=True)):
            flow = flow and i in read
            if flow and (samples is None or samples.kind is not Kind.BATCHED):
                raise Crossed(f"{function.what} lets samples influence each other in its forward")
            results.append(samples and Samples(samples.kind, samples.layout, flow))
        grads = self._body(function.bwd, [*outs, *saved])
        for arg, (_, samples), (_, of_grad) in zip(op.node.args, args, grads, strict=True):
            traced = isinstance(arg, fx.Node) and TRACED.of(arg) is True
            if not traced or samples is None or samples.kind is not Kind.BATCHED or not holds_samples(of_grad):
                continue
            if of_grad.layout != samples.layout:
                raise Crossed(f"{function.what} lets samples influence each other in its backward")
        return results

    def _control(self, op: Op) -> list[Samples | None]:
        """Follow cond, scan, map or while_loop, as its bodies say."""
        target: Any = op.node.target
        results = target.samples(self._results, self._pairs(op))
        results = [s and Samples(s.kind, s.layout, flow) for s, flow in zip(results, op.flows, strict=True)]
        if Samples(Kind.MIXED, traced=True) in results:
            raise Crossed("what its body returns depends on several samples")
        return results

    def _results(self, gm: fx.GraphModule, inputs: Sequence[Pair]) -> Any:
        results = self._body(gm, inputs)
        return results if isinstance(results, list) else [results]

    def _pairs(self, op: Op) -> list[Pair]:
        """Return the values of a call's arguments, each with its samples."""
        samples = {operand.node: operand.samples for operand in op.promoted.operands}
        return [(FAKE.of(arg), samples.get(arg)) if isinstance(arg, fx.Node) else (arg, None) for arg in op.node.args]

    def _body(self, gm: fx.GraphModule, inputs: Sequence[Pair]) -> Any:
        """Return a nest of (fake value, samples): what a body returns for these inputs."""
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        fakes = [value.detach() if isinstance(value, Tensor) else value for value, _ in inputs]
        known = [samples and Samples(samples.kind, samples.layout) for _, samples in inputs]
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

    def _mutate(self, base: fx.Node, new: Samples) -> None:
        """What is written changes what earlier nodes of the same memory hold."""
        if new == SAMPLES.of(base) and new.kind is not Kind.MIXED:  # other samples may have met in it
            return
        views = self.by_memory[memory_of(FAKE.of(base))]
        for view, samples in after_write(views, base, new, self.replay).items():
            SAMPLES.put(view, samples)

    def _check_assigned(self, op: Op) -> None:
        """An assignment that lower_assignments left: nothing that matters may be in it."""
        if any(operand.samples != Samples(Kind.CONSTANT) for operand in op.operands):
            raise LostLayout(
                "an assignment into a slice puts samples where they cannot be followed",
                where=source_line(op.node),
                path=path_to(op.node, self.ctx),
                advice="Use torch.cat, torch.where or masked_fill.",
            )

    def _check_decided(self, graph: fx.Graph) -> None:
        """No copies are left whose order nothing decided."""
        for node in graph.nodes:
            if is_undecided(SAMPLES.get(node)):
                raise LostCopies(node)

    def _check_returned(self, output: fx.Node) -> None:
        """See Note [Returned mixtures]."""
        if self.ctx.mixing == "allow" or not self.alone:
            return
        for node in output.all_input_nodes:
            samples, fake = SAMPLES.of(node), FAKE.of(node)
            if isinstance(samples, Samples) and samples.kind is Kind.MIXED and samples.traced and fake.dim():
                raise Crossed(
                    f"the model returns values of shape {self.symbols.show_shape(fake.shape)} in which samples have "
                    "met, and what a loss outside does with them cannot be followed",
                    "Return each sample's own values, or a loss without dimensions.",
                    node,
                    whole=True,
                )


# The handler of an op, by its family or, if that says nothing, by the last kind among its operands.
_Handler = Callable[[_Inference, Op], list[Samples | None]]
_OF_ANY_KIND: dict[Family | None, _Handler] = {Family.FACTORY: _Inference._made, Family.PACKED: _Inference._tracked}
_OF_KIND: dict[Kind, _Handler] = {
    Kind.CONSTANT: _Inference._shared,
    Kind.UNIFORM: _Inference._shared,
    Kind.BATCHED: _Inference._batched,
    Kind.MIXED: _Inference._mixed,
}
_WITH_BODIES: dict[Family, _Handler] = {Family.FUNCTION: _Inference._function, Family.CONTROL: _Inference._control}


def _constant(output: Any) -> Samples | None:
    return Samples(Kind.CONSTANT) if isinstance(output, Tensor) else None


def _as_lists(output: Any) -> Any:
    """Return a nest of results with a pair, of no value and no samples, in the place of everything that is no value."""
    if isinstance(output, tuple | list):
        return [_as_lists(item) for item in output]
    return output if isinstance(output, fx.Node) else (None, None)

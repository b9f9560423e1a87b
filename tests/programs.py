"""Random programs: small models, and what must hold for each of them.

`programs()` is a hypothesis strategy: an nn.Module whose forward is readable Python for any batch size. Its steps are
those of `tests/steps`. `check(program, backend)` compares fxgrad with the loop over single samples, the truth.

Whether a program mixes samples is known twice: each step says what it does with them, and the oracle, which knows
nothing of fxgrad, compares the forward of the batch with those of the single samples and changes one sample.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxgrad
from tests.independence import with_one_changed
from tests.program_oracle import (
    Input,
    NotAlone,
    Program,
    Truth,
    grad_error,
    loop,
    loss_of,
    mixes_by_oracle,
    restored,
    shares,
    tuple_of,
    whole_gradients,
)
from tests.steps import tables
from tests.steps.builder import Builder, Layout, TooLarge, Value
from tests.steps.endings import MIXTURES
from tests.steps.expected import Expected
from tests.steps.moves import to_dim
from tests.steps.parametric import broadcast
from tests.steps.step import Step
from tests.steps.texts import PLACE, rows

TOLERANCE = 1e-9
OF_INDUCTOR = 1e-6
ROUNDED = re.compile(r"torch\.full\(.*\.item\(\)"), 1e-4
"""What PyTorch rounds to float32 and Inductor, with and without fxgrad, does not; sums that cancel make it larger."""
LARGEST = 1e6  # a program with larger values, outputs or gradients is not drawn


# ---------------------------------------------------------------------------- generator


SIZES = st.integers(1, 9)  # of a program, in steps
MANY = 13  # samples: above every number in a step that is expected to depend on how many there are


@contextmanager
def float64() -> Iterator[None]:
    """Tensors that a program makes by itself have the parameters' dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@st.composite
def programs(draw: st.DrawFn, sizes: st.SearchStrategy[int] = SIZES) -> Program:
    """Draw a program with finite, not too large values. Hypothesis makes every choice, so it can shrink a failure."""
    size, seed, rng = draw(sizes), draw(st.integers(0, 2**16)), draw(st.randoms(use_true_random=False))
    try:
        with float64():
            program = write(seed, size, rng)
            tame = program is not None and is_tame(program)
    except Exception:  # PyTorch itself refuses, whatever it is: instance_norm of one position
        tame, program = False, None
    assume(tame)
    assert program is not None
    return program


def for_programs(
    check_one: Callable[[Program, int | None], None],
    number: int,
    count: int,
    sizes: st.SearchStrategy[int] = SIZES,
    phases: Sequence[Phase] = (Phase.generate, Phase.shrink),
) -> None:
    """Call `check_one(program, second_batch)` for the programs among `count` draws, the same ones for the same number.

    Hypothesis draws two in five programs again; one that passed is not checked twice.
    """
    passed: set[tuple[str, int | None]] = set()

    @hypothesis.seed(number)
    @settings(
        max_examples=count,
        phases=phases,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(sizes), st.sampled_from((None, 7, 1, 0, 5)))
    def each(program: Program, second_batch: int | None) -> None:
        key = program.source, second_batch
        if key not in passed:
            check_one(program, second_batch)
            passed.add(key)

    each()


def some_programs(count: int, number: int = 0) -> list[Program]:
    """Return the programs of `count` draws."""
    drawn: dict[str, Program] = {}
    for_programs(lambda program, _: drawn.update({program.source: program}), number, count, phases=(Phase.generate,))
    return list(drawn.values())


def write(seed: int, size: int, rng: random.Random) -> Program | None:
    """Write one attempt at a program of `size` steps; `rng` makes every choice."""
    b = Builder(rng, batch=rng.choice([2, 3, 3, 4]))
    inputs = draw_inputs(b)
    mixing_step = rng.randrange(9) if b.chance(0.7) else None
    for step in range(size):
        take_step(b, tables.TOGETHER if step == mixing_step else tables.APART)
    outputs = finish(b)
    ending = "" if b.expected is not Expected.APART or b.chance(0.9) else mixture(b, outputs)
    return text_of(b, inputs, outputs, ending, seed, size)


@float64()
def program_of(step: Step, seed: int) -> Program | None:
    """A program of one step on rows of three columns, or None where the step does not apply to them."""
    b = Builder(random.Random(f"{step.kind} {step.name} {seed}"), batch=4)
    b.values.append(Value("x0", (1, 3), Layout(0), False))
    value = attempt(b, step, b.values[0])
    if value is None:
        return None
    outputs: list[tuple[str, Layout | None]] = [(value.name, value.layout)]
    if value.layout is not None:
        scaled = b.like(f"{value.name} * {b.bare(broadcast(b, value))}", value, learned=True)
        outputs = [(scaled.name, scaled.layout)]
    elif not b.declarations:  # a loss of rows that nothing is learned in
        b.lines.insert(0, f"x0 = x0 * {b.bare((3,))}")
    return text_of(b, [Input("x0", (1, 3), 0)], outputs, "", seed, 1)


def text_of(
    b: Builder,
    inputs: list[Input],
    outputs: list[tuple[str, Layout | None]],
    ending: str,
    seed: int,
    size: int,
) -> Program | None:
    """The program as Python; None where nothing in it is learned."""
    if not outputs or not any("nn.Parameter" in line or "= nn." in line for line in b.declarations):
        return None
    first = next(x for x in inputs if x.dim is not None)
    names = ", ".join(x.name for x in inputs)
    returned = ", ".join(code for code, _ in outputs)
    body = [f"B = {first.name}.shape[{first.dim}]", *b.lines, f"return {returned}{',' if ending else ''}"]
    source = "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    source += "".join(f"        {line}\n" for line in b.declarations)
    source += f"\n    def {'body' if ending else 'forward'}(self, {names}):\n"
    source += "".join(f"        {line}\n" for line in body)
    if ending:
        source += f"\n    def ending(self, {returned}):\n        return {ending}\n"
        source += f"\n    def forward(self, {names}):\n        return self.ending(*self.body({names}))\n"
    layouts = tuple(layout for _, layout in outputs)
    expected = Expected.MIXES if ending else b.expected
    return Program(seed, size, b.batch, source, tuple(inputs), layouts, expected, bool(ending), tuple(b.steps))


def mixture(b: Builder, outputs: list[tuple[str, Layout | None]]) -> str:
    """What an ending returns: the last value that has rows as one in which samples met, or nothing."""
    flat = [v for v in b.values if (v.name, v.layout) in outputs and v.rank == 2 and v.layout == Layout(0)]
    flat = [v for v in flat if v.shape[0] == 1]
    if not flat:
        return ""
    name = b.rng.choice(list(MIXTURES))
    b.steps.append(f"mixtures: {name}")
    code = PLACE.sub(flat[-1].name, MIXTURES[name])
    return ", ".join(code if output == flat[-1].name else output for output, _ in outputs)


def draw_inputs(b: Builder) -> list[Input]:
    """One to three arguments; the first one holds samples, and so at least one float."""
    inputs = [draw_batched(b, "x0", integer=False)]
    for k in range(1, b.rng.choice([1, 1, 2, 3])):
        if b.chance(0.35):
            shape = tuple(b.small() for _ in range(b.rng.randint(0, 2)))
            inputs.append(Input(f"x{k}", shape, None))
            b.values.append(Value(f"x{k}", shape, None, False))
        else:
            inputs.append(draw_batched(b, f"x{k}", integer=b.chance(0.5)))
    return inputs


def draw_batched(b: Builder, name: str, integer: bool) -> Input:
    rank = b.rng.choice([1, 2]) if integer else b.rng.choice([1, 2, 2, 3, 3, 4])
    dim = 0 if b.chance(0.75) else b.rng.randrange(rank)
    shape = tuple(1 if d == dim else b.small() for d in range(rank))
    (b.ids if integer else b.values).append(Value(name, shape, Layout(dim), False))
    return Input(name, shape, dim, integer)


def take_step(b: Builder, choice: list[list[Step]]) -> None:
    """Apply one step that fits to a value, mostly a recent one; what does not fit leaves nothing behind."""
    for _ in range(30):
        step = tables.draw(b.rng, choice)
        value = b.values[-1] if b.chance(0.7) else b.rng.choice(b.values)
        if step.expected is not Expected.APART and value.layout is None:
            continue
        if attempt(b, step, value) is not None:
            return


def attempt(b: Builder, step: Step, value: Value) -> Value | None:
    """The step's value, or None and everything as it was."""
    before = len(b.declarations), len(b.lines), len(b.values), set(b.used), dict(b.parameters)
    try:
        result = step.build(b, value)
    except TooLarge:
        result = None
    if result is None:
        del b.declarations[before[0] :], b.lines[before[1] :], b.values[before[2] :]
        b.used, b.parameters = before[3], before[4]
        return None
    b.steps.append(f"{step.kind}: {step.name}")
    if step.expected is not Expected.APART:
        b.mixed, b.expected = result, step.expected
    return result


def finish(b: Builder) -> list[tuple[str, Layout | None]]:
    """What the program returns: the learned values that hold samples and that nothing else used; one at least."""
    ends = [v for v in b.values if v.learned and v.layout is not None and v.name not in b.used]
    if not ends:
        held = [v for v in b.values if v.layout is not None]
        v = held[-1] if held else b.values[0]
        ends = [b.like(f"{v.name} * {b.bare(broadcast(b, v))}", v, learned=True)]
    if b.mixed is not None and b.mixed.name not in b.used:
        ends.append(b.like(f"{b.mixed.name} * {b.bare(broadcast(b, b.mixed))}", b.mixed, learned=True))
    ends = [rejoined(b, v) for v in ends[-3:]]
    outputs: list[tuple[str, Layout | None]] = [(v.name, v.layout) for v in ends]
    if b.chance(0.2):
        together = b.chance(0.5) and b.expected is Expected.APART
        kinds = (Expected.MIXES, Expected.DEPENDS) if together else (Expected.APART,)
        loss = attempt(b, b.rng.choice(tables.losses(*kinds)), ends[-1])
        if loss is not None:
            outputs[-1] = (loss.name, None)
    elif b.chance(0.3):
        flat = rows(b, ends[-1])
        if flat is not None:
            outputs[-1] = (flat.name, flat.layout)
    return outputs


def rejoined(b: Builder, v: Value) -> Value:
    """Sometimes bring the samples to the front before the value is returned."""
    return to_dim(b, v, 0) if b.chance(0.3) else v


def is_tame(program: Program) -> bool:
    """Whether outputs and gradients are finite and of reasonable size, so that 1e-9 tells right from wrong."""
    model, args = program.model(), program.sample(program.batch)
    with restored(model):
        outputs = tuple_of(model(*args))
    if not loss_of(outputs).requires_grad or not all(is_small(out) for out in outputs):
        return False
    whole = whole_gradients(model, args)
    if program.expected is not Expected.APART and not program.ending:
        learned = [g for name, g in whole.items() if name != "x0"]
        return all(map(is_small, whole.values())) and any(g.abs().max() > 1e-3 for g in learned)
    truth = truth_of(program, model, args, program.batch)
    tensors = [*truth.grads.values(), *truth.input_grads, *(o for out in truth.outputs for o in out)]
    return all(map(is_small, tensors)) and any(g.abs().max() > 1e-3 for g in truth.grads.values())


def is_small(t: Tensor) -> bool:
    return t.numel() == 0 or bool(t.isfinite().all() and t.abs().max() < LARGEST)


def truth_of(program: Program, model: nn.Module, args: list[Tensor], batch: int) -> Truth:
    """The loop over single samples, or over their shares where the program returns values in which samples met."""
    return (shares if program.ending else loop)(program, model, args, batch)


# ---------------------------------------------------------------------------- the check


@contextmanager
def quick_dynamo() -> Iterator[None]:
    """Leave out what costs half of a tiny program's compile time: timing the guards, caching fake tensors."""
    with (
        mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, create=True),
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
    ):
        yield


@dataclass(frozen=True)
class Outcome:
    """right, refused (as it must be, or with the reason), mixing returned, wrong, crash, host crash or generator."""

    kind: str
    reason: str = ""

    @property
    def fails(self) -> bool:
        return self.kind in ("wrong", "crash", "generator")


def first_sentence(error: BaseException) -> str:
    """The error's class and first line, without the names and numbers of this one program."""
    line = (str(error).strip().splitlines() or [""])[0]
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", line)
    line = re.sub(r"\b[vapmcx]\d+(\.\w+)?\b", "…", line)
    line = re.sub(r"\d+", "N", line)
    return f"{type(error).__name__}: {line}"[:160]


REFUSED = {
    Expected.APART: "refused",
    Expected.MIXES: "mixing refused",
    Expected.DEPENDS: "depends refused",
}


@float64()
def check(program: Program, backend: str = "eager", second_batch: int | None = None) -> Outcome:
    """Transform, run forward and backward for some batch sizes and with one sample changed, compare with the loop."""
    mixes = not program.ending and mixes_by_oracle(program)
    if mixes and program.expected is Expected.APART:
        return Outcome("generator", "the program mixes samples and was not meant to")
    norms = program.ending and program.seed % 2 == 1
    batch, tolerance = program.batch, tolerance_of(program, backend)
    try:
        model = program.model()
        quantity = fxgrad.NormSample() if norms else fxgrad.GradSample()
        how = where_samples_are(program)
        transformed = fxgrad.transform(model, backend=backend, quantity=quantity, **how)
        for batch, changed in calls(program, second_batch):
            outcome = compare(program, model, transformed, batch, changed, tolerance)
            if outcome is not None:
                returned = program.expected is not Expected.APART and returns_shares(program, backend)
                return Outcome("mixing returned") if returned else outcome
    except fxgrad.FxgradError as error:
        return Outcome(REFUSED[program.expected], first_sentence(error))
    except Exception as error:
        host = crashes_without_fxgrad(program, backend, batch)
        return Outcome("host crash" if host else "crash", first_sentence(error))
    return Outcome("right" if program.expected is Expected.APART else "mixing right")


def tolerance_of(program: Program, backend: str) -> float:
    """Return the largest error that a program may have."""
    if backend != "inductor":
        return TOLERANCE
    rounded, tolerance = ROUNDED
    return tolerance if rounded.search(program.source) else OF_INDUCTOR


def returns_shares(program: Program, backend: str) -> bool:
    """Whether samples met in what the program returns: rows are shares, adding up, and no norm of them is given."""
    args, how = program.sample(program.batch), where_samples_are(program)
    try:
        fxgrad.transform(program.model(), backend=backend, quantity=fxgrad.NormSample(), **how)(*args)
        return False
    except fxgrad.errors.MixedSamples:
        pass
    model = program.model()
    whole = whole_gradients(program.model(), args)
    loss_of(fxgrad.transform(model, backend=backend, **how)(*args)).backward()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: p.grad_sample.sum(0) for name, p in named.items()}  # type: ignore[attr-defined]
    return grad_error(sums, {name: whole[name] for name in named}) < TOLERANCE


def calls(program: Program, second_batch: int | None) -> Iterator[tuple[int, int | None]]:
    """Batch sizes, and the sample that is changed in a call."""
    yield program.batch, None
    yield program.batch, program.seed % program.batch
    if second_batch is not None:
        yield second_batch, None
    if program.expected is Expected.DEPENDS:
        yield MANY, None


def crashes_without_fxgrad(program: Program, backend: str, batch: int) -> bool:
    """Whether torch.compile alone fails on the program, into one graph, with this compiler or with none."""
    capture: dict[str, Any] = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    for compiler in dict.fromkeys(("eager", backend)):
        torch._dynamo.reset()
        try:
            with torch._dynamo.config.patch(**capture):
                model = torch.compile(program.model(), backend=compiler, fullgraph=True)
                loss_of(model(*program.sample(batch))).backward()
        except Exception:
            return True
    return False


def where_samples_are(program: Program) -> dict[str, Any]:
    """The arguments of `transform` that say it, left out where the default does."""
    if set(program.in_dims) == {0}:
        return {}
    if set(program.in_dims) == {1} and program.seed % 2:
        return {"batch_first": False}
    return {"in_dims": program.in_dims}


def compare(
    program: Program, model: nn.Module, transformed: nn.Module, batch: int, changed: int | None, tolerance: float
) -> Outcome | None:
    """None where outputs, per-sample gradients and the first input's gradient are those of the loop."""
    args = program.sample(batch)
    if changed is not None:
        args = with_one_changed(args, program.in_dims, changed)
    where = f"at batch size {batch}" + (" with one sample changed" if changed is not None else "")
    try:
        if batch == 0:
            with restored(model):
                loss_of(model(*args)).backward()
            fxgrad.zero_grad(model)
        with restored(model):
            with torch.no_grad():
                plain = tuple_of(model(*args))
            state = [buffer.clone() for buffer in model.buffers()]
    except (RuntimeError, IndexError):  # PyTorch itself has no such op for B = 0: reshape(B, -1), amax(0)
        fxgrad.zero_grad(model)
        return None
    try:
        truth = truth_of(program, model, args, batch)
    except NotAlone as error:
        truth = None
        reason = first_sentence(error)
    args[0].requires_grad_(program.seed % 2 == 0)
    outputs = tuple_of(transformed(*args))
    loss_of(outputs).backward()
    if truth is None:
        return Outcome("wrong", f"a single sample raises {reason}")
    if not all(g.isfinite().all() for g in truth.grads.values()):
        fxgrad.zero_grad(model)
        return None
    for a, b in zip(outputs, plain, strict=True):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return Outcome("wrong", f"forward differs from the plain model's {where}")
    if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(model.buffers(), state, strict=True)):
        return Outcome("wrong", f"a buffer differs from the plain model's {where}")
    outcome = compare_gradients(program, model, args, truth, where, tolerance)
    fxgrad.zero_grad(model)
    return outcome


def compare_gradients(
    program: Program, model: nn.Module, args: list[Tensor], truth: Truth, where: str, tolerance: float
) -> Outcome | None:
    """None where what fxgrad left on the parameters and on the first input is the truth."""
    results: dict[str, Tensor] = {}
    expected = dict(truth.grads)
    for name, p in model.named_parameters():
        rows, norms = getattr(p, "grad_sample", None), getattr(p, "norm_sample", None)
        if p.grad is not None:
            return Outcome("wrong", "p.grad is set")
        if (rows is None and norms is None) == p.requires_grad:
            return Outcome("wrong", "no result" if p.requires_grad else "a result for a frozen parameter")
        if rows is not None:
            results[name] = rows
        elif norms is not None:
            results[name], expected[name] = norms, expected[name].unsqueeze(-1).flatten(1).norm(dim=1)
    if grad_error(results, expected) > tolerance:
        return Outcome("wrong", f"the samples' gradients differ {where}")
    of_input = args[0].grad
    if of_input is not None and program.expected is Expected.APART and truth.input_grads:
        # beside the parameters' gradients: one that is zero but for rounding is measured against those
        of_samples = torch.cat(truth.input_grads, program.inputs[0].dim or 0)
        if grad_error({"x0": of_input, **results}, {"x0": of_samples, **expected}) > tolerance:
            return Outcome("wrong", "gradient of the input differs")
    return None


KNOWN_REFUSALS: dict[str, str] = {
    r"UnsupportedOp: \w+_ writes into a function of parameters that is handed to all samples": "read by the samples "
    "after the write",
    r"UnsupportedOp: \w+_ writes into a function of parameters whose size changes": "a batch size taken from an input "
    "that is used for nothing else is not known to be one",
    r"UnknownOp: .* (as_strided|higher_order::register_hook) ": "ops that nobody has classified",
    r"BatchSizeError: (one_hot|split) fixes": "PyTorch's own shape rule makes the batch a number",
    r"GraphBreak: TorchDynamo does not capture the model: (Consider annotating .*)?(PendingUnbacked|Could not extract|"
    r"Could not guard)": "a number of a tensor as a size, in a factory or in an if, that Dynamo cannot follow",
    r"GraphBreak: TorchDynamo does not capture the model: Expected body_fn_output": "while_loop wants each "
    "result in memory as the first",
    r"GraphBreak: TorchDynamo does not capture the model: This higher order operator": "PyTorch's own cond, whose "
    "arguments share memory where there is one sample",
    r"MixedSamples: (index_(put|copy|add)|scatter\w*) .* it writes one sample": "places counted by the pieces that the "
    "batch was cut into, a number, or by an arange from the last to the first",
    r"GraphBreak: the model does not capture as one graph: Failed to trace builtin": "a number made a text",
    r"LostLayout: … does not work for every number of samples": "modules called on one sample after the other",
    r"LostLayout: \w+ gives a parameter's value": "copies of a parameter over a merged dim, used alone",
    r"UniformOutput: a gradient arrived at an output": "copies of a parameter, one per sample, returned",
    r"MixedSamples: batch_norm .* another dimension than": "eval mode takes samples on dim 0 only",
    r"MixedSamples: (index_add|gather|scatter_add) .* no sample dimension": "merged samples indexed beside them",
    r"MixedSamples: (gather|take_along_dim|scatter_\w+|index_\w+) .* it indexes the sample dimension": "an index of "
    "samples, each its own, written as arithmetic",
    r"MixedSamples: embedding .* its table holds samples": "rows of samples, looked up by their own numbers",
    r"MixedSamples: \w+ (.* cannot be followed|takes samples out of the batch by their places)": "a range of merged "
    "samples; one sample after the other; samples moved and moved back",
    r"MixedSamples: \w+ .* a value that depends on several samples": "data whose samples were lost on the way, and "
    "where and lerp of two losses",
}
"""What the reasons look like for which a program that does not mix samples may be refused, each with its why."""


_ONE_BY_ONE = re.compile(r"\[\S+\(a\) for a in \S+\]")  # `torch.stack([m(a) for a in x])`, or over `x.split(1)`


def is_known(reason: str, source: str) -> bool:
    """Whether a refusal's reason is on the closed list.

    Where a program calls a module on one sample after the other, the batch is a number, and any op may say it first.
    """
    fixed = r"LostLayout: (\S+|an assignment) does not work for every number of samples"
    if _ONE_BY_ONE.search(source) and re.match(fixed, reason):
        return True
    return any(re.match(pattern, reason) for pattern in KNOWN_REFUSALS)

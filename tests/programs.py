"""Random programs: small models built from a seed, and what must hold for each of them.

`generate(seed, size)` writes an nn.Module whose forward is readable Python for any batch size. The first `size` steps
of a larger program are the smaller program's steps, so a failure is shortened by lowering the size alone.
`check(program, backend)` compares fxgrad with the loop over single samples, the truth.

Whether a program mixes samples is known twice: the generator knows which lines it wrote for that purpose, and the
oracle compares the forward of the batch with the forwards of the single samples.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fxgrad
import tests.program_layers  # noqa: F401  (fills PARAMETRIC)
from tests.program_builder import Builder, Layout, TooLarge, Value
from tests.program_local import LOCAL
from tests.program_mixing import MIXING
from tests.program_moves import MOVES, Op, to_dim
from tests.program_ops import PARAMETRIC, broadcast
from tests.program_oracle import Input, Program, grad_error, loop, loss_of, mixes_by_oracle

TOLERANCE = 1e-9
LARGEST = 1e6  # a program with larger values, outputs or gradients is replaced by the next one


# ---------------------------------------------------------------------------- generator


def generate(seed: int, size: int | None = None) -> Program:
    """The program of this seed; degenerate ones (values too large, not finite) are replaced, always the same way."""
    for attempt in range(20):
        rng = random.Random(f"{seed}/{attempt}")
        program = write(
            seed, size or rng.randint(1, 9), rng, random.Random(f"{seed}/{attempt}/end")
        )
        try:
            if program is not None and is_tame(program):
                return program
        except ValueError:  # PyTorch refuses the sizes: instance_norm of a single position
            continue
    raise AssertionError(f"seed {seed}: no program without degenerate values")


def write(seed: int, size: int, rng: random.Random, end: random.Random) -> Program | None:
    """One attempt at a program of `size` steps; `end` is a source of its own, so that a shorter one is a prefix."""
    b = Builder(rng, batch=rng.choice([2, 3, 3, 4]))
    inputs = draw_inputs(b)
    mixing_step = rng.randrange(12) if b.chance(0.3) else None
    for step in range(size):
        take_step(b, MIXING if step == mixing_step else None)
    b.rng = end
    outputs = finish(b)
    if not outputs:
        return None
    first = next(x for x in inputs if x.dim is not None)
    body = [
        f"B = {first.name}.shape[{first.dim}]",
        *b.lines,
        f"return {', '.join(code for code, _ in outputs)}",
    ]
    if not any("nn.Parameter" in line or "= nn." in line for line in b.declarations):
        return None
    names = ", ".join(x.name for x in inputs)
    source = "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    source += "".join(f"        {line}\n" for line in b.declarations)
    source += f"\n    def forward(self, {names}):\n" + "".join(f"        {line}\n" for line in body)
    layouts = tuple(layout for _, layout in outputs)
    return Program(seed, size, b.batch, source, tuple(inputs), layouts, b.mixed is not None)


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


def take_step(b: Builder, table: list[Op] | None) -> None:
    """Apply one op that fits to a value, mostly a recent one; what does not fit leaves nothing behind."""
    for _ in range(30):
        ops = table or b.rng.choice([PARAMETRIC, PARAMETRIC, PARAMETRIC, MOVES, MOVES, LOCAL])
        value = b.values[-1] if b.chance(0.7) else b.rng.choice(b.values)
        if table is MIXING and value.layout is None:
            continue
        before = len(b.declarations), len(b.lines), len(b.values), set(b.used), dict(b.parameters)
        try:
            result = b.rng.choice(ops)(b, value)
            if result is not None:
                b.mixed = result if table is MIXING else b.mixed
                return
        except TooLarge:
            pass
        del b.declarations[before[0] :], b.lines[before[1] :], b.values[before[2] :]
        b.used, b.parameters = before[3], before[4]


def finish(b: Builder) -> list[tuple[str, Layout | None]]:
    """What the program returns: the learned values that hold samples and that nothing else used; one at least."""
    ends = [v for v in b.values if v.learned and v.layout is not None and v.name not in b.used]
    if not ends:
        held = [v for v in b.values if v.layout is not None]
        v = held[-1] if held else b.values[0]
        ends = [b.like(f"{v.name} * {b.bare(broadcast(b, v))}", v, learned=True)]
    if b.mixed is not None and b.mixed.name not in b.used:
        ends.append(
            b.like(f"{b.mixed.name} * {b.bare(broadcast(b, b.mixed))}", b.mixed, learned=True)
        )
    ends = [rejoined(b, v) for v in ends[-3:]]
    outputs: list[tuple[str, Layout | None]] = [(v.name, v.layout) for v in ends]
    if b.chance(0.15):
        form = b.rng.choice(LOSSES)
        last = ends[-1]
        outputs[-1] = (form.format(v=last.name, d=b.rng.randrange(last.rank), w=ends[0].name), None)
    return outputs


LOSSES = (
    "{v}.sin().sum()",
    "-{v}.sin().sum() * 0.5",
    "{v}.square().sum({d}).sum()",
    "{v}.sin().sum() * 0.5 + {w}.cos().sum()",
    "({v}.sum() + {w}.tanh().sum()) / 2",
    "F.mse_loss({v}, torch.zeros_like({v}), reduction='sum')",
)


def rejoined(b: Builder, v: Value) -> Value:
    """Sometimes bring the samples to the front before the value is returned."""
    return to_dim(b, v, 0) if b.chance(0.3) else v


def is_tame(program: Program) -> bool:
    """Whether outputs and gradients are finite and of reasonable size, so that 1e-9 tells right from wrong."""
    model, args = program.model(), program.sample(program.batch)
    if not loss_of(model(*args)).requires_grad:
        return False
    truth = loop(program, model, args, program.batch)
    tensors = [
        *truth.grads.values(),
        *truth.input_grads,
        *(o for out in truth.outputs for o in out),
    ]
    if not all(t.isfinite().all() and (t.numel() == 0 or t.abs().max() < LARGEST) for t in tensors):
        return False
    return any(g.abs().max() > 1e-3 for g in truth.grads.values())


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
    """right, refused (mixing, as it must be), refused (with the reason), wrong, crash, host crash or generator."""

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


def check(program: Program, backend: str = "eager", second_batch: int | None = None) -> Outcome:
    """Transform, run forward and backward for one or two batch sizes, compare with the loop."""
    mixes = mixes_by_oracle(program)
    if mixes and not program.mixes:
        return Outcome("generator", "the program mixes samples and was not meant to")
    try:
        model = program.model()
        transformed = fxgrad.transform(model, backend=backend, **where_samples_are(program))
        for batch in [program.batch] + ([] if second_batch is None else [second_batch]):
            outcome = compare(program, model, transformed, batch)
            if outcome is not None:
                return outcome
    except fxgrad.FxgradError as error:
        return Outcome("mixing refused" if program.mixes else "refused", first_sentence(error))
    except Exception as error:
        host = backend != "eager" and crashes_without_fxgrad(program, backend)
        return Outcome("host crash" if host else "crash", first_sentence(error))
    return Outcome("mixing right" if mixes else "right")


def crashes_without_fxgrad(program: Program, backend: str) -> bool:
    """Whether torch.compile alone fails on the program, with the same compiler."""
    torch._dynamo.reset()
    try:
        loss_of(torch.compile(program.model(), backend=backend)(*program.sample(program.batch))).backward()
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
    program: Program, model: nn.Module, transformed: nn.Module, batch: int
) -> Outcome | None:
    """None where outputs, per-sample gradients and the first input's gradient are those of the loop."""
    args = program.sample(batch)
    truth = loop(program, model, args, batch)
    try:
        if batch == 0:
            loss_of(model(*args)).backward()
            fxgrad.zero_grad(model)
        with torch.no_grad():
            plain = model(*args)
    except (RuntimeError, IndexError):  # PyTorch itself has no such op for B = 0: reshape(B, -1), amax(0)
        fxgrad.zero_grad(model)
        return None
    args[0].requires_grad_(program.seed % 2 == 0)
    outputs = transformed(*args)
    loss_of(outputs).backward()
    for a, b in zip(*((o,) if isinstance(o, Tensor) else o for o in (outputs, plain)), strict=True):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE):
            return Outcome("wrong", f"forward differs from the plain model's at batch size {batch}")
    found = {}
    for name, p in model.named_parameters():
        grad_sample = getattr(p, "grad_sample", None)
        if p.grad is not None:
            return Outcome("wrong", "p.grad is set")
        if (grad_sample is not None) != p.requires_grad:
            return Outcome(
                "wrong",
                "no grad_sample" if p.requires_grad else "grad_sample of a frozen parameter",
            )
        if grad_sample is not None:
            found[name] = grad_sample
    error = grad_error(found, truth.grads)
    if error > TOLERANCE:
        return Outcome("wrong", f"grad_sample differs at batch size {batch}")
    if args[0].requires_grad and not program.mixes and args[0].grad is not None and batch:
        expected = torch.cat(truth.input_grads, program.inputs[0].dim or 0)
        # beside the parameters' gradients: one that is zero but for rounding is measured against those
        if grad_error({"x0": args[0].grad, **found}, {"x0": expected, **truth.grads}) > TOLERANCE:
            return Outcome("wrong", "gradient of the input differs")
    fxgrad.zero_grad(model)
    return None


KNOWN_REFUSALS: dict[str, str] = {
    r"UnsupportedOp: \w+_ writes into a function of parameters whose size changes": "a batch size taken from an input "
    "that is used for nothing else is not known to be one",
    r"BatchSizeError: take_along_dim fixes": "PyTorch's own shape rule makes the batch a number",
    r"LostLayout: \w+ gives a parameter's value": "copies of a parameter over a merged dim, used alone",
    r"UniformOutput: a gradient arrived at an output": "copies of a parameter, one per sample, returned",
    r"MixedSamples: batch_norm .* another dimension than": "eval mode takes samples on dim 0 only",
    r"MixedSamples: (index_add|gather|scatter_add) .* no sample dimension": "merged samples indexed beside them",
    r"MixedSamples: getitem .* cannot be followed": "a range of merged samples",
    r"MixedSamples: \w+ .* a value that depends on several samples": "data whose samples were lost on the way",
}
"""What the reasons look like for which a program that does not mix samples may be refused, each with its why."""


def is_known(reason: str) -> bool:
    """Whether a refusal's reason is on the closed list."""
    return any(re.match(pattern, reason) for pattern in KNOWN_REFUSALS)

"""What a program ends in: losses, which keep samples apart or do not, and returned values in which samples met."""

from __future__ import annotations

from tests.steps.builder import Builder, Value
from tests.steps.expected import Expected
from tests.steps.slots import FILLS
from tests.steps.step import Step, Table
from tests.steps.texts import expand, rows, slots_of


def loss(name: str, text: str, expected: Expected) -> Step:
    """A step whose value is a loss, without dimensions."""

    def build(b: Builder, v: Value) -> Value | None:
        x = rows(b, v)
        if x is None:
            return None
        *lines, result = expand(b, text, x, expected)[0].split("\n")
        b.lines.extend(lines)
        return b.emit(result, (), None, x, learned=True)

    return Step("losses", name, build, expected)


def loss_of_any(form: str) -> Step:
    """A sum over samples of a value wherever its samples are."""

    def build(b: Builder, v: Value) -> Value | None:
        w = b.rng.choice([w for w in b.values if w.layout is not None])
        return b.emit(form.format(v=v.name, d=b.rng.randrange(v.rank), w=w.name), (), None, v, w, learned=True)

    return Step("losses", form, build, Expected.APART)


SUMS: Table = [
    loss_of_any(form)
    for form in (
        "{v}.sin().sum()",
        "-{v}.sin().sum() * 0.5",
        "{v}.square().sum({d}).sum()",
        "{v}.sin().sum() * 0.5 + {w}.cos().sum()",
        "({v}.sum() + {w}.tanh().sum()) / 2",
        "F.mse_loss({v}, torch.zeros_like({v}), reduction='sum')",
    )
]

APART = {
    "two sums": "{x}.square().sum() + 0.1 * {x}.abs().sum()",
    "by features": "{x}.square().sum() / {x}.shape[1]",
    "an own weight": "({x}.square().sum(1) * {x}[:, 0]).sum()",
    "an own detached weight": "({x}.square() * {x}.detach()).sum()",
    "cross entropy": "F.cross_entropy({x}, {ids}, reduction='sum')",
    "own token means": "(({x}.square() * ({x} > 0)).sum(1) / ({x} > 0).sum(1).clamp(min=1)).sum()",
    "own experts": "({x}.softmax(1) * F.one_hot({x}.argmax(1), {C})).sum()",
    "focal": "(F.cross_entropy({x}, {ids}, reduction='none') * (1 - {x}.softmax(1).detach().amax(1))).sum()",
}

MIXES = {
    "balanced": "{z}, {y} = {x}.square().sum(), {x}.abs().sum() + 1\n{z} + ({z}.detach() / {y}.detach()) * {y}",
    "balanced by numbers": "{z}, {y} = {x}.square().sum(), {x}.abs().sum() + 1\n{z} + ({z}.item() / {y}.item()) * {y}",
    "balanced experts": (
        "{z} = {x}.softmax(1)\n(F.one_hot({z}.argmax(1), {C}).to({z}.dtype).mean(0) * {z}.mean(0)).sum() * 3"
    ),
    "balanced experts, z-loss": "{x}.logsumexp(1).mean().square()",
    "focal by the batch": "{z} = {x}.square().sum(1)\n({z} * {z}.detach().mean()).sum()",
    "token mean by float": "({x}.square() * ({x} > 0)).sum() / ({x} > 0).sum().clamp(min=1)",
    "over the sum of weights": "({x}.square().sum(1) * {x}[:, 0]).sum() / {x}[:, 0].square().sum().add(1)",
    "the square": "{x}.sum().square()",
    "the logarithm": "({x}.square().sum() + 1).log()",
    "the largest": "{x}.square().sum(1).max()",
    "the top": "{x}.square().sum(1).topk(1).values.sum()",
    "logsumexp": "{x}.square().sum(1).logsumexp(0)",
    "softmax weights": "({x}.square().sum(1) * {x}.sum(1).softmax(0)).sum()",
    "variance": "{x}.var(0, unbiased=False).sum()",
    "a detached mean": "({x} - {x}.mean(0).detach()).square().sum()",
    "a clamp": "{x}.sum().clamp(max=0.3)",
    "moments": "F.mse_loss({x}.sum(0), torch.ones({C}), reduction='sum')",
    "correlation": "({x}.t() @ {x}).tanh().sum()",
    "triplets": "F.triplet_margin_loss({x}, {x}.roll(1, 0), {x}.sin(), reduction='sum')",
    "where": "torch.where({x}.sum() > 0, {x}.sin().sum(), {x}.cos().sum())",
    "an index": "torch.stack([{x}.sin().sum(), {x}.cos().sum()])[({x}.sum() > 0).long()]",
    "a slot": "{z} = torch.zeros(())\n{z}.add_({x}.detach().abs().sum())\n{x}.square().sum() * {z}",
    "by out=": "{z} = torch.zeros(())\ntorch.sum({x}.detach().abs(), (0, 1), out={z})\n{x}.square().sum() * {z}",
    "classes' weights": "F.cross_entropy({x}, {ids}, {x}.detach().mean(0).abs(), reduction='sum')",
}

EITHER = {
    "times s": "{x}.square().sum() * {s}",
    "times a detached s": "{x}.square().sum() * {s}.detach()",
    "over s": "{x}.square().sum() / ({s}.detach().abs() + 1)",
    "times n": "{x}.square().sum() * {n}",
    "alpha": "torch.add({x}.sum(), {x}.abs().sum(), alpha={n})",
    "a weight of rows": "({x}.square() * {r}.detach()).sum()",
    "a target of rows": "({x} - {r}.detach()).square().sum()",
    "a target of others": "F.mse_loss({x}, {o}.detach(), reduction='sum')",
    "classes of others": "F.cross_entropy({x}, {o}.argmax(1), reduction='sum')",
    "under no_grad": "with torch.no_grad():\n    {z} = {s} * 1.0\n{x}.square().sum() * {z}",
    "a row by index": "({x}.square().sum(1) * {x}.detach()[{i}].sum(1)).sum()",
    "in a condition": "torch.where({s} > 0.4, {x}.sin().sum(), {x}.cos().sum())",
    "a smooth l1": "F.smooth_l1_loss({x}, {o}.detach(), reduction='sum', beta=abs({n}) + 0.1)",
    "lerp": "torch.lerp({x}.sin().sum(), {x}.cos().sum(), {s}.detach().double())",
}

LOSSES: Table = [
    *SUMS,
    *(loss(name, text, Expected.APART) for name, text in APART.items()),
    *(loss(name, text, Expected.MIXES) for name, text in MIXES.items()),
    *(
        loss(f"{name}, {expected.name.lower()}", text, expected)
        for name, text in EITHER.items()
        for expected in Expected
        if any(FILLS[expected].get(slot) for slot in slots_of(text))
    ),
]

MIXTURES = {
    "a mean": "{x}.mean(0)",
    "a sum": "{x}.sum(0)",
    "a detached target": "{x} - {x}.mean(0).detach()",
    "similarities": "{x} @ {x}.t()",
    "the largest": "{x}.amax(0)",
    "one sample": "{x}[0]",
    "centred": "{x} - {x}.mean(0)",
    "running sums": "{x}.cumsum(0)",
    "the covariance": "{x}.t() @ {x}",
    "softmax": "{x}.softmax(0)",
    "distances": "torch.cdist({x}, {x} + 1)",
    "flipped": "{x}.flip(0)",
    "norms of columns": "{x}.norm(dim=0)",
    "an average, scaled": "{x}.mean(0, keepdim=True) * 0.5",
    "means of two": "torch.stack([{x}.mean(0), {x}.sum(0)])",
    "einsum": "torch.einsum('bi,bj->ij', {x}, {x})",
    "InfoNCE's numbers": "F.normalize({x}, dim=1, eps=0.1) @ F.normalize({x}, dim=1, eps=0.1).t() / 0.5",
    "a median": "{x}.median(0).values",
}
"""Values in which samples met, made of the rows `x` that a program has at its end."""

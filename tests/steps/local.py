"""Ops of the random programs without parameters that compute within each sample: elementwise, reductions."""

from __future__ import annotations

from tests.steps.builder import Builder, Value, tuple_text
from tests.steps.expected import Expected
from tests.steps.moves import replaced, shifted
from tests.steps.step import table

LOCAL, local = table("local", Expected.APART)

UNARY = [
    *(
        ".tanh()",
        ".sin()",
        ".abs()",
        ".sigmoid()",
        ".clamp(-1, 0.5)",
        ".square()",
        ".neg()",
        ".clone()",
        ".relu()",
    ),
    *(
        ".contiguous()",
        ".double()",
        ".masked_fill({0} > 0.3, 0.1)",
        " * 0.5",
        " + 1",
        ".clamp(min=-0.3)",
    ),
    *(".add(1, alpha=0.5)", ".type_as({0})"),
]
FUNCTIONS = [
    *(
        "F.gelu",
        "F.silu",
        "F.softplus",
        "F.elu",
        "F.leaky_relu",
        "torch.relu",
        "F.hardtanh",
        "torch.atan",
    ),
    *("F.mish", "F.logsigmoid", "torch.cos"),
]


@local
def unary(b: Builder, v: Value) -> Value | None:
    if b.chance(0.4):
        return b.like(f"{b.rng.choice(FUNCTIONS)}({v.name})", v)
    return b.like(v.name + b.rng.choice(UNARY).format(v.name), v)


@local
def detached(b: Builder, v: Value) -> Value | None:
    """A gate without gradient."""
    return b.like(f"{v.name} * {v.name}.detach().sigmoid()", v) if v.learned else None


@local
def in_place(b: Builder, v: Value) -> Value | None:
    copy = b.like(f"{v.name} * 0.9", v)
    return b.like(
        f"{copy.name}.{b.rng.choice(['tanh_()', 'mul_(2)', 'add_(1)', 'relu_()', 'clamp_(max=0.4)'])}",
        copy,
    )


@local
def binary(b: Builder, v: Value) -> Value | None:
    w = b.rng.choice([w for w in b.values if w.shape == v.shape and w.layout == v.layout])
    forms = [
        "{0} + {1}",
        "{0} * {1}",
        "{0} - {1}",
        "{0} / ({1}.abs() + 1)",
        "torch.where({0} > 0, {0}, {1})",
    ]
    forms += [
        "torch.maximum({0}, {1})",
        "torch.lerp({0}, {1}, 0.3)",
        "torch.addcmul({0}, {1}, {1}, value=0.5)",
    ]
    return b.like(b.rng.choice(forms).format(v.name, w.name), v, w)


@local
def with_constant(b: Builder, v: Value) -> Value | None:
    shape = [1 if d not in v.other_dims else v.shape[d] for d in range(b.rng.randint(0, v.rank), v.rank)]
    if b.chance(0.3):
        return b.like(f"torch.where({b.mask(shape)}, {v.name}, 0.2)", v)
    return b.like(f"{v.name} {b.rng.choice('+-*')} {b.constant(shape)}", v)


@local
def reduced(b: Builder, v: Value) -> Value | None:
    if not v.other_dims:
        return None
    d = b.rng.choice(v.other_dims)
    op = b.rng.choice(["mean", "sum", "amax", "logsumexp", "prod", "amin", "norm"])
    if b.chance(0.4):
        return b.emit(f"{v.name}.{op}(dim={d}, keepdim=True)", replaced(v.shape, d, 1), v.layout, v)
    return b.emit(f"{v.name}.{op}(dim={b.axis(v, d)})", replaced(v.shape, d), shifted(v.layout, d, -1), v)


@local
def along(b: Builder, v: Value) -> Value | None:
    """Ops that keep the shape and work along dims without samples."""
    if not v.other_dims:
        return None
    d = b.axis(v, b.rng.choice(v.other_dims))
    forms = [
        f"F.softmax({{0}}, dim={d})",
        f"{{0}}.log_softmax({d})",
        f"F.normalize({{0}}, dim={d}, eps=0.1)",
    ]
    forms += [
        f"{{0}}.cumsum({d})",
        f"{{0}} - {{0}}.mean({d}, keepdim=True)",
        f"{{0}} * {{0}}.sum({d}, keepdim=True)",
    ]
    forms += [f"{{0}} / ({{0}}.norm(dim={d}, keepdim=True) + 0.1)"]
    return b.like(b.rng.choice(forms).format(v.name), v)


@local
def fresh_from_batch(b: Builder, v: Value) -> Value | None:
    """A constant made at run time with the samples' shape."""
    form = b.rng.choice(
        [
            "{0} + torch.zeros_like({0})",
            "{0} * torch.ones({1}, dtype={0}.dtype)",
            "{0} + {0}.new_full({1}, 0.5)",
        ]
    )
    return b.like(form.format(v.name, tuple_text(v.sizes())), v)


@local
def within_sample_product(b: Builder, v: Value) -> Value | None:
    """x @ x.mT within each sample."""
    if v.rank < 3 or v.layout is None or v.layout.dim >= v.rank - 2:
        return None
    n = v.shape[-2]
    return b.emit(f"{v.name} @ {v.name}.mT", (*v.shape[:-1], n), v.layout, v)


@local
def pooled(b: Builder, v: Value) -> Value | None:
    if v.rank != 3 or v.layout is None or v.layout.dim == 2 or v.shape[2] < 2:
        return None
    op = b.rng.choice(["F.max_pool1d({}, 2, 1)", "F.avg_pool1d({}, 2, 1)"])
    return b.emit(op.format(v.name), (*v.shape[:2], v.shape[2] - 1), v.layout, v)

"""Ops of the random programs that take parameters: elementwise, joining and products."""

from __future__ import annotations

import string

from tests.steps.builder import Builder, Value
from tests.steps.expected import Expected
from tests.steps.moves import replaced, shifted
from tests.steps.step import table

PARAMETRIC, parametric = table("parametric", Expected.APART)


def broadcast(b: Builder, v: Value) -> tuple[int, ...]:
    """A shape that broadcasts against v without touching its samples."""
    shape = []
    for d in range(b.rng.choice([0, *range(v.rank + 1)]), v.rank):
        shape.append(1 if d not in v.other_dims or b.chance(0.25) else v.shape[d])
    return tuple(shape)


# ---------------------------------------------------------------------------- elementwise


@parametric
def elementwise(b: Builder, v: Value) -> Value | None:
    forms = [
        "{x} + {w}",
        "{w} + {x}",
        "{x} - {w}",
        "{w} - {x}",
        "{x} * {w}",
        "{w} * {x}",
        "{x} / ({w}.abs() + 0.5)",
    ]
    forms += [
        "{w} / ({x}.abs() + 0.5)",
        "torch.where({x} > 0, {x}, {w})",
        "torch.where({k}, {w}, {x})",
    ]
    forms += [
        "torch.addcmul({x}, {x}, {w})",
        "torch.addcmul({w}, {x}, {x})",
        "torch.lerp({x}, {w}, 0.3)",
    ]
    forms += [
        "torch.maximum({x}, {w})",
        "{x} * (1 + {w}) + {w}",
        "({x}.abs() + 0.2) ** {w}",
        "torch.atan2({x}, {w})",
    ]
    form = b.rng.choice(forms)
    w = b.parameter(*broadcast(b, v))
    return b.like(
        form.format(x=v.name, w=w, k=b.mask(broadcast(b, v)) if "{k}" in form else ""),
        v,
        learned=True,
    )


@parametric
def outer_elementwise(b: Builder, v: Value) -> Value | None:
    """A parameter with a dim more than the value, or wider than it where the value has size 1."""
    op = b.rng.choice("+*-")
    ones = [d for d in v.other_dims if v.shape[d] == 1]
    if ones and b.chance(0.7):
        d, size = b.rng.choice(ones), b.small()
        w = b.parameter(*[size if i == d else 1 for i in range(v.rank)])
        return b.emit(f"{v.name} {op} {w}", replaced(v.shape, d, size), v.layout, v, learned=True)
    if v.rank > 4:
        return None
    shape = [1 if d not in v.other_dims else v.shape[d] for d in range(v.rank)]
    lead = b.small()
    w = b.parameter(lead, *shape)
    return b.emit(f"{w} {op} {v.name}", (lead, *v.shape), shifted(v.layout, 0, 1), v, learned=True)


@parametric
def accumulated(b: Builder, v: Value) -> Value | None:
    """In-place ops that take a parameter."""
    copy = b.like(f"{v.name} * 1.1", v)
    op = b.rng.choice(["+=", "*=", "-="])
    b.lines.append(f"{copy.name} {op} {b.parameter(*broadcast(b, v))}")
    return b.like(f"{copy.name}.tanh()", copy, learned=True)


@parametric
def assigned(b: Builder, v: Value) -> Value | None:
    """A slice without samples overwritten by a parameter."""
    dims = [d for d in v.other_dims if v.shape[d] > 1]
    if not dims:
        return None
    d = b.rng.choice(dims)
    copy = b.like(f"{v.name} + 0.1", v)
    i = b.rng.randrange(v.shape[d])
    shape = [1 if k not in v.other_dims else v.shape[k] for k in range(v.rank) if k != d]
    b.lines.append(f"{copy.name}[{', '.join([':'] * d + [str(i)])}] = {b.parameter(*shape)}")
    return b.like(f"{copy.name}.sin()", copy, learned=True)


@parametric
def prelu(b: Builder, v: Value) -> Value | None:
    wide = v.rank > 1 and 1 in v.other_dims and b.chance(0.6)
    count = v.shape[1] if wide else 1
    if b.chance(0.5):
        return b.like(f"{b.module(f'nn.PReLU({count})')}({v.name})", v, learned=True)
    return b.like(f"F.prelu({v.name}, {b.parameter(count)})", v, learned=True)


@parametric
def joined_parameter(b: Builder, v: Value) -> Value | None:
    """cat of a parameter expanded to the batch: a class token, on either side."""
    if not v.other_dims:
        return None
    d, count = b.rng.choice(v.other_dims), b.rng.randint(1, 2)
    shape = tuple(count if k == d else v.shape[k] if k in v.other_dims else 1 for k in range(v.rank))
    sizes = ", ".join(str(count) if k == d else v.size(k) for k in range(v.rank))
    w = f"{b.parameter(*shape)}.expand({sizes})"
    if v.layout is not None and b.chance(0.3):
        w = f"{b.parameter(*shape)}.repeat({', '.join('1' if k in v.other_dims else v.size(k) for k in range(v.rank))})"
    pair = [v.name, w] if b.chance(0.5) else [w, v.name]
    return b.emit(
        f"torch.cat([{', '.join(pair)}], {b.axis(v, d)})",
        replaced(v.shape, d, v.shape[d] + count),
        v.layout,
        v,
        learned=True,
    )


@parametric
def expanded(b: Builder, v: Value) -> Value | None:
    """A parameter spread over the whole batch, alone at first."""
    if v.layout is None:
        return None
    shape = tuple(v.shape[d] if d in v.other_dims else 1 for d in range(v.rank))
    forms = [
        "{w}.expand({s})",
        "{w}.expand_as({x})",
        "{w} + torch.zeros({s}, dtype={x}.dtype)",
        "{w}.broadcast_to({s})",
    ]
    code = b.rng.choice(forms).format(w=b.parameter(*shape), s=", ".join(v.sizes()), x=v.name)
    w = b.like(code, v, learned=True)
    return b.like(f"{w.name}.tanh() * {v.name}", v, w)


# ---------------------------------------------------------------------------- products


@parametric
def linear(b: Builder, v: Value) -> Value | None:
    if v.rank == 0 or v.rank - 1 not in v.other_dims:
        return None
    i, o, bias = v.shape[-1], b.small(), b.chance(0.7)
    if b.chance(0.4):
        code = f"{b.module(f'nn.Linear({i}, {o}, bias={bias})')}({v.name})"
    else:
        code = f"F.linear({v.name}, {b.parameter(o, i)}{', ' + b.parameter(o) if bias else ''})"
    return b.emit(code, (*v.shape[:-1], o), v.layout, v, learned=True)


@parametric
def twice(b: Builder, v: Value) -> Value | None:
    """One module called twice."""
    if v.rank == 0 or v.rank - 1 not in v.other_dims:
        return None
    m = b.module(f"nn.Linear({v.shape[-1]}, {v.shape[-1]})")
    return b.like(f"{m}({m}({v.name}).tanh())", v, learned=True)


@parametric
def matmul_right(b: Builder, v: Value) -> Value | None:
    if v.rank == 0 or v.rank - 1 not in v.other_dims:
        return None
    i, o = v.shape[-1], b.small()
    if b.chance(0.2):
        layout = v.layout
        return b.emit(f"{v.name} @ {b.parameter(i)}", v.shape[:-1], layout, v, learned=True)
    lead: tuple[int, ...] = ()
    if v.rank > 2 and v.rank - 3 in v.other_dims and b.chance(0.7):
        lead = (v.shape[-3],)
    w = b.parameter(*lead, i, o)
    forms = ["{x} @ {w}", "torch.matmul({x}, {w})"]
    if v.rank == 2:
        forms += ["torch.mm({x}, {w})", f"torch.addmm({b.parameter(o)}, {{x}}, {{w}})"]
    if v.rank == 3 and lead:
        forms += [
            "torch.bmm({x}, {w})",
            f"torch.baddbmm({b.parameter(1, o)}, {{x}}, {{w}}, beta=0.5)",
        ]
    return b.emit(b.rng.choice(forms).format(x=v.name, w=w), (*v.shape[:-1], o), v.layout, v, learned=True)


@parametric
def matmul_left(b: Builder, v: Value) -> Value | None:
    if v.rank < 2 or v.rank - 2 not in v.other_dims:
        return None
    i, o = v.shape[-2], b.small()
    w = b.parameter(o, i)
    forms = ["{w} @ {x}", "torch.matmul({w}, {x})"] + (["torch.mm({w}, {x})"] if v.rank == 2 else [])
    return b.emit(
        b.rng.choice(forms).format(x=v.name, w=w),
        (*v.shape[:-2], o, v.shape[-1]),
        v.layout,
        v,
        learned=True,
    )


@parametric
def einsum(b: Builder, v: Value) -> Value | None:
    letters = string.ascii_lowercase[: v.rank]
    summed = [d for d in v.other_dims if b.chance(0.4)]
    shared = [d for d in v.other_dims if d in summed or b.chance(0.3)]
    new = "z" if b.chance(0.7) else ""
    w_letters = [letters[d] for d in shared] + [*new]
    b.rng.shuffle(w_letters)
    size = {**dict(zip(letters, v.shape, strict=True)), "z": b.small()}
    out = [x for d, x in enumerate(letters) if d not in summed] + [*new]
    b.rng.shuffle(out)
    w = b.parameter(*[size[x] for x in w_letters])
    terms, names = [letters, "".join(w_letters)], [v.name, w]
    if b.chance(0.4):
        terms, names = terms[::-1], names[::-1]
    layout = v.layout and v.layout._replace(dim=out.index(letters[v.layout.dim]))
    code = f'torch.einsum("{", ".join(terms)} -> {"".join(out)}", {", ".join(names)})'
    return b.emit(code, [size[x] for x in out], layout, v, learned=True)


@parametric
def tensordot(b: Builder, v: Value) -> Value | None:
    if not v.other_dims:
        return None
    d, o = b.rng.choice(v.other_dims), b.small()
    w = b.parameter(v.shape[d], o)
    return b.emit(
        f"torch.tensordot({v.name}, {w}, dims=([{d}], [0]))",
        (*replaced(v.shape, d), o),
        shifted(v.layout, d, -1),
        v,
        learned=True,
    )


@parametric
def bilinear(b: Builder, v: Value) -> Value | None:
    if v.rank < 2 or v.rank - 1 not in v.other_dims or v.layout is None:
        return None
    o, i = b.rng.randint(1, 3), v.shape[-1]
    w = b.rng.choice([w for w in b.values if w.shape == v.shape and w.layout == v.layout])
    code = f"F.bilinear({v.name}, {w.name}, {b.parameter(o, i, i)}, {b.parameter(o)})"
    return b.emit(code, (*v.shape[:-1], o), v.layout, v, w, learned=True)


@parametric
def attention(b: Builder, v: Value) -> Value | None:
    """Scaled dot-product attention of a value with itself, its bias a table of parameters."""
    if v.rank not in (3, 4) or v.layout is None or v.layout.dim >= v.rank - 2:
        return None
    t = v.shape[-2]
    code = f"F.scaled_dot_product_attention({v.name}, {v.name}, {v.name}, attn_mask={b.parameter(t, t)})"
    return b.like(code, v, learned=True)

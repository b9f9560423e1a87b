"""Ops of the random programs that take parameters: convolutions, norms, tables, modules called on parts."""

from __future__ import annotations

from tests.steps.builder import VOCABULARY, Builder, Layout, Value, tuple_text
from tests.steps.moves import shifted, to_dim, to_rank
from tests.steps.parametric import parametric


@parametric
def conv(b: Builder, v: Value) -> Value | None:
    if v.layout is None or v.rank < 2:
        return None
    nd = b.rng.choice([1, 1, 2])
    v = to_rank(b, to_dim(b, v, 0), nd + 2)
    groups = v.shape[1] if b.chance(0.25) else 1
    i, o = v.shape[1], groups * b.rng.randint(1, 2) if groups > 1 else b.small()
    k = [b.rng.randint(1, min(3, size + 2)) for size in v.shape[2:]]
    stride, bias = b.rng.choice([1, 1, 2]), b.chance(0.6)
    out = [(size + 2 - kk) // stride + 1 for size, kk in zip(v.shape[2:], k, strict=True)]
    if b.chance(0.2):
        w = b.parameter(o, i // groups, *b.rng.choices([1, 3], k=nd))
        code = f"F.conv{nd}d({v.name}, {w}, padding='same', dilation={b.rng.randint(1, 2)}, groups={groups})"
        return b.emit(code, (v.shape[0], o, *v.shape[2:]), v.layout, v, learned=True)
    if b.chance(0.5):
        mode = b.rng.choice(["zeros", "zeros", "circular", "replicate"])
        args = f"{i}, {o}, {tuple_text(k)}, stride={stride}, padding=1, groups={groups}, bias={bias}"
        module = b.module(f"nn.Conv{nd}d({args}, padding_mode='{mode}')")
        code = f"{module}({v.name})"
    else:
        w = b.parameter(o, i // groups, *k)
        beta = b.parameter(o) if bias else None
        code = f"F.conv{nd}d({v.name}, {w}, {beta}, stride={stride}, padding=1, groups={groups})"
    return b.emit(code, (v.shape[0], o, *out), v.layout, v, learned=True)


@parametric
def conv_transpose(b: Builder, v: Value) -> Value | None:
    if v.layout is None or v.rank < 2:
        return None
    v = to_rank(b, to_dim(b, v, 0), 3)
    o = b.rng.randint(1, 3)
    w = b.parameter(v.shape[1], o, 2)
    return b.emit(
        f"F.conv_transpose1d({v.name}, {w}, stride=2)",
        (v.shape[0], o, 2 * v.shape[2]),
        v.layout,
        v,
        learned=True,
    )


@parametric
def layer_norm(b: Builder, v: Value) -> Value | None:
    first = v.rank if v.layout is None else v.layout.dim + 1
    if v.rank == 0 or (first >= v.rank and v.layout is not None):
        return None
    d = b.rng.randrange(first if v.layout is not None else 0, v.rank)
    shape = v.shape[d:]
    text, bias = tuple_text(shape), b.chance(0.6)
    forms = [f"{b.module(f'nn.LayerNorm({text}, bias={bias})')}({v.name})"]
    if b.chance(0.6):
        w, beta = b.parameter(*shape), b.parameter(*shape) if bias else "None"
        forms = [
            f"F.layer_norm({v.name}, {text}, {w}, {beta}, eps=0.01)",
            f"F.rms_norm({v.name}, {text}, {w}, eps=0.01)",
        ]
        if b.chance(0.3):
            forms = [f"{b.module(f'nn.RMSNorm({text}, eps=0.01)')}({v.name})"]
    return b.like(b.rng.choice(forms), v, learned=True)


@parametric
def channel_norm(b: Builder, v: Value) -> Value | None:
    """group_norm, instance_norm and batch_norm in eval mode on (N, C, ...)."""
    if v.layout is None or v.rank < 2:
        return None
    kind = b.rng.choice(["group", "group", "instance", "batch"])
    if kind != "batch" or v.layout.dim == 1:
        v = to_dim(b, v, 0)
    c = v.shape[1]
    w, beta = b.parameter(c), b.parameter(c)
    if kind == "group":
        groups = b.rng.choice([k for k in range(1, c + 1) if c % k == 0])
        if v.numel // v.shape[0] // groups < 2:
            return None
        # PyTorch 2.13 crashes in group_norm's backward on channels-last input that needs no gradient
        code = f"F.group_norm({v.name}.contiguous(), {groups}, {w}, {beta}, eps=0.01)"
        if b.chance(0.5):
            code = f"{b.module(f'nn.GroupNorm({groups}, {c})')}({v.name}.contiguous())"
        return b.like(code, v, learned=True)
    if kind == "instance":
        v = to_rank(b, v, 3)
        if v.shape[2] < 2:
            return None
        return b.like(
            f"F.instance_norm({v.name}, None, None, {b.parameter(v.shape[1])}, {b.parameter(v.shape[1])}, eps=0.01)",
            v,
            learned=True,
        )
    if b.chance(0.4) and v.rank < 4:
        return b.like(f"{b.module(f'nn.BatchNorm1d({c}).eval()')}({v.name})", v, learned=True)
    # PyTorch's own gradient of x is wrong on CPU where the weight is not contiguous (2.13): a bare one
    w = b.bare((c,))
    mean, variance = b.constant((c,)), b.buffer(f"torch.full(({c},), 0.7)")
    return b.like(
        f"F.batch_norm({v.name}, {mean}, {variance}.abs() + 0.5, {w}, {beta}, False)",
        v,
        learned=True,
    )


@parametric
def embedding(b: Builder, v: Value) -> Value | None:
    """A table looked up by an integer input, or by the value itself made an integer."""
    width = b.small()
    padding = b.rng.choice(["", "", f", padding_idx={b.rng.randrange(VOCABULARY)}"])
    if not b.ids or b.chance(0.2):
        name, source = f"({v.name}.detach().abs() * 2).long().clamp(max={VOCABULARY - 1})", v
    else:
        source = b.rng.choice(b.ids)
        name = source.name
    table = b.parameter(VOCABULARY, width)
    codes = [f"F.embedding({name}, {table}{padding})"]
    if source.rank:  # Dynamo makes a number of a 0-dim index
        codes.append(f"{table}[{name}]")
    if b.chance(0.4):
        codes = [f"{b.module(f'nn.Embedding({VOCABULARY}, {width}{padding})')}({name})"]
    return b.emit(b.rng.choice(codes), (*source.shape, width), source.layout, source, learned=True)


@parametric
def positions(b: Builder, v: Value) -> Value | None:
    """A table looked up by positions made at run time: a function of parameters alone."""
    if v.rank < 2 or v.rank - 1 not in v.other_dims or v.rank - 2 not in v.other_dims:
        return None
    t, c = v.shape[-2:]
    return b.like(
        f"{v.name} + F.embedding(torch.arange({t}), {b.parameter(t + b.rng.randint(0, 2), c)})",
        v,
        learned=True,
    )


@parametric
def table_by_ids(b: Builder, v: Value) -> Value | None:
    """Other ways to look rows of a parameter up by integer inputs."""
    if not b.ids:
        return None
    ids, width = b.rng.choice(b.ids), b.small()
    if b.chance(0.3):
        code = f"{b.parameter(width, VOCABULARY)}[:, {ids.name}]"
        return b.emit(code, (width, *ids.shape), shifted(ids.layout, 0, 1), ids, learned=True)
    table = b.parameter(VOCABULARY, width)
    if ids.rank == 2 and ids.layout == Layout(0) and b.chance(0.5):
        code = f"F.embedding_bag({ids.name}, {table}, mode='{b.rng.choice(['sum', 'mean'])}')"
        return b.emit(code, (1, width), ids.layout, ids, learned=True)
    codes = [f"F.one_hot({ids.name}, {VOCABULARY}).double() @ {table}"]
    if ids.rank == 1:
        codes.append(f"{table}.index_select(0, {ids.name})")
    return b.emit(b.rng.choice(codes), (*ids.shape, width), ids.layout, ids, learned=True)


@parametric
def scale_by_class(b: Builder, v: Value) -> Value | None:
    """One number per sample looked up in a parameter."""
    flat = [x for x in b.ids if x.rank == 1]
    if not flat or v.layout is None or v.shape[v.layout.dim] != 1:
        return None
    view = ", ".join("1" if d in v.other_dims else "B" for d in range(v.rank))
    return b.like(f"{v.name} * {b.parameter(VOCABULARY)}[{flat[0].name}].view({view})", v, learned=True)


@parametric
def module_over_parts(b: Builder, v: Value) -> Value | None:
    """One module called on every part of a dim: its uses add up."""
    dims = [d for d in v.other_dims if v.shape[d] <= 4 and d != v.rank - 1]
    if not dims or v.rank - 1 not in v.other_dims:
        return None
    d, o = b.rng.choice(dims), b.small()
    m = b.module(f"nn.Linear({v.shape[-1]}, {o})")
    code = f"torch.stack([{m}(part) for part in {v.name}.unbind({d})], {d})"
    return b.emit(code, (*v.shape[:-1], o), v.layout, v, learned=True)


@parametric
def recurrence(b: Builder, v: Value) -> Value | None:
    """A hand-written recurrence over a dim, its state starting from a parameter or from zeros of the batch's size."""
    if v.rank != 3 or v.layout is None or v.layout.dim == 2:
        return None
    d, h = 1 - v.layout.dim, b.rng.randint(1, 3)
    if v.shape[d] > 4:
        return None
    w, u = b.parameter(h, v.shape[2]), b.parameter(h, h)
    size = v.size(v.layout.dim)
    start = b.rng.choice([f"{v.name}.new_zeros({size}, {h})", f"{b.parameter(h)}.expand({size}, {h})"])
    state = b.name("h")
    b.lines.append(f"{state} = {start}")
    b.lines.append(f"for part in {v.name}.unbind({d}):")
    b.lines.append(f"    {state} = torch.tanh(F.linear(part, {w}) + F.linear({state}, {u}))")
    return b.emit(f"{state} * 1", (v.shape[v.layout.dim], h), v.layout._replace(dim=0), v, learned=True)


@parametric
def checkpointed(b: Builder, v: Value) -> Value | None:
    """A layer under activation checkpointing."""
    if v.rank == 0 or v.rank - 1 not in v.other_dims or not v.learned:
        return None
    m = b.module(f"nn.Linear({v.shape[-1]}, {v.shape[-1]})")
    code = f"checkpoint(lambda t: {m}(t).tanh(), {v.name}, use_reentrant=False)"
    return b.like(code, v, learned=True)


@parametric
def weight_normed(b: Builder, v: Value) -> Value | None:
    if v.rank == 0 or v.rank - 1 not in v.other_dims:
        return None
    o = b.small()
    m = b.module(f"nn.utils.parametrizations.weight_norm(nn.Linear({v.shape[-1]}, {o}))")
    return b.emit(f"{m}({v.name})", (*v.shape[:-1], o), v.layout, v, learned=True)


@parametric
def without_grad(b: Builder, v: Value) -> Value | None:
    """A layer whose result carries no gradient, used as a gate."""
    if v.rank == 0 or v.rank - 1 not in v.other_dims:
        return None
    gate = b.name("a")
    b.lines.append("with torch.no_grad():")
    b.lines.append(f"    {gate} = {v.name} @ {b.parameter(v.shape[-1], v.shape[-1])}")
    return b.like(f"{v.name} * {gate}.sigmoid()", v)

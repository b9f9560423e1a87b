"""Ops of the random programs that mix samples on purpose: fxgrad has to refuse them."""

from __future__ import annotations

from tests.steps.builder import Builder, Value
from tests.steps.expected import Expected
from tests.steps.moves import to_dim
from tests.steps.step import table

MIXING, mixing = table("mixing", Expected.MIXES)


def sample_dim(v: Value) -> int:
    assert v.layout is not None
    return v.layout.dim


@mixing
def across(b: Builder, v: Value) -> Value | None:
    d = sample_dim(v)
    forms = [
        f"{{0}} - {{0}}.mean({d}, keepdim=True)",
        f"F.softmax({{0}}, dim={d})",
        f"{{0}} + {{0}}.flip({d})",
    ]
    forms += [
        f"{{0}} * {{0}}.roll(1, {d})",
        f"{{0}}.cumsum({d})",
        f"{{0}}.sort({d}).values",
        "{0} * {0}.mean()",
    ]
    forms += [
        "{0} / (1 + {0}.norm())",
        f"{{0}} * {{0}}.select({d}, 0).unsqueeze({d})",
        f"F.normalize({{0}}, dim={d})",
    ]
    forms += [
        f"{{0}}.flip({d})",
        f"{{0}}.roll(1, {d})",
        f"{{0}} - {{0}}.narrow({d}, 0, 1)",
        f"{{0}}.log_softmax({d})",
    ]
    forms += [
        f"{{0}} * {{0}}.amax({d}, keepdim=True)",
        f"{{0}} + {{0}}.sum({d}, keepdim=True).tanh()",
    ]
    return b.like(b.rng.choice(forms).format(v.name), v)


@mixing
def gram(b: Builder, v: Value) -> Value | None:
    """Every sample against every other one."""
    if v.rank != 2:
        return None
    v = to_dim(b, v, 0)
    return b.like(f"({v.name} @ {v.name}.T).softmax(-1) @ {v.name}", v)


@mixing
def batch_norm(b: Builder, v: Value) -> Value | None:
    if v.rank < 2:
        return None
    v = to_dim(b, v, 0)
    if v.numel == v.shape[1]:  # one value per channel is an error for a single sample
        return None
    return b.like(
        f"F.batch_norm({v.name}, None, None, {b.bare((v.shape[1],))}, None, True, eps=0.01)",
        v,
        learned=True,
    )


@mixing
def misread(b: Builder, v: Value) -> Value | None:
    """(B, T) memory read as (T, B) or the reverse: the shape is right, the samples are not."""
    others = [d for d in v.other_dims if v.shape[d] > 1]
    if not others:
        return None
    d, e = sorted((sample_dim(v), b.rng.choice(others)))
    sizes = v.sizes()
    sizes[d], sizes[e] = sizes[e], sizes[d]
    code = b.rng.choice([".reshape({0}).transpose({1}, {2})", ".transpose({1}, {2}).reshape({3})"])
    return b.like(v.name + code.format(", ".join(sizes), d, e, ", ".join(v.sizes())), v)


@mixing
def conv_over_samples(b: Builder, v: Value) -> Value | None:
    if v.rank != 3:
        return None
    v = to_dim(b, v, 2)
    return b.like(f"F.conv1d({v.name}, {b.parameter(v.shape[1], v.shape[1], 3)}, padding=1)", v, learned=True)


@mixing
def attention_over_samples(b: Builder, v: Value) -> Value | None:
    if v.rank != 3:
        return None
    v = to_dim(b, v, 1)
    return b.like(f"F.scaled_dot_product_attention({v.name}, {v.name}, {v.name})", v)


@mixing
def picked_by_others(b: Builder, v: Value) -> Value | None:
    """Rows of other samples, by a run-time index or by position."""
    d = sample_dim(v)
    rows = f"torch.arange({v.size(d)} - 1, -1, -1)"
    forms = [f"{v.name}.index_select({d}, {rows})", f"{v.name}[{':, ' * d}{rows}] + {v.name}"]
    forms.append(f"torch.cat([{v.name}.narrow({d}, 1, {v.size(d)} - 1), {v.name}.narrow({d}, 0, 1)], {d})")
    flat = [x for x in b.ids if x.rank == 1]
    if flat and d == 0:
        forms.append(f"{v.name}[{flat[0].name} % B]" if v.shape[0] == 1 else forms[0])
    if flat and d == 0 and v.shape[0] == 1:
        view = ", ".join(["B"] + ["1"] * (v.rank - 1))
        forms.append(f"{v.name}.gather(0, ({flat[0].name} % B).view({view}).expand({', '.join(v.sizes())}))")
    return b.like(b.rng.choice(forms), v)


@mixing
def pairwise(b: Builder, v: Value) -> Value | None:
    """Distances and products of every sample with every other one, summed over the others."""
    if v.rank != 2:
        return None
    v = to_dim(b, v, 0)
    forms = [
        'torch.einsum("ab, cb -> ac", {0}, {0}).sum(1, keepdim=True)',
        "torch.cdist({0}, {0} + 1).mean(1, keepdim=True)",
        "torch.mm({0}, {0}.t()).amax(1, keepdim=True)",
        "({0}.unsqueeze(1) - {0}.unsqueeze(0)).square().sum((1, 2)).unsqueeze(1)",
        "{0}.matmul({0}.mT).tanh().sum(-1, keepdim=True)",
        "F.cosine_similarity({0}, {0}.flip(0), dim=1, eps=0.1).unsqueeze(1)",
        '({0} @ torch.einsum("ab, ac -> bc", {0}, {0})).sum(1, keepdim=True)',
    ]
    return b.emit(b.rng.choice(forms).format(v.name), (v.shape[0], 1), v.layout, v)


@mixing
def neighbours(b: Builder, v: Value) -> Value | None:
    """Sliding over the sample dim: pooling, shifts, differences."""
    d = sample_dim(v)
    last = to_dim(b, v, v.rank - 1) if v.rank > 1 else v
    forms = [
        "F.pad({0}, (1, 0))[..., :-1]",
        "{0} - F.pad({0}, (1, 0))[..., :-1]",
        "{0}.roll(1, -1) + {0}",
    ]
    forms += [
        "F.pad({0}, (1, 1)).unfold(-1, 3, 1).sum(-1)",
        "F.layer_norm({0}, ({0}.shape[-1],), eps=0.01)",
    ]
    if v.rank == 3:
        forms += [
            "F.avg_pool1d({0}, 3, 1, 1)",
            "F.max_pool1d({0}, 3, 1, 1)",
            "F.instance_norm({0}, eps=0.01)",
        ]
    if d == v.rank - 1:
        forms.append("{0}.logcumsumexp(-1)")
    return b.like(b.rng.choice(forms).format(last.name), last)


@mixing
def normed_over_samples(b: Builder, v: Value) -> Value | None:
    """group_norm whose group spans the sample dim."""
    if v.rank != 3:
        return None
    v = to_dim(b, v, 2)
    if v.shape[1] < 2:
        return None
    return b.like(f"F.group_norm({v.name}, 1, {b.bare((v.shape[1],))}, None, eps=0.01)", v, learned=True)

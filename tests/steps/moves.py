"""Ops of the random programs that move or pick elements, and hold no parameter.

Each takes the builder and a value and writes one or two lines, keeping the layout by its own arithmetic, or returns
None where it does not apply.
"""

from __future__ import annotations

import math

from tests.steps.builder import Builder, Layout, Value, tuple_text
from tests.steps.expected import Expected
from tests.steps.step import table

MOVES, move = table("moves", Expected.APART)


def replaced(shape: tuple[int, ...], dim: int, *sizes: int) -> tuple[int, ...]:
    """The shape with dim `dim` replaced by `sizes`."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def shifted(layout: Layout | None, dim: int, by: int) -> Layout | None:
    """The layout after `by` dims were put in front of `dim`, or taken away there."""
    if layout is None or layout.dim < dim:
        return layout
    return layout._replace(dim=layout.dim + by)


def permuted(b: Builder, v: Value, order: list[int], code: str) -> Value:
    layout = v.layout and v.layout._replace(dim=order.index(v.layout.dim))
    return b.emit(code, [v.shape[d] for d in order], layout, v)


def to_dim(b: Builder, v: Value, target: int) -> Value:
    """Move the samples to dim `target`."""
    assert v.layout is not None
    if v.layout.dim == target:
        return v
    order = [d for d in range(v.rank) if d != v.layout.dim]
    order.insert(target, v.layout.dim)
    return permuted(b, v, order, f"{v.name}.movedim({v.layout.dim}, {target})")


def to_rank(b: Builder, v: Value, rank: int) -> Value:
    """Merge or add trailing dims behind a leading sample dim until the rank is right."""
    while v.rank < rank:
        v = b.emit(f"{v.name}.unsqueeze(-1)", (*v.shape, 1), v.layout, v)
    if v.rank > rank:
        merged = (*v.shape[: rank - 1], math.prod(v.shape[rank - 1 :]))
        v = b.emit(f"{v.name}.flatten({rank - 1})", merged, v.layout, v)
    return v


# ---------------------------------------------------------------------------- movement


@move
def transpose(b: Builder, v: Value) -> Value | None:
    if v.rank < 2:
        return None
    i, j = b.rng.sample(range(v.rank), 2)
    order = list(range(v.rank))
    order[i], order[j] = j, i
    return permuted(b, v, order, f"{v.name}.transpose({b.axis(v, i)}, {b.axis(v, j)})")


@move
def permute(b: Builder, v: Value) -> Value | None:
    if v.rank < 3:
        return None
    order = b.rng.sample(range(v.rank), v.rank)
    return permuted(b, v, order, f"{v.name}.permute({', '.join(map(str, order))})")


@move
def merge(b: Builder, v: Value) -> Value | None:
    if v.rank < 2:
        return None
    d = b.rng.randrange(v.rank - 1)
    layout = shifted(v.layout, d + 1, -1)
    if v.layout is not None and v.layout.dim == d:
        layout = v.layout._replace(inner=v.layout.inner * v.shape[d + 1])
    elif v.layout is not None and v.layout.dim == d + 1:
        layout = Layout(d, v.layout.outer * v.shape[d], v.layout.inner)
    shape = (*v.shape[:d], v.shape[d] * v.shape[d + 1], *v.shape[d + 2 :])
    sizes = v.sizes()
    joined = tuple_text([*sizes[:d], f"{sizes[d]} * {sizes[d + 1]}", *sizes[d + 2 :]])
    code = b.rng.choice([f".flatten({d}, {d + 1})", f".reshape{joined}", f".contiguous().view{joined}"])
    if b.chance(0.2):
        code = f".reshape{tuple_text([*sizes[:d], '-1', *sizes[d + 2 :]])}"
    return b.emit(v.name + code, shape, layout, v)


@move
def split_dim(b: Builder, v: Value) -> Value | None:
    """unflatten: a dim without samples into two factors, or the sample dim into two or three."""
    if v.rank == 0 or v.rank > 4:
        return None
    d = b.rng.randrange(v.rank)
    if v.layout is None or v.layout.dim != d:
        first = b.rng.choice([k for k in range(1, v.shape[d] + 1) if v.shape[d] % k == 0])
        sizes = (first, v.shape[d] // first)
        text = tuple_text(b.rng.choice([sizes, (-1, sizes[1]), (sizes[0], -1)]) if all(sizes) else sizes)
        code = f"{v.name}.unflatten({b.axis(v, d)}, {text})"
        return b.emit(code, replaced(v.shape, d, *sizes), shifted(v.layout, d + 1, 1), v)
    outer, inner = v.layout.outer, v.layout.inner
    left = b.rng.choice([k for k in range(1, outer + 1) if outer % k == 0])
    right = b.rng.choice([k for k in range(1, inner + 1) if inner % k == 0])
    middle = (outer // left) * (inner // right)
    pieces = [
        (left, str(left)),
        (middle, f"{middle} * B" if middle > 1 else "B"),
        (right, str(right)),
    ]
    keep = [p for i, p in enumerate(pieces) if i == 1 or p[0] > 1]
    new = tuple(p[0] for p in keep)
    layout = Layout(d + (left > 1), outer // left, inner // right)
    text = tuple_text([p[1] for p in keep])
    sizes_text = [*v.sizes()[:d], *(p[1] for p in keep), *v.sizes()[d + 1 :]]
    code = f"unflatten({d}, {text})" if b.chance(0.6) else f"reshape{tuple_text(sizes_text)}"
    return b.emit(f"{v.name}.{code}", replaced(v.shape, d, *new), layout, v)


@move
def canonical(b: Builder, v: Value) -> Value | None:
    """Samples first, alone in their dim."""
    if v.layout is None or (v.layout.dim == 0 and v.shape[0] == 1):
        return None
    d, outer, inner = v.layout
    sizes = [*v.sizes()[:d], str(outer), "B", str(inner), *v.sizes()[d + 1 :]]
    shape = (1, *v.shape[:d], outer, inner, *v.shape[d + 1 :])
    code = f"{v.name}.reshape({', '.join(sizes)}).movedim({d + 1}, 0)"
    w = b.emit(code, shape, Layout(0), v)
    return b.emit(
        f"{w.name}.flatten({d + 1}, {d + 2})",
        replaced(shape, d + 1, outer * inner)[: d + 2] + shape[d + 3 :],
        Layout(0),
        w,
    )


@move
def insert_one(b: Builder, v: Value) -> Value | None:
    if v.rank > 4:
        return None
    d = b.rng.randint(0, v.rank)
    shape = (*v.shape[:d], 1, *v.shape[d:])
    code = f"{v.name}.unsqueeze({d})"
    if b.chance(0.3):
        code = f"{v.name}[{', '.join([':'] * d + ['None'])}]"
    return b.emit(code, shape, shifted(v.layout, d, 1), v)


@move
def remove_one(b: Builder, v: Value) -> Value | None:
    ones = [d for d in v.other_dims if v.shape[d] == 1]
    if not ones:
        return None
    d = b.rng.choice(ones)
    return b.emit(f"{v.name}.squeeze({b.axis(v, d)})", replaced(v.shape, d), shifted(v.layout, d, -1), v)


@move
def expand_one(b: Builder, v: Value) -> Value | None:
    ones = [d for d in v.other_dims if v.shape[d] == 1]
    if not ones:
        return None
    d, size = b.rng.choice(ones), b.small()
    sizes: list[str | int] = ["-1"] * v.rank
    sizes[d] = size
    return b.emit(f"{v.name}.expand({', '.join(map(str, sizes))})", replaced(v.shape, d, size), v.layout, v)


@move
def repeat(b: Builder, v: Value) -> Value | None:
    """repeat or repeat_interleave, along any dim: the sample dim gets a larger outer or inner factor."""
    if v.rank == 0:
        return None
    d, times, layout = b.rng.randrange(v.rank), b.rng.randint(2, 3), v.layout
    interleave = b.chance(0.5)
    if layout is not None and layout.dim == d:
        outer, inner = layout.outer, layout.inner
        layout = Layout(d, outer, inner * times) if interleave else Layout(d, outer * times, inner)
    code = f"repeat_interleave({times}, dim={d})"
    if not interleave:
        code = f"repeat({', '.join(str(times if i == d else 1) for i in range(v.rank))})"
    return b.emit(f"{v.name}.{code}", replaced(v.shape, d, v.shape[d] * times), layout, v)


@move
def piece(b: Builder, v: Value) -> Value | None:
    """chunk, split, unbind, slices: a part of a dim without samples."""
    dims = [d for d in v.other_dims if v.shape[d] > 0]
    if not dims:
        return None
    d = b.rng.choice(dims)
    size, axis, colons = v.shape[d], b.axis(v, d), ", ".join([":"] * d)
    lead = colons + ", " if colons else ""
    i = b.rng.randrange(size)
    form = b.rng.randrange(5)
    if form == 0:
        code = b.rng.choice(
            [
                f".unbind({axis})[{i}]",
                f".select({axis}, {i - size})",
                f"[{lead}{i}]",
                f"[{lead}{i - size}]",
            ]
        )
        return b.emit(v.name + code, replaced(v.shape, d), shifted(v.layout, d, -1), v)
    if form == 1 and size > 1:
        first = b.rng.randint(1, size - 1)
        names = b.name("a"), b.name("a")
        b.lines.append(f"{', '.join(names)} = {v.name}.split([{first}, {size - first}], dim={axis})")
        b.emit(names[0], replaced(v.shape, d, first), v.layout, v)
        return b.emit(names[1], replaced(v.shape, d, size - first), v.layout, v)
    if form == 2 and size % 2 == 0:
        code = f".chunk(2, {axis})[{b.rng.randint(0, 1)}]"
        return b.emit(v.name + code, replaced(v.shape, d, size // 2), v.layout, v)
    if form == 3:
        length = b.rng.randint(1, size - i)
        return b.emit(f"{v.name}.narrow({axis}, {i}, {length})", replaced(v.shape, d, length), v.layout, v)
    step = b.rng.randint(1, 2)
    stop = b.rng.randint(i + 1, size)
    code = (
        f"{v.name}[{lead}{i}:{stop}:{step}]"
        if b.chance(0.7)
        else f"{v.name}[..., {i}:{stop}:{step}{', :' * (v.rank - 1 - d)}]"
    )
    return b.emit(code, replaced(v.shape, d, len(range(i, stop, step))), v.layout, v)


@move
def piece_of_samples(b: Builder, v: Value) -> Value | None:
    """One of the outer or inner repetitions of a merged sample dim: every sample is still there."""
    if v.layout is None or v.shape[v.layout.dim] == 1:
        return None
    d, outer, inner = v.layout
    lead = "".join([":, "] * d)
    if outer > 1:
        k, block = b.rng.randrange(outer), f"{inner} * B" if inner > 1 else "B"
        codes = [
            f"[{lead}{k} * {block}:{k + 1} * {block}]",
            f".chunk({outer}, {d})[{k}]",
            f".split({block}, {d})[{k}]",
        ]
        return b.emit(v.name + b.rng.choice(codes), replaced(v.shape, d, inner), Layout(d, 1, inner), v)
    k = b.rng.randrange(inner)
    return b.emit(f"{v.name}[{lead}{k}::{inner}]", replaced(v.shape, d, 1), Layout(d), v)


@move
def indexed(b: Builder, v: Value) -> Value | None:
    """Integer index, index_select, gather and take_along_dim within a sample."""
    dims = [d for d in v.other_dims if v.shape[d] > 0]
    if not dims:
        return None
    d, count = b.rng.choice(dims), b.rng.randint(1, 4)
    index = b.index(v.shape[d], count)
    colons = "".join([":, "] * d)
    codes = [f"[{colons}{index}]", f".index_select({b.axis(v, d)}, {index})"]
    if v.layout is not None:
        view = ", ".join(str(count) if i == d else "1" for i in range(v.rank))
        sizes = ", ".join("-1" if i == d else v.size(i) for i in range(v.rank))
        codes += [
            f".gather({d}, {index}.view({view}).expand({sizes}))",
            f".take_along_dim({index}.view({view}), {d})",
        ]
    return b.emit(v.name + b.rng.choice(codes), replaced(v.shape, d, count), v.layout, v)


@move
def spread(b: Builder, v: Value) -> Value | None:
    """scatter, index_add and sliding windows along a dim without samples."""
    dims = [d for d in v.other_dims if v.shape[d] > 1]
    if not dims:
        return None
    d = b.rng.choice(dims)
    if b.chance(0.4) and v.rank < 5:
        size = b.rng.randint(1, v.shape[d])
        code = f"{v.name}.unfold({b.axis(v, d)}, {size}, 1)"
        return b.emit(code, (*replaced(v.shape, d, v.shape[d] - size + 1), size), v.layout, v)
    size = b.rng.randint(2, 4)
    target = [str(size) if k == d else v.size(k) for k in range(v.rank)]
    zeros = f"{v.name}.new_zeros({', '.join(target)})"
    if b.chance(0.5):
        code = f"{zeros}.index_add({d}, {b.index(size, v.shape[d])}, {v.name})"
    else:
        view = ", ".join(str(v.shape[d]) if k == d else "1" for k in range(v.rank))
        sizes = ", ".join("-1" if k == d else v.size(k) for k in range(v.rank))
        code = f"{zeros}.scatter_add({d}, {b.index(size, v.shape[d])}.view({view}).expand({sizes}), {v.name})"
    return b.emit(code, replaced(v.shape, d, size), v.layout, v)


@move
def picked_per_sample(b: Builder, v: Value) -> Value | None:
    """One position per sample, by a run-time index: x[arange(B), ids], or gather with ids of the sample."""
    flat = [x for x in b.ids if x.rank == 1]
    if not flat or v.layout != Layout(0) or v.rank < 2 or v.shape[0] != 1 or v.shape[1] == 0:
        return None
    index = f"({flat[0].name} % {v.shape[1]})"
    if b.chance(0.4):
        return b.emit(f"{v.name}[torch.arange(B), {index}]", replaced(v.shape, 1), v.layout, v)
    view = ", ".join(["B"] + ["1"] * (v.rank - 1))
    sizes = ", ".join(["-1", "1", *v.sizes()[2:]])
    code = f"{v.name}.gather(1, {index}.view({view}).expand({sizes}))"
    return b.emit(code, replaced(v.shape, 1, 1), v.layout, v)


@move
def joined(b: Builder, v: Value) -> Value | None:
    """cat or stack of two values of one shape and layout; cat along the sample dim adds to its outer factor."""
    partners = [w for w in b.values if w.shape == v.shape and w.layout == v.layout]
    w = b.rng.choice(partners)
    pair = f"[{v.name}, {w.name}]"
    if b.chance(0.4) or v.rank == 0:
        d = b.rng.randint(0, v.rank)
        return b.emit(
            f"torch.stack({pair}, {d})",
            (*v.shape[:d], 2, *v.shape[d:]),
            shifted(v.layout, d, 1),
            v,
            w,
        )
    d, layout = b.rng.randrange(v.rank), v.layout
    if layout is not None and layout.dim == d:
        layout = layout._replace(outer=2 * layout.outer)
    return b.emit(f"torch.cat({pair}, {b.axis(v, d)})", replaced(v.shape, d, 2 * v.shape[d]), layout, v, w)


@move
def reordered(b: Builder, v: Value) -> Value | None:
    """flip, roll, sort along a dim without samples."""
    if not v.other_dims:
        return None
    d = b.rng.choice(v.other_dims)
    if b.chance(0.2):
        k = b.rng.randint(1, v.shape[d])
        return b.emit(f"{v.name}.topk({k}, dim={d}).values", replaced(v.shape, d, k), v.layout, v)
    return b.like(
        v.name + b.rng.choice([f".flip({d})", f".flip([{b.axis(v, d)}])", f".roll(1, {d})", f".sort({d}).values"]),
        v,
    )


@move
def padded(b: Builder, v: Value) -> Value | None:
    if v.rank == 0 or (v.layout is not None and v.layout.dim == v.rank - 1):
        return None
    left, right = b.rng.randint(0, 2), b.rng.randint(0, 2)
    return b.emit(
        f"F.pad({v.name}, ({left}, {right}))",
        replaced(v.shape, v.rank - 1, v.shape[-1] + left + right),
        v.layout,
        v,
    )

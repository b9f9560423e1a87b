"""Rules of ops that move elements: they move the ids in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxgrad.proof.calls import LARGEST, Call, Undecided
from fxgrad.proof.origins import MANY, added, folded, joined, no_samples, regrouped, whole
from fxgrad.proof.rules.registry import follows


@follows("view _unsafe_view reshape _reshape_alias view_copy _reshape_copy")
def view(call: Call) -> Tensor:
    source = call.ids("self")
    if "dtype" in call.arguments:
        values = call.arguments["self"], call.outputs[0]
        if any(value.is_complex() for value in values) or len({value.element_size() for value in values}) > 1:
            raise Undecided("it reads values as another dtype, of another width")
        return source
    if source.numel() == 1:
        return source.reshape([1] * call.out_rank())
    return regrouped(source, call.shape("self"), call.out_shape())


@follows(
    """permute transpose t unsqueeze squeeze diagonal split unbind split_with_sizes unfold rot90 permute_copy
    transpose_copy unsqueeze_copy squeeze_copy diagonal_copy unbind_copy split_copy split_with_sizes_copy
    unsafe_split unsafe_split_with_sizes unfold_copy"""
)
def moved(call: Call) -> Any:
    """Run the op on ids in place of values."""
    source, shape = call.ids("self"), call.shape("self")
    if source.numel() == 1 and len(call.outputs) == 1:
        return source.reshape([1] * call.out_rank())
    numbers = {name: call.get(name) for name in call.arguments if name != "self"}
    for name in numbers:
        _check(call, name, shape)
    result = call.run({**numbers, "self": source.expand(shape)})
    return list(result) if isinstance(result, tuple | list) else result


@follows("expand expand_copy")
def expand(call: Call) -> Tensor:
    """Keep the ids, which broadcast as the values do."""
    return call.ranked(call.ids("self"))


def _check(call: Call, name: str, shape: Sequence[int]) -> None:
    """Check offsets and lengths along dimensions that grow with the batch; there they may act as thresholds."""
    if name in ("split_size", "split_sizes", "size", "step"):
        for dim in call.dims("dim" if "dim" in call.arguments else "dimension", len(shape)):
            call.check_numbers(call.arguments[name], dim)
    if name == "offset":  # a distant diagonal has no elements in a small matrix
        for dim in (call.get("dim1"), call.get("dim2")):
            call.check_numbers(call.arguments["offset"], dim % len(shape))


@follows("slice slice_copy select select_copy narrow_copy")
def cut(call: Call) -> Tensor:
    """Take a slice along one dimension; refuse one that may be empty only at this batch size."""
    source = call.ids("self")
    (dim,) = call.dims("dim", source.dim())
    names = _check_along(call, dim)
    if source.shape[dim] == 1:
        return source.squeeze(dim) if call.name.startswith("select") else source
    numbers = {name: call.get(name) for name in names}
    return call.run({**numbers, "self": call.full(source, call.shape("self"), [dim])})  # type: ignore[no-any-return]


def _check_along(call: Call, dim: int) -> list[str]:
    """Check the numbers that place a slice along a dimension; return their names."""
    names = [name for name in call.arguments if name not in ("self", "src", "dim")]
    for name in names:
        call.check_numbers(call.arguments[name], dim)
    return names


@follows("cat")
def cat(call: Call) -> Tensor:
    parts = [part for part in call.arguments["tensors"] if part.dim() == call.out_rank()]
    (dim,) = call.dims("dim", call.out_rank())
    ids = [call.of(part) for part in parts]
    if all(part_ids.shape[dim] == 1 for part_ids in ids) and all(torch.equal(part_ids, ids[0]) for part_ids in ids):
        return ids[0]
    sizes = [max(part_ids.shape[d] for part_ids in ids) for d in range(call.out_rank())]
    full = []
    for part, part_ids in zip(parts, ids, strict=True):
        sizes[dim] = call.trial.shape(part.shape)[dim]
        full.append(call.full(part_ids, sizes, range(len(sizes))))
    return torch.cat(full, dim)


@follows("stack")
def stack(call: Call) -> Tensor:
    parts = call.arguments["tensors"]
    (dim,) = call.dims("dim", call.out_rank())
    ids = torch.broadcast_tensors(*(call.of(part) for part in parts))
    return torch.stack(ids, dim)


@follows("roll flip")
def turned(call: Call) -> Tensor:
    source, shape = call.ids("self"), call.shape("self")
    dims = call.dims("dims", len(shape)) if call.get("dims") or call.name == "roll" else []
    if all(source.shape[dim] == 1 for dim in dims):
        return source
    if call.name == "flip":
        return torch.flip(call.full(source, shape, dims), dims)
    if not call.get("dims"):
        raise Undecided("it rolls over all elements")
    raw = call.check_linear(call.arguments["shifts"])
    shifts = [(shift, dim) for shift, dim in zip(raw, dims, strict=True) if source.shape[dim] != 1]
    for shift, dim in shifts:
        call.check_numbers(shift, dim)
    full = call.full(source, shape, dims)
    return torch.roll(full, [call.trial.number(shift) for shift, _ in shifts], [dim for _, dim in shifts])


@follows("repeat")
def repeat(call: Call) -> Tensor:
    repeats, shape = call.get("repeats"), call.shape("self")
    source = call.ids("self")
    source = source.reshape([1] * (len(repeats) - source.dim()) + list(source.shape))
    padded_shape = [1] * (len(repeats) - len(shape)) + shape
    varying = [dim for dim, size in enumerate(source.shape) if size != 1]
    times = [times if dim in varying else 1 for dim, times in enumerate(repeats)]
    return call.full(source, padded_shape, varying).repeat(times)


@follows("constant_pad_nd")
def pad(call: Call) -> Tensor:
    source, shape = call.ids("self"), call.shape("self")
    widths, kept = call.get("pad"), []
    for i in range(0, len(widths), 2):
        dim = len(shape) - 1 - i // 2
        if source.shape[dim] == 1:
            kept += [0, 0]  # the constants get the ids of their neighbours
        else:
            call.check_numbers(call.arguments["pad"][i : i + 2], dim)
            kept += widths[i : i + 2]
    value = torch.nn.functional.pad(source, kept)
    empty = any(p and size == 1 for p, size in zip(widths[::2], reversed(shape), strict=False))
    return joined(value) if empty else value


@follows("slice_scatter select_scatter diagonal_scatter")
def written(call: Call) -> Tensor:
    """Write values into a slice of others."""
    base, source, shape = call.ids("self"), call.ids("src"), call.shape("self")
    if call.name == "diagonal_scatter":
        if base.numel() == source.numel() == 1:
            return added(base.reshape([1] * len(shape)), source.reshape([1] * len(shape)))
        _check(call, "offset", shape)
        into = call.full(base, shape, range(len(shape)))
        of = call.full(source, call.shape("src"), range(len(shape) - 1))
        return call.run({"self": into, "src": of})  # type: ignore[no-any-return]
    (dim,) = call.dims("dim", len(shape))
    select = call.name == "select_scatter"
    if select:
        source = source.unsqueeze(dim)
    fixed = base.shape[dim] == 1 and source.shape[dim] == 1
    if fixed and torch.equal(*torch.broadcast_tensors(base, source)):
        return base
    sizes = [max(a, b) for a, b in zip(base.shape, source.shape, strict=True)]
    sizes[dim] = shape[dim]
    numbers = {name: call.get(name) for name in _check_along(call, dim)}
    into = call.full(base, sizes, range(len(sizes)))
    sizes[dim] = 1 if select else call.shape("src")[dim]
    of = call.full(source, sizes, range(len(sizes)))
    return call.run({**numbers, "self": into, "src": of.squeeze(dim) if select else of})  # type: ignore[no-any-return]


@follows("tril triu")
def kept(call: Call) -> Tensor:
    return call.ids("self")


@follows("as_strided as_strided_copy")
def as_strided(call: Call) -> Tensor:
    """Read memory by other strides; elements outside the operand have ids MANY."""
    ids, shape, size = call.ids("self"), call.shape("self"), call.get("size")
    source = call.arguments["self"]
    begin = call.trial.number(source.storage_offset())
    new_offset = call.get("storage_offset")
    offset = 0 if new_offset is None else new_offset - begin
    for name in ("size", "stride"):
        call.check_linear(call.arguments[name])
    strides, new = [call.trial.number(stride) for stride in source.stride()], call.get("stride")
    count = 1 + max(_last(shape, strides), offset + _last(size, new))
    if count > LARGEST or offset < 0:
        raise Undecided("it reads memory by strides")
    memory = torch.full([count], MANY, dtype=torch.int32)
    memory.as_strided(shape, strides).copy_(ids.expand(shape))
    return memory.as_strided(size, new, offset)


@follows("as_strided_scatter")
def as_strided_scatter(call: Call) -> Tensor:
    """Write into memory by other strides (`fill_diagonal_`), where nothing is of samples, nor as many as they."""
    sizes = [size for name in ("self", "src") for size in call.arguments[name].shape]
    if any(bool(ids.any()) for ids in call.all_ids()) or any(isinstance(size, torch.SymInt) for size in sizes):
        raise Undecided("it writes to memory by strides")
    return no_samples(call.out_rank())


def _last(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the memory offset of the last element of a strided tensor."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@follows("view_as_real")
def view_as_real(call: Call) -> Tensor:
    return call.ids("self").unsqueeze(-1)


@follows("view_as_complex")
def view_as_complex(call: Call) -> Tensor:
    return folded(call.ids("self"), [-1]).squeeze(-1)


@follows("diag_embed")
def diag_embed(call: Call) -> Tensor:
    source, rank = call.ids("self"), call.out_rank()
    call.check_numbers(call.arguments["offset"], -1)
    offset, *dims = (call.get(name) for name in ("offset", "dim1", "dim2"))
    if source.shape[-1] == 1 and [dim % rank for dim in dims] == [rank - 2, rank - 1]:
        return source.unsqueeze(-1)
    return torch.diag_embed(call.full(source, call.shape("self"), [source.dim() - 1]), offset, *dims)


@follows("pixel_shuffle pixel_unshuffle channel_shuffle")
def shuffled(call: Call) -> Tensor:
    """Run the op on the ids of the dimensions that it permutes within an image."""
    source = call.ids("self")
    dims = [1] if call.name == "channel_shuffle" else list(range(source.dim() - 3, source.dim()))
    if all(source.shape[dim] == 1 for dim in dims):
        return source
    factor = next(name for name in ("groups", "upscale_factor", "downscale_factor") if name in call.arguments)
    return call.func(call.full(source, call.shape("self"), dims), call.get(factor))  # type: ignore[no-any-return]


@follows("repeat_interleave")
def repeat_interleave(call: Call) -> Tensor:
    raise Undecided("it repeats rows a number of times that only the values say")


@follows("empty zeros ones full arange scalar_tensor eye linspace logspace empty_strided")
def made(call: Call) -> Tensor:
    return joined(no_samples(0), *map(whole, call.all_ids())).reshape([1] * call.out_rank())

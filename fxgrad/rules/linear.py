"""Matrix products with a parameter on either side, and those of groups that rows are sent to (mixtures of experts)."""

from __future__ import annotations

import string
from typing import Any

import torch
import torch.nn.functional as F

from fxgrad.kernels.grouped import grouped_rows
from fxgrad.kernels.precision import computable
from fxgrad.ops.equation import Equation
from fxgrad.rules.reduce import summed_to
from fxgrad.rules.registry import rule
from fxgrad.rules.uses import Slot
from fxgrad.terms import Term


@rule(F.linear, of=("weight", "bias"), batched=("input",))
def linear(g, input, weight, bias=None):
    """y = x Wᵀ + b      dW_n = Σ_k g_nk ⊗ x_nk      db_n = Σ_k g_nk"""
    if weight.dim() == 1:
        return {"weight": Term("n...,n...i->ni", g, input), "bias": summed_to(g, ())}
    return {"weight": Term("n...o,n...i->noi", g, input), "bias": Term("n...o->no", g)}


@rule(F.bilinear, of=("weight", "bias"), batched=("input1", "input2"))
def bilinear(g, input1, input2, weight, bias=None):
    """y_o = x₁ᵀ W_o x₂ + b_o      dW_n = Σ_k g_nk ⊗ x₁_nk ⊗ x₂_nk      db_n = Σ_k g_nk"""
    return {"weight": Term("n...o,n...i,n...j->noij", g, input1, input2), "bias": Term("n...o->no", g)}


def _product(g, x, w, *, left):
    """The gradient of W in ``W @ x`` (left) or ``x @ W``: samples first, as in torch.matmul."""
    if left:
        if w.dim() == 1:
            return Term("n...t,n...it->ni", g, x)
        if w.dim() == 2:
            vector = x.dim() == 2
            return Term("n...o,n...i->noi" if vector else "n...ot,n...it->noi", g, x)
        return _batched(g, x, w, left=True)
    if w.dim() == 1:
        return Term("n...,n...i->ni", g, x)
    if w.dim() == 2:
        return Term("n...o,n...i->noi", x, g)
    return _batched(g, x, w, left=False)


def _batched(g, x, w, *, left):
    """Of a batch of matrices, which broadcasting may have repeated: one term, summed over what was repeated."""
    ndim = max(w.dim(), g.dim() - 1)
    g, x = _pad(g, ndim), _pad(x, ndim)
    x = x.expand(*g.shape[:-2], *x.shape[-2:])
    shape = (1,) * (ndim - w.dim()) + tuple(w.shape[:-2])
    batch = "abcdefgh"[: ndim - 2]
    kept = "".join(letter for letter, size in zip(batch, shape, strict=True) if not isinstance(size, int) or size > 1)
    sides = (f"n{batch}ot,n{batch}it", "oi") if left else (f"n{batch}to,n{batch}ti", "io")
    return Term(f"{sides[0]}->n{kept}{sides[1]}", g, x, shape=w.shape)


def _pad(value, ndim):
    """One-sample values with at least ``ndim`` dims, so that batch dims line up behind the samples."""
    missing = ndim - (value.dim() - 1)
    return value.reshape(value.shape[0], *[1] * missing, *value.shape[1:]) if missing > 0 else value


def _scaled(g, factor):
    """g times the conjugate of a number that the forward multiplied by."""
    return computable(g) * (factor.conjugate() if isinstance(factor, complex) else factor)


def _either_side(g, left, right, use, names, scale=1):
    """Terms for whichever side of a product holds the parameter."""
    g = _scaled(g, scale) if scale != 1 else g
    out = {}
    if names[0] in use.differentiated:
        out[names[0]] = _product(g, right, left, left=True)
    if names[1] in use.differentiated:
        out[names[1]] = _product(g, left, right, left=False)
    return out


def _samples_beside(one, other):
    """A product's rule needs samples on the side that is not the parameter."""

    def applies(use, shapes):
        pairs = (one, other), (other, one)
        return all(use.has_samples(beside) for name, beside in pairs if name in use.differentiated)

    return applies


@rule(torch.matmul, of=("input", "other"), applies=_samples_beside("input", "other"))
def matmul(g, input, other, use):
    """y = x W      dW_n = Σ_k x_nkᵀ g_nk        y = W x      dW_n = Σ_k g_nk x_nkᵀ"""
    return _either_side(g, input, other, use, ("input", "other"))


@rule("rmatmul", of=("input", "other"), applies=_samples_beside("input", "other"))
def rmatmul(g, input, other, use):
    """y = other @ input, as in ``other.__matmul__``'s reflected form"""
    return _either_side(g, other, input, use, ("other", "input"))


@rule(torch.mm, torch.bmm, of=("input", "mat2"), applies=_samples_beside("input", "mat2"))
def mm(g, input, mat2, use):
    """y = x W      dW_n = x_nᵀ g_n"""
    return _either_side(g, input, mat2, use, ("input", "mat2"))


@rule(torch.mv, of=("vec",), applies=_samples_beside("input", "vec"))
def mv(g, input, vec):
    """y = X v      dv_n = X_nᵀ g_n"""
    return {"vec": _product(g, input, vec, left=False)}


@rule(torch.addmm, of=("input", "mat1", "mat2"), applies=_samples_beside("mat1", "mat2"))
def addmm(g, input, mat1, mat2, use, beta=1, alpha=1):
    """y = β b + α x W      dW_n = α Σ_k x_nkᵀ g_nk      db_n = β Σ_k g_nk"""
    out = _either_side(g, mat1, mat2, use, ("mat1", "mat2"), alpha)
    return out | ({"input": summed_to(_scaled(g, beta), input.shape)} if "input" in use.differentiated else {})


@rule(torch.baddbmm, of=("input", "batch1", "batch2"), applies=_samples_beside("batch1", "batch2"))
def baddbmm(g, input, batch1, batch2, use, beta=1, alpha=1):
    """y = β b + α x W, a batch of products"""
    out = _either_side(g, batch1, batch2, use, ("batch1", "batch2"), alpha)
    return out | ({"input": summed_to(_scaled(g, beta), input.shape)} if "input" in use.differentiated else {})


def _has_plain_letters(use, shapes):
    """Whether every letter of an operand stands there once, at the same size everywhere, without dots."""
    equation = use.arguments["equation"]
    if not isinstance(equation, str):
        return False
    read = Equation.of(equation)
    if read.output is None or read.has_dots or read.repeats_a_letter:
        return False
    sizes: dict[str, Any] = {}
    return all(
        sizes.setdefault(letter, size) == size
        for operand, slot in zip(read.inputs, use.arguments["operands"], strict=True)
        for letter, size in zip(operand.letters, shapes[slot.position], strict=True)
    )


@rule(torch.einsum, of=("operands",), applies=_has_plain_letters)
def einsum(g, equation, operands, use):
    """y = einsum(.., W, ..)      dW_n: the same equation with y and W in each other's place"""
    read = Equation.of(equation).without("n")  # n are the samples
    letters = [operand.letters for operand in read.inputs]
    slots = use.arguments["operands"]
    grads: list[Any] = [None] * len(slots)
    for i, slot in enumerate(slots):
        if slot.position not in use.wrt:
            continue
        others = [j for j in range(len(slots)) if j != i]
        left = [f"n{read.output}"] + [("n" if use.layouts[slots[j].position] else "") + letters[j] for j in others]
        alone = [letter for letter in letters[i] if not any(letter in text for text in left)]  # summed before all else
        sizes = dict(zip(letters[i], operands[i].shape, strict=True))
        left += ["".join(alone)] * bool(alone)
        ones = [g.new_ones([sizes[letter] for letter in alone])] * bool(alone)
        grads[i] = Term(f"{','.join(left)}->n{letters[i]}", g, *(operands[j] for j in others), *ones)
    return {"operands": grads}


def _has_plain_dims(use, shapes):
    """Whether the dims are numbers, there are letters for all, and none has a size of one, which PyTorch repeats."""
    sides, dims = [use.arguments[name] for name in ("a", "b")], use.arguments["dims"]
    if not all(isinstance(side, Slot) for side in sides):
        return False
    sizes = [size for side in sides for size in shapes[side.position]]
    pair = isinstance(dims, tuple | list) and len(dims) == 2 and all(isinstance(own, tuple | list) for own in dims)
    return (isinstance(dims, int) or pair) and 1 not in sizes and len(sizes) < 50


@rule(torch.tensordot, of=("a", "b"), applies=_has_plain_dims)
def tensordot(g, a, b, use, dims=2):
    """y = Σ over some dims of a and b        as the einsum that says the same"""
    batched = {name: use.has_samples(name) for name in "ab"}
    left, right, result = _letters_of(dims, a.dim() - batched["a"], b.dim() - batched["b"])
    operands = {"a": (left, a), "b": (right, b)}
    found = {}
    for name, other in ("ab", "ba"):
        if name in use.differentiated:
            letters, value = operands[other]
            n = "n" if batched[other] else ""
            found[name] = Term(f"n{result},{n}{letters}->n{operands[name][0]}", g, value)
    return found


def _letters_of(dims, a, b):
    """The letters of both operands of a tensordot, of so many dims, and of its result."""
    pairs = (range(a - dims, a), range(dims)) if isinstance(dims, int) else dims
    of_a, of_b = ([dim % rank for dim in own] for own, rank in zip(pairs, (a, b), strict=True))
    names = iter(string.ascii_letters.replace("n", ""))
    left = [next(names) for _ in range(a)]
    right = [left[of_a[of_b.index(dim)]] if dim in of_b else next(names) for dim in range(b)]
    kept = [left[i] for i in range(a) if i not in of_a] + [right[i] for i in range(b) if i not in of_b]
    return "".join(left), "".join(right), "".join(kept)


@rule(grouped_rows, of=("weight",), batched=("input", "ids"))
def rows_of_groups(g, input, weight, ids):
    """y_k = x_k W[e_k]      dW_n[e] = Σ_{k: e_nk = e} x_nk ⊗ g_nk"""
    groups = weight.shape[0]
    sent = F.one_hot(ids.clamp(0, groups - 1), groups) * ((ids >= 0) & (ids < groups)).unsqueeze(-1)
    return {"weight": Term("nke,nki,nko->neio", sent.to(g.dtype), input, g)}

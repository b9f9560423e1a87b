"""The rules of the proof that samples do not meet, on PyTorch's database of ops: one sample is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fxgrad.ops.families import _TABLE
from fxgrad.proof.calls import Origins
from fxgrad.proof.following import Follow
from fxgrad.proof.origins import MANY, SUM
from fxgrad.proof.rules import RULES
from fxgrad.proof.rules import of as rule_of
from fxgrad.proof.trials import Trial
from tests.databases import CRASHES, op_db

SAMPLES = 3  # of each op in the database
CASES_OF_AN_OP, QUICK_CASES = 6, 2  # of each sample, in `make long` and in `make test`
AT_RANDOM = {"empty_like", "new_empty", "empty", "new_empty_strided", "empty_strided", "empty_permuted"}


class Followed(TorchDispatchMode):
    """Ordinary tensors, each op of which `Follow` sees."""

    def __init__(self, follow: Follow) -> None:
        super().__init__()
        self.follow, self.written = follow, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.written = self.written or func._schema.is_mutable
        self.follow(func, args, kwargs or {}, result)
        return result


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def detached(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def ids_of(call: Any, inputs: Any, place: int, dim: int) -> list[Tensor] | None:
    """The ids of each output, where one input holds a sample at each index of a dimension.

    None where something is written: the graphs that are proved are functional.
    """
    inputs = detached(inputs)
    held = tensors_in(inputs)[place]
    size = held.shape[dim]
    ids = torch.arange(1, size + 1, dtype=torch.int32).reshape([-1 if d == dim else 1 for d in range(held.dim())])
    follow = Follow([Trial(size, sympy.Symbol("B"), {}, last=False)], clips=False)
    follow.set(held, Origins((ids,)))
    torch.manual_seed(0)
    with torch.no_grad(), Followed(follow) as mode:
        outputs = tensors_in(call(inputs))
    with _disable_current_modes():
        return None if mode.written else [follow.of(out).ids[0].expand(out.shape) for out in outputs]


def values_of(call: Any, inputs: Any) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [out.detach().clone() for out in tensors_in(call(detached(inputs)))]


def changed(inputs: Any, place: int, dim: int, samples: Sequence[int]) -> Any:
    """The inputs with some samples of one of them changed."""
    inputs = detached(inputs)
    held = tensors_in(inputs)[place]
    for n in samples:
        part = held.select(dim, n)
        part.copy_(part * 0.75 + 0.02 * (n + 1) if held.is_floating_point() else part.flip(0) if part.dim() else part)
    return inputs


def differs(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return ~torch.isclose(a, b, rtol=1e-9, atol=1e-11, equal_nan=True)
    return a != b


def check(call: Any, inputs: Any, place: int, dim: int) -> None:
    """Where one sample's change shows, the ids say so; a sum of samples is no more than that."""
    ids = ids_of(call, inputs, place, dim)
    if ids is None:
        return
    size = tensors_in(inputs)[place].shape[dim]
    base = values_of(call, inputs)
    for n in range(size):
        new = values_of(call, changed(inputs, place, dim, [n]))
        for i, (a, b, own) in enumerate(zip(base, new, ids, strict=True)):
            if a.shape != b.shape:
                assert bool((own == MANY).all()), f"output {i} has another shape for another sample {n}"
                continue
            moved = differs(a, b)
            wrong = moved & ~((own == n + 1) | (own == SUM) | (own == MANY))
            assert not wrong.any(), f"output {i} depends on sample {n} of input {place} along {dim}: ids {own}"
    if size > 1:
        both, first, second = (values_of(call, changed(inputs, place, dim, which)) for which in ([0, 1], [0], [1]))
        for a, b, c, d, own in zip(base, both, first, second, ids, strict=True):
            if bool((own == SUM).any()) and a.shape == b.shape == c.shape == d.shape and a.is_floating_point():
                sums = own == SUM
                torch.testing.assert_close((b - d)[sums], (c - a)[sums], rtol=1e-6, atol=1e-9, equal_nan=True)


def samples_of(info: Any) -> Iterator[Any]:
    torch.manual_seed(1)
    yield from islice(info.sample_inputs("cpu", torch.float64, requires_grad=False), SAMPLES)


def cases_of(inputs: Any, most: int) -> list[tuple[int, int]]:
    """Which tensor holds the samples, and along which dimension."""
    held = tensors_in(inputs)
    found = [
        (place, dim)
        for place, tensor in enumerate(held)
        if tensor.is_floating_point()
        for dim in range(tensor.dim())
        if 1 < tensor.shape[dim] < 12
    ]
    step = max(1, len(found) // most)
    return found[::step][:most]


OPS = [
    info
    for info in op_db
    if torch.float64 in info.supported_dtypes("cpu")
    and info.name not in CRASHES | AT_RANDOM
    and not info.name.startswith("jiterator")  # of CUDA
    and info.variant_test_name != "partial_views"  # of memory that a copy does not have
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("info", "most"),
    [
        *((info, QUICK_CASES) for info in OPS[::2]),
        *(pytest.param(info, CASES_OF_AN_OP, marks=pytest.mark.long) for info in OPS),
    ],
    ids=lambda of: (
        "-".join(filter(None, (of.name, of.variant_test_name))) if hasattr(of, "variant_test_name") else str(of)
    ),
)
def test_a_rule_by_changing_one_sample(info: Any, most: int) -> None:
    for sample in samples_of(info):
        inputs = (sample.input, sample.args, sample.kwargs)

        def call(given: Any) -> Any:
            first, args, kwargs = given
            return info.op(first, *args, **kwargs)

        for place, dim in cases_of(inputs, most):
            check(call, inputs, place, dim)


aten = torch.ops.aten
A, M, V, X, I4 = (4, 3), (3, 3), (3,), (2, 3, 4), (2, 4, 6, 6)
# calls that the database does not make, with the shapes of their inputs
CALLS: dict[str, tuple[Any, Sequence[tuple[int, ...]]]] = {
    "all": (lambda x: aten.all.dim(x > 0.5, 1), [A]),
    "amin": (lambda x: aten.amin(x, [0]), [A]),
    "argmax": (lambda x: aten.argmax(x, 1), [A]),
    "argmin": (lambda x: aten.argmin(x, 0), [A]),
    "median": (lambda x: aten.median(x), [A]),
    "renorm": (lambda x: aten.renorm(x, 2, 0, 0.5), [A]),
    "renorm, last": (lambda x: aten.renorm(x, 2, -1, 0.5), [X]),
    "nansum": (lambda x: aten.nansum(x, [1]), [A]),
    "count_nonzero": (lambda x: aten.count_nonzero.dim_IntList(x > 0.5, [1]), [A]),
    "softmax": (lambda x: aten._softmax(x, 1, False), [A]),
    "_softmax_backward_data": (lambda g, y: aten._softmax_backward_data(g, y, 1, torch.float64), [X, X]),
    "_log_softmax_backward_data": (lambda g, y: aten._log_softmax_backward_data(g, y, -1, torch.float64), [X, X]),
    "_weight_norm_interface": (lambda v, g: aten._weight_norm_interface(v, g, 0), [A, (4, 1)]),
    "_weight_norm_interface, last": (lambda v, g: aten._weight_norm_interface(v, g, 1), [A, (1, 3)]),
    "_linalg_eigvals": (lambda x: aten._linalg_eigvals(x), [(4, 3, 3)]),
    "cholesky_inverse": (lambda x: aten.cholesky_inverse(x), [(4, 3, 3)]),
    "cholesky_solve": (lambda b, x: aten.cholesky_solve(b, x), [(4, 3, 2), (4, 3, 3)]),
    "_euclidean_dist": (lambda x, y: aten._euclidean_dist(x, y), [(2, 4, 3), (2, 5, 3)]),
    "linear": (lambda x, w, b: aten.linear(x, w, b), [X, (5, 4), (5,)]),
    "index_add": (lambda x, y: aten.index_add(x, 0, torch.tensor([0, 2, 2]), y), [A, (3, 3)]),
    "index_copy": (lambda x, y: aten.index_copy(x, 0, torch.tensor([3, 0, 2]), y), [A, (3, 3)]),
    "index_fill": (lambda x: aten.index_fill.int_Scalar(x, 1, torch.tensor([1]), 2.0), [A]),
    "index_reduce": (lambda x, y: aten.index_reduce(x, 0, torch.tensor([0, 2, 2]), y, "amax"), [A, (3, 3)]),
    "index_put": (lambda x, y: aten.index_put(x, [torch.tensor([3, 0])], y), [A, (2, 3)]),
    "index_put, one column": (lambda x, y: aten.index_put(x, [None, torch.tensor([2, 0])], y), [A, (4, 2)]),
    "index_put, added": (lambda x, y: aten.index_put(x, [torch.tensor([1, 1])], y, True), [A, (2, 3)]),
    "index_put, by data": (
        lambda x, y: aten.index_put(x, [(y[:, 0] * 3).long(), torch.arange(3)], y[:, 0]), [A, (3, 3)],
    ),
    "index_put, masked": (lambda x, y: aten.index_put(x, [x > 0.5], y), [A, ()]),
    "_unsafe_index": (lambda x: aten._unsafe_index(x, [None, torch.tensor([0, 2])]), [A]),
    "_unsafe_index_put": (lambda x, y: aten._unsafe_index_put(x, [torch.tensor([1, 3])], y), [A, (2, 3)]),
    "searchsorted": (lambda s, x: aten.searchsorted.Tensor(s.sort(-1)[0], x), [(4, 5), (4, 3)]),
    "bucketize": (lambda x, s: aten.bucketize.Tensor(x, s.sort()[0]), [A, (5,)]),
    "_embedding_bag, largest": (
        lambda w: aten._embedding_bag(w, torch.tensor([0, 2, 1, 1, 3]), torch.tensor([0, 2, 2]), False, 2), [A],
    ),
    "_embedding_bag": (
        lambda w, p: aten._embedding_bag(w, torch.tensor([0, 2, 1, 1, 3]), torch.tensor([0, 2, 2]), False, 0, False, p),
        [A, (5,)],
    ),
    "_embedding_bag, with their end": (
        lambda w, p: aten._embedding_bag(
            w, torch.tensor([0, 2, 1, 1, 3]), torch.tensor([0, 2, 2, 5]), False, 0, False, p, True
        ),
        [A, (5,)],
    ),
    "embedding_renorm": (lambda w: aten.embedding_renorm(w, torch.tensor([1, 2]), 0.5, 2.0), [A]),
    "histc": (lambda x: aten.histc(x, 4, 0, 1), [A]),
    "nonzero_static": (lambda x: aten.nonzero_static(x > 0.5, size=5), [A]),
    "unique_consecutive": (lambda x: aten.unique_consecutive((x * 3).long(), True, True), [(6,)]),
    "_unique2": (lambda x: aten._unique2((x * 3).long(), True, True), [(6,)]),
    "unique_dim": (lambda x: aten.unique_dim((x * 3).long(), 0, True, True), [A]),
    "avg_pool1d": (lambda x: aten.avg_pool1d(x, [2]), [X]),
    "adaptive_avg_pool1d": (lambda x: aten.adaptive_avg_pool1d(x, [2]), [X]),
    "upsample_nearest2d": (lambda x: aten.upsample_nearest2d(x, [8, 8]), [I4]),
    "upsample_nearest3d": (lambda x: aten.upsample_nearest3d(x, [4, 4, 4]), [(2, 3, 2, 2, 2)]),
    "_upsample_nearest_exact2d": (lambda x: aten._upsample_nearest_exact2d(x, [8, 8]), [I4]),
    "_upsample_nearest_exact3d": (lambda x: aten._upsample_nearest_exact3d(x, [4, 4, 4]), [(2, 3, 2, 2, 2)]),
    "_upsample_bicubic2d_aa": (lambda x: aten._upsample_bicubic2d_aa(x, [4, 4], False), [I4]),
    "reflection_pad2d": (lambda x: aten.reflection_pad2d(x, [1, 1, 1, 1]), [I4]),
    "reflection_pad3d": (lambda x: aten.reflection_pad3d(x, [1] * 6), [(2, 3, 2, 2, 2)]),
    "replication_pad3d": (lambda x: aten.replication_pad3d(x, [1] * 6), [(2, 3, 2, 2, 2)]),
    "affine_grid_generator": (lambda x: aten.affine_grid_generator(x, [4, 1, 2, 3], True), [(4, 2, 3)]),
    "affine_grid_generator, of two": (lambda x: aten.affine_grid_generator(x, [2, 5, 3, 1], False), [(2, 2, 3)]),
    "affine_grid_generator, in space": (lambda x: aten.affine_grid_generator(x, [3, 1, 2, 3, 2], True), [(3, 3, 4)]),
    "col2im": (lambda x: aten.col2im(x, [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]), [(2, 12, 4)]),
    "im2col": (lambda x: aten.im2col(x, [2, 2], [1, 1], [0, 0], [2, 2]), [I4]),
    "convolution": (
        lambda x, w, b: aten.convolution(x, w, b, [1], [0], [1], False, [0], 1), [(2, 3, 6), (4, 3, 2), (4,)],
    ),
    "convolution, in groups": (
        lambda x, w, b: aten.convolution(x, w, b, [1], [0], [1], False, [0], 3), [(2, 3, 6), (6, 1, 2), (6,)],
    ),
    "convolution, transposed": (
        lambda x, w, b: aten.convolution(x, w, b, [2], [0], [1], True, [1], 1), [(2, 3, 6), (3, 4, 2), (4,)],
    ),
    "convolution, transposed, in groups": (
        lambda x, b: aten.convolution(x, torch.ones(4, 3, 2).double(), b, [1], [0], [1], True, [0], 2),
        [(2, 4, 6), (6,)],
    ),
    "batch norm, training": (
        lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5),
        [X, V, V, V, V],
    ),
    "batch norm, evaluating": (
        lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-5), [X, V, V, V, V],
    ),
    "batch norm, by its statistics": (
        lambda x, w, b, m, v: aten._batch_norm_no_update(x, w, b, m, v, 0.1, 1e-5), [X, V, V, V, V],
    ),
    "attention": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v),
        [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4)],
    ),
    "ctc": (
        lambda x: aten._ctc_loss(x.log_softmax(2), torch.tensor([[1, 2], [2, 1]]), [5, 5], [2, 2]), [(5, 2, 4)],
    ),
    "ctc, targets in a row": (
        lambda x, t: aten._ctc_loss(x.log_softmax(2), (t * 3).long() + 1, [5, 5], [0, 2])[0], [(5, 2, 4), (2,)],
    ),
    "nll, and its weights": (
        lambda x, t: aten.nll_loss_forward(x, (t * 3).long(), torch.tensor([1.0, 2, 4]).double(), 1, -100), [A, (4,)],
    ),
    "group norm": (lambda x, w, b: aten.native_group_norm(x, w, b, 2, 3, 4, 3, 1e-5), [X, V, V]),
    "group norm of other sizes": (lambda x: aten.native_group_norm(x, None, None, 1, 3, 8, 1, 1e-5), [X]),
    "group norm of other channels": (lambda x: aten.native_group_norm(x, None, None, 2, 2, 6, 1, 1e-5), [X]),
    "expand": (lambda x: aten.expand(x, [2, 4, 3]), [A]),
    "diag_embed": (lambda x: aten.diag_embed(x, 1), [A]),
    "select_copy": (lambda x: aten.select_copy(x, 1, 2), [A]),
    "slice_copy": (lambda x: aten.slice_copy(x, 0, 1, 3), [A]),
    "split_copy": (lambda x: aten.split_copy(x, 2, 0), [A]),
    "unsafe_split_with_sizes": (lambda x: aten.unsafe_split_with_sizes(x, [1, 3], 0), [A]),
    "as_strided": (lambda x: aten.as_strided(x, [3, 2], [1, 3], 1), [A]),
    "slice_scatter": (lambda x, y: aten.slice_scatter(x, y, 0, 1, 3), [A, (2, 3)]),
    "select_scatter": (lambda x, y: aten.select_scatter(x, y, 1, 2), [A, (4,)]),
    "diagonal_scatter": (lambda x, y: aten.diagonal_scatter(x, y, 1), [A, (2,)]),
    "view_as_real": (lambda x: aten.view_as_real(torch.complex(x, x)), [A]),
    "view_as_complex": (lambda x: aten.view_as_complex(x), [(4, 2)]),
    "view": (lambda x: aten.view(x, [2, 6]), [A]),
    "repeat": (lambda x: aten.repeat(x, [2, 1, 2]), [A]),
    "roll": (lambda x: aten.roll(x, [1, 2], [0, 1]), [A]),
    "constant_pad_nd": (lambda x: aten.constant_pad_nd(x, [1, 0, -1, 2]), [A]),
    "trilinear": (lambda a, w, b: torch.nn.functional.bilinear(a, b, w), [A, (5, 3, 2), (4, 2)]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_by_changing_one_sample(name: str) -> None:
    function, shapes = CALLS[name]
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.rand(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    cases = [(place, dim) for place, shape in enumerate(shapes) for dim in range(len(shape))]
    for place, dim in cases:
        check(lambda given: function(*given), inputs, place, dim)


FAMILIES = [op for names, _ in _TABLE for op in names if hasattr(aten, op)]
SHAPE_BY_DATA = {"linalg_lstsq"}  # Dynamo breaks the graph there


@pytest.mark.parametrize("op", sorted(set(FAMILIES) - SHAPE_BY_DATA))
def test_an_op_with_a_family_has_a_rule(op: str) -> None:
    """`infer_samples` knows it, so the proof has to know the ATen ops that it is made of."""
    packet = getattr(aten, op)
    for overload in (getattr(packet, name) for name in packet.overloads()):
        tensors = any(isinstance(argument.type, torch.TensorType) for argument in overload._schema.arguments)
        if tensors and not overload._schema.is_mutable and not _is_composite(overload.name()):
            assert rule_of(overload) is not None, overload


def _is_composite(name: str) -> bool:
    """Decide whether an op never reaches the proof, which sees what it is made of; an op of TorchScript neither."""
    listed = torch._C._dispatch_has_kernel(name)
    return not listed or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def followed(function: Any, *shapes: Sequence[int]) -> Origins:
    """What is known of a call's output, where dimension 0 of every input is the samples'."""
    follow = Follow([Trial(shapes[0][0], sympy.Symbol("B"), {}, last=False)], clips=False)
    inputs = [torch.ones(shape, dtype=torch.float64) for shape in shapes]
    for held in inputs:
        follow.set(held, Origins((torch.arange(1, len(held) + 1, dtype=torch.int32)[:, None],)))
    with torch.no_grad(), Followed(follow):
        out = function(*inputs)
    with _disable_current_modes():
        return follow.of(out)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x.sum(0).to(torch.float32), True),
        (lambda x: x.sum(0).to(torch.complex128).to(torch.float64), True),
        (lambda x: x.to(torch.int32).sum(0, dtype=torch.int32).long(), True),
        (lambda x: x.to(torch.int32).sum(0, dtype=torch.int32).double(), True),
        (lambda x: x.sum(0).long(), False),
        (lambda x: x.sum(0).to(torch.complex128).long(), False),
        (lambda x: x.long().sum(0).int(), False),
        (lambda x: x.long().sum(0).bool(), False),
        (lambda x: x.long().sum(0, dtype=torch.bool), False),
        (lambda x: x.sum(0).bool(), False),
        (lambda x: x.to(torch.complex128).sum(0).bool(), False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_sum_is_kept_by_casts_that_are_linear(function: Any, kept: bool) -> None:
    assert followed(function, A).ids[0].unique().tolist() == [SUM if kept else MANY]


def test_a_rule_asks_for_the_samples_in_each_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(x: Any, y: Any) -> Any:
        return aten.linalg_cross(x, y)

    monkeypatch.setitem(RULES, "linalg_cross", lambda given: given.ids("self"))
    found = followed(call, A, A)
    assert found.blame is not None
    assert found.blame.sentence == "linalg_cross: fxgrad does not know what the samples in its other do"
    assert found.ids[0].unique().tolist() == [MANY]
    assert followed(lambda x: call(x, torch.ones(A, dtype=torch.float64)), A).ids[0].flatten().tolist() == [1, 2, 3, 4]


def test_the_form_of_an_operand_holds_no_samples() -> None:
    for function in (torch.zeros_like, torch.rand_like, lambda x: x.new_ones(3), lambda x: aten.fill(x, 1)):
        assert followed(function, A).alone


def test_the_check_finds_a_wrong_rule() -> None:
    def call(x: Any) -> Any:
        return torch.cumsum(x, 0)

    own = RULES["cumsum"]
    RULES["cumsum"] = lambda given: given.ids("self")
    try:
        with pytest.raises(AssertionError, match="depends on sample"):
            check(call, torch.randn(3, 2, dtype=torch.float64), 0, 0)
    finally:
        RULES["cumsum"] = own
    check(call, torch.randn(3, 2, dtype=torch.float64), 0, 0)

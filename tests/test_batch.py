"""Where the samples are: the batch size of every call, and the graphs that calls of different sizes need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxgrad
from fxgrad.compile.inductor import inner_compiler
from fxgrad.errors import BatchSizeError, OptionError, UnsupportedOp
from fxgrad.samples.batch import SHARED, Roles
from fxgrad.testing import assert_per_sample_grads, default_loss, per_sample_grads, relative_error


@dataclass
class Pair:
    first: Tensor
    second: Tensor


class Point(NamedTuple):
    left: Tensor
    right: Tensor


def t(*shape: int) -> Tensor:
    return torch.zeros(shape)


def find(*args: Any, kwargs: Any = None, names: Any = (), **options: Any) -> tuple[int, list[int]]:
    """The batch size, and every input's role in order."""
    options = {"batch_size": None, "batch_first": True, "in_dims": None} | options
    batch = Roles(names=names, **options).find(args, kwargs or {})
    return batch.size, [dim for _, dim in batch.roles()]


Look = Callable[[], tuple[int, list[int]]]

FOUND: dict[str, tuple[Look, tuple[int, list[int]]]] = {
    "one argument": (lambda: find(t(4, 2)), (4, [0])),
    "keyword": (lambda: find(kwargs={"x": t(4, 2)}), (4, [0])),
    "both": (lambda: find(t(4, 2), kwargs={"mask": t(4)}), (4, [0, 0])),
    "numbers and None": (lambda: find(t(4, 2), 3, None, "mode"), (4, [0])),
    "0-dim tensors are shared": (lambda: find(t(4, 2), t()), (4, [0, SHARED])),
    "nested": (lambda: find([t(4), {"a": (t(4, 2), [t(4)])}]), (4, [0, 0, 0])),
    "dataclass": (lambda: find(Pair(t(4), t(4, 2))), (4, [0, 0])),
    "dataclass in a list": (lambda: find([Pair(t(4), t())]), (4, [0, SHARED])),
    "named tuple": (lambda: find(Point(t(4), t(4, 3))), (4, [0, 0])),
    "no samples": (lambda: find(t(0, 3)), (0, [0])),
    "batch_first=False": (lambda: find(t(7, 4, 2), t(9, 4), batch_first=False), (4, [1, 1])),
    "batch_size": (lambda: find(t(4, 2), t(3, 3), batch_size=4), (4, [0, SHARED])),
    "in_dims int": (lambda: find(t(2, 4), t(3, 4), in_dims=1), (4, [1, 1])),
    "in_dims int, keyword": (lambda: find(t(2, 4), kwargs={"y": t(3, 4)}, in_dims=1), (4, [1, 1])),
    "in_dims negative": (lambda: find(t(2, 3, 4), in_dims=-1), (4, [2])),
    "in_dims tuple": (lambda: find(t(4, 2), t(5, 2), t(3, 4), in_dims=(0, None, 1)), (4, [0, SHARED, 1])),
    "in_dims list": (lambda: find(t(4, 2), t(5, 2), in_dims=[0, None]), (4, [0, SHARED])),
    "in_dims prefix": (lambda: find([t(2, 4), {"a": t(3, 4)}], in_dims=(1,)), (4, [1, 1])),
    "in_dims nested": (lambda: find((t(4), t(5)), {"a": t(6), "b": t(4)}, in_dims=((0, None), {"a": None})),
                       (4, [0, SHARED, SHARED, 0])),
    "in_dims dict": (lambda: find(t(4), kwargs={"m": t(5), "n": t(4)}, in_dims={"m": None}), (4, [0, SHARED, 0])),
    "in_dims dict by position": (lambda: find(t(4), t(5), in_dims={1: None}), (4, [0, SHARED])),
    "in_dims dict by name": (lambda: find(t(4), t(5), names=["x", "m"], in_dims={"m": None}), (4, [0, SHARED])),
    "in_dims for a dataclass": (lambda: find(Pair(t(4), t(5)), in_dims=({"second": None},)), (4, [0, SHARED])),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_found(case: str) -> None:
    look, expected = FOUND[case]
    assert look() == expected


REFUSED: dict[str, tuple[Look, str]] = {
    "nothing": (lambda: find(), "no tensor among the inputs holds samples"),
    "no tensor": (lambda: find(3, [1, 2]), "no tensor among the inputs holds samples"),
    "0-dim only": (lambda: find(t()), "no tensor among the inputs holds samples"),
    "all shared": (lambda: find(t(4), in_dims=(None,)), "no tensor among the inputs holds samples"),
    "disagree": (lambda: find(t(4, 2), t(5, 3)), "input 0 has 4 on dimension 0, input 1 has 5 on dimension 0"),
    "disagree by name": (lambda: find(t(4), kwargs={"m": [t(5)]}, names=["x"]),
                         r"input 'x' has 4 on dimension 0, input 'm'\[0\] has 5 on dimension 0"),
    "disagree in a dataclass": (lambda: find(Pair(t(4), t(5))), r"input 0\['first'\] has 4.*input 0\['second'\] has 5"),
    "disagree, in_dims": (lambda: find(t(4, 2), t(4, 5), in_dims=(0, 1)), "has 4 on dimension 0.*has 5 on dimension 1"),
    "batch_size": (lambda: find(t(4, 2), batch_size=5), "no input has batch_size=5"),
    "no dimension 1": (lambda: find(t(3, 4), t(4), batch_first=False), r"input 1 has 1 dimension\(s\), so no .* 1"),
    "in_dims too large": (lambda: find(t(3, 4), in_dims=2), r"input 0 has 2 dimension\(s\), so no sample dimension 2"),
    "two roles": (lambda: (lambda x: find(x, x, in_dims=(0, 1)))(t(4, 4)), "passed twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    look, sentence = REFUSED[case]
    with pytest.raises(BatchSizeError, match=sentence):
        look()


def test_in_dims_of_another_structure() -> None:
    with pytest.raises(OptionError, match="in_dims has 1 entries for the 2 of input 0"):
        find((t(4), t(4)), in_dims=((0,),))


def test_a_role_once_told_apart_is_kept() -> None:
    """A mask [T, T] stays shared when a batch comes along that has as many samples as it has steps."""
    roles = Roles(4, True, None, ["x", "mask"])
    assert [dim for _, dim in roles.find((t(4, 3), t(3, 3)), {}).roles()] == [0, SHARED]
    assert [dim for _, dim in roles.find((t(4, 4), t(4, 4)), {}).roles()] == [0, SHARED]
    assert [dim for _, dim in roles.find((t(4, 4),), {"mask": t(4, 4)}).roles()] == [0, SHARED]
    with pytest.raises(BatchSizeError, match="no input has batch_size=4"):
        roles.find((t(5, 4), t(4, 4)), {})


# --- through the compiler ------------------------------------------------------------------------------


class Mixer(nn.Module):
    """A convolution, a norm and self-attention over the image's positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)
        self.position = nn.Parameter(torch.randn(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2) + self.position
        q, k, v = self.qkv(y).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2, dim=-1)
        return self.out((weights @ v).mean(1))


class Counting:
    """A backend that counts the graphs it compiles."""

    def __init__(self, backend: str = "eager") -> None:
        self.graphs, self.backend = 0, backend

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return inner_compiler(self.backend)(gm, inputs)


def check(model: nn.Module, gs_model: nn.Module, *args: Any, **how: Any) -> None:
    fxgrad.zero_grad(model)
    truth = per_sample_grads(model, default_loss, args, **how)
    default_loss(gs_model(*args)).backward()
    found = {name: p.grad_sample for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert relative_error(found, truth) <= 1e-10
    fxgrad.zero_grad(model)


@pytest.mark.parametrize(
    ("sizes", "compiler"), [((8, 7, 9, 1, 0, 5, 0, 1), "aot_eager"), ((1, 0, 9, 2, 3), "eager"), ((0, 0, 2), "eager")]
)
def test_batch_sizes_in_a_row(sizes: tuple[int, ...], compiler: str, device: torch.device) -> None:
    model, backend = Mixer().double().to(device), Counting(compiler)
    gs_model = fxgrad.transform(model, backend=backend)
    for size in sizes:
        check(model, gs_model, torch.randn(size, 2, 3, 3, dtype=torch.float64, device=device))
    assert backend.graphs <= 3


@pytest.mark.parametrize("length", [3, 6])
def test_as_long_as_the_batch(length: int, device: torch.device) -> None:
    """Sizes that equal the batch size at the first call, or later, are still no samples."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm([length, 6]), nn.Tanh(), nn.Linear(6, 6)).double().to(device)
    backend = Counting()
    gs_model = fxgrad.transform(model, backend=backend)
    for size in (length, 2 * length, 6, 4):
        check(model, gs_model, torch.randn(size, length, 6, dtype=torch.float64, device=device))
    assert backend.graphs == 1


class Masked(nn.Module):
    """A mask over steps that all samples share, beside the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.tanh(self.fc(x))
        return mask @ y + (mask * 2).sum()


@pytest.mark.parametrize("options", [{"in_dims": (0, None)}, {"batch_size": 6}])
def test_a_shared_mask_of_any_size(options: Any, device: torch.device) -> None:
    """The mask's own size changes from call to call, and is once the batch size."""
    model = Masked().double().to(device)
    gs_model = fxgrad.transform(model, backend="eager", **options)
    for steps in (4, 5, 6, 12):
        x = torch.randn(6, steps, 3, dtype=torch.float64, device=device)
        mask = torch.rand(steps, steps, dtype=torch.float64, device=device)
        check(model, gs_model, x, mask, in_dims=(0, None))


class Nested(nn.Module):
    """Inputs in containers, outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, pair: Any, extra: Any, *, scale: Tensor, flags: Any = None) -> Any:
        y = self.fc(pair.left + extra["a"][0]) * scale
        return {"y": y, "more": [y.relu() + pair.right]}


def test_nested_inputs_and_outputs(device: torch.device) -> None:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device)

    model = Nested().double().to(device)
    extra = {"a": [make(4, 3), 7], "b": None}
    assert_per_sample_grads(
        model, Point(make(4, 3), make(4, 2)), extra, scale=make(4, 1), flags=("f", 1), backend="eager"
    )


class OnPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.fc(pair.first), self.fc(pair.second * 2))


def test_dataclasses_in_and_out(device: torch.device) -> None:
    x, y = torch.randn(2, 5, 3, dtype=torch.float64, device=device)
    model = OnPair().double().to(device)
    out = fxgrad.transform(model, backend="eager")(Pair(x, y))
    default_loss([out.first, out.second]).backward()
    for i in range(5):
        model.zero_grad()
        alone = model(Pair(x[i : i + 1], y[i : i + 1]))
        default_loss([alone.first, alone.second]).backward()
        for p in model.parameters():
            torch.testing.assert_close(p.grad_sample[i], p.grad)  # type: ignore[attr-defined]


OTHER_DIMS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "batch_first": ({"batch_first": False}, (3, 5, 4)),
    "in_dims": ({"in_dims": (2,)}, (3, 4, 5)),
}


class Steps(nn.Module):
    """Sums over all dims but the samples'."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.dim = nn.Parameter(torch.randn(4)), dim

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(self.dim, 0)
        return torch.tanh(x * self.weight).sum(1)


@pytest.mark.parametrize("case", OTHER_DIMS)
def test_samples_on_another_dimension(case: str, device: torch.device) -> None:
    options, shape = OTHER_DIMS[case]
    model = Steps(shape.index(5)).double().to(device)
    x = torch.randn(shape, dtype=torch.float64, device=device)
    default_loss(fxgrad.transform(model, backend="eager", **options)(x)).backward()
    truth = per_sample_grads(model, default_loss, (x,), in_dims=(shape.index(5),))
    assert relative_error({"weight": model.weight.grad_sample}, truth) <= 1e-10  # type: ignore[attr-defined]


class Fixed(nn.Module):
    """Writes its batch size down."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).view(4, 2)


def test_a_batch_size_fixed_by_the_model(device: torch.device) -> None:
    with pytest.raises((BatchSizeError, fxgrad.errors.LostLayout), match=r"(?s)number of samples.*view\(4, 2\)"):
        fxgrad.transform(Fixed().to(device), backend="eager")(torch.randn(4, 3, device=device))


class TwoRows(nn.Module):
    """Makes PyTorch's shape rule of `where` take two samples for the other two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.rows = nn.Parameter(torch.randn(1, 3)), torch.tensor([True, False]).view(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.where(self.rows.to(x.device), torch.stack([x, x]), 0.2) @ self.w
        return rows.transpose(0, 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_batch_size_fixed_by_pytorch(backend: str, device: torch.device, capfd: Any) -> None:
    model = TwoRows().double().to(device)
    for size in (2, 3, 2):
        assert_per_sample_grads(model, torch.randn(size, 1, dtype=torch.double, device=device), backend=backend)
    assert "Constraints violated" not in capfd.readouterr().err


class AsksForSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.shape[0] != 4 else self.fc(x).sin()


def test_a_model_that_asks_for_its_batch_size(device: torch.device) -> None:
    model = AsksForSize().double().to(device)
    gs, x = fxgrad.transform(model, backend="eager"), torch.randn(5, 3, dtype=torch.double, device=device)
    for size in (4, 5):
        gs(x[:size]).sum().backward()
        slope = model.fc(x[:4]).cos() if size == 4 else x.new_ones(size, 2)
        found: Tensor = model.fc.weight.grad_sample  # type: ignore[attr-defined]
        torch.testing.assert_close(found, slope[:, :, None] * x[:size, None])
        fxgrad.zero_grad(model)


class Counted(nn.Module):
    """Takes nothing but the number of samples from an input, and copies of a weight for so many."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(3, 2), nn.Parameter(torch.randn(4))

    def forward(self, batch: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        copies = self.scale.expand(batch["ids"].shape[0], -1).sin()
        return self.fc(x), copies * x.new_ones(batch["ids"].shape[0], 1)


@pytest.mark.parametrize("length", [5, 7])
def test_a_size_of_an_input_that_is_used_for_nothing_else(length: int, device: torch.device) -> None:
    batch = {"ids": torch.zeros(5, length, dtype=torch.long, device=device)}
    assert_per_sample_grads(
        Counted().double().to(device), batch, torch.randn(5, 3, dtype=torch.double, device=device), backend="eager"
    )


def test_another_size_of_such_an_input_is_not_the_batch(device: torch.device) -> None:
    """Its length is five by chance: what has that size holds no samples."""

    class Length(Counted):
        def forward(self, batch: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(x), self.scale.expand(batch["ids"].shape[1], -1).sin()

    gs = fxgrad.transform(Length().to(device), backend="eager")
    _, copies = gs({"ids": torch.zeros(5, 5, dtype=torch.long, device=device)}, torch.randn(5, 3, device=device))
    with pytest.raises(fxgrad.errors.UniformOutput, match="depends on parameters alone"):
        copies.sum().backward()


class Bags(nn.Module):
    """One bag for each sample, by offsets or by rows."""

    def __init__(self, lookup: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.lookup = nn.Parameter(torch.randn(7, 3)), lookup

    def forward(self, ids: Tensor) -> Tensor:
        return self.lookup(ids, self.table)


LIMITED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "offsets": lambda ids, w: F.embedding_bag(ids.flatten(), w, torch.arange(len(ids)) * 4, max_norm=0.5),
    "rows": lambda ids, w: F.embedding_bag(ids, w, max_norm=0.5),
    "a view": lambda ids, w: F.embedding(ids, w[1:6], max_norm=0.5),
}


@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.NormSample()], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("form", LIMITED)
def test_a_table_that_its_lookup_shortens(form: str, batch: int, quantity: fxgrad.Quantity) -> None:
    """It is refused for one sample, as for more."""
    gs = fxgrad.transform(Bags(LIMITED[form]), quantity=quantity, backend="eager")
    with pytest.raises(UnsupportedOp, match="max_norm= has no per-sample gradient: it renormalises the weight"):
        gs(torch.randint(5, (batch, 4)))


class Written(nn.Module):
    """Returns copies of a parameter into which samples were written by the name of a dropout that is off."""

    def __init__(self, options: dict[str, Any], kept: bool) -> None:
        super().__init__()
        self.scale, self.kept, self.options = nn.Parameter(torch.randn(3)), kept, options

    def forward(self, x: Tensor) -> Tensor:
        copies = self.scale.repeat(len(x), 1)
        dropped = F.dropout(copies, **self.options)
        (dropped if self.kept else copies).mul_(x)
        return copies if self.kept else dropped


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("options", [dict(p=0.0), dict(training=False)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_copies_behind_a_dropout_that_is_off(batch: int, options: Any, kept: bool, device: torch.device) -> None:
    model = Written(options, kept).double().to(device)
    assert_per_sample_grads(model, torch.randn(batch, 3, dtype=torch.double, device=device), backend="eager")

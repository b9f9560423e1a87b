"""torch.cond, scan, map and while_loop inside the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map as _typed_map
from torch._higher_order_ops.while_loop import while_loop

import fxgrad
from fxgrad.errors import MixedSamples, UnsupportedOp
from fxgrad.testing import assert_per_sample_grads
from tests.quick import long_but

torch_map: Any = _typed_map
# PyTorch's own: torch.cond outside of torch.compile compiles itself, and looks at .grad of what it closes over
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Model(nn.Module):
    flag: Tensor

    def __init__(self, body: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(3, 3), nn.Linear(3, 3), body
        self.register_buffer("flag", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def a_branch(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch.cond(m.flag > 0, lambda t: m.a(t).tanh(), lambda t: m.b(t) * 2, (x,))
    return out * m.b.bias


def the_other_branch(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch.cond(m.flag < 0, lambda t: m.a(t).tanh(), lambda t: m.b(t) * m.a.bias, (x,))
    return out


def a_parameter_decides(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch.cond(m.a.bias.sum() > 9, lambda t: t.sin(), lambda t: m.b(t), (m.a(x),))
    return out


def a_branch_with_merged_samples(m: Model, x: Tensor) -> Tensor:
    h = m.a(x).flatten(0, 1)
    out: Tensor = torch.cond(m.flag > 0, lambda t: m.b(t), lambda t: t * m.b.bias, (h,))
    return out.view_as(x)


def a_scan_over_time(m: Model, x: Tensor) -> Tensor:
    def step(carry: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(m.a(t) + m.b(carry))
        return new, new * m.a.bias

    last, every = scan(step, x.new_zeros(x.shape[0], 3), x.transpose(0, 1))
    return last + every.sum(0)


def a_map_over_time(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch_map(lambda t: m.a(t).tanh(), x.transpose(0, 1))
    return out.sum(0)


def a_map_over_samples(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch_map(lambda t: m.a(t).tanh() * t.mean(), x)
    return out


def a_loop(m: Model, x: Tensor) -> Tensor:
    def again(i: Tensor, h: Tensor) -> Tensor:
        return i < 3

    def body(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(m.a(h)) + m.b.bias

    out: Tensor = while_loop(again, body, (torch.tensor(0, device=x.device), x))[1]
    return out


def a_branch_of_constants(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch.cond(m.flag < 0, lambda t: t * m.b.bias, lambda t: torch.zeros_like(t), (x,))
    return out * m.a.bias + out.sin()


def a_scan_from_a_layer(m: Model, x: Tensor) -> Tensor:
    def step(carry: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(m.a(t) + carry), carry * 2

    last, every = scan(step, m.b(x[:, 0]), x.transpose(0, 1))
    return last + every.sum(0)


def a_loop_from_a_layer(m: Model, x: Tensor) -> Tensor:
    start = torch.tensor(0, device=x.device), m.b(x)
    out: Tensor = while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, torch.tanh(m.a(h))), start)[1]
    return out


def a_branch_behind_a_number(m: Model, x: Tensor) -> Tensor:
    scale = m.flag.item()
    out: Tensor = torch.cond(m.flag > 0, lambda t: m.a(t).tanh(), lambda t: m.b(t) * 2, (x * scale,))
    return out * m.b.bias + m.flag.cos().item()


def a_branch_by_a_number(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch.cond(m.flag.long().item() > 0, lambda t: m.a(t).tanh(), lambda t: m.b(t) * 2, (x,))
    return out * m.b.bias


def a_scan_behind_a_number(m: Model, x: Tensor) -> Tensor:
    scale = m.flag.long().item()
    last, every = scan(lambda c, t: (torch.tanh(m.b(c) + t), c * 2), m.a(x[:, 0]), x.transpose(0, 1) * scale)
    return last + every.sum(0)


BODIES = [
    a_branch, the_other_branch, a_parameter_decides, a_branch_with_merged_samples, a_scan_over_time,
    a_map_over_time, a_map_over_samples, a_loop, a_branch_of_constants, a_scan_from_a_layer, a_loop_from_a_layer,
    a_branch_behind_a_number, a_branch_by_a_number, a_scan_behind_a_number,
]  # fmt: skip


QUICK = (
    a_branch, a_parameter_decides, a_branch_with_merged_samples, a_scan_over_time, a_map_over_samples, a_loop,
    a_scan_from_a_layer, a_branch_by_a_number, a_scan_behind_a_number,
)  # fmt: skip

# PyTorch's own scan refuses a transposed batch of one: it takes that for an alias of its input. Before 2.13 it takes
# a carried value that starts as zeros for one, of any size: torch.compile alone fails on it.
SCANS = (a_scan_over_time, a_scan_from_a_layer)
REFUSED = (a_scan_over_time,) if torch.__version__ < "2.13" else ()


@pytest.mark.parametrize(
    ("body", "size"),
    long_but(lambda body, _: body in QUICK, [(body, 4) for body in BODIES if body not in REFUSED])
    + long_but(
        lambda body, _: body in (a_branch, a_map_over_time), [(body, 1) for body in BODIES if body not in SCANS]
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_against_the_loop(body: Any, size: int, device: torch.device) -> None:
    # torch 2.13's own while_loop loses gradients through a carried value that starts without one
    x = torch.randn(size, 5, 3, dtype=torch.double, device=device, requires_grad=True)
    assert_per_sample_grads(Model(body).double().to(device), x, backend="aot_eager")


@pytest.mark.inductor
@pytest.mark.parametrize("body", [a_branch, a_map_over_time], ids=lambda body: body.__name__)
def test_through_inductor(body: Any, device: torch.device) -> None:
    assert_per_sample_grads(Model(body).to(device), torch.randn(4, 5, 3, device=device), tolerance=1e-4)


def samples_decide(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 0, lambda t: m.a(t), lambda t: m.b(t), (x,))
    return out


def a_branch_that_mixes(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch.cond(m.flag > 0, lambda t: m.a(t), lambda t: m.b(t) - m.b(t).mean(0), (x,))
    return out


def a_scan_over_samples(m: Model, x: Tensor) -> Tensor:
    last, every = scan(lambda c, t: (c + m.a(t), c * 2), torch.zeros_like(x[0]), x)
    return last + every.sum(0)


def a_map_with_the_batch(m: Model, x: Tensor) -> Tensor:
    out: Tensor = torch_map(lambda t, every: m.a(t) * every.mean(), x, x * 2)
    return out


def samples_stop_the_loop(m: Model, x: Tensor) -> Tensor:
    out: Tensor = while_loop(lambda h: h.abs().max() > 0.1, lambda h: (torch.tanh(m.a(h)) / 2,), (x,))[0]
    return out


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (samples_decide, "cond lets samples influence each other"),
        (a_branch_that_mixes, "its bodies hold the samples in different places"),
        (a_scan_over_samples, "it runs along the sample dimension"),
        (a_map_with_the_batch, "it maps over one sample's values together with another's"),
        (samples_stop_the_loop, "how often its body runs depends on samples"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mixing_is_refused(body: Any, reason: str, device: torch.device) -> None:
    gs = fxgrad.transform(Model(body).to(device), backend="eager")
    with pytest.raises(MixedSamples, match=reason):
        gs(torch.randn(4, 5, 3, device=device))


def of_parameters_alone_by_cond(m: Model, x: Tensor) -> Tensor:
    h, u = torch.cond(m.flag > 0, lambda t, b: (t * b, b * 2), lambda t, b: (t + b, b * 3), (m.a(x), m.b.bias))
    return h * u


def of_parameters_alone_by_scan(m: Model, x: Tensor) -> Tensor:
    start = (x.new_zeros(x.shape[0], 3), m.b.bias * 1)
    carry, _ = scan(lambda c, t: ((c[0] + t * m.b.bias, c[1] * m.b.bias), t * 2), start, torch.stack([x, m.a(x)]))
    return carry[0] * carry[1]


@pytest.mark.parametrize("body", [of_parameters_alone_by_cond, of_parameters_alone_by_scan], ids=["cond", "scan"])
def test_a_result_of_parameters_alone_beside_others_is_refused(body: Any, device: torch.device) -> None:
    name = body.__name__.rpartition("_")[2]
    said = f"one of the values that {name} returns depends on parameters alone, and another on samples"
    with pytest.raises(UnsupportedOp, match=said) as raised:
        fxgrad.transform(Model(body).to(device), backend="eager")(torch.randn(5, 3, device=device))
    assert "Compute what depends on parameters alone outside of it." in str(raised.value)
    assert "path: x -> " in str(raised.value)

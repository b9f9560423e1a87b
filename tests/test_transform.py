"""A transformed model is a drop-in for the model: the same state, the same class, another backward."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed

import fxgrad
from fxgrad.api import engine_of
from fxgrad.capture.dynamo import MARKS, CapturedCall
from fxgrad.errors import OptionError
from fxgrad.testing import default_loss, per_sample_grads, relative_error

BATCH = 5


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


class Net(nn.Module):
    """A model with parameters, a buffer, a tied weight and a keyword argument."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        """Two layers."""
        return self.fc2(torch.tanh(self.fc1(x) * self.scale + shift))

    def predict(self, x: Tensor) -> Tensor:
        return self(x)


@pytest.fixture
def net(device: torch.device) -> Net:
    return Net().to(device, torch.float64)


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(BATCH, 3, dtype=torch.float64, device=device)


def view(model: Any, **options: Any) -> Any:
    return fxgrad.transform(model, backend="eager", **options)


def right(gs_model: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None, **kwargs: Any) -> bool:
    """One forward and backward gives the loop's per-sample gradients and leaves .grad alone."""
    engine = engine_of(gs_model)
    assert engine is not None
    truth = per_sample_grads(engine.model, default_loss, (x,), kwargs)
    fxgrad.zero_grad(gs_model)
    default_loss((call or gs_model)(x, **kwargs)).backward()
    named = {name: p for name, p in gs_model.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in named.values())
    tolerance = 1e-10 if x.dtype == torch.float64 else 2e-2
    found = {name: p.grad_sample for name, p in named.items()}  # type: ignore[attr-defined]
    return relative_error(found, truth) <= tolerance


def test_class_name_and_signature(net: Net) -> None:
    gs = view(net)
    assert isinstance(gs, Net)
    assert type(gs).__name__ == "Net" and type(gs).__module__ == Net.__module__
    assert inspect.signature(gs.forward) == inspect.signature(net.forward)
    assert gs.forward.__doc__ == net.forward.__doc__
    assert repr(gs) == repr(net)


def test_state_is_the_models_own(net: Net) -> None:
    gs = view(net)
    assert gs.fc1 is net.fc1 and gs.scale is net.scale
    assert all(a is b for a, b in zip(gs.parameters(), net.parameters(), strict=True))
    assert [name for name, _ in gs.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert list(gs.state_dict()) == list(net.state_dict())
    gs.eval()
    assert not net.training and not net.fc1.training
    gs.note = "seen from both"
    assert net.note == "seen from both"


def test_the_original_goes_on_working(net: Net, x: Tensor) -> None:
    gs = view(net)
    assert right(gs, x)
    gs.zero_grad()
    default_loss(net(x)).backward()
    for p in net.parameters():
        assert p.grad is not None and getattr(p, "grad_sample", None) is None


@pytest.mark.parametrize("name", ["__call__", "forward", "predict"])
def test_every_way_to_call_is_transformed(net: Net, x: Tensor, name: str) -> None:
    gs = view(net)
    assert right(gs, x, getattr(gs, name))


def test_keyword_arguments(net: Net, x: Tensor) -> None:
    assert right(view(net), x, shift=0.3)


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_save])
@pytest.mark.parametrize("after_a_call", [False, True])
def test_copies(net: Net, x: Tensor, copied: Callable[[Any], Any], after_a_call: bool) -> None:
    gs = view(net)
    if after_a_call:
        assert right(gs, x)
    other = copied(gs)
    assert type(other).__name__ == "Net" and isinstance(other, Net)
    assert other.fc1.weight is not net.fc1.weight and torch.equal(other.fc1.weight, net.fc1.weight)
    fxgrad.zero_grad(net)
    assert right(other, x)
    assert all(getattr(p, "grad_sample", None) is None for p in net.parameters())


def test_copies_keep_the_options(net: Net, x: Tensor) -> None:
    other = copy.deepcopy(view(net, accumulate="sum"))
    for _ in range(2):
        other(x).sum().backward()
    assert torch.allclose(other.fc2.bias.grad_sample, x.new_full((BATCH, 2), 2.0))


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(net: Net, x: Tensor, assign: bool, device: torch.device) -> None:
    gs = view(net)
    assert right(gs, x)
    state = Net().to(device, torch.float64).state_dict()
    gs.load_state_dict(state, assign=assign)
    assert torch.equal(gs.fc1.weight, state["fc1.weight"])
    assert right(gs, x)


def test_half_and_to(net: Net, x: Tensor) -> None:
    gs = view(net)
    assert right(gs, x)
    fxgrad.zero_grad(gs)
    assert gs.half() is gs
    assert right(gs, x.half()) and net.fc1.weight.dtype == torch.float16
    fxgrad.zero_grad(gs)
    assert right(gs.to(torch.float64), x)


def test_train_and_eval(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to(x)
    gs = view(model)
    gs(x).sum().backward()
    gs.zero_grad()
    assert right(gs.eval(), x)


def test_forward_hooks(net: Net, x: Tensor) -> None:
    gs = view(net)
    gs.register_forward_hook(lambda module, args, output: output * 2)
    net.fc1.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert torch.equal(gs(x).detach(), net(x).detach())
    assert right(gs, x)


def test_swapped_submodule_and_parameter(net: Net, x: Tensor) -> None:
    gs = view(net)
    assert right(gs, x)
    gs.fc2 = nn.Linear(4, 6).to(x)
    assert right(gs, x) and net.fc2.out_features == 6
    net.fc1.bias = nn.Parameter(torch.randn(4).to(x))
    assert right(gs, x)


def test_no_grad_runs_the_original(net: Net, x: Tensor) -> None:
    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise AssertionError("nothing is to be compiled")

    gs = fxgrad.transform(net, backend=backend)
    with torch.no_grad():
        assert torch.equal(gs(x), net(x))
    net.requires_grad_(False)
    assert torch.equal(gs(x), net(x))


def test_outputs_and_input_gradients_are_the_models(net: Net, x: Tensor) -> None:
    gs, x2 = view(net), x.clone().requires_grad_()
    x.requires_grad_()
    y, y2 = net(x), gs(x2)
    assert torch.equal(y, y2)
    default_loss(y).backward()
    default_loss(y2).backward()
    assert x.grad is not None and x2.grad is not None
    torch.testing.assert_close(x.grad, x2.grad)


def test_user_tensors_are_not_left_marked(net: Net, x: Tensor) -> None:
    torch._dynamo.maybe_mark_dynamic(x, 1)
    before = dict(x.__dict__)
    gs = view(net)
    assert right(gs, x)
    assert x.__dict__ == before
    fxgrad.zero_grad(gs)
    with pytest.raises(Exception, match="shapes cannot be multiplied"):
        gs(x[:, :2])
    assert x.__dict__ == before


def test_nothing_is_left_on_tensors_of_a_known_graph(net: Net, x: Tensor) -> None:
    """Dynamo is configured only where it compiles; AOTAutograd marks what it saves in every call."""
    gs = fxgrad.transform(net, backend="aot_eager")
    for _ in range(3):
        assert right(gs, x)
        fxgrad.zero_grad(gs)
        assert not x.__dict__.keys() & set(MARKS)


def test_a_known_graph_does_not_configure_dynamo(net: Net, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    gs = view(net)
    assert right(gs, x)
    fxgrad.zero_grad(gs)
    configured: list[CapturedCall] = []
    monkeypatch.setattr(CapturedCall, "configure", configured.append)
    assert right(gs, torch.cat([x, x])) and not configured


def test_marks_of_other_compiled_models_do_not_configure_dynamo(
    net: Net, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd marks what a compiled model returns, and what it saves: a frozen part in front of ours, say."""
    front = torch.compile(nn.Linear(3, 3).to(x), backend="aot_eager", dynamic=True)
    x = front(torch.cat([x, x])).detach()
    x._dynamo_propagated_dynamic_indices = {0}  # type: ignore[attr-defined]  # as it is left on what is saved
    before, others = dict(x.__dict__), front(torch.ones_like(x))
    gs = fxgrad.transform(net, backend="aot_eager")
    assert right(gs, x) and x.__dict__ == before
    fxgrad.zero_grad(gs)
    configured: list[CapturedCall] = []
    monkeypatch.setattr(CapturedCall, "configure", configured.append)
    assert right(gs, x) and not configured
    assert x.__dict__ == before
    assert torch.equal(front(torch.ones_like(x)), others)  # its graph is found again


def test_a_compilation_that_nobody_announced(net: Net, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo announces a compilation where nothing else is under way, CUDA graphs among it."""
    monkeypatch.setattr(callback_handler, "run_start_callbacks", lambda _: None)
    gs = view(nn.Sequential(net, nn.GRU(2, 2, batch_first=True), First()).to(x))
    for size in (BATCH, BATCH + 2):
        assert right(gs, torch.randn(size, 6, 3).to(x))
        fxgrad.zero_grad(gs)
    torch._dynamo.reset()  # forgets the callbacks
    assert right(gs, torch.randn(BATCH, 6, 3).to(x))


def test_inside_another_model(net: Net, x: Tensor) -> None:
    """A transformed model that is part of a transformed model is the plain one there."""
    first = nn.Linear(3, 3).to(x)
    default_loss(view(nn.Sequential(first, view(net)))(x)).backward()
    truth = per_sample_grads(nn.Sequential(first, net), default_loss, (x,))
    named = nn.Sequential(first, net).named_parameters()
    found = {name: p.grad_sample for name, p in named}  # type: ignore[attr-defined]
    assert relative_error(found, truth) <= 1e-10


def test_two_views_of_one_model(net: Net, x: Tensor) -> None:
    assert right(view(net), x) and right(view(net), x)


def test_a_models_own_error_is_its_own(net: Net, x: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"^(addmm: )?mat1 and mat2 shapes cannot be multiplied \(5x2 and 3x4\)$"):
        view(net)(x[:, :2])
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        view(net)(x, unknown=1)


class Bracket(Tensor):
    """A tensor subclass that says of itself what it is."""


BAD_OPTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a module": (lambda net: view(net.forward), "nn.Module, not method"),
    "a class": (lambda net: view(type(net)), "nn.Module, not the class Net"),
    "transformed": (lambda net: view(view(net)), "already transformed"),
    "compiled": (lambda net: view(torch.compile(net)), "not a compiled one"),
    "backend": (lambda net: fxgrad.transform(net, backend="indcutor"), "backend has to be"),
    "loss_reduction": (lambda net: view(net, loss_reduction="max"), "loss_reduction has to be"),
    "loss_reduction zero": (lambda net: view(net, loss_reduction=0), "loss_reduction has to be"),
    "loss_reduction bool": (lambda net: view(net, loss_reduction=True), "loss_reduction has to be"),
    "accumulate": (lambda net: view(net, accumulate="add"), "accumulate has to be"),
    "mixing": (lambda net: view(net, mixing="yes"), "mixing has to be"),
    "batch_size zero": (lambda net: view(net, batch_size=0), "positive int"),
    "batch_size float": (lambda net: view(net, batch_size=4.0), "positive int"),
    "batch_size bool": (lambda net: view(net, batch_size=True), "positive int"),
    "in_dims": (lambda net: view(net, in_dims=("0",)), "in_dims holds"),
    "quantity": (lambda net: view(net, quantity="norms"), "quantity has to be"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(net: Net, case: str) -> None:
    make, sentence = BAD_OPTIONS[case]
    with pytest.raises(OptionError, match=sentence):
        make(net)


def test_compiled_in_place(net: Net) -> None:
    net.compile(backend="eager")
    with pytest.raises(OptionError, match=r"model\.compile\(\)"):
        view(net)


def test_not_compiled_in_place(net: Net, x: Tensor) -> None:
    """It would compile the original's calls, which share its state."""
    gs = view(net)
    with pytest.raises(OptionError, match=r"compile\(\) of a transformed model"):
        gs.compile(backend="eager")
    assert net(x).shape == gs(x).shape


def test_no_samples_in_a_model_that_holds_a_transformed_one(net: Net, x: Tensor) -> None:
    gs = view(nn.Sequential(view(net), nn.Tanh()))
    for size in (0, 2):
        fxgrad.zero_grad(gs)
        gs(x[:size]).sum().backward()
        assert len(fxgrad.delivered(net.fc1.weight)) == size


PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "tensor subclass, Bracket": lambda: torch.randn(2).as_subclass(Bracket),
    "complex": lambda: torch.randn(2, dtype=torch.complex64),
    "sparse": lambda: torch.randn(2, 2).to_sparse(),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_that_are_no_ordinary_tensors(net: Net, x: Tensor, kind: str) -> None:
    gs = view(net)
    net.extra = nn.Parameter(PARAMETERS[kind]())
    for model, takes in ((gs, x), (view, net)):
        with pytest.raises(OptionError, match=f"'extra' is (a )?{kind}"):
            model(takes)
    net.extra.requires_grad_(False)
    gs(x).sum().backward()
    assert net.fc1.weight.grad_sample.shape == (BATCH, 4, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["tensor subclass, Bracket", "complex"])  # Dynamo itself takes no sparse ones
def test_such_parameters_through_the_backend(net: Net, x: Tensor, kind: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.extra = net, nn.Parameter(PARAMETERS[kind]().to(x.device))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = (self.net(x) * self.extra).abs()
            return out

    compiled = torch.compile(Scaled(), backend="fxgrad", options={"backend": "eager"})
    with pytest.raises(BackendCompilerFailed, match=f"is (a )?{kind}"):
        compiled(x)
    assert not hasattr(net.fc1.weight, "grad_sample")


def test_other_transforms_around_it(net: Net, x: Tensor) -> None:
    gs = view(net)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(OptionError, match="forward-mode AD"):
            gs(dual)
    for around in (lambda: torch.func.vmap(gs)(x), lambda: torch.func.jvp(gs, (x,), (x,))):
        with pytest.raises(OptionError, match=r"torch\.func"):
            around()

"""The behaviours that PyTorch tests its private expanded weights for, here of `call_for_per_sample_grads`.

docs/parity.md goes through PyTorch's files function by function and names the test of each.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import fxgrad
from fxgrad.errors import MixedSamples
from fxgrad.testing import assert_per_sample_grads, default_loss, per_sample_grads, relative_error
from tests.database_models import op_cases
from tests.databases import module_db, op_db

with mock.patch("torch.backends.disable_global_flags"):  # its import would forbid other tests to set flags
    from torch.testing._internal.common_nn import get_new_module_tests, module_tests

SUPPORTED = [
    "nn.functional.linear",
    "nn.functional.conv1d",
    "nn.functional.conv2d",
    "nn.functional.conv3d",
    "nn.functional.embedding",
    "nn.functional.group_norm",
    "nn.functional.instance_norm",
    "nn.functional.layer_norm",
]
"""The ops that expanded weights know."""

MODULES = "Linear Conv1d Conv2d Conv3d Embedding LayerNorm GroupNorm".split()
MODULES += [f"InstanceNorm{dim}d" for dim in (1, 2, 3)]
OPS = [op for op in op_db if op.name in SUPPORTED]
call: Any = fxgrad.call_for_per_sample_grads


def natural_cases(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The op's sample inputs with the samples on dim 0."""
    for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
        for case in op_cases(op.op, op.name, sample):
            source = getattr(case.model, "source", "")  # the input holds samples, and nothing else does
            by_input = "op(x0" in source or op.name.endswith("embedding")
            if by_input and case.natural and case.out_dims is not None and case.in_dims == (0,):
                yield case
                break  # others end PyTorch 2.13 in float16, on processors that compute in it


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("most", [2, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_forward(op: Any, dtype: torch.dtype, most: int) -> None:
    """The forward with trainable weights equals the plain one (PyTorch's test has none that are trainable)."""
    if dtype not in op.supported_dtypes("cpu"):
        pytest.skip(f"PyTorch's {op.name} has no {dtype} on CPU")
    seen = 0
    for case in natural_cases(op, dtype):
        assert any(p.requires_grad for p in case.model.parameters())
        plain = case.model(*case.inputs)
        own = fxgrad.transform(case.model, in_dims=case.in_dims, backend="eager")(*case.inputs)
        torch.testing.assert_close(own, plain)
        seen += 1
        if seen == most:
            break
    assert seen


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("by_input", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("most", [2, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_per_sample_grads(op: Any, reduction: str, by_input: bool, most: int) -> None:
    seen = 0
    for case in natural_cases(op, torch.float64):
        case = case.with_input_gradients(by_input)
        samples = max(x.shape[0] for x, dim in zip(case.inputs, case.in_dims, strict=True) if dim == 0)
        if samples == 0 or case.out_dims != [0] * len(case.out_dims):
            continue
        gs = fxgrad.transform(case.model, in_dims=case.in_dims, backend="eager", loss_reduction=reduction)
        loss = case.loss_fn(gs(*case.inputs))
        (loss / samples if reduction == "mean" else loss).backward()
        found = {name: p.grad_sample for name, p in case.model.named_parameters()}
        fxgrad.zero_grad(case.model)
        expected = per_sample_grads(case.model, case.loss_fn, case.inputs, in_dims=case.in_dims)
        assert relative_error(found, expected) < 1e-10
        seen += 1
        if seen == most:
            break
    assert seen


def built(test: dict[str, Any]) -> tuple[nn.Module, Tensor] | None:
    if test.get("module_name") not in MODULES or "zero_batch" in test.get("desc", ""):
        return None
    module = getattr(nn, test["module_name"])(*test["constructor_args"])
    x = test["input_fn"]() if "input_fn" in test else torch.randn(test["input_size"])
    if not any(True for _ in module.parameters()) or "no_batch" in test.get("desc", ""):
        return None
    return module.double(), x.double() if x.is_floating_point() else x


TESTS = {
    f"{test['module_name']} {test.get('desc', '')}": made
    for test in [*module_tests, *get_new_module_tests()]
    if (made := built(test)) is not None
}


class Twice(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) * self.module(x.flip(-1))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", TESTS)
def test_module(name: str, twice: bool) -> None:
    """Every entry of PyTorch's `module_tests` of the supported kinds, single and used twice."""
    module, x = TESTS[name]
    assert_per_sample_grads(Twice(module) if twice else module, x, backend="eager")


RECURRENT = [info for info in module_db if info.name in ("nn.RNN", "nn.LSTM", "nn.GRU")]


class SamplesFirst(nn.Module):
    """A recurrent module whose results have the samples first."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        out, last = self.rnn(x, states if len(states) > 1 else states[0] if states else None)
        last = last if isinstance(last, tuple) else (last,)
        return out if self.rnn.batch_first else out.transpose(0, 1), *(h.transpose(0, 1) for h in last)


@pytest.mark.parametrize("one_in", [10, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("info", RECURRENT, ids=lambda info: info.name)
def test_recurrent_modules(info: Any, one_in: int) -> None:
    """Every input of `module_db`: refused as it is (unbatched), right as a batch, right when packed."""
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    for index, sample in islice(enumerate(inputs), 0, None, one_in):
        torch.manual_seed(index)
        rnn = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double()
        x, *states = sample.forward_input.args
        states = list(states[0]) if states and isinstance(states[0], tuple | list) else states
        assert x.dim() == 2
        batch_dim = 0 if rnn.batch_first else 1
        with pytest.raises(MixedSamples, match=r"recurrence .*: it runs along the sample dimension"):
            fxgrad.transform(SamplesFirst(rnn), backend="eager", in_dims=(0, *[1] * len(states)))(x)
        batched = torch.randn(3, *x.shape, dtype=x.dtype).transpose(0, batch_dim).contiguous().requires_grad_()
        given = [torch.randn(h.shape[0], 3, h.shape[1], dtype=h.dtype).requires_grad_() for h in states]
        in_dims = (batch_dim, *[1] * len(given))
        assert_per_sample_grads(SamplesFirst(rnn), batched, *given, in_dims=in_dims, backend="eager")
        packed(rnn, batched.detach())
        torch._dynamo.reset()


@pytest.mark.parametrize("one_in", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("info", RECURRENT, ids=lambda info: info.name)
def test_recurrent_modules_as_pytorch_calls_them(info: Any, one_in: int) -> None:
    """PyTorch's test makes a batch of two equal samples, says so, and leaves the states' place to be known."""
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    for sample in islice(inputs, 0, None, one_in):
        rnn = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double()
        x, *states = sample.forward_input.args
        states = list(states[0]) if states and isinstance(states[0], tuple | list) else states
        batched = torch.stack([x, x], 0 if rnn.batch_first else 1).detach()
        given = [torch.stack([h, h], 1).detach() for h in states]
        arguments = (tuple(given),) if len(given) > 1 else tuple(given)
        gs = call(rnn, batch_size=2, batch_first=rnn.batch_first, backend="eager")
        gs(batched, *arguments)[0].sum().backward()
        found = {name: p.grad_sample for name, p in rnn.named_parameters()}
        fxgrad.zero_grad(rnn)
        rnn(batched, *arguments)[0].sum().backward()
        expected = {name: p.grad / 2 for name, p in rnn.named_parameters()}
        for i in (0, 1):
            assert relative_error({name: g[i] for name, g in found.items()}, expected) < 1e-10
        rnn.zero_grad()
        torch._dynamo.reset()


def packed(rnn: Any, batched: Tensor) -> None:
    """The same rows as a packed batch: rows of grad_sample are the user's, where PyTorch's are sorted."""
    x = batched if rnn.batch_first else batched.transpose(0, 1)
    lengths = torch.tensor([1, x.shape[1], max(1, x.shape[1] - 1)])
    rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out = fxgrad.transform(rnn, backend="eager")(rows)[0]
    assert isinstance(out, PackedSequence)
    default_loss(out.data.sum()).backward()
    found = {name: p.grad_sample for name, p in rnn.named_parameters()}
    fxgrad.zero_grad(rnn)
    for i, length in enumerate(lengths):
        one = x[i : i + 1, :length]
        default_loss(rnn(one if rnn.batch_first else one.transpose(0, 1))[0].sum()).backward()
        expected = {name: p.grad for name, p in rnn.named_parameters()}
        assert relative_error({name: g[i] for name, g in found.items()}, expected) < 1e-10
        rnn.zero_grad()


def cnn(dim: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    conv: Any = getattr(nn, f"Conv{dim}d")
    pool: Any = getattr(nn, f"AdaptiveAvgPool{dim}d")
    layers = [conv(3, 4, 3, padding=1), norm(4), nn.ReLU(), conv(4, 6, 2), pool(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 5))


NORMS: dict[str, Callable[[int, int], nn.Module]] = {
    "nothing": lambda dim, channels: nn.Identity(),
    "instance norm": lambda dim, channels: getattr(nn, f"InstanceNorm{dim}d")(channels, affine=True),
    "group norm": lambda dim, channels: nn.GroupNorm(2, channels),
    "layer norm": lambda dim, channels: nn.LayerNorm([channels, *[6] * dim]),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_models(dim: int, norm: str) -> None:
    model = cnn(dim, lambda channels: NORMS[norm](dim, channels)).double()
    assert_per_sample_grads(model, torch.randn(4, 3, *[6] * dim, dtype=torch.float64), backend="eager")


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_embedding_model(dim: int) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.LayerNorm(3)).double()
    assert_per_sample_grads(model, torch.randint(9, (5, *[3] * (dim - 1))), backend="eager")


def test_what_expanded_weights_refuse_works() -> None:
    """Ops outside their ten, a parameter as input, an input shared by all samples."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.w = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.table, self.w.t()).sum(0) + (x @ self.w).cumsum(-1)

    assert_per_sample_grads(Model().double(), torch.randn(6, 3, dtype=torch.float64), backend="eager")


def linear() -> Any:
    return nn.Linear(10, 5)


class TestTheInterface:
    """`call_for_per_sample_grads` is called as PyTorch's is."""

    def test_it_fills_grad_sample(self) -> None:
        module, x = linear(), torch.randn(7, 10)
        call(module, backend="eager")(x).sum().backward()
        assert module.weight.grad_sample.shape == (7, 5, 10)
        assert module.weight.grad is None

    def test_what_fails_at_once(self) -> None:
        module = linear()
        with pytest.raises(RuntimeError, match=r"^Module passed must be nn\.Module, got str"):
            call("fail")
        with pytest.raises(RuntimeError, match=r"^Batch size passed must be None or an integer, got float"):
            call(module, batch_size=6.4)
        with pytest.raises(RuntimeError, match=r"^Batch size must be positive, got -64"):
            call(module, batch_size=-64)
        with pytest.raises(RuntimeError, match=r"^Expected loss_reduction argument to be sum or mean, got"):
            call(module, loss_reduction="")

    def test_grad_sample_has_to_be_cleared(self) -> None:
        module, x = linear(), torch.randn(7, 10)
        call(module, backend="eager")(x).sum().backward()
        with pytest.raises(RuntimeError, match=r"^Current Expanded Weights accumulates the gradients"):
            call(module)
        module.weight.grad_sample = None
        with pytest.raises(RuntimeError, match=r"^Current Expanded Weights accumulates the gradients"):
            call(module)
        module.bias.grad_sample = None
        call(module, backend="eager")(x).sum().backward()

    def test_calls_add_up(self) -> None:
        module, x = linear(), torch.randn(7, 10)
        wrapper = call(module, backend="eager")
        (wrapper(x).sum() + wrapper(2 * x).sum()).backward()
        torch.testing.assert_close(module.weight.grad_sample[:, 0], 3 * x)
        wrapper(x).sum().backward()
        torch.testing.assert_close(module.weight.grad_sample[:, 0], 4 * x)

    def test_one_graph_for_every_step(self) -> None:
        graphs: list[Any] = []

        def backend(gm: Any, inputs: Any) -> Any:
            graphs.append(gm)
            return gm.forward

        module = linear()
        for size in (7, 8, 9):
            call(module, backend=backend)(torch.randn(size, 10)).sum().backward()
            fxgrad.zero_grad(module)
        assert len(graphs) == 1

    def test_mean(self) -> None:
        module, x = linear(), torch.randn(7, 10)
        call(module, loss_reduction="mean", backend="eager")(x).sum(1).mean().backward()
        torch.testing.assert_close(module.weight.grad_sample[:, 0], x)

    def test_batch_second(self) -> None:
        module, x = linear(), torch.randn(3, 7, 10)
        call(module, batch_first=False, backend="eager")(x).sum().backward()
        torch.testing.assert_close(module.weight.grad_sample[:, 0], x.sum(0))

    def test_a_copy_and_a_pickle_are_free_of_it(self) -> None:
        module, x = linear(), torch.randn(7, 10)
        call(module, backend="eager")(x).sum().backward()
        module.zero_grad()
        fxgrad.zero_grad(module)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            call(other, backend="eager")(x).sum().backward()
            assert module.weight.grad_sample is None
            assert other.weight.grad_sample.shape == (7, 5, 10)
        assert list(module.state_dict()) == ["weight", "bias"]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        def read(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self.linear(value)
            if isinstance(value, dict):
                value = list(value.values())
            elif dataclasses.is_dataclass(value):
                value = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return sum(read(item) for item in value) if isinstance(value, list | tuple) else 0

        return sum(read(value) for value in [*args, *kwargs.values()])


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor


class TestTheBatchSize:
    @pytest.mark.parametrize(
        "inputs",
        [
            lambda x: ((x,), {}),
            lambda x: ((x, x + 1), {}),
            lambda x: ((), {"x": x}),
            lambda x: (([x, {"y": x + 1}], (x,)), {"z": [x]}),
            lambda x: ((Pair(x, x + 1),), {}),
            lambda x: (("text", x), {"flag": True}),
        ],
        ids=["one", "two", "keyword", "nest", "dataclass", "with other things"],
    )
    def test_it_is_found(self, inputs: Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        model: Any = Structured()
        args, kwargs = inputs(torch.randn(4, 5))
        call(model, backend="eager")(*args, **kwargs).sum().backward()
        assert model.linear.weight.grad_sample.shape == (4, 5, 5)

    def test_inputs_that_disagree(self) -> None:
        wrapper = call(Structured(), backend="eager")
        with pytest.raises(RuntimeError, match=r"found at least one input with batch size 4 and one with batch size 5"):
            wrapper(torch.randn(4, 5), torch.randn(5, 5))
        with pytest.raises(RuntimeError, match=r"found at least one input with batch size 4 and one with batch size 5"):
            wrapper(torch.randn(4, 5), other=torch.randn(5, 5))

    def test_no_tensor(self) -> None:
        with pytest.raises(RuntimeError, match=r"^Unable to find a tensor in the passed args and kwargs"):
            call(Structured(), backend="eager")("text", [1, 2])

    def test_it_is_given(self) -> None:
        model: Any = Structured()
        call(model, batch_size=4, backend="eager")(torch.randn(4, 5), torch.randn(1, 5)).sum().backward()
        assert model.linear.weight.grad_sample.shape == (4, 5, 5)

    def test_it_is_given_and_wrong(self) -> None:
        with pytest.raises(RuntimeError, match=r"no input has batch_size=3"):
            call(Structured(), batch_size=3, backend="eager")(torch.randn(4, 5))

    @pytest.mark.parametrize("size", [0, 1])
    def test_none_and_one(self, size: int) -> None:
        """Expanded weights give up on an empty batch."""
        module: Any = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
        call(module, backend="eager")(torch.randn(size, 5)).sum().backward()
        assert module[0].weight.grad_sample.shape == (size, 4, 5)

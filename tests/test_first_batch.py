"""The check of the first batch: right models pass with the same numbers, mixing ones raise and leave no result."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.api import engine_of
from fxgrad.capture.shared_memory import copies
from fxgrad.engine import Engine
from fxgrad.errors import MixedSamples, OptionError
from fxgrad.first_batch.changes import BatchedInput, chosen
from fxgrad.verification.oracle import default_loss
from tests.quick import long_but

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

QUANTITIES: dict[str, Callable[[], fxgrad.Quantity]] = {
    "rows": fxgrad.GradSample,
    "norms": fxgrad.NormSample,
    "clipped": lambda: fxgrad.ClippedGrad(1.0),
    "clipped by parameter": lambda: fxgrad.ClippedGrad(1.0, groups="per_parameter"),
    "gram": fxgrad.GradGram,
    "projection": lambda: fxgrad.GradProjection(4),
}


def centred(x: Tensor) -> Tensor:
    """Mix the samples, though it is registered as an op that does not."""
    return x - 0.1 * x.mean(0)


def across(x: Tensor) -> Tensor:
    """The same for samples on dimension 1."""
    return x - 0.1 * x.mean(1, keepdim=True)


class Wrapped(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Net(nn.Module):
    """Two layers with dropout, a buffer that counts calls, and one that averages the inputs."""

    count: Tensor
    mean: Tensor

    def __init__(self, before: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.last, self.before = nn.Linear(3, 5), nn.Linear(5, 2), before
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        x = x if self.before is None else self.before(x)
        out: Tensor = self.last(self.drop(torch.tanh(self.first(x))))
        return out


class Ids(nn.Module):
    """Integers and a mask of floats, in a dict; two outputs, one of which is a loss over all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        h = self.table(batch["ids"]) * batch["mask"].unsqueeze(-1)
        logits = self.head(h.sum(1))
        return {"logits": logits, "loss": F.cross_entropy(logits, batch["label"], reduction="sum")}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: Any) -> Tensor:
        out: Tensor = self.lstm(x)[1][0][0]
        return out


class Writes(nn.Module):
    """Writes to its input, to a frozen parameter and to a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(2)
            self.layer.weight.mul_(0.5)
        x.mul_(self.scale)
        out: Tensor = self.layer(x + y)
        return out


class Lengths(nn.Module):
    """Takes lengths that have to be sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.lstm(pack_padded_sequence(x, lengths, batch_first=True))[1][0][0]
        return out


def ids() -> dict[str, Tensor]:
    mask = (torch.rand(5, 4) > 0.3).float()
    return {"ids": torch.randint(7, (5, 4)), "mask": mask, "label": torch.randint(3, (5,))}


def packed() -> Any:
    return pack_sequence([torch.randn(n, 3) for n in (2, 5, 3, 4)], enforce_sorted=False)


def tangled() -> tuple[Tensor, Tensor]:
    """Two inputs in one memory, neither of which has numbers of the other."""
    memory = torch.randn(5, 6)
    return memory[:, :3], memory[:, 3:]


def net() -> Net:
    return Net()


def batch() -> tuple[Tensor]:
    return (torch.randn(6, 3),)


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], dict[str, Any]]
RIGHT: dict[str, Case] = {
    "dropout and buffers": (net, batch, {}),
    "two samples": (net, lambda: (torch.randn(2, 3),), {}),
    "bfloat16": (lambda: Net().bfloat16(), lambda: (torch.randn(6, 3).bfloat16(),), {}),
    "float64": (lambda: Net().double(), lambda: (torch.randn(6, 3).double(),), {}),
    "an input that requires grad": (net, lambda: (torch.randn(6, 3).requires_grad_(),), {}),
    "equal samples": (net, lambda: (torch.ones(6, 3),), {}),
    "Inf and NaN": (
        lambda: nn.Linear(3, 2),
        lambda: (torch.tensor([[1.0, 2, 3], [math.inf] * 3, [math.nan] * 3, [4, 5, 6], [7, 8, 9]]),),
        {},
    ),
    "groups": (net, batch, {"quantity": fxgrad.GradSample(group_size=2)}),
    "two groups": (net, batch, {"quantity": fxgrad.NormSample(group_size=3)}),
    "mean": (net, batch, {"loss_reduction": "mean"}),
    "sorted lengths": (Lengths, lambda: (torch.randn(4, 5, 3), torch.tensor([5, 4, 2, 1])), {}),
    "time first": (lambda: nn.LSTM(3, 4), lambda: (torch.randn(7, 5, 3),), {"batch_first": False}),
    "in_dims": (lambda: nn.Bilinear(3, 3, 2), lambda: (torch.randn(5, 3), torch.randn(5, 3)), {"in_dims": (0, 0)}),
    "a dict of integers": (Ids, lambda: (ids(),), {}),
    "a packed sequence": (Packed, lambda: (packed(),), {}),
    "a sorted packed sequence": (Packed, lambda: (pack_sequence([torch.randn(n, 3) for n in (5, 3, 3)]),), {}),
    "a convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten()),
        lambda: (torch.rand(4, 2, 6, 6).contiguous(memory_format=torch.channels_last),),
        {},
    ),
    "batch norm in eval mode": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval()), batch, {}),
    "writes": (Writes, lambda: (torch.randn(5, 3), torch.randn(5, 3)), {}),
    "inputs that share memory": (Writes, tangled, {}),
}


def engine(model: nn.Module) -> Engine:
    found = engine_of(model)
    assert found is not None
    return found


def numbers(case: Case, **options: Any) -> dict[str, Any]:
    """Everything that one step leaves."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    plain, args = case[0](), case[1]()
    model = fxgrad.transform(plain, **{"backend": "eager"} | case[2] | options)
    out = model(*args)
    default_loss(out).backward()
    assert engine(model).first_batch is None
    left = {"out": out, "rng": torch.get_rng_state(), "results": dict(engine(model).store.results)}
    left["parameters"] = {
        name: (p.detach(), *(getattr(p, place, None) for place in ("grad", "grad_sample", "norm_sample")))
        for name, p in plain.named_parameters()
    }
    left["buffers"] = dict(plain.named_buffers())
    left["inputs"] = [(x, x.grad if x.is_leaf else None) for x in args if isinstance(x, Tensor)]
    return left


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def unchecked(**options: Any) -> Any:
    return fxgrad.transform(Net(centred), backend="eager", check_first_batch=True, **options)


@pytest.fixture(autouse=True)
def _registered() -> None:
    fxgrad.register_op(centred)
    fxgrad.register_op(across)


class TestRight:
    @pytest.mark.parametrize(
        ("name", "backend"),
        long_but(
            lambda name, backend: backend == "eager" or name in ("dropout and buffers", "writes", "a packed sequence"),
            itertools.product(RIGHT, ("eager", "aot_eager")),
        ),
    )
    def test_numbers_are_those_without_the_check(self, name: str, backend: str) -> None:
        same(*(numbers(RIGHT[name], backend=backend, check_first_batch=check) for check in (False, True)))

    @pytest.mark.parametrize("quantity", QUANTITIES)
    def test_quantities(self, quantity: str) -> None:
        case = RIGHT["dropout and buffers"]
        same(*(numbers(case, quantity=QUANTITIES[quantity](), check_first_batch=check) for check in (False, True)))

    def test_several_quantities_and_sample_weights(self) -> None:
        clipped = fxgrad.ClippedGrad(1.0, sample_weight=True)
        quantities = [fxgrad.NormSample(), clipped]
        model = fxgrad.transform(Net(), quantity=quantities, backend="eager", check_first_batch=True)
        model(torch.randn(4, 3), sample_weight=torch.tensor([1.0, 0, 1, 0])).sum().backward()
        assert fxgrad.result(model, clipped).weight[1] == 0

    def test_inductor(self) -> None:
        options = dict(backend="inductor", quantity=fxgrad.ClippedGrad(1.0))
        case = RIGHT["dropout and buffers"]
        same(*(numbers(case, **options, check_first_batch=check) for check in (False, True)))

    def test_autocast(self) -> None:
        model = fxgrad.transform(Net(), backend="aot_eager", check_first_batch=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.randn(6, 3))
        out.sum().backward()
        assert engine(model).first_batch is None

    def test_under_hooks_on_saved_tensors(self) -> None:
        """weight_norm's gradient runs under torch.func, which refuses such hooks."""
        saved = []

        def pack(x: Tensor) -> Tensor:
            saved.append(x)
            return x

        model = fxgrad.transform(weight_norm(nn.Linear(3, 2)), backend="eager", check_first_batch=True)
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = model(torch.randn(4, 3))
            out.sum().backward()
            fxgrad.zero_grad(model)
        assert saved and len(saved) % 2 == 0  # as many in the call with the check

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_under_a_checkpoint(self, reentrant: bool) -> None:
        rows = []
        for check in (False, True):
            torch.manual_seed(1)
            plain = Net()
            model = fxgrad.transform(plain, backend="eager", check_first_batch=check)
            x = torch.randn(6, 3, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).sin().sum().backward()
            rows.append([p.grad_sample for p in plain.parameters()])  # type: ignore[attr-defined]
        same(*rows)


class TestMixed:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("quantity", QUANTITIES)
    def test_raises_and_leaves_everything(self, quantity: str, backend: str) -> None:
        plain = Net(centred)
        model = fxgrad.transform(plain, quantity=QUANTITIES[quantity](), backend=backend, check_first_batch=True)
        for p in plain.parameters():
            p.grad = torch.ones_like(p)
        x = torch.randn(6, 3, requires_grad=True)
        random = torch.get_rng_state()
        for _ in range(2):  # and once more, since nothing has passed
            with pytest.raises(MixedSamples, match=r"samples influence each other: samples \d and \d have new values"):
                model(x)
            assert plain.count == 0 and not plain.mean.any() and x.grad is None
            assert all(p.grad is not None and bool((p.grad == 1).all()) for p in plain.parameters())
            assert not any(hasattr(p, place) for p in plain.parameters() for place in ("grad_sample", "norm_sample"))
            assert not engine(model).store.results
            assert torch.equal(random, torch.get_rng_state())

    @pytest.mark.parametrize("size", [2, 3, 64])
    def test_any_batch_size(self, size: int) -> None:
        with pytest.raises(MixedSamples, match=r"moved for sample \d+ by 0"):
            unchecked()(torch.randn(size, 3))

    def test_behind_the_last_layer(self) -> None:
        """Under a gradient that does not depend on the output no row would move."""
        plain = nn.Sequential(nn.Linear(3, 2), Wrapped(centred))
        with pytest.raises(MixedSamples, match=r"grad_sample of '0\."):
            fxgrad.transform(plain, backend="eager", check_first_batch=True)(torch.randn(6, 3))

    def test_in_the_backward_alone(self) -> None:
        def silent(x: Tensor) -> Tensor:
            return _CentredGradient.apply(x)

        fxgrad.register_op(silent)
        plain = nn.Sequential(nn.Linear(3, 3), Wrapped(silent), nn.Linear(3, 2))
        with pytest.raises(MixedSamples, match=r"grad_sample of '0\."):
            fxgrad.transform(plain, backend="eager", check_first_batch=True)(torch.randn(6, 3))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_maximum_over_the_batch(self, dtype: torch.dtype) -> None:
        """Of fifty samples one has the largest value: that one is changed."""

        def scaled(x: Tensor) -> Tensor:
            return x / x.abs().max()

        fxgrad.register_op(scaled)
        with pytest.raises(MixedSamples, match=r"samples \d+ and \d+ have new values in the first batch"):
            fxgrad.transform(Net(scaled).to(dtype), backend="eager", check_first_batch=True)(
                torch.randn(50, 3).to(dtype)
            )

    def test_a_mean_over_the_tokens_that_count(self) -> None:
        """The loss divides by a number to which every sample contributes."""

        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 4)

            def forward(self, x: Tensor, label: Tensor) -> Tensor:
                return F.cross_entropy(self.layer(x).flatten(0, 1), label.flatten(), ignore_index=-100)

        label = torch.randint(4, (5, 6))
        for i in range(5):
            label[i, : i + 1] = -100
        with pytest.raises(MixedSamples, match="losses divided by a count over the batch"):
            fxgrad.transform(Loss(), backend="eager", check_first_batch=True)(torch.randn(5, 6, 3), label)

    def test_integers(self) -> None:
        class Mixing(Ids):
            def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
                return {"logits": centred(self.head(self.table(batch["ids"]).sum(1)))}

        with pytest.raises(MixedSamples, match=r"samples \d and \d have new values in the first batch"):
            fxgrad.transform(Mixing(), backend="eager", check_first_batch=True)(ids())

    def test_packed_sequences(self) -> None:
        class Mixing(Packed):
            def forward(self, x: Any) -> Tensor:
                return centred(super().forward(x))

        with pytest.raises(MixedSamples, match=r"samples \d and \d have new values in the first batch"):
            fxgrad.transform(Mixing(), backend="eager", check_first_batch=True)(packed())

    def test_packed_data_may_move_with_the_lengths(self) -> None:
        """Nothing is mixed where another sample's rows of packed data lie elsewhere."""

        class Packs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(3, 4, batch_first=True)

            def forward(self, x: Tensor, lengths: Tensor) -> Any:
                out, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
                return out, pad_packed_sequence(out, batch_first=True)[0]

        model = fxgrad.transform(Packs(), backend="eager", check_first_batch=True)
        model(torch.randn(4, 7, 3), torch.tensor([3, 7, 5, 1]))
        assert engine(model).first_batch is None

    def test_time_first(self) -> None:
        plain = nn.Sequential(nn.Linear(3, 4), Wrapped(across))
        model = fxgrad.transform(plain, batch_first=False, backend="eager", check_first_batch=True)
        with pytest.raises(MixedSamples, match=r"samples \d and \d have new values in the first batch"):
            model(torch.randn(7, 5, 3))


class _CentredGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


class TestWhen:
    def test_at_the_first_batch_of_more_than_one(self) -> None:
        model = unchecked()
        for size in (0, 1):
            model(torch.randn(size, 3)).sum().backward()
            fxgrad.zero_grad(model)
        with torch.no_grad():
            model(torch.randn(4, 3))
        with pytest.raises(MixedSamples, match=r"samples \d and \d have new values in the first batch"):
            model(torch.randn(4, 3))

    def test_at_the_first_batch_of_more_than_one_group(self) -> None:
        model = unchecked(quantity=fxgrad.NormSample(group_size=2))
        model(torch.randn(2, 3))
        with pytest.raises(MixedSamples, match=r"each other: sample \d has new values"):
            model(torch.randn(4, 3))

    @pytest.mark.parametrize("nothing", [torch.zeros(4, 3), torch.randn(1, 3).expand(4, 3)])
    def test_not_where_nothing_can_be_changed(self, nothing: Tensor) -> None:
        model = unchecked()
        model(nothing)
        with pytest.raises(MixedSamples, match=r"samples \d and \d have new values in the first batch"):
            model(torch.randn(4, 3))

    @pytest.mark.parametrize("check", [False, True])
    def test_two_more_runs_of_the_same_graph(self, check: bool) -> None:
        runs, compiled = [], []

        def counting(gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
            compiled.append(gm)

            def run(*args: Any) -> Any:
                runs.append(len(args))
                return gm(*args)

            return run

        model = fxgrad.transform(Net(), backend=counting, check_first_batch=check)
        for size, expected in ((4, 3 if check else 1), (7, 4 if check else 2)):
            model(torch.randn(size, 3)).sum().backward()
            fxgrad.zero_grad(model)
            assert (len(runs), len(compiled)) == (expected, 1)

    def test_nothing_is_compiled_for_it(self) -> None:
        found = []
        for check in (False, True):
            torch._dynamo.reset()
            counters.clear()
            model = fxgrad.transform(Net(), backend="aot_eager", check_first_batch=check)
            model(torch.randn(4, 3)).sum().backward()
            found.append({kind: dict(counters[kind]) for kind in ("stats", "frames", "aot_autograd")})
        assert found[0] == found[1] and found[0]["stats"]["unique_graphs"] == 1

    def test_python_s_own_state_is_not_changed_again(self) -> None:
        class Counts(Net):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x)

        plain = Counts()
        fxgrad.transform(plain, backend="eager", check_first_batch=True)(torch.randn(4, 3))
        assert plain.calls == 1

    def test_a_pickled_model_is_checked_again(self) -> None:
        model = fxgrad.transform(nn.Linear(3, 2), backend="eager", check_first_batch=True)
        model(torch.randn(4, 3))
        assert engine(model).first_batch is None
        assert engine(pickle.loads(pickle.dumps(model))).first_batch is not None

    def test_verify_does_without(self) -> None:
        verdict = fxgrad.verify(unchecked().eval(), torch.randn(4, 3))
        assert not verdict.ok and verdict.refusal is None


class TestRefused:
    @pytest.mark.parametrize(
        "options, sentence",
        [
            ({"mixing": "allow"}, "looks for what mixing='allow' allows"),
            ({"fullgraph": False}, "needs the whole model as one graph"),
            ({"quantity": fxgrad.SquaredGrad()}, "nothing to compare: SquaredGrad.* no result per sample"),
            ({"quantity": [fxgrad.Grad(), fxgrad.GradVariance()]}, "nothing to compare"),
        ],
    )
    def test_options(self, options: dict[str, Any], sentence: str) -> None:
        with pytest.raises(OptionError, match=sentence):
            fxgrad.transform(Net(), check_first_batch=True, **options)

    def test_a_model_that_raises_for_other_values(self) -> None:
        def limited(gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                if not any(isinstance(arg, Tensor) and arg.shape == x.shape and torch.equal(arg, x) for arg in args):
                    raise ValueError("not these")
                return gm(*args)

            return run

        x = torch.randn(2, 3)
        model = fxgrad.transform(Net(), backend=limited, check_first_batch=True)
        with pytest.raises(OptionError, match=r"raises ValueError where sample \d has another sample's values: not"):
            model(x)


class TestChanges:
    def test_the_largest_and_the_smallest(self) -> None:
        x = torch.tensor([[2.0], [-9.0], [1.0], [3.0]])
        change = chosen({0: BatchedInput(x, 0, torch.arange(4))}, 4, 2)
        assert change is not None and change.samples == (1, 2)

    def test_new_values_lie_between_two_samples(self) -> None:
        x = torch.tensor([[2.0, 4], [0, 8], [1, 2]])
        held, made = BatchedInput(x, 0, torch.arange(3)), x.clone()
        change = chosen({0: held}, 3, 1)
        assert change is not None and held.put(made, change)
        assert (made != x).any(1).tolist() == [False, True, False]
        assert made.min() >= 0 and made.max() <= 8

    @pytest.mark.parametrize(
        "x",
        [
            torch.randn(4, 1, 3).expand(4, 5, 3),
            torch.randn(6, 4).t(),
            torch.randn(4, 8)[:, 1::2],
            torch.randn(9).unfold(0, 3, 2),
            torch.randn(4, 0),
            torch.tensor(3.0),
        ],
    )
    def test_copies_have_the_strides_of_what_they_copy(self, x: Tensor) -> None:
        made = copies({0: x}, frozenset())[0]
        same(made, x)
        assert made.stride() == x.stride() and (not x.numel() or made.data_ptr() != x.data_ptr())

    def test_conjugated_and_sparse_values(self) -> None:
        for x in (torch.randn(4, dtype=torch.complex64).conj(), torch.eye(3).to_sparse()):
            same(copies({0: x}, frozenset())[0], x)

    def test_samples_that_share_memory_stay(self) -> None:
        windows = torch.randn(9).unfold(0, 3, 2)
        held, made = BatchedInput(windows, 0, torch.arange(4)), copies({0: windows}, frozenset())[0]
        change = chosen({0: held}, 4, 2)
        assert change is not None and not held.put(made, change) and torch.equal(made, windows)

    def test_a_repeated_dimension_is_written_once(self) -> None:
        x = torch.randn(4, 1, 3).expand(4, 5, 3)
        held, made = BatchedInput(x, 0, torch.arange(4)), copies({0: x}, frozenset())[0]
        change = chosen({0: held}, 4, 2)
        assert change is not None and held.put(made, change)
        assert (made != x).flatten(1).any(1).sum() == 2


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
class TestOpacus:
    def test_make_private_turns_it_on(self) -> None:
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        from fxgrad.opacus import make_private

        for options in ({}, {"check_first_batch": False}):
            plain, privacy = Net(centred), PrivacyEngine(accountant="rdp")
            model, _, _ = make_private(
                privacy,
                module=plain,
                optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
                data_loader=DataLoader(TensorDataset(torch.randn(16, 3)), 8),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                one_backward=True,
                backend="eager",
                **options,  # type: ignore[arg-type]
            )
            if options:
                model(torch.randn(8, 3)).sum().backward()
                continue
            with pytest.raises(MixedSamples, match=r"and the result of ClippedGrad\(1.0\) moved for sample"):
                model(torch.randn(8, 3))
            assert not privacy.accountant.history


class Conjugated(nn.Module):
    """A model that returns a conjugate, which PyTorch keeps as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ihfft(x * self.w)


def test_conjugated_output() -> None:
    model, x = Conjugated(), torch.randn(4, 3, dtype=torch.float64)
    assert model(x).is_conj()
    view = fxgrad.transform(model, check_first_batch=True, backend="eager")
    view(x).abs().sum().backward()
    expected = torch.autograd.functional.jacobian(lambda w: torch.fft.ihfft(x * w).abs().sum(1), model.w.detach())
    torch.testing.assert_close(model.w.grad_sample, expected)  # type: ignore[attr-defined]
    fxgrad.zero_grad(model)
    fxgrad.verify(model, x).raise_if_wrong()

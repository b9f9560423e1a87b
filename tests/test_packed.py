"""Packed sequences: as the model's input, and packed inside of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

import fxgrad
from fxgrad.errors import FxgradError, LostLayout
from fxgrad.testing import relative_error
from tests.quick import TRACED, long_but

KINDS = [nn.RNN, nn.LSTM, nn.GRU]
IN, H = 4, 5
LENGTHS = {"unsorted": [3, 7, 5, 1], "sorted": [7, 5, 3, 3], "alike": [4, 4, 4, 4]}


def loss(outputs: Any) -> Tensor:
    """A sum over samples: of packed rows, and of padded values that are zero behind a sample's end."""
    if isinstance(outputs, PackedSequence):
        outputs = outputs.data
    if isinstance(outputs, Tensor):
        return (outputs * torch.linspace(0.5, 1.5, outputs.shape[-1]).to(outputs)).sin().sum()
    return sum((loss(item) for item in outputs), torch.zeros(()))


def grads_alone(model: nn.Module, calls: Sequence[Callable[[], Any]]) -> dict[str, Tensor]:
    """The loop: one forward and backward for each sample."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for call in calls:
        model.zero_grad()
        loss(call()).backward()
        for name, p in model.named_parameters():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    model.zero_grad()
    return {name: torch.stack(grads) for name, grads in rows.items()}


def found(model: nn.Module) -> dict[str, Tensor]:
    parameters: dict[str, Any] = dict(model.named_parameters())
    grads = {name: p.grad_sample for name, p in parameters.items()}
    fxgrad.zero_grad(model)
    return grads


def same(actual: Any, expected: Any) -> None:
    if isinstance(actual, PackedSequence):
        assert type(expected) is PackedSequence
        assert torch.equal(actual.batch_sizes, expected.batch_sizes)
        for a, b in zip(actual[2:], expected[2:], strict=True):
            assert a is b is None or (a is not None and b is not None and torch.equal(a, b))
        torch.testing.assert_close(actual.data, expected.data)
    elif isinstance(actual, Tensor):
        torch.testing.assert_close(actual, expected)
    else:
        for a, b in zip(actual, expected, strict=True):
            same(a, b)


def alone(model: nn.Module, sequence: Tensor) -> Any:
    return model(pack_sequence([sequence]))


class OnPacked(nn.Module):
    """Gets a PackedSequence; a row-wise layer, an RNN, a row-wise layer; returns packed rows and last states."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.before, self.rnn = nn.Linear(IN, IN), kind(IN, H, **options)
        self.after = nn.Linear((self.rnn.proj_size or H) * (2 if self.rnn.bidirectional else 1), 3)

    def forward(self, packed: PackedSequence, *states: Tensor) -> Any:
        rows = PackedSequence(self.before(packed[0]).tanh(), *packed[1:])
        out, last = self.rnn(rows, states if len(states) > 1 else states[0] if states else None)
        last = last if isinstance(last, tuple) else (last,)
        return PackedSequence(self.after(out[0]), *out[1:]), *(state.transpose(0, 1) for state in last)


class Packing(nn.Module):
    """Gets padded values and lengths, packs and pads."""

    def __init__(self, kind: Any, total: int | None = None, sort: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn, self.total, self.sort = kind(IN, H, batch_first=True, **options), total, sort

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.sort)
        out, last = self.rnn(packed)
        padded, again = pad_packed_sequence(out, batch_first=True, total_length=self.total)
        last = last if isinstance(last, tuple) else (last,)
        return (padded, again, *(state.transpose(0, 1) for state in last))


OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two ways, two layers": dict(num_layers=2, bidirectional=True),
    "without bias": dict(bias=False, bidirectional=True),
}


# Each order is seen with each kind, and each option with each kind; the options change nothing of how rows are packed.
every_option = pytest.mark.parametrize(
    ("kind", "order", "options"),
    long_but(
        lambda kind, order, options: options == "one layer" or order == "unsorted",
        itertools.product(KINDS, LENGTHS, OPTIONS),
    ),
)


def sample(lengths: Sequence[int]) -> list[Tensor]:
    return [torch.randn(length, IN, dtype=torch.float64) for length in lengths]


@pytest.mark.parametrize("by_input", [True, False])
@every_option
def test_a_packed_input(kind: Any, order: str, options: str, by_input: bool) -> None:
    model = OnPacked(kind, **OPTIONS[options]).double()
    sequences = sample(LENGTHS[order])
    sort = order != "unsorted"
    packed, again = (pack_sequence(sequences, enforce_sorted=sort) for _ in range(2))
    packed.data.requires_grad_(by_input)
    again.data.requires_grad_(by_input)
    outputs = fxgrad.transform(model, backend="eager")(packed)
    expected = model(again)
    same(outputs, expected)
    loss(outputs).backward()
    grads = found(model)
    loss(expected).backward()
    assert relative_error(grads, grads_alone(model, [partial(alone, model, s) for s in sequences])) < 1e-10
    if by_input:
        torch.testing.assert_close(packed.data.grad, again.data.grad)


@pytest.mark.parametrize("kind", long_but(lambda kind: kind is nn.LSTM, KINDS))
def test_given_states_are_in_the_users_order(kind: Any) -> None:
    model = OnPacked(kind, bidirectional=True).double()
    sequences = sample(LENGTHS["unsorted"])
    states = [torch.randn(2, 4, H, dtype=torch.float64) for _ in range(2 if kind is nn.LSTM else 1)]
    own = [state.clone().requires_grad_() for state in states]
    plain = [state.clone().requires_grad_() for state in states]
    packed = pack_sequence(sequences, enforce_sorted=False)
    gs = fxgrad.transform(model, backend="aot_eager", in_dims=(0, 1, 1))
    loss(gs(packed, *own)).backward()
    grads = found(model)
    loss(model(packed, *plain)).backward()
    torch.testing.assert_close([s.grad for s in own], [s.grad for s in plain])

    def alone(i: int) -> Any:
        return model(pack_sequence([sequences[i]]), *(h[:, i : i + 1] for h in states))

    calls = [partial(alone, i) for i in range(len(sequences))]
    assert relative_error(grads, grads_alone(model, calls)) < 1e-10


@pytest.mark.parametrize("total", [None, pytest.param(9, marks=pytest.mark.long)])
@every_option
def test_packed_in_the_model(kind: Any, order: str, options: str, total: int | None) -> None:
    model = Packing(kind, total, order != "unsorted", **OPTIONS[options]).double()
    lengths = torch.tensor(LENGTHS[order])
    x = pad_sequence(sample(LENGTHS[order]), batch_first=True)
    x = torch.cat([x, torch.randn(4, 2, IN, dtype=torch.float64)], 1)  # longer than the longest
    own, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs, expected = fxgrad.transform(model, backend="aot_eager")(own, lengths), model(plain, lengths)
    same(outputs, expected)
    loss([o for o in outputs if o.is_floating_point()]).backward()
    grads = found(model)
    loss([o for o in expected if o.is_floating_point()]).backward()
    torch.testing.assert_close(own.grad, plain.grad)

    def alone(i: int) -> list[Tensor]:
        return [o for o in model(x[i : i + 1], lengths[i : i + 1]) if o.is_floating_point()]

    assert relative_error(grads, grads_alone(model, [partial(alone, i) for i in range(4)])) < 1e-10


def test_a_total_length_is_padded_to() -> None:
    model, lengths = Packing(nn.LSTM, total=9).double(), torch.tensor(LENGTHS["unsorted"])
    x = pad_sequence(sample(LENGTHS["unsorted"]), batch_first=True)
    outputs = fxgrad.transform(model, backend="aot_eager")(x, lengths)
    assert outputs[0].shape[1] == 9
    same(outputs, model(x, lengths))
    loss([o for o in outputs if o.is_floating_point()]).backward()
    calls = [lambda i=i: model(x[i : i + 1], lengths[i : i + 1]) for i in range(4)]
    floats = [lambda call=call: [o for o in call() if o.is_floating_point()] for call in calls]
    assert relative_error(found(model), grads_alone(model, floats)) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_clipped_sums_where_the_model_packs(kind: Any) -> None:
    """The longest length is a number that the graph reads from data: no size decides how precisely a sum is taken."""
    model = Packing(kind).double()
    lengths = torch.tensor(LENGTHS["unsorted"])
    x = pad_sequence(sample(LENGTHS["unsorted"]), batch_first=True)

    def floats(outputs: Any) -> list[Tensor]:
        return [output for output in outputs if output.is_floating_point()]

    def alone(i: int) -> list[Tensor]:
        return floats(model(x[i : i + 1], lengths[i : i + 1]))

    rows = grads_alone(model, [partial(alone, i) for i in range(4)])
    norms = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    clipped = fxgrad.ClippedGrad(float(norms.median()))
    transformed = fxgrad.transform(model, quantity=[fxgrad.NormSample(), clipped], backend="aot_eager")
    loss(floats(transformed(x, lengths))).backward()
    result = fxgrad.result(transformed, clipped)
    torch.testing.assert_close(result.norm_sample, norms)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, torch.einsum("n,n...->...", result.weight, rows[name]))


class Reader(nn.Module):
    """Embeds packed ids, two RNNs over one pack, attends over what they say; lengths from a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(11, IN, padding_idx=0), nn.Parameter(torch.rand(IN) + 1)
        self.first, self.second = nn.GRU(IN, H, batch_first=True), nn.LSTM(H, H, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * H, 3)

    def forward(self, ids: Tensor) -> Tensor:
        packed = pack_padded_sequence(ids.unsqueeze(-1), (ids > 0).sum(1), True, False)
        rows = (self.table(packed[0].squeeze(-1)) + 3).log() * self.scale
        packed = PackedSequence(nn.functional.layer_norm(rows, (IN,), self.scale), *packed[1:])
        out, _ = self.second(self.first(packed)[0])
        values = PackedSequence(self.head(out[0]).exp(), *out[1:])
        return pad_packed_sequence(values, batch_first=True)[0]


@pytest.mark.parametrize("backend", [*TRACED, pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.long])])
def test_layers_on_packed_rows(backend: str) -> None:
    model = Reader().double()
    lengths = LENGTHS["unsorted"]
    ids = pad_sequence([torch.randint(1, 11, (length,)) for length in lengths], batch_first=True)
    outputs = fxgrad.transform(model, backend=backend)(ids)
    same(outputs, model(ids))
    loss(outputs).backward()
    grads = found(model)
    calls = [lambda i=i: model(ids[i : i + 1, : lengths[i]]) for i in range(len(lengths))]
    assert relative_error(grads, grads_alone(model, calls)) < 1e-10


def rebuilt(rnn: nn.GRU, x: Tensor, lengths: Tensor) -> Any:
    """Sorted samples have no indices, so the model leaves them out."""
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    assert packed[2] is None and packed[3] is None
    out, last = rnn(PackedSequence(packed[0] * 2, packed[1]), x[None, :, 0, :1].expand(1, -1, H))
    return out, pad_packed_sequence(out, batch_first=True)[0], last.transpose(0, 1) * x[:, :1, :1]


@pytest.mark.parametrize("size", [1, 4])
def test_sorted_sequences_have_no_indices(size: int) -> None:
    model, lengths = Body(rebuilt).double(), torch.tensor([5, 3, 3, 1][:size])
    x = torch.randn(size, 5, IN, dtype=torch.float64)
    outputs = fxgrad.transform(model, backend="aot_eager")(x, lengths)
    same(outputs, model(x, lengths))
    loss(outputs).backward()
    calls = [lambda i=i: model(x[i : i + 1], lengths[i : i + 1]) for i in range(size)]
    assert relative_error(found(model), grads_alone(model, calls)) < 1e-10


def test_other_sequences_need_their_indices() -> None:
    def lost(rnn: nn.GRU, packed: PackedSequence) -> Tensor:
        return rnn(PackedSequence(packed[0] * 2, packed[1]))[1].transpose(0, 1)

    def of_lengths(rnn: nn.GRU, x: Tensor, lengths: Tensor) -> Tensor:
        return lost(rnn, pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))

    lengths = torch.tensor(LENGTHS["unsorted"])
    x = pad_sequence(sample(LENGTHS["unsorted"]), batch_first=True)
    sorted_input = pack_sequence(sample(LENGTHS["sorted"]))
    unknown, unread = (
        "without sorted_indices has its samples in the order of their lengths",
        "the model reads it without",
    )
    for function, inputs, words in ((lost, (sorted_input,), unread), (of_lengths, (x, lengths), unknown)):
        torch._dynamo.reset()
        with pytest.raises(LostLayout, match=words) as raised:
            fxgrad.transform(Body(function).double(), backend="eager")(*inputs)
        assert "PackedSequence(f(p.data), *p[1:])" in str(raised.value) and "test_packed.py" in str(raised.value)


def test_indices_that_do_not_undo_the_order() -> None:
    """PyTorch puts the samples in an order of unsorted_indices alone, fxgrad in that of the batch."""
    packed = pack_sequence(sample(LENGTHS["unsorted"]), enforce_sorted=False)
    data, sizes, order, _ = packed
    assert order is not None
    model = OnPacked(nn.GRU).double()
    view = fxgrad.transform(model, backend="eager")
    view(packed)
    for indices in ((order, torch.arange(4)), (order, order.clone()), (None, torch.arange(4).flip(0))):
        with pytest.raises(FxgradError, match="unsorted_indices of a PackedSequence do not undo its sorted_indices"):
            view(PackedSequence(data, sizes, *indices))
    undone = PackedSequence(data, sizes, None, torch.arange(4))
    same(view(undone), model(undone))


class Hierarchy(nn.Module):
    """Words within sentences: the rows that are packed hold parts of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.sentences = nn.GRU(IN, H, batch_first=True), nn.GRU(H, H, batch_first=True)
        self.gate = nn.Linear(IN, IN)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.flatten(0, 1), lengths.flatten(), True, False)
        packed = PackedSequence(self.gate(packed[0]).sigmoid(), *packed[1:])
        last = self.words(packed)[1].squeeze(0)
        return self.sentences(last.unflatten(0, lengths.shape))[0]


def test_rows_that_hold_parts_of_samples() -> None:
    model = Hierarchy().double()
    x, lengths = torch.randn(3, 2, 6, IN, dtype=torch.float64), torch.tensor([[3, 6], [1, 2], [6, 4]])
    loss(fxgrad.transform(model, backend="aot_eager")(x, lengths)).backward()
    grads = found(model)
    calls = [lambda i=i: model(x[i : i + 1], lengths[i : i + 1]) for i in range(3)]
    assert relative_error(grads, grads_alone(model, calls)) < 1e-10


@pytest.mark.parametrize("kind", long_but(lambda kind: kind is nn.LSTM, KINDS))
def test_dropout_draws_what_pytorch_draws(kind: Any) -> None:
    model = OnPacked(kind, num_layers=2, bidirectional=True, dropout=0.5).double()
    packed = pack_sequence(sample(LENGTHS["unsorted"]), enforce_sorted=False)
    gs = fxgrad.transform(model, backend="aot_eager")
    torch.manual_seed(3)
    outputs = gs(packed)
    torch.manual_seed(3)
    same(outputs, model(packed))


def test_a_sorted_sequence_with_weights() -> None:
    """It has no indices of its own; the weights are the call's only other argument."""
    model, sequences = OnPacked(nn.LSTM).double(), sample((5, 4, 2))
    clipped = fxgrad.ClippedGrad(1e-3, sample_weight=True)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    loss(transformed(pack_sequence(sequences), sample_weight=torch.tensor([1.0, 2.0, 0.0]))).backward()
    found = fxgrad.result(transformed, clipped)
    assert found.weight[2] == 0 and (found.weight[:2] > 0).all() and found.norm_sample.shape == (3,)


def test_one_sample() -> None:
    model = OnPacked(nn.LSTM).double()
    (sequence,) = sample([5])
    loss(fxgrad.transform(model, backend="aot_eager")(pack_sequence([sequence]))).backward()
    assert relative_error(found(model), grads_alone(model, [lambda: model(pack_sequence([sequence]))])) < 1e-10


def test_new_lengths_do_not_compile_again() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    model = Packing(nn.LSTM, num_layers=2, bidirectional=True)
    gs = fxgrad.transform(model, backend=backend)
    on_packed = fxgrad.transform(OnPacked(nn.GRU), backend=backend)

    def packed(x: Tensor, lengths: Tensor) -> Any:
        return on_packed(pack_padded_sequence(x, lengths, True, False))

    for call in (gs, packed):
        graphs.clear()
        for i in range(10):
            batch, time = 2 + i % 4, 3 + i
            outputs = call(torch.randn(batch, time, IN), torch.randint(1, time + 1, (batch,)))
            loss([outputs[0], outputs[-1]]).backward()
            fxgrad.zero_grad(gs)
            fxgrad.zero_grad(on_packed)
        assert len(graphs) <= 2


def test_a_length_of_zero_is_pytorchs_error() -> None:
    gs = fxgrad.transform(Packing(nn.GRU), backend="aot_eager")
    with pytest.raises(RuntimeError, match="Length of all samples has to be greater than 0"):
        gs(torch.randn(3, 4, IN), torch.tensor([2, 0, 4]))


class Body(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.rnn, self.body = nn.GRU(IN, H, batch_first=True), body

    def forward(self, *inputs: Any) -> Any:
        return self.body(self.rnn, *inputs)


def python_numbers(rnn: nn.GRU, x: Tensor, lengths: Tensor) -> Tensor:
    return rnn(pack_padded_sequence(x, [4, 3, 2], batch_first=True))[1].transpose(0, 1)


def a_list_of_samples(rnn: nn.GRU, x: Tensor, lengths: Tensor) -> Tensor:
    return rnn(pack_sequence([x[0], x[1], x[2]]))[1].transpose(0, 1)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [(python_numbers, r"pass them as a tensor \[B\], without tolist\(\)"), (a_list_of_samples, "pass the model a")],
)
def test_what_fixes_the_batch_is_refused(body: Callable[..., Any], sentence: str) -> None:
    gs = fxgrad.transform(Body(body), backend="eager")
    with pytest.raises(FxgradError, match=sentence):
        gs(torch.randn(3, 4, IN), torch.tensor([4, 3, 2]))


def test_tolist_is_refused() -> None:
    def to_list(rnn: nn.GRU, x: Tensor, lengths: Tensor) -> Tensor:
        return rnn(pack_padded_sequence(x, lengths.tolist(), batch_first=True))[1].transpose(0, 1)

    gs = fxgrad.transform(Body(to_list), backend="eager")
    with pytest.raises(FxgradError, match="got its lengths as Python numbers"):
        gs(torch.randn(3, 4, IN), torch.tensor([4, 3, 2]))


def test_sorted_samples_are_refused_where_they_are_sorted() -> None:
    def sort_and_back(rnn: nn.GRU, x: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        last = rnn(pack_padded_sequence(x[order], lengths, batch_first=True))[1][0]
        return last[order.argsort()]

    gs = fxgrad.transform(Body(sort_and_back), backend="eager")
    with pytest.raises(FxgradError) as refusal:
        gs(torch.randn(3, 4, IN), torch.tensor([2, 4, 3]))
    said = str(refusal.value)
    assert (
        "getitem lets samples influence each other: it puts the samples into an order that all of them decide" in said
    )
    assert "pack_padded_sequence(x[order], lengths, batch_first=True)" in said and "enforce_sorted=False" in said


def test_the_data_alone_says_nothing_of_samples() -> None:
    gs = fxgrad.transform(nn.Sequential(OnData()), backend="eager")
    with pytest.raises(LostLayout, match=r"which sample a row of \S*data belongs to is lost"):
        gs(pack_sequence(sample([3, 2])))


class OnData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, 2).double()

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.layer(packed.data)


@pytest.mark.xfail(
    torch.__version__.startswith("2.12"),
    raises=FxgradError,
    reason="Dynamo of torch 2.12 reads no field by name of a PackedSequence that it made itself: IndexError",
)
def test_fields_by_name() -> None:
    def halved(rnn: nn.GRU, packed: PackedSequence) -> PackedSequence:
        out = rnn(packed)[0]
        return PackedSequence(out.data / 2, out.batch_sizes, out.sorted_indices, out.unsorted_indices)

    fxgrad.transform(Body(halved).double(), backend="eager")(pack_sequence(sample([3, 2])))


def test_what_depends_on_the_order_of_all_is_refused() -> None:
    def by_batch_sizes(rnn: nn.GRU, packed: PackedSequence) -> PackedSequence:
        out = rnn(packed)[0]
        return PackedSequence(out[0] * packed.batch_sizes.sum(), *out[1:])

    gs = fxgrad.transform(Body(by_batch_sizes).double(), backend="eager")
    with pytest.raises(FxgradError, match="mul lets samples influence each other"):
        gs(pack_sequence(sample([3, 2])))

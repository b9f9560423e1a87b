"""nn.RNN, nn.LSTM, nn.GRU and their cells against the loop over single samples."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._decomp import decomposition_table

import fxgrad
from fxgrad.errors import BatchSizeError, MixedSamples
from fxgrad.graph.context import Context
from fxgrad.passes.decompose_recurrent import decompose_recurrent
from fxgrad.samples.symbols import Symbols
from fxgrad.testing import assert_per_sample_grads, default_loss, per_sample_grads, relative_error
from tests.quick import TRACED, long_but

KINDS = [nn.RNN, nn.LSTM, nn.GRU]
B, T, IN, H = 3, 5, 4, 6


class Recurrent(nn.Module):
    """One recurrent module; ``uses`` says which of its results are returned."""

    def __init__(self, kind: Any, uses: str = "both", **options: Any) -> None:
        super().__init__()
        self.rnn = kind(IN, H, **options)
        self.uses = uses

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        given = states if len(states) > 1 else states[0] if states else None
        out, last = self.rnn(x, given)
        last = last if isinstance(last, tuple) else (last,)
        # every result with the samples first
        out = out if self.rnn.batch_first else out.transpose(0, 1)
        last = tuple(state.transpose(0, 1) for state in last)
        return {"output": out, "states": last, "both": (out, last), "cell": last[-1]}[self.uses]


def states_for(rnn: nn.RNNBase, batch: int = B, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rows = rnn.num_layers * (2 if rnn.bidirectional else 1)
    sizes = [rnn.proj_size or H, H] if isinstance(rnn, nn.LSTM) else [H]
    return [torch.randn(rows, batch, size, dtype=dtype, requires_grad=True) for size in sizes]


def check(model: Recurrent, x: Tensor, states: Sequence[Tensor] = (), **how: Any) -> None:
    in_dims = (0 if model.rnn.batch_first else 1, *(1 for _ in states))
    assert_per_sample_grads(model, x, *states, **{"in_dims": in_dims, "backend": "eager", **how})


def sequence(batch_first: bool = False, dtype: torch.dtype = torch.float64, time: int = T) -> Tensor:
    return torch.randn(*((B, time) if batch_first else (time, B)), IN, dtype=dtype)


@given(
    kind=st.sampled_from(KINDS),
    relu=st.booleans(),
    options=st.fixed_dictionaries(
        dict(num_layers=st.integers(1, 3), bidirectional=st.booleans(), bias=st.booleans(), batch_first=st.booleans())
    ),
    proj=st.booleans(),
    given_states=st.booleans(),
    by_input=st.booleans(),
    uses=st.sampled_from(["output", "states", "both", "cell"]),
    time=st.integers(1, 6),
    frozen=st.sampled_from(["", "weight_ih", "weight_hh", "bias", "l0"]),
)
def check_options(
    kind: Any,
    relu: bool,
    options: dict[str, Any],
    proj: bool,
    given_states: bool,
    by_input: bool,
    uses: str,
    time: int,
    frozen: str,
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    if kind is nn.RNN and relu:
        options = {**options, "nonlinearity": "relu"}
    if kind is nn.LSTM and proj:
        options = {**options, "proj_size": 2}
    model = Recurrent(kind, uses, **options).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    if not any(p.requires_grad for p in model.parameters()):
        return
    x = sequence(options["batch_first"], time=time).requires_grad_(by_input)
    check(model, x, states_for(model.rnn) if given_states else ())


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
def test_every_option(count: int) -> None:
    settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))(check_options)()


@pytest.mark.parametrize("by_input", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    long_but(
        lambda kind, dtype: kind is nn.LSTM or dtype is torch.float64,
        itertools.product(KINDS, (torch.float32, torch.float64, torch.bfloat16)),
    ),
    ids=str,
)
def test_every_dtype(kind: Any, dtype: torch.dtype, by_input: bool, device: torch.device) -> None:
    model = Recurrent(kind, num_layers=2, bidirectional=True).to(device, dtype)
    x = sequence(dtype=dtype).to(device).requires_grad_(by_input)
    check(model, x, backend="aot_eager")


@pytest.mark.inductor
@pytest.mark.parametrize("kind", long_but(lambda kind: kind is nn.LSTM, KINDS))
def test_through_inductor(kind: Any, device: torch.device) -> None:
    model = Recurrent(kind, num_layers=2, bidirectional=True, batch_first=True).to(device)
    check(model, sequence(True, torch.float32).to(device), backend="inductor")


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers(kind: Any) -> None:
    model = Recurrent(kind, num_layers=3, dropout=0.4, bidirectional=True).double()
    check(model, sequence(), seed=3)


@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_small_batches(kind: Any, batch: int) -> None:
    model = Recurrent(kind, batch_first=True).double()
    if batch:
        check(model, torch.randn(batch, T, IN, dtype=torch.float64))
    else:
        gs = fxgrad.transform(model, backend="eager")
        default_loss(gs(torch.randn(0, T, IN, dtype=torch.float64))).backward()
        assert model.rnn.weight_hh_l0.grad_sample.shape == (0, *model.rnn.weight_hh_l0.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_as_long_as_the_sequence(kind: Any) -> None:
    check(Recurrent(kind, bidirectional=True).double(), sequence(time=B))


class Twice(nn.Module):
    """One module over two sequences, its last state handed on, with rows that hold parts of samples."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(IN, H, batch_first=True), nn.Linear(H, IN)
        self.start = nn.Parameter(torch.randn(1, 1, H))

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, 1)  # [B * sentences, T, IN]
        start = self.start.expand(1, words.shape[0], H).contiguous()
        out, _ = self.rnn(words, (start, start) if isinstance(self.rnn, nn.LSTM) else start)
        sentences = self.head(out[:, -1]).unflatten(0, x.shape[:2])
        return self.rnn(sentences)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_twice_over_merged_rows_with_a_learned_start(kind: Any) -> None:
    assert_per_sample_grads(Twice(kind).double(), torch.randn(B, 2, T, IN, dtype=torch.float64), backend="eager")


@pytest.mark.parametrize("kind", KINDS)
def test_normalised_weights(kind: Any) -> None:
    model = Recurrent(kind)
    nn.utils.parametrizations.weight_norm(model.rnn, "weight_hh_l0")
    nn.utils.parametrizations.spectral_norm(model.rnn, "weight_ih_l0")
    check(model.double().eval(), sequence())


def doubled_list(rnn: Any) -> None:
    rnn._flat_weights = [getattr(rnn, name) * 2 for name in rnn._flat_weights_names]


def doubled_item(rnn: Any) -> None:
    rnn._flat_weights[0] = rnn.weight_ih_l0 * 2


def doubled_attribute(rnn: Any) -> None:
    rnn.weight_hh_l0 = rnn.raw * 2


class OwnWeights(nn.Module):
    """It changes what its layer reads, PyTorch's list of weights or an attribute, in each forward."""

    def __init__(self, kind: Any, change: Any) -> None:
        super().__init__()
        self.rnn, self.change = kind(IN, H, batch_first=True), change
        if change is doubled_attribute:
            self.rnn.raw = self.rnn._parameters.pop("weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.rnn)
        return self.rnn(x)[0]


@pytest.mark.parametrize("size", [1, B])
@pytest.mark.parametrize("change", [doubled_list, doubled_item, doubled_attribute])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_the_model_sets(kind: Any, change: Any, size: int) -> None:
    x = torch.randn(size, 3, IN, dtype=torch.float64)
    assert_per_sample_grads(OwnWeights(kind, change).double(), x, backend="eager")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_set_between_calls(kind: Any) -> None:
    rnn: Any = kind(IN, H, batch_first=True)
    model, x = nn.Sequential(rnn).double(), sequence()
    view = fxgrad.transform(model, backend="eager")
    torch.testing.assert_close(view(x), model(x))
    rnn._flat_weights[0] = rnn.weight_ih_l0.detach() * 2
    torch.testing.assert_close(view(x), model(x))
    rnn.weight_hh_l0 = nn.Parameter(rnn.weight_hh_l0.detach() * 3)  # PyTorch fills its list again
    torch.testing.assert_close(view(x), model(x))


class Cells(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell = kind(IN, H)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] * state[1] if isinstance(state, tuple) else state


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_cells_in_a_loop(kind: Any, backend: str, device: torch.device) -> None:
    x = torch.randn(B, 3, IN, dtype=torch.float64, device=device)
    assert_per_sample_grads(Cells(kind).double().to(device), x, backend=backend)


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_input_is_refused(kind: Any) -> None:
    gs = fxgrad.transform(nn.Sequential(kind(IN, H)), backend="eager")
    with pytest.raises(MixedSamples, match="runs along the sample dimension"):
        gs(torch.randn(T, IN))


@pytest.mark.parametrize("kind", KINDS)
def test_pytorchs_own_errors(kind: Any) -> None:
    gs = fxgrad.transform(Recurrent(kind), backend="eager", in_dims=(1, 1, 1))
    with pytest.raises(RuntimeError, match=r"input\.size\(-1\) must be equal to input_size\. Expected 4, got 7"):
        gs(torch.randn(T, B, 7))
    with pytest.raises(RuntimeError, match=r"Expected hidden"):
        gs(torch.randn(T, B, IN), *[state.detach().float() for state in states_for(kind(IN, H, 2))])


def test_lengths_change_without_compiling_again() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    model = nn.LSTM(IN, H, 2, bidirectional=True, batch_first=True).double()
    gs = fxgrad.transform(model, backend=backend)
    for batch, time in [(3, 5), (4, 7), (4, 4), (2, 64), (5, 6), (7, 9)]:
        default_loss(gs(torch.randn(batch, time, IN, dtype=torch.float64))).backward()
        fxgrad.zero_grad(gs)
    assert len(graphs) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_sequence_has_the_same_graph(kind: Any) -> None:
    def nodes(time: int) -> list[str]:
        made = fxgrad.trace(kind(IN, H, 2, bidirectional=True, batch_first=True), torch.randn(B, time, IN))
        return [str(node.target) for node in made.graph_module.graph.nodes]

    torch._dynamo.reset()
    short = nodes(6)
    torch._dynamo.reset()
    assert nodes(512) == short


_TABLE = {
    nn.LSTM: torch.ops.aten.lstm.input,
    nn.GRU: torch.ops.aten.gru.input,
    nn.RNN: torch.ops.aten.rnn_tanh.input,
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_is_pytorchs_decomposition(kind: Any, batch_first: bool) -> None:
    """`decompose_recurrent` of PyTorch's own op computes what its decomposition table says."""
    rnn = kind(IN, H, 2, bidirectional=True, batch_first=batch_first).double()
    x, states = sequence(batch_first), [state.detach() for state in states_for(kind(IN, H, 2, bidirectional=True))]
    hx = states if kind is nn.LSTM else states[0]
    weights = list(rnn.parameters())
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(1 + len(states) + len(weights))]
    h = nodes[1 : 1 + len(states)]
    own = getattr(torch._VF, {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}[kind])
    settings_ = (True, 2, 0.0, False, True, batch_first)
    call = graph.call_function(own, (nodes[0], h if kind is nn.LSTM else h[0], nodes[1 + len(states) :], *settings_))
    graph.output([graph.call_function(getitem, (call, i)) for i in range(1 + len(states))])
    gm = decompose_recurrent(fx.GraphModule(nn.Module(), graph), Context(Symbols(), {}, [], {}))
    gm.recompile()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the flags themselves
        with torch.backends.mkldnn.flags(enabled=False, allow_tf32=False):
            expected = decomposition_table[_TABLE[kind]](x, hx, weights, *settings_)
    with torch.no_grad():
        outputs = gm(x, *states, *weights)
    pairs = zip(expected, outputs, strict=True)  # before 2.13 the table leaves a dimension of one in the last states
    torch.testing.assert_close(outputs, [e.view_as(own) for e, own in pairs])


class Broken(nn.Module):
    """A frozen recurrent layer in a graph of its own, between two that have parameters."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(IN, IN), nn.Linear(H, 2)
        self.rnn = kind(IN, H, batch_first=True).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        torch._dynamo.graph_break()
        h = self.rnn(h)[0]
        torch._dynamo.graph_break()
        return self.after(h)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of Dynamo, at a break
@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("kind", long_but(lambda kind: kind is nn.LSTM, KINDS))
def test_a_graph_without_parameters(kind: Any, backend: str) -> None:
    model, x = Broken(kind).double(), sequence(True)
    assert_per_sample_grads(model, x, backend=backend, options={"fullgraph": False})


class Decoder(nn.Module):
    """One step at a time, its own output as the next input."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(IN, H, batch_first=True), nn.Linear(H, IN)

    def forward(self, x: Tensor) -> Tensor:
        h, states, outputs = x[:, :1], None, []
        for _ in range(3):
            y, states = self.rnn(h, states)
            h = self.out(y)
            outputs.append(h)
        return torch.cat(outputs, 1)


def test_a_layer_called_step_by_step() -> None:
    assert_per_sample_grads(Decoder().double(), sequence(True))


def test_under_autocast() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(IN, H, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.rnn(x)[0].float()

    # Not every processor has a bfloat16 LSTM in oneDNN; PyTorch's own runs on all. (`flags` sets TF32, too, and warns.)
    torch._C._set_mkldnn_enabled(False)
    try:
        assert_per_sample_grads(Mixed(), sequence(True, torch.float32), tolerance=5e-2)
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize(("reduction", "factor"), [("sum", 1.0), ("mean", 1 / B), (8, 1 / 8)])
def test_tied_directions_under_every_reduction(reduction: Any, factor: float) -> None:
    model = Recurrent(nn.LSTM, "output", bidirectional=True, batch_first=True).double()
    model.rnn.weight_hh_l0_reverse = model.rnn.weight_hh_l0
    x = sequence(True)
    expected = per_sample_grads(model, default_loss, (x,))
    (default_loss(fxgrad.transform(model, backend="aot_eager", loss_reduction=reduction)(x)) * factor).backward()
    parameters: dict[str, Any] = dict(model.named_parameters())
    assert relative_error({name: p.grad_sample for name, p in parameters.items()}, expected) < 1e-10


# Where states have their samples


def unsaid(model: Any, x: Tensor, *states: Tensor, view: Any = None, **how: Any) -> None:
    """The loop's gradients, though nothing says where the states have their samples."""
    gs = view if view is not None else fxgrad.transform(model, backend="eager", **how)
    default_loss(gs(x, *states)).backward()
    found = {name: p.grad_sample for name, p in model.named_parameters()}
    fxgrad.zero_grad(model)
    expected = per_sample_grads(model, default_loss, (x, *states), in_dims=(0, *[1] * len(states)))
    assert relative_error(found, expected) < 1e-10


@pytest.mark.parametrize("batch_size", [None, "given"])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    long_but(
        lambda kind, options: kind is nn.LSTM,
        itertools.product(KINDS, [dict(), dict(num_layers=2), dict(bidirectional=True)]),
    ),
    ids=str,
)
def test_states_with_the_batch_first(kind: Any, options: Any, batch: int, batch_size: Any) -> None:
    """States are [layers * directions, B, hidden] whatever batch_first says, and however many samples there are."""
    model = Recurrent(kind, batch_first=True, **options).double()
    x = torch.randn(batch, T, IN, dtype=torch.float64)
    unsaid(model, x, *states_for(model.rnn, batch), batch_size=batch if batch_size else None)


def test_states_at_every_batch_size() -> None:
    model = Recurrent(nn.LSTM, batch_first=True, num_layers=2).double()
    view = fxgrad.transform(model, backend="eager")
    for batch in (2, 3, 1, 0, 2):  # two layers
        x = torch.randn(batch, T, IN, dtype=torch.float64)
        unsaid(model, x, *states_for(model.rnn, batch), view=view)


class Started(nn.Module):
    """A layer whose states are a function of the second input, which is read beside it, too."""

    def __init__(self, start: Any) -> None:
        super().__init__()
        self.start, self.rnn, self.bridge = start, nn.GRU(IN, H, 2, batch_first=True), nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.rnn(x, self.start(self, h))[0] + self.bridge(h.transpose(0, 1)).sum(1, keepdim=True)


@pytest.mark.parametrize(
    "start",
    [
        lambda m, h: m.bridge(h).tanh(),
        lambda m, h: 2 * h.detach() + 1,
        lambda m, h: h.contiguous().masked_fill(h < 0, 0),
    ],
)
def test_states_changed_on_their_way(start: Any) -> None:
    unsaid(Started(start).double(), torch.randn(2, T, IN).double(), torch.randn(2, 2, H).double())


def test_a_transposed_state_has_the_samples_first() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(IN, H, 2, batch_first=True)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.rnn(x, h.transpose(0, 1).contiguous())[0]

    for batch in (2, 3):
        x, h = torch.randn(batch, T, IN).double(), torch.randn(batch, 2, H).double()
        assert_per_sample_grads(Model().double(), x, h, backend="eager")


def test_an_input_that_is_no_state_has_to_agree() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(IN, H, batch_first=True)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.rnn(x)[0] * h.mean()

    with pytest.raises(BatchSizeError, match=r"^inputs disagree about the batch size: input 'x' has 3 on dimension 0"):
        fxgrad.transform(Model(), backend="eager")(torch.randn(3, T, IN), torch.randn(2, 3, H))


def test_in_dims_decide_about_states() -> None:
    model = Recurrent(nn.GRU, batch_first=True, num_layers=2)
    x, (h,) = torch.randn(2, T, IN), states_for(model.rnn, 2, torch.float32)
    with pytest.raises(MixedSamples, match=r"lets samples influence each other|takes samples out of the batch"):
        fxgrad.transform(model, backend="eager", in_dims=(0, 0))(x, h)


def test_tied_states_are_verified_and_explained() -> None:
    model = Recurrent(nn.LSTM, "output", batch_first=True, num_layers=2)
    assert fxgrad.verify(model, torch.randn(2, T, IN), *states_for(model.rnn, 2)).ok
    assert "B" in str(fxgrad.explain(model, torch.randn(2, T, IN), *states_for(model.rnn, 2, torch.float32)))

"""What is padded to the longest of its samples: right where a sample alone would give the same, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fxgrad
from fxgrad.errors import FxgradError, MixedSamples
from tests.programs import quick_dynamo
from tests.quick import long_but

IN, H = 3, 4
LENGTHS = torch.tensor([3, 5, 1, 2])
SEEN = r"the longest sample is|the lengths of all|influence each other|out of the batch|data-dependent expression"
"""How refusals say that a sample would see the others' lengths."""


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


class Padded(nn.Module):
    """Packs, pads to the longest sample again, and reads that."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.rnn, self.head, self.norm = nn.GRU(IN, H, batch_first=True), nn.Linear(H, H), nn.LayerNorm(H)
        self.score, self.places, self.again = nn.Linear(H, 1), nn.Embedding(9, H), nn.GRU(H, H, batch_first=True)
        self.second, self.p, self.read = nn.LSTM(H, H, batch_first=True), nn.Parameter(torch.rand(H) + 0.5), read
        self.both = nn.GRU(H, H // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, n = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.read(self, out, n.to(out.device))


def mask_of(out: Tensor, n: Tensor) -> Tensor:
    return torch.arange(out.shape[1])[None] < n[:, None]


def last_of(out: Tensor, n: Tensor) -> Tensor:
    return out[torch.arange(len(n)), n - 1]


def masked_mean(m: Any, out: Tensor, n: Tensor) -> Tensor:
    mask = mask_of(out, n).unsqueeze(-1)
    return (m.head(out) * mask).sum(1) / n[:, None]


def masked_mean_by_its_own_count(m: Any, out: Tensor, n: Tensor) -> Tensor:
    mask = mask_of(out, n).unsqueeze(-1).to(out.dtype)
    return (m.norm(out) * mask).sum(1) / mask.sum(1)


def pooled_by_attention(m: Any, out: Tensor, n: Tensor) -> Tensor:
    scores = m.score(out).squeeze(-1).masked_fill(~mask_of(out, n), float("-inf"))
    return (scores.softmax(1).unsqueeze(-1) * m.head(out)).sum(1)


def pooled_by_a_product(m: Any, out: Tensor, n: Tensor) -> Tensor:
    scores = m.score(out).squeeze(-1).masked_fill(~mask_of(out, n), float("-inf"))
    return (scores.softmax(1).unsqueeze(1) @ m.head(out)).squeeze(1)


def attention(m: Any, out: Tensor, n: Tensor) -> Tensor:
    scores = (m.head(out) @ out.mT).masked_fill(~mask_of(out, n)[:, None, :], float("-inf"))
    return last_of(scores.softmax(-1) @ m.head(out), n)


def largest_of_masked(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return m.head(out).masked_fill(~mask_of(out, n)[..., None], float("-inf")).amax(1)


def largest_with_its_place(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return m.head(out).masked_fill(~mask_of(out, n)[..., None], float("-inf")).max(1).values


def chosen_by_where(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return torch.where(mask_of(out, n)[..., None], m.head(out).exp(), 0.0).sum(1)


def written_zeros(m: Any, out: Tensor, n: Tensor) -> Tensor:
    out = m.head(out)
    out[~mask_of(out, n)] = 0.0
    return out.sum(1)


def places_added(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return last_of(m.head(out + m.places(torch.arange(out.shape[1]))), n)


def running_sum(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return last_of(m.head(out).cumsum(1), n)


def without_the_first(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return m.head(out[:, 1:].tanh().sum(1))


def merged_and_split(m: Any, out: Tensor, n: Tensor) -> Tensor:
    flat = m.head(out).reshape(-1, 2, 2).transpose(1, 2).reshape(out.shape)
    return last_of(flat, n)


class Scaled(torch.autograd.Function):
    """A gradient of twice its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Ones(torch.autograd.Function):
    """A gradient of ones, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.ones_like(ctx.saved_tensors[0])


class Straight(torch.autograd.Function):
    """A mask whose backward knows nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


def packed_again(m: Any, out: Tensor, n: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.head(out), n, batch_first=True, enforce_sorted=False)
    again, (h, _) = m.second(packed)
    return h[-1] + pad_packed_sequence(again, batch_first=True)[0].sum(1)


def packed_again_both_ways(m: Any, out: Tensor, n: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.head(out), n, batch_first=True, enforce_sorted=False)
    again, h = m.both(packed)
    return last_of(pad_packed_sequence(again, batch_first=True)[0], n) + h.transpose(0, 1).flatten(1)


def scores_of_a_vector(m: Any, out: Tensor, n: Tensor) -> Tensor:
    scores = (torch.tanh(m.head(out)) @ m.p).masked_fill(~mask_of(out, n), float("-inf"))
    return (scores.softmax(1).unsqueeze(-1) * out).sum(1)


def a_mask_or_another(m: Any, out: Tensor, n: Tensor) -> Tensor:
    hidden = ~mask_of(out, n) | (out[:, :, 0] > 0)
    return m.head(out).masked_fill(hidden.unsqueeze(-1), 0.0).sum(1)


RIGHT = {
    "a sum of zeros": lambda m, out, n: m.head(2 * out.tanh().sum(1)),
    "a sum over its own count": lambda m, out, n: m.head(out.sum(1) / n[:, None]),
    "the last step by gather": lambda m, out, n: m.head(out).gather(1, (n - 1)[:, None, None].expand(-1, 1, H))[:, 0],
    "the last step by index": lambda m, out, n: last_of(m.head(out), n),
    "the first step": lambda m, out, n: m.head(out.tanh())[:, 0],
    "gelu of zeros": lambda m, out, n: m.head(F.gelu(out).sum(1)),
    "silu of zeros": lambda m, out, n: m.head(F.silu(out / 2).sum(1)),
    "a product without a bias": lambda m, out, n: (out @ m.head.weight).sum(1),
    "zeros with zeros": lambda m, out, n: m.head(out @ out.mT @ out)[:, 0],
    "a norm of zeros": lambda m, out, n: m.head(torch.linalg.vector_norm(out + 0, dim=1)),
    "features turned around": lambda m, out, n: m.head(out.flip(2).sum(1)),
    "features side by side": lambda m, out, n: m.head(torch.cat([out, out], 2).sum(1)[:, :H]),
    "zeros to zeros": lambda m, out, n: m.head((out + torch.zeros_like(out)).sum(1)),
    "a norm of each step": lambda m, out, n: last_of(m.norm(m.head(out)), n),
    **{f.__name__.replace("_", " "): f for f in (
        masked_mean, masked_mean_by_its_own_count, pooled_by_attention, pooled_by_a_product, attention,
        largest_of_masked, largest_with_its_place, chosen_by_where, written_zeros, places_added,
        running_sum, without_the_first, merged_and_split, packed_again, packed_again_both_ways, scores_of_a_vector,
        a_mask_or_another)},
    "a gradient of twice its size": lambda m, out, n: last_of(Scaled.apply(m.head(out)), n),
}  # fmt: skip


def one_too_many(m: Any, out: Tensor, n: Tensor) -> Tensor:
    mask = torch.arange(out.shape[1])[None] <= n[:, None]
    return (m.head(out) * mask.unsqueeze(-1)).sum(1)


def a_mask_of_others(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return (m.head(out) * (torch.arange(out.shape[1])[None] < (n + 1)[:, None]).unsqueeze(-1)).sum(1)


def a_mask_that_is_off(m: Any, out: Tensor, n: Tensor) -> Tensor:
    mask = torch.arange(out.shape[1]).add(-1)[None] < n[:, None]
    return (m.head(out) * mask.unsqueeze(-1)).sum(1)


def a_mask_of_rounded_places(m: Any, out: Tensor, n: Tensor) -> Tensor:
    mask = torch.arange(out.shape[1]).to(torch.bfloat16)[None] < n[:, None]
    return (m.head(out) * mask.unsqueeze(-1)).sum(1)


def softmax_of_what_is_small(m: Any, out: Tensor, n: Tensor) -> Tensor:
    scores = m.score(out).squeeze(-1).masked_fill(~mask_of(out, n), -1.0)
    return (scores.softmax(1).unsqueeze(-1) * m.head(out)).sum(1)


def infinite_times_zero(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return m.head(out * (1 / out.abs().sum(-1, keepdim=True))).nan_to_num().sum(1)


def zeros_over_zeros(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return m.head((out / out.norm(dim=-1, keepdim=True)).sum(1))


def a_second_dimension(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return m.head(out[:, :, None].expand(-1, -1, out.shape[1], -1).sum((1, 2)))


def an_outer_sum(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return m.head((out[:, :, None] * torch.ones(out.shape[1])[:, None]).sum(2)[:, 0])


def read_in_another_order(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return m.head(out).reshape(out.shape[0], H, -1)[:, 1:2, :1].sum(2).expand(-1, H)


def last_state_of_all_steps(m: Any, out: Tensor, n: Tensor) -> Tensor:
    return m.again(out)[1].transpose(0, 1)


def as_many_as_rows(m: Any, out: Tensor, n: Tensor) -> Tensor:
    packed = pack_padded_sequence(out, n, batch_first=True, enforce_sorted=False)
    return m.head(out.sum(1)) * torch.ones_like(packed.data).sum()


def truths_of_two_dimensions(m: Any, out: Tensor, n: Tensor) -> Tensor:
    every = torch.ones(1, out.shape[1], dtype=torch.bool)
    return m.head(out[:, 0]) * torch.ones(1, out.shape[1], dtype=out.dtype)[every].sum()


def running_over_features(m: Any, out: Tensor, n: Tensor) -> Tensor:
    flat = m.head(out).transpose(1, 2).reshape(len(out), -1).cumsum(1)
    return zeros_behind(flat.view(len(out), H, -1).transpose(1, 2), out, n).sum(1)


def place_of_the_largest(m: Any, out: Tensor, n: Tensor) -> Tensor:
    hidden = out.masked_fill(~mask_of(out, n)[..., None], float("-inf"))
    return hidden.transpose(1, 2).flatten(1).argmax(1)[:, None] * m.p


def zeros_behind(y: Tensor, out: Tensor, n: Tensor) -> Tensor:
    return y.masked_fill(~mask_of(out, n)[..., None], 0.0)


def softmax_of_nothing(m: Any, out: Tensor, n: Tensor) -> Tensor:
    nothing = torch.full((out.shape[1],), float("-inf"), dtype=out.dtype)
    return m.head(out[:, 0]) * nothing.softmax(0).nan_to_num(1.0).sum()


def largest_of_nothing(m: Any, out: Tensor, n: Tensor) -> Tensor:
    hidden = torch.where(mask_of(out, n)[..., None], 0.0, float("-inf"))
    return (m.head(out) + hidden + torch.where(m.p > 0, 0.0, float("-inf"))).amax(1)


def half_of_a_whole(m: Any, out: Tensor, n: Tensor) -> Tensor:
    half = torch.full_like(out, 0.5, dtype=torch.int64)
    return ((torch.where(mask_of(out, n)[..., None], m.head(out), half) - 0.5) * m.p).sum(1)


def written_behind_the_first(m: Any, out: Tensor, n: Tensor) -> Tensor:
    rest = out[:, 1:].clone()
    rest[:, :1] = m.p
    return rest.sum(1)


REFUSED = {
    "a backward of ones": lambda m, out, n: zeros_behind(Ones.apply(m.head(out)), out, n).sum(1),
    "a mask past the backward": lambda m, out, n: Straight.apply(m.head(out), mask_of(out, n)[..., None]).sum(1),
    "infinite weights counted": lambda m, out, n: (
        out @ torch.full((H, H), float("inf"), dtype=out.dtype)).isnan().sum(1) * m.p,
    "infinite quotients counted": lambda m, out, n: (out / (n - n)[:, None, None]).nan_to_num(1.0, 1.0).sum(1) * m.p,
    "complex zeros": lambda m, out, n: (
        torch.log(torch.complex(out, out)) * mask_of(out, n)[..., None]).isnan().sum(1) * m.p,
    "halves that are too large": lambda m, out, n: (
        (out + 1e5).half() * mask_of(out, n)[..., None]).isnan().sum(1) * m.p,
    "roots of zeros": lambda m, out, n: (out @ m.head.weight).abs().sqrt().sum(1),
    "one over a signed zero": lambda m, out, n: (1 / (m.head(out) * mask_of(out, n)[..., None])).amin(1),
    "signs of zeros": lambda m, out, n: torch.signbit(m.head(out) * mask_of(out, n)[..., None]).sum(1) * m.p,
    "a running sum of ones": lambda m, out, n: m.head(out)[:, 0] * torch.ones(
        out.shape[1], 3, dtype=out.dtype).t().reshape(-1).cumsum(0).view(3, out.shape[1])[1, 0],
    "a mean": lambda m, out, n: m.head(out.mean(1)),
    "a largest": lambda m, out, n: m.head(out.amax(1)),
    "the last place": lambda m, out, n: m.head(out[:, -1]),
    "places from the end": lambda m, out, n: m.head(out)[torch.arange(len(out)), -n],
    "turned around": lambda m, out, n: m.head(out.flip(1)[:, 0]),
    "a layer on the padding": lambda m, out, n: m.head(out).sum(1),
    "weights of all steps": lambda m, out, n: m.head((out.softmax(1) * out).sum(1)),
    "zeros and a number": lambda m, out, n: m.head((out + 1).sum(1)),
    "cosines of zeros": lambda m, out, n: m.head(out.cos().sum(1)),
    "how many steps": lambda m, out, n: m.head(out.sum(1)) / out.shape[1],
    "how many steps, filled": lambda m, out, n: m.head(out.sum(1)) * torch.full((), out.shape[1]),
    "how many steps, filled like": lambda m, out, n: m.head(out.sum(1)) * torch.full_like(out[0, 0], out.shape[1]),
    "how many ones": lambda m, out, n: m.head(out.sum(1)) * torch.ones_like(out).sum(1),
    "how many new ones": lambda m, out, n: m.head(out.sum(1)) * torch.ones(out.shape[1]).sum(),
    "the last of all places": lambda m, out, n: m.head(out.sum(1)) * torch.arange(out.shape[1]).amax(),
    "parts of one": lambda m, out, n: last_of(m.head(out) * torch.linspace(0, 1, out.shape[1])[:, None], n),
    "places turned around": lambda m, out, n: last_of(
        m.head(out) * torch.arange(out.shape[1] - 1, -1, -1)[:, None], n),
    "places from minus the longest": lambda m, out, n: last_of(
        m.head(out) * torch.arange(-out.shape[1], 0)[:, None], n),
    "all but the last": lambda m, out, n: m.head(out)[:, :-1].tanh().sum(1),
    "rolled steps": lambda m, out, n: m.head(out.roll(1, 1))[:, 0],
    "sorted steps": lambda m, out, n: m.head(out.sort(1).values)[:, 0],
    "steps behind steps": lambda m, out, n: m.head(torch.cat([out, out + 1], 1).sum(1)),
    "a norm over steps": lambda m, out, n: m.head(F.normalize(out.exp(), dim=1))[:, 0],
    "each step's share": lambda m, out, n: m.head(out.renorm(2, 2, 0.1))[:, 0],
    "a negative index after all": lambda m, out, n: m.head(out)[torch.arange(len(out)), n - 2],
    **{f.__name__.replace("_", " "): f for f in (
        one_too_many, a_mask_of_others, a_mask_that_is_off, a_mask_of_rounded_places, softmax_of_what_is_small,
        infinite_times_zero, zeros_over_zeros, a_second_dimension, an_outer_sum, read_in_another_order,
        last_state_of_all_steps, as_many_as_rows, truths_of_two_dimensions, running_over_features,
        place_of_the_largest, softmax_of_nothing, largest_of_nothing, half_of_a_whole, written_behind_the_first)},
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_does_not_see_the_longest_sample(name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    model, lengths = Padded(RIGHT[name]).double().to(device), LENGTHS
    x = torch.randn(4, 5, IN, dtype=torch.float64, device=device)
    g = torch.randn(4, H, dtype=torch.float64, device=device)
    with torch.device(device):
        (fxgrad.transform(model, backend="eager")(x, lengths) * g).sum().backward()
        for i in range(len(x)):
            alone = (model(x[i : i + 1], lengths[i : i + 1]) * g[i]).sum()
            own = torch.autograd.grad(alone, list(model.parameters()), allow_unused=True, materialize_grads=True)
            for (at, p), expected in zip(model.named_parameters(), own, strict=True):
                rows = getattr(p, "grad_sample", None)
                found = torch.zeros_like(p) if rows is None else rows[i]
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=at)


@pytest.mark.parametrize("name", [*list(REFUSED)[::2], *long_but(lambda _: False, list(REFUSED)[1::2])])
def test_what_sees_the_longest_sample_is_refused(name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    gs = fxgrad.transform(Padded(REFUSED[name]).double().to(device), backend="eager")
    x = torch.randn(4, 5, IN, dtype=torch.float64, device=device)
    with pytest.raises(FxgradError, match=SEEN), torch.device(device):
        gs(x, LENGTHS)


class FromLengths(Padded):
    """Packs by a cast of lengths, and masks by these."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.long(), batch_first=True, enforce_sorted=False)
        out = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        return self.read(self, out, lengths)


@pytest.mark.parametrize("lengths", [[2.7, 5.0, 1.0, 2.0], [3 + 2**32, 5, 1, 2]])
def test_lengths_that_a_cast_changes(lengths: Any) -> None:
    torch._dynamo.reset()
    gs = fxgrad.transform(FromLengths(RIGHT["masked mean"]).double(), backend="eager")
    with pytest.raises(FxgradError, match="sum may see how long the longest sample is"):
        gs(torch.randn(4, 5, IN, dtype=torch.float64), torch.tensor(lengths, dtype=torch.float64))


def test_lengths_of_32_bits() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 5, IN, dtype=torch.float64)
    model: Any = FromLengths(RIGHT["masked mean"]).double()
    fxgrad.transform(model, backend="eager")(x, LENGTHS.int()).sum().backward()
    assert model.head.bias.grad_sample.shape == (4, H)


PACKED = {
    "how many steps": lambda m, p: m(p) * p.batch_sizes.shape[0],
    "how many ones": lambda m, p: m(p) * torch.ones_like(p.batch_sizes).sum(),
    "how many rows": lambda m, p: m(p) * p.data.shape[0],
    "how many rows, filled": lambda m, p: m(p) * torch.ones(p.data.shape[0], dtype=p.data.dtype).sum(),
    "how many rows, alike": lambda m, p: m(p) * torch.ones_like(p.data).sum(),
    "as long as the longest": lambda m, p: m.head(
        pad_packed_sequence(m.rnn(p)[0], batch_first=True, total_length=p.batch_sizes.shape[0])[0]).mean(1),
    "the place of a row": lambda m, p: m(PackedSequence(
        p.data * torch.ones_like(p.data).cumsum(0), p.batch_sizes, p.sorted_indices, p.unsorted_indices)),
}  # fmt: skip


class OfPacked(nn.Module):
    """Reads a packed sequence."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner = Inner()
        self.read = read

    def forward(self, p: PackedSequence) -> Tensor:
        return self.read(self.inner, p)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(IN, H), nn.Linear(H, H)

    def forward(self, p: PackedSequence) -> Tensor:
        return self.head(pad_packed_sequence(self.rnn(p)[0], batch_first=True)[0].sum(1))


def packed_rows() -> PackedSequence:
    x = torch.randn(4, 5, IN, dtype=torch.float64)
    return pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)


@pytest.mark.parametrize("name", PACKED)
def test_how_long_a_packed_input_is(name: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(FxgradError, match=SEEN):
        fxgrad.transform(OfPacked(PACKED[name]).double(), backend="eager")(packed_rows())


def test_how_sequences_are_packed_is_named() -> None:
    with pytest.raises(MixedSamples, match=r"how sequences are packed \(batch_sizes, sorted_indices\) depends on"):
        fxgrad.transform(OfPacked(PACKED["how many ones"]).double(), backend="eager")(packed_rows())


def test_a_packed_input() -> None:
    torch._dynamo.reset()
    model: Any = OfPacked(lambda m, p: m(p)).double()
    fxgrad.transform(model, backend="eager")(packed_rows()).sum().backward()
    assert model.inner.head.weight.grad_sample.shape == (4, H, H)


@pytest.mark.parametrize("quantity", [fxgrad.ClippedGrad(1.0), fxgrad.NormSample()], ids=str)
def test_of_single_samples_nothing_of_parameters_is_returned_behind_the_ends(quantity: Any) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 5, IN, dtype=torch.float64)
    returned = Padded(lambda m, out, n: m.head(out)).double()
    with pytest.raises(FxgradError, match="behind the ends"):
        fxgrad.transform(returned, quantity=quantity, backend="eager")(x, LENGTHS)
    torch._dynamo.reset()
    masked = Padded(lambda m, out, n: zeros_behind(m.head(out), out, n)).double()
    fxgrad.transform(masked, quantity=quantity, backend="eager")(x, LENGTHS).sum().backward()
    norm: Any = getattr(masked.head.bias, "norm_sample", None)
    assert (masked.head.bias.grad if norm is None else norm) is not None


def test_the_refusal_says_what_to_do() -> None:
    gs = fxgrad.transform(Padded(REFUSED["a mean"]).double(), backend="eager")
    with pytest.raises(FxgradError, match=r"may see how long the longest sample is[^$]*test_longest\.py") as caught:
        gs(torch.randn(4, 5, IN, dtype=torch.float64), LENGTHS)
    assert "total_length=" in str(caught.value)

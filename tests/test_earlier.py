"""What frees memory runs as early as it can, and no order has a higher peak for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import fresh_cache

from benchmarks.memory import peak_bytes
from benchmarks.models.transformers import LongConvolution
from benchmarks.peers import ours
from benchmarks.tasks import Spec, class_losses, make_task, vectors
from fxgrad.compile.earlier import _peak as peak
from fxgrad.compile.earlier import earlier, lowest
from fxgrad.host.inductor import Kernel
from fxgrad.host.versions import at_least


def kernels(made: list[int], reads: list[list[int]], acts: frozenset[int] = frozenset()) -> list[Kernel]:
    """Each makes one value and reads those of earlier ones; what nothing reads is a result, and stays."""
    readers = [frozenset(i for i, ones in enumerate(reads) if value in ones) for value in range(len(made))]
    return [
        Kernel(frozenset(ones), made[i], [(made[value], readers[value]) for value in sorted({*ones})], i in acts)
        for i, ones in enumerate(reads)
    ]


def test_a_sum_goes_to_what_it_reads() -> None:
    """A backward of three layers: gradients of 100, of which sums of 1 are used in the end."""
    chain = kernels([100, 100, 100, 1, 1, 1, 1], [[], [0], [1], [0], [1], [2], [3, 4, 5]])
    order = earlier(chain)
    assert order == [0, 3, 1, 4, 2, 5, 6]
    assert (peak(chain, [*range(7)]), peak(chain, order)) == (301, 202)


def test_the_order_with_the_lower_peak_is_taken() -> None:
    """Two values of 100, each summed: in the first order the sums wait for a third value, which makes as much."""
    planned = kernels([100, 100, 100, 1, 1], [[], [], [0, 1], [0, 2], [1, 2]])
    given = kernels([100, 1, 100, 1], [[], [0], [], [2]])
    assert lowest([planned, given]) == (1, earlier(given))
    assert lowest([given, planned]) == (0, earlier(given))
    assert lowest([given, given]) == (0, earlier(given))


def test_what_makes_more_than_it_frees_stays() -> None:
    assert earlier(kernels([10, 1, 1, 50], [[], [], [1], [0, 2]])) == [0, 1, 2, 3]
    assert earlier(kernels([10, 20, 30, 10], [[], [], [1], [0]])) == [0, 3, 1, 2]
    assert earlier([]) == []


def test_nothing_passes_what_acts() -> None:
    """Kernel 1 raises an error before kernel 3 reads by a wrong index; and kernel 3 may be the one that raises."""
    made, reads = [10, 5, 30, 10], [[], [], [], [0]]
    assert earlier(kernels(made, reads)) == [0, 3, 1, 2]
    assert earlier(kernels(made, reads, frozenset({1}))) == [0, 1, 3, 2]
    assert earlier(kernels(made, reads, frozenset({3}))) == [0, 1, 2, 3]


@given(st.data())
def test_no_order_has_a_higher_peak(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    made = data.draw(st.lists(st.integers(0, 100), min_size=n, max_size=n))
    reads = [data.draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else [] for i in range(n)]
    found = kernels(made, reads, data.draw(st.frozensets(st.integers(0, n - 1), max_size=2)))
    order = earlier(found)
    place = {one: i for i, one in enumerate(order)}
    assert sorted(order) == [*range(n)]
    assert all(place[other] < place[one] for one in range(n) for other in found[one].behind)
    assert peak(found, order) <= peak(found, [*range(n)])
    acting = [one for one in range(n) if found[one].acts]
    assert all((place[one] < place[other]) == (one < other) for one in acting for other in range(n) if one != other)


class Squared(LongConvolution):
    """The mean of squares: gradients of the positions differ."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv(self.norm1(x).transpose(1, 2))[..., : x.shape[1]]
        x = x + mixed.transpose(1, 2)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        logits: Tensor = self.head(x.square().mean(1))
        return logits


@pytest.mark.inductor
@pytest.mark.skipif(not at_least("2.13"), reason="older versions keep their order")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_gradient_of_a_wide_layer_is_not_kept(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MB in float32, which a bias alone would keep while the convolution before it runs its backward."""
    task = make_task("wide", Spec(lambda: Squared(256, 64), 8, vectors(256, 256, classes=10), class_losses), "cpu")

    def measured() -> int:
        torch._dynamo.reset()
        engine = ours.fxgrad(task, "C", whole=whole)
        for _ in range(3):
            engine.step()
        return peak_bytes(task, engine)

    peak_now = measured()
    monkeypatch.setattr("fxgrad.compile.inductor.lowest", lambda orders: (0, [*range(len(orders[0]))]))
    with fresh_cache():
        peak_before = measured()
    assert peak_now < 0.9 * peak_before, (peak_now, peak_before)

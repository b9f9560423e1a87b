"""`fxgrad.verify` of models that return a loss of the whole batch, alone or beside outputs with samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import RuleError
from fxgrad.verification.undivided import shares

B, T, V = 4, 5, 6


def tripled(x: Tensor, w: Tensor) -> Tensor:
    return x * w * 3


def register(wrong: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
    @fxgrad.implements_per_sample_grads(tripled, of=["w"], override=True)
    def rule(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": wrong((g * x * 3).flatten(1, -2).sum(1))}


def a_thousandth(rows: Tensor) -> Tensor:
    return rows * 1.001


def one_sample(rows: Tensor) -> Tensor:
    return torch.cat([rows[:1] * 1.001, rows[1:]])


def exchanged(rows: Tensor) -> Tensor:
    return rows.roll(1, 0)


def all_of_one(rows: Tensor) -> Tensor:
    return torch.cat([rows.sum(0, keepdim=True), torch.zeros_like(rows[1:])])


def evenly(rows: Tensor) -> Tensor:
    return rows.mean(0).expand_as(rows)


WRONG = [a_thousandth, one_sample, exchanged, all_of_one, evenly]
"""The last three have the right sum over samples."""


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


torch.utils._pytree.register_dataclass(Output)

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda loss, logits: (loss, logits),
    "last": lambda loss, logits: (logits, loss),
    "dict": lambda loss, logits: {"loss": loss, "more": [{"logits": logits}]},
    "dataclass": Output,
    "copied": lambda loss, logits: (loss, logits.clone()),  # no gradient of the loss flows through this output
    "alone": lambda loss, logits: loss,
}


class Tagger(nn.Module):
    """A model of tokens with a mean loss inside, as Hugging Face's with ``labels=``."""

    def __init__(self, form: str = "tuple", dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(V, 4), nn.Dropout(dropout), nn.Linear(4, V)
        self.w, self.form = nn.Parameter(torch.randn(4)), FORMS[form]

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.dropout(torch.tanh(tripled(self.embed(ids), self.w))))
        return self.form(self.loss(logits, labels), logits)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(ignored: str = "none") -> tuple[Tensor, Tensor]:
    ids, labels = torch.randint(V, (B, T)), torch.randint(V, (B, T))
    if ignored == "evenly":
        labels[:, 3:] = -100
    if ignored == "unevenly":
        labels[0, 2:] = labels[2, :4] = -100
    if ignored == "a sample":
        labels[1] = -100
    return ids, labels


def verdicts(verdict: fxgrad.Verdict) -> set[str]:
    return {p.verdict for p in verdict.parameters}


BRIEFLY = ("tuple", "copied", "alone")
EACH = [(form, ignored, 0.0) for form in FORMS for ignored in ("none", "evenly", "unevenly", "a sample")]
DROPOUT = [(form, ignored, 0.5) for form in BRIEFLY for ignored in ("none", "unevenly")]


@pytest.mark.parametrize("form, ignored, dropout", EACH + DROPOUT)
def test_a_right_model(form: str, ignored: str, dropout: float) -> None:
    register()
    model = fxgrad.transform(Tagger(form, dropout), backend="eager")
    verdict = fxgrad.verify(model, *batch(ignored))
    assert verdicts(verdict) == {"right"}
    assert all(p.error is not None and p.error < 1e-12 for p in verdict.parameters)
    # the number of labels that count is a sum over samples: a sample with fewer changes the others' gradients
    assert {influence.what for influence in verdict.influences} <= {"grad_sample"}
    assert verdict.ok == (ignored in ("none", "evenly"))


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("form, ignored, dropout", [*DROPOUT[::2], *((form, "unevenly", 0.0) for form in BRIEFLY)])
def test_a_wrong_rule(form: str, ignored: str, dropout: float, wrong: Callable[[Tensor], Tensor]) -> None:
    register(wrong)
    model = fxgrad.transform(Tagger(form, dropout), backend="eager")
    verdict = fxgrad.verify(model, *batch(ignored))
    by_name = {p.name: p.verdict for p in verdict.parameters}
    assert by_name == {"embed.weight": "right", "head.weight": "right", "head.bias": "right", "w": "wrong"}
    assert not verdict.ok


@pytest.mark.parametrize("form", ["last", "dict", "dataclass"])
def test_a_wrong_rule_and_a_nested_output(form: str) -> None:
    register(exchanged)
    verdict = fxgrad.verify(Tagger(form), *batch())
    assert [p.name for p in verdict.parameters if p.verdict == "wrong"] == ["w"] and not verdict.ok


@pytest.mark.parametrize("form", ["tuple", "alone"])
def test_a_wrong_gradient_of_the_loss_alone(form: str) -> None:
    """The transformed model takes another loss than the plain one: that of a mean over samples of means over tokens."""

    class Model(Tagger):
        def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                return super().loss(logits, labels)
            each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            return (each.sum(1) / (labels != -100).sum(1)).mean()

    register()
    ids, labels = batch("unevenly")
    assert fxgrad.verify(Model(form), *batch("evenly")).ok
    verdict = fxgrad.verify(Model(form), ids, labels)
    assert verdicts(verdict) == {"wrong"} and not verdict.ok


class Regression(nn.Module):
    """A model of one parameter tensor, whose samples are alike."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.w, self.form = nn.Parameter(torch.randn(3)), FORMS[form]

    def forward(self, x: Tensor) -> Any:
        y = tripled(x, self.w)
        return self.form(y.square().mean(), y)


@pytest.mark.parametrize("form", ["tuple", "copied", "alone"])
def test_shares_that_only_the_gradients_have(form: str) -> None:
    """Neither the sum over samples nor a change of a sample shows it: the samples are alike."""
    register()
    assert fxgrad.verify(Regression(form), torch.ones(B, 3)).ok
    register(lambda rows: rows * torch.tensor([2.0, 0.0, 1.0, 1.0]).to(rows).unsqueeze(1))
    verdict = fxgrad.verify(Regression(form), torch.ones(B, 3))
    assert verdict.sum_error is not None and verdict.sum_error < 1e-12
    assert verdicts(verdict) == {"wrong"} and not verdict.ok


@pytest.mark.parametrize("factor", [1e-2, 1e2])
@pytest.mark.parametrize("form", ["tuple", "copied"])
def test_a_small_loss_beside_large_logits_is_checked_as_well(form: str, factor: float) -> None:
    """In float32, an error of 0.1 % of the smaller one would otherwise be lost beside the other."""

    class Model(Tagger):
        def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
            scale = factor if not torch.compiler.is_compiling() else factor * 1.001
            return super().loss(logits.float(), labels) * scale

    register()
    verdict = fxgrad.verify(Model(form), *batch())
    assert verdict.tolerance == 1e-4 and "wrong" in verdicts(verdict) and not verdict.ok


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["", "dropout"])
@pytest.mark.parametrize("form", ["tuple", "alone"])
def test_a_batch_of_one(form: str, dropout: float) -> None:
    register()
    ids, labels = batch()
    verdict = fxgrad.verify(Tagger(form, dropout), ids[:1], labels[:1])
    assert verdict.ok and verdicts(verdict) == {"right"} and verdict.notes == ()


@pytest.mark.parametrize("form", ["tuple", "alone"])
@pytest.mark.parametrize("reduction", ["mean", 0.1])
def test_rows_scaled_by_loss_reduction(form: str, reduction: Any) -> None:
    register()
    ids, labels = batch()
    transformed = fxgrad.transform(Tagger(form), loss_reduction=reduction, backend="eager")
    verdict = fxgrad.verify(transformed, ids, labels)
    assert verdict.ok
    assert (verdict.notes == ()) == (reduction == "mean")
    register(one_sample)
    transformed = fxgrad.transform(Tagger(form), loss_reduction=reduction, backend="eager")
    assert not fxgrad.verify(transformed, ids, labels).ok


@pytest.mark.parametrize("form", ["tuple", "copied", "alone"])
def test_the_note_on_the_loss(form: str) -> None:
    register()
    mean, tokens = fxgrad.verify(Tagger(form), *batch()), fxgrad.verify(Tagger(form), *batch("a sample"))
    assert mean.notes == ("the model's own loss weighs each sample's by 1/B: pass loss_reduction=\"mean\" to undo it",)
    assert tokens.notes == ("the model's own loss weighs each sample's by 0.333, 0, 0.333, 0.333",)


def test_dropout_needs_no_eval_mode_where_the_loss_is_a_function_of_the_outputs() -> None:
    register()
    verdict = fxgrad.verify(Tagger("tuple", 0.5), *batch())
    assert verdict.notes == () and "under one seed" in verdict.witness
    verdict = fxgrad.verify(Tagger("copied", 0.5), *batch())
    assert "tried in eval mode" in verdict.notes[0] and verdict.witness == "the loop over single samples"


class TwoLosses(nn.Module):
    """Two heads whose labels count differently, as in BERT's pre-training and in the span of an answer."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.body, self.tokens, self.samples = nn.Linear(3, 4), nn.Linear(4, V), nn.Linear(4, 2)
        self.w, self.form = nn.Parameter(torch.randn(4)), form

    def forward(self, x: Tensor, labels: Tensor, y: Tensor) -> Any:
        h = tripled(torch.tanh(self.body(x)), self.w)
        tokens, samples = self.tokens(h), self.samples(h[:, 0])
        loss = F.cross_entropy(tokens.flatten(0, 1), labels.flatten()) + F.cross_entropy(samples, y)
        return (loss, tokens, samples) if self.form == "outputs" else loss


def two_losses() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, T, 3), batch("unevenly")[1], torch.randint(2, (B,))


def test_a_loss_of_several_outputs() -> None:
    register()
    assert verdicts(fxgrad.verify(TwoLosses("outputs"), *two_losses())) == {"right"}
    register(one_sample)
    verdict = fxgrad.verify(TwoLosses("outputs"), *two_losses())
    assert [p.name for p in verdict.parameters if p.verdict == "wrong"] == ["w"]


def test_a_loss_that_is_no_sum_of_the_samples_own() -> None:
    register()
    verdict = fxgrad.verify(TwoLosses("alone"), *two_losses())
    assert verdicts(verdict) == {"no reference"} and not verdict.ok
    assert verdict.notes[-1].startswith("each sample's share of output 0 is unknown: pass a loss_fn of outputs with")
    allowed = fxgrad.transform(TwoLosses("alone"), mixing="allow", backend="eager")
    assert not fxgrad.verify(allowed, *two_losses()).ok
    labels = torch.randint(V, (B, T))
    assert fxgrad.verify(TwoLosses("alone"), torch.randn(B, T, 3), labels, torch.randint(2, (B,))).ok


def test_a_loss_and_a_model_that_takes_no_sample_alone() -> None:
    class Pair(Tagger):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            if len(ids) == 1:
                raise ValueError("two or more")
            return super().forward(ids, labels)

    register()
    verdict = fxgrad.verify(Pair("tuple"), *batch())
    assert verdict.ok and "under one seed" in verdict.witness
    verdict = fxgrad.verify(Pair("alone"), *batch())
    assert verdicts(verdict) == {"no reference"} and not verdict.ok
    with pytest.raises(RuleError, match=r"nothing was compared: one sample alone raises ValueError; each sample's"):
        verdict.raise_if_wrong()


class WithTemperature(Tagger):
    """A parameter that only the loss uses: not all of its gradient flows through the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.rand(V))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(tripled(logits, self.v), labels)


@pytest.mark.parametrize("ignored", ["none", "unevenly"])
def test_a_parameter_that_only_the_loss_uses(ignored: str) -> None:
    register()
    assert verdicts(fxgrad.verify(WithTemperature(), *batch(ignored))) == {"right"}
    register(lambda rows: one_sample(rows) if rows.shape[1] == V else rows)
    verdict = fxgrad.verify(WithTemperature(), *batch(ignored))
    assert [p.name for p in verdict.parameters if p.verdict == "wrong"] == ["v"]


def test_mixing_that_is_allowed_hides_no_wrong_gradient() -> None:
    for form in ("tuple", "copied", "alone"):
        register()
        model = fxgrad.transform(Tagger(form), mixing="allow", backend="eager")
        assert fxgrad.verify(model, *batch("unevenly")).ok
        register(exchanged)
        model = fxgrad.transform(Tagger(form), mixing="allow", backend="eager")
        assert not fxgrad.verify(model, *batch("unevenly")).ok


def test_a_sample_alone_whose_loss_is_not_finite() -> None:
    class ByNumber(Tagger):
        def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
            each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            return each.sum() / (labels != -100).sum()

    for form in ("tuple", "alone"):
        register()
        assert verdicts(fxgrad.verify(ByNumber(form), *batch("a sample"))) == {"right"}
        register(exchanged)
        assert "wrong" in verdicts(fxgrad.verify(ByNumber(form), *batch("a sample")))


def test_a_loss_of_the_first_output_alone() -> None:
    register()
    assert fxgrad.verify(Tagger(), *batch(), loss_fn=lambda output: output[0]).ok
    register(one_sample)
    assert not fxgrad.verify(Tagger(), *batch(), loss_fn=lambda output: output[0]).ok


class TestShares:
    """Each sample's share, from the plain model's gradients alone."""

    def rows(self, n: int = B, size: int = 20) -> Tensor:
        return torch.randn(n, size, dtype=torch.float64)

    def of(self, rows: Tensor, weights: Tensor | list[float]) -> Tensor | None:
        total = torch.as_tensor(weights, dtype=rows.dtype) @ rows
        return shares({"w": rows}, {"w": total}, 1e-10)

    @pytest.mark.parametrize("weights", [[1.0] * B, [1 / B] * B, [0.5, 0.1, 0.1, 0.3], [0.0, 0.0, 0.0, 1.0]])
    def test_they_are_solved_for(self, weights: list[float]) -> None:
        found = self.of(self.rows(), weights)
        assert found is not None and torch.allclose(found, torch.tensor(weights, dtype=found.dtype))

    def test_no_weighted_sum(self) -> None:
        rows = self.rows()
        total = rows.mean(0)
        total[0] += 1e-6
        assert shares({"w": rows}, {"w": total}, 1e-10) is None

    def test_samples_alike_have_equal_shares(self) -> None:
        rows = self.rows()
        rows[2] = rows[1]
        found = self.of(rows, [0.4, 0.2, 0.2, 0.2])
        assert found is not None and torch.allclose(found, torch.tensor([0.4, 0.2, 0.2, 0.2], dtype=found.dtype))

    def test_more_samples_than_numbers(self) -> None:
        rows = self.rows(B, 2)
        assert self.of(rows, [0.5, 0.1, 0.1, 0.3]) is None
        assert self.of(rows, [1 / B] * B) is not None and self.of(rows, [1.0] * B) is not None

    def test_rows_without_a_share(self) -> None:
        rows = self.rows()
        rows[1] = 0.0
        found = self.of(rows, [0.5, 7.0, 0.2, 0.3])
        assert found is not None and torch.allclose(found, torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=found.dtype))
        total = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=rows.dtype) @ rows
        rows[1, 3] = torch.nan
        found = shares({"w": rows}, {"w": total}, 1e-10)
        assert found is not None and found[1] == 0.0
        assert shares({"w": rows}, {"w": total * torch.nan}, 1e-10) is None

    def test_as_many_samples_as_numbers_fit_anything(self) -> None:
        assert self.of(self.rows(B, B), [0.5, 0.1, 0.1, 0.3]) is None

    def test_proportional_gradients(self) -> None:
        rows = self.rows()
        rows[2] = rows[1] * 2
        assert self.of(rows, [0.4, 0.2, 0.2, 0.2]) is None

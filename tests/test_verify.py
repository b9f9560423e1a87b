"""`fxgrad.verify`: what it must catch, what it must accept, and that it leaves the model alone."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import BatchSizeError, LostLayout, MixedSamples, OptionError, RuleError
from fxgrad.verification.verdict import Influence


class Lambda(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, function: Any, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.Sequential(*layers), function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.layers(inputs[0]), *inputs[1:])


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def x(n: int = 5) -> Tensor:
    return torch.randn(n, 3)


def verdicts(verdict: fxgrad.Verdict) -> dict[str, str]:
    return {p.name: p.verdict for p in verdict.parameters}


def squared_scale(x: Tensor, w: Tensor) -> Tensor:
    return x * w.square()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return squared_scale(x + self.v, self.w)


def register(factor: float = 1.0, mix: float = 0.0) -> None:
    @fxgrad.implements_per_sample_grads(squared_scale, of=["w"])
    def rule(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        found = factor * (g * x * 2 * w).flatten(1, -2).sum(1)
        return {"w": found + mix * (found.sum(0) - found)}


def test_a_right_model() -> None:
    verdict = fxgrad.verify(small(), x())
    verdict.raise_if_wrong()
    assert verdict.ok
    assert (verdict.batch_size, verdict.dtype, verdict.tolerance) == (5, "float64", 1e-10)
    assert verdict.witness == "the loop over single samples"
    assert set(verdicts(verdict).values()) == {"right"}
    assert all(p.error is not None and p.error <= 1e-14 for p in verdict.parameters)
    assert verdict.influences == () and verdict.refusal is None


def test_a_rule_wrong_by_a_thousandth_is_caught() -> None:
    register(1.001)
    verdict = fxgrad.verify(Scaled(), x())
    assert not verdict.ok
    assert verdicts(verdict) == {"w": "wrong", "v": "right"}
    (w, _) = verdict.parameters
    assert w.error == pytest.approx(1e-3, rel=1e-6) and w.sample is not None
    with pytest.raises(RuleError, match=r"grad_sample of 'w' is off by 1.0e-03 \(tolerance 1e-10\), most for sample"):
        verdict.raise_if_wrong()


def test_a_rule_that_divides_by_zero_is_caught() -> None:
    register(float("nan"))
    verdict = fxgrad.verify(Scaled(), x())
    assert verdicts(verdict) == {"w": "wrong", "v": "right"} and verdict.parameters[0].error == float("inf")


def test_a_right_rule_of_ones_own() -> None:
    register()
    assert fxgrad.verify(Scaled(), x()).ok


def test_a_rule_that_mixes_is_caught_where_its_sum_over_samples_is_right() -> None:
    @fxgrad.implements_per_sample_grads(squared_scale, of=["w"])
    def rule(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        found = (g * x * 2 * w).flatten(1, -2).sum(1)
        return {"w": found.mean(0).expand_as(found)}

    verdict = fxgrad.verify(Scaled(), x())
    assert verdict.sum_error is not None and verdict.sum_error <= 1e-10
    assert verdicts(verdict)["w"] == "wrong"
    assert {influence.what for influence in verdict.influences} == {"grad_sample"}
    assert verdict.influences[1] == Influence(1, (0, 2, 3, 4), "grad_sample")
    assert "every sample changes the grad_sample of every other" in str(verdict)


def test_an_op_wrongly_promised_to_treat_samples_alone() -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(0)

    fxgrad.register_op(centred)
    verdict = fxgrad.verify(Lambda(centred, nn.Linear(3, 2)), x())
    assert not verdict.ok and verdict.refusal is None
    with pytest.raises(MixedSamples, match="samples influence each other: every sample changes output 0 of every"):
        verdict.raise_if_wrong()


def test_batch_statistics_are_refused_and_seen() -> None:
    verdict = fxgrad.verify(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), x())
    assert isinstance(verdict.refusal, MixedSamples)
    assert set(verdicts(verdict).values()) == {"refused"}
    text = str(verdict)
    assert "mixing: every sample changes output 0 of every other" in text
    assert "refused: MixedSamples: batch_norm in training mode lets samples influence each other" in text
    assert text.endswith("verdict: refused")
    with pytest.raises(MixedSamples, match="batch_norm in training mode"):
        verdict.raise_if_wrong()


def test_who_sees_whom() -> None:
    model = Lambda(lambda h: (h, h.cumsum(0)), nn.Linear(3, 3))
    verdict = fxgrad.verify(model, x(4))
    assert [(i.source, i.targets, i.what) for i in verdict.influences] == [
        (0, (1, 2, 3), "output 1"),
        (1, (2, 3), "output 1"),
        (2, (3,), "output 1"),
    ]
    assert "mixing: sample 0 changes output 1 of samples 1 to 3\n        sample 1 changes" in str(verdict)


def test_mixing_that_is_allowed_is_said_and_accepted() -> None:
    model = Lambda(lambda h: h.cumsum(0), nn.Linear(3, 3))
    verdict = fxgrad.verify(fxgrad.transform(model, mixing="allow", backend="eager"), x(4))
    assert verdict.ok and len(verdict.influences) == 3
    assert set(verdicts(verdict).values()) == {"not compared"}


def test_what_is_refused_without_mixing() -> None:
    verdict = fxgrad.verify(Lambda(lambda h: h.view(4, 3) * 2, nn.Linear(3, 3)), x(4))
    assert isinstance(verdict.refusal, LostLayout) and verdict.influences == ()
    assert "mixing: none; each sample was changed in turn, and no other's output moved" in str(verdict)


def test_dropout() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    verdict = fxgrad.verify(model, x())
    assert verdict.ok and "under one seed" in verdict.witness
    assert fxgrad.verify(model.eval(), x()).witness == "the loop over single samples"


@pytest.mark.inductor
def test_inductor_draws_other_numbers() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    verdict = fxgrad.verify(fxgrad.transform(model), x())
    assert verdict.ok and verdict.notes[0].startswith('through "aot_eager"')


def test_dropout_with_a_wrong_rule() -> None:
    register(1.001)
    verdict = fxgrad.verify(nn.Sequential(nn.Dropout(0.5), Scaled()), x())
    assert verdicts(verdict) == {"1.w": "wrong", "1.v": "right"}


def test_dropout_and_a_loss_inside() -> None:
    model = Lambda(lambda h, y: F.cross_entropy(h, y, reduction="sum"), nn.Linear(3, 4), nn.Dropout(0.5))
    verdict = fxgrad.verify(model, x(), torch.tensor([0, 1, 2, 3, 0]))
    assert verdict.ok
    assert verdict.notes == ("the model draws random numbers and returns a loss of all samples: tried in eval mode",)


def test_dropout_that_eval_mode_does_not_end() -> None:
    model = Lambda(lambda h: F.dropout(h, 0.5, training=True).sum(), nn.Linear(3, 4))
    verdict = fxgrad.verify(model, x())
    assert not verdict.ok and set(verdicts(verdict).values()) == {"not compared"}
    with pytest.raises(RuleError, match=r"nothing was compared: .*draws random numbers in eval mode too"):
        verdict.raise_if_wrong()


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_a_loss_outside_with_targets_of_the_batch(reduction: str) -> None:
    y = torch.tensor([0, 1, 1, 0, 1])
    seen = []

    def loss_fn(output: Tensor) -> Tensor:
        seen.append(output.shape)
        return F.cross_entropy(output, y, reduction=reduction)

    assert fxgrad.verify(small(), x(), loss_fn=loss_fn).ok
    assert set(seen) == {(5, 2)}
    scaled = fxgrad.transform(small(), loss_reduction="mean" if reduction == "mean" else "sum", backend="eager")
    assert fxgrad.verify(scaled, x(), loss_fn=loss_fn).ok


def test_a_loss_outside_through_which_samples_see_each_other() -> None:
    verdict = fxgrad.verify(small(), x(), loss_fn=lambda output: (output @ output.T).logsumexp(1))
    assert not verdict.ok
    assert set(verdicts(verdict).values()) == {"right"}  # dL/dW(i) is what it is
    assert {influence.what for influence in verdict.influences} == {"loss"}


def test_a_loss_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="loss_fn has to return a tensor, not float"):
        fxgrad.verify(small(), x(), loss_fn=lambda output: 1.0)  # type: ignore[arg-type, return-value]


def test_a_mean_inside_the_model() -> None:
    model, y = Lambda(F.cross_entropy, nn.Linear(3, 4)), torch.tensor([0, 1, 2, 3, 0])
    verdict = fxgrad.verify(model, x(), y)
    assert verdict.ok
    (note,) = verdict.notes
    assert note == "the model's own loss weighs each sample's by 1/B: pass loss_reduction=\"mean\" to undo it"
    assert fxgrad.verify(fxgrad.transform(model, loss_reduction="mean", backend="eager"), x(), y).notes == ()


def test_a_mean_over_labels_that_count_lets_samples_see_each_other() -> None:
    model = Lambda(F.cross_entropy, nn.Linear(3, 4))
    verdict = fxgrad.verify(model, x(4), torch.tensor([0, 1, -100, 3]))
    assert set(verdicts(verdict).values()) == {"right"} and not verdict.ok
    assert "the model's own loss weighs each sample's by 0.333, 0.333, 0, 0.333" in verdict.notes
    assert {(i.source, i.what) for i in verdict.influences} >= {(2, "grad_sample")}


def test_tied_frozen_and_unused_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3), nn.Identity())
    model[2].weight = model[0].weight
    model[3].bias.requires_grad_(False)
    model[4].register_parameter("spare", nn.Parameter(torch.randn(2)))
    verdict = fxgrad.verify(model, x())
    assert verdict.ok
    assert verdicts(verdict) == {
        "0.weight": "right",
        "0.bias": "right",
        "2.bias": "right",
        "3.weight": "right",
        "3.bias": "frozen",
        "4.spare": "unused",
    }
    assert "'2.weight' is '0.weight'" in verdict.notes


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)], ids=["outside", "between", "inside"])
def test_samples_merged_into_a_dimension_of_the_output(order: tuple[int, ...]) -> None:
    def merge(h: Tensor) -> Tensor:
        return h.permute(*order, 3).reshape(-1, 3)

    assert fxgrad.verify(Lambda(merge, nn.Linear(3, 3)), torch.randn(4, 2, 3, 3)).ok
    dropped = fxgrad.transform(Lambda(merge, nn.Linear(3, 3), nn.Dropout(0.5)), backend="eager")
    assert fxgrad.verify(dropped, torch.randn(4, 2, 3, 3)).ok


def test_samples_on_the_second_dimension_and_integers() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2))
    transformed = fxgrad.transform(model, batch_first=False, backend="eager")
    verdict = fxgrad.verify(transformed, torch.randint(7, (6, 4)))
    assert verdict.ok and verdict.batch_size == 4


def test_a_shared_input_and_keywords() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, batch: dict[str, Tensor], *, scale: Tensor) -> dict[str, Tensor]:
            return {"out": self.layer(batch["x"]) * scale}

    model = fxgrad.transform(Model(), in_dims={"batch": 0, "scale": None}, backend="eager")
    assert fxgrad.verify(model, {"x": x()}, scale=torch.randn(3)).ok


def test_a_model_that_does_not_run_in_float64() -> None:
    model = Lambda(lambda h: h @ torch.ones(2, 2), nn.Linear(3, 2))
    verdict = fxgrad.verify(model, x())
    assert verdict.ok and (verdict.dtype, verdict.tolerance) == ("float32", 1e-4)
    assert verdict.notes[0].startswith("not in float64, where the model raises RuntimeError: expected m1 and m2")


def test_a_model_that_computes_in_float32_inside() -> None:
    verdict = fxgrad.verify(Lambda(lambda h: h.float().exp().double(), nn.Linear(3, 2)), x())
    assert verdict.ok and (verdict.dtype, verdict.tolerance) == ("float64", 1e-4)
    assert verdict.notes == ("the model computes in float32 inside",)


def test_a_parameter_without_dims() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s = nn.Parameter(torch.tensor(0.3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.s

    assert fxgrad.verify(nn.Sequential(nn.Linear(3, 2), Scale()), x()).ok


def test_the_models_own_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fxgrad.verify(small(), torch.randn(5, 4))


def test_a_batch_of_one_and_of_none() -> None:
    assert fxgrad.verify(small(), x(1)).ok
    with pytest.raises(BatchSizeError, match="the batch is empty"):
        fxgrad.verify(small(), x(0))


def test_packed_inputs_are_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([x(4), x(2)])
    with pytest.raises(OptionError, match="cannot take single samples out of a PackedSequence"):
        fxgrad.verify(nn.LSTM(3, 2), packed)


def test_a_model_that_cannot_be_copied() -> None:
    model = small()
    model.lock = __import__("threading").Lock()
    with pytest.raises(OptionError, match="the model cannot be copied: TypeError: cannot pickle"):
        fxgrad.verify(model, x())


def test_values_left_on_modules_do_not_hinder_the_copy() -> None:
    model = small()
    model.last = model(x())
    assert fxgrad.verify(model, x()).ok


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=True).eval(), nn.Dropout(0.5))
    inputs = x().requires_grad_()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
        p.grad_sample = torch.randn(2, *p.shape)  # type: ignore[attr-defined]
    parameters = dict(model.named_parameters())
    grads = {name: (p.grad, p.grad_sample) for name, p in parameters.items()}  # type: ignore[attr-defined]
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    random = torch.get_rng_state()
    assert fxgrad.verify(model, inputs).ok
    assert torch.equal(random, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    for name, p in model.named_parameters():
        assert p is parameters[name] and p.dtype == torch.float32
        assert (p.grad, p.grad_sample) == grads[name]  # type: ignore[attr-defined]
    assert inputs.grad is None and not hasattr(inputs, "_fxgrad_sample_dim")


def test_the_text() -> None:
    model = small()
    model[0].bias.requires_grad_(False)
    register(1.001)
    text = str(fxgrad.verify(nn.Sequential(model, nn.Linear(2, 3), Scaled()), x()))
    text = re.sub(r"\d\.\de-1[4-9]|0\.0e\+00", "0.0e+00", text)
    text = re.sub(r"\d  WRONG", "4  WRONG", text)
    assert (
        text
        == """\
5 samples in float64, tolerance 1e-10; against the loop over single samples

parameter   shape     error  worst sample  verdict
0.0.weight  [4, 3]  0.0e+00                right
0.0.bias    [4]                            frozen
0.2.weight  [2, 4]  0.0e+00                right
0.2.bias    [2]     0.0e+00                right
1.weight    [3, 2]  0.0e+00                right
1.bias      [3]     0.0e+00                right
2.w         [3]     1.0e-03             4  WRONG
2.v         [3]     0.0e+00                right

outputs against the plain model's: 0.0e+00
sum over samples against the ordinary gradient: 1.0e-03
mixing: none; each sample was changed in turn, and no other's output or gradient moved
verdict: NOT OK"""
    )


@pytest.mark.parametrize(
    "options",
    [
        {"quantity": fxgrad.NormSample(), "strategy": "gram"},
        {"quantity": fxgrad.ClippedGrad(1.0), "check_first_batch": True},
        {"quantity": [fxgrad.Grad(), fxgrad.SquaredGrad()]},
    ],
    ids=lambda options: str(options["quantity"]),
)
def test_a_model_transformed_for_another_quantity(options: dict[str, Any]) -> None:
    """Its per-sample gradients are compared, whatever is made of them; those of a wrong rule are wrong."""
    model = small()
    verdict = fxgrad.verify(fxgrad.transform(model, backend="eager", **options), x())
    assert verdict.ok and set(verdicts(verdict).values()) == {"right"}
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())
    register(factor=1.001)
    wrong = fxgrad.verify(fxgrad.transform(Scaled(), backend="eager", **options), x())
    assert verdicts(wrong) == {"w": "wrong", "v": "right"}

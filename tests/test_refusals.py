"""What is refused, word for word, and the neighbours of it that are not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.testing import assert_per_sample_grads, default_loss
from tests.cases import Case, Input, Weight, ids, w, x


@dataclass(frozen=True)
class Refusal:
    case: Case
    text: str


RETURN = "a value that depends on several samples may only be summed, scaled and returned"
PAIRS = "a value of pairs of samples may only be returned"
KEEP = 'Keep the op within one sample, leave it out of the model, or pass mixing="allow".'
COPIES = "Expand or repeat the parameter along a dimension of its own."

REFUSED: list[Refusal] = []
ACCEPTED: list[Case] = []

Program = Callable[..., Any]


class Model(nn.Module):
    """A function of x and parameters."""

    def __init__(self, function: Program, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.empty(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Any:
        # written out: before 2.13 Dynamo cannot unpack a ParameterList
        return self.function(x, *[self.weights[i] for i in range(len(self.weights))])


def model_case(function: Program, x: Input, *weights: Weight) -> Case:
    return Case(function.__name__, lambda: Model(function, [w.shape for w in weights]), (x,))


def refused(text: list[str], x: Input, *weights: Weight) -> Callable[[Program], Program]:
    """The function, on these arguments, raises this error: its sentence, and the lines under it."""

    def register(function: Program) -> Program:
        REFUSED.append(Refusal(model_case(function, x, *weights), "\n  ".join(text)))
        return function

    return register


def accepted(x: Input, *weights: Weight) -> Callable[[Program], Program]:
    """The function, on these arguments, has the loop's gradients."""

    def register(function: Program) -> Program:
        ACCEPTED.append(model_case(function, x, *weights))
        return function

    return register


def text_of(error: fxgrad.FxgradError) -> str:
    """The error with its class, as Python prints it, without line numbers."""
    return re.sub(r"\.py:\d+", ".py:N", f"{type(error).__name__}: {error}")


# Batch norm


@refused(
    [
        "MixedSamples: batch_norm in training mode lets samples influence each other",
        "test_refusals.py:N   return F.batch_norm(x, None, None, w, training=True)",
        "path: x -> batch_norm",
        "Use GroupNorm, or put the layer in eval mode.",
    ],
    x(3),
    w(3),
)
def batch_norm_in_training(x: Tensor, w: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, training=True)


@accepted(x(3), w(3))
def batch_norm_by_fixed_statistics(x: Tensor, w: Tensor) -> Tensor:
    return F.batch_norm(x, torch.zeros_like(w), torch.ones_like(w), w, training=False)


# A class for each sample


@refused(
    [
        "BatchSizeError: one_hot fixes the batch size: it works for one number of samples only",
        "test_refusals.py:N   rows = F.one_hot(h.argmax(1), h.shape[0])",
        "Its number of classes is the batch size: column j stands for sample j, so a product with it picks other "
        "samples' rows. Use a number of classes that does not depend on the batch, or gather within a sample.",
    ],
    x(3),
    w(4, 3),
)
def rows_by_one_hot(x: Tensor, w: Tensor) -> Tensor:
    h = F.linear(x, w)
    rows = F.one_hot(h.argmax(1), h.shape[0])
    return rows.to(h.dtype) @ h


@accepted(x(3), w(4, 3))
def classes_by_one_hot(x: Tensor, w: Tensor) -> Tensor:
    h = F.linear(x, w)
    return h * F.one_hot(h.argmax(1), 4)


# The number of samples as a number

NUMBER = "does not work for every number of samples"
SIZES = "Write sizes in terms of x.shape[0], or use -1 in view and reshape."
PLACES = "takes samples out of the batch by their places"
AT_ONCE = "Work on all samples at once, or use torch.vmap for a function of one sample."


@refused(
    [
        f"LostLayout: view {NUMBER}: shape '[5, 4]' is invalid for input of size 4*B",
        "test_refusals.py:N   return F.linear(x, w).view(5, 4)",
        SIZES,
    ],
    x(3),
    w(4, 3),
)
def viewed_by_a_number(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).view(5, 4)


@refused(
    [
        f"LostLayout: reshape {NUMBER}: its result is [5, 3*((B//5))]",
        "test_refusals.py:N   rows = x.reshape(5, -1)",
        SIZES,
    ],
    x(3),
    w(4, 3),
)
def reshaped_by_a_number(x: Tensor, w: Tensor) -> Tensor:
    rows = x.reshape(5, -1)
    scaled = 2 * rows
    return F.linear(scaled, w)


@refused(
    [
        "BatchSizeError: the model checks its sizes (torch._check), which holds for one number of samples only",
        "test_refusals.py:N   torch._check(x.shape[0] == 5)",
        "Check the batch size outside of the model.",
    ],
    x(3),
    w(4, 3),
)
def checked_by_a_number(x: Tensor, w: Tensor) -> Tensor:
    torch._check(x.shape[0] == 5)
    return F.linear(x, w)


@accepted(x(3), w(4, 3))
def asserted_to_be_a_number(x: Tensor, w: Tensor) -> Tensor:
    assert x.shape[0] < 6
    return F.linear(x, w)


@refused(
    [
        f"MixedSamples: getitem {PLACES}",
        "test_refusals.py:N   rows = [x[i] for i in range(x.shape[0])]",
        "path: x -> getitem",
        AT_ONCE,
    ],
    x(3),
    w(4, 3),
)
def one_after_the_other(x: Tensor, w: Tensor) -> Tensor:
    rows = [x[i] for i in range(x.shape[0])]
    return torch.stack([F.linear(row, w) for row in rows])


@refused(
    [
        f"MixedSamples: getitem {PLACES}",
        "test_refusals.py:N   return F.linear(x, w)[:4]",
        "path: x -> linear -> getitem",
        AT_ONCE,
    ],
    x(3),
    w(4, 3),
)
def the_first_four(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)[:4]


# Hooks


@refused(
    [
        f"MixedSamples: register_hook lets samples influence each other: {RETURN}",
        "test_refusals.py:N   h.register_hook(lambda g: 2 * g)",
        "path: x -> linear -> sum -> register_hook",
        KEEP,
    ],
    x(3),
    w(4, 3),
)
def hook_on_a_sum(x: Tensor, w: Tensor) -> Tensor:
    h = F.linear(x, w).sum(0)
    h.register_hook(lambda g: 2 * g)
    return h * 1.0


@refused(
    [
        "GraphBreak: forward removes a hook (register_hook), which one graph cannot hold",
        "test_refusals.py:N   handle.remove()",
        "Leave the hook out where it is not wanted. Compute what the hook computes in an autograd.Function inside of "
        "the model, whose backward fxgrad follows.",
    ],
    x(3),
    w(4, 3),
)
def hook_removed(x: Tensor, w: Tensor) -> Tensor:
    h = F.linear(x, w)
    handle = h.register_hook(lambda g: 2 * g)
    handle.remove()
    return h.tanh()


# Statistics of the batch


@refused(
    [
        f"MixedSamples: linear lets samples influence each other: {RETURN}",
        "test_refusals.py:N   return F.linear(centered, w)",
        "path: x -> mean -> sub -> linear",
        KEEP,
    ],
    x(3),
    w(4, 3),
)
def centered_before_a_layer(x: Tensor, w: Tensor) -> Tensor:
    centered = x - x.mean(0)
    return F.linear(centered, w)


@refused(
    [
        f"MixedSamples: sub lets samples influence each other: {RETURN}",
        "test_refusals.py:N   return h - h.mean(0)",
        "path: x -> linear -> mean -> sub",
        KEEP,
    ],
    x(3),
    w(4, 3),
)
def centered_after_a_layer(x: Tensor, w: Tensor) -> Tensor:
    h = F.linear(x, w)
    return h - h.mean(0)


@accepted(x(4, 3), w(3))
def centered_within_the_sample(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) * w


# Along the batch


@refused(
    [
        "MixedSamples: softmax lets samples influence each other: it works along the sample dimension",
        "test_refusals.py:N   return (x * w).softmax(0)",
        "path: x -> mul -> softmax",
        KEEP,
    ],
    x(3),
    w(3),
)
def softmax_over_the_batch(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).softmax(0)


@accepted(x(3), w(3))
def softmax_over_features(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).softmax(-1)


@refused(
    [
        "MixedSamples: sort lets samples influence each other: it works along the sample dimension",
        "test_refusals.py:N   return (x * w).sort(0).values",
        "path: x -> mul -> sort",
        KEEP,
    ],
    x(3),
    w(3),
)
def sorted_batch(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sort(0).values


@accepted(x(3), w(3))
def sorted_features(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sort().values


@refused(
    [
        "MixedSamples: cumsum lets samples influence each other: it works along the sample dimension",
        "test_refusals.py:N   return torch.cumsum(x * w, dim=-2)",
        "path: x -> mul -> cumsum",
        KEEP,
    ],
    x(3),
    w(3),
)
def cumsum_over_the_batch(x: Tensor, w: Tensor) -> Tensor:
    return torch.cumsum(x * w, dim=-2)


@accepted(x(3), w(3))
def cumsum_over_features(x: Tensor, w: Tensor) -> Tensor:
    return torch.cumsum(x * w, dim=1)


@refused(
    [
        "MixedSamples: softmax lets samples influence each other: it works along the sample dimension",
        "test_refusals.py:N   return (x.flatten(0, 1) * w).softmax(0)",
        "path: x -> flatten -> mul -> softmax",
        KEEP,
    ],
    x(4, 3),
    w(3),
)
def softmax_over_merged_rows(x: Tensor, w: Tensor) -> Tensor:
    return (x.flatten(0, 1) * w).softmax(0)


@accepted(x(4, 3), w(3))
def softmax_within_merged_rows(x: Tensor, w: Tensor) -> Any:
    return (x.flatten(0, 1) * w).softmax(1).unflatten(0, (-1, 4))


# Samples in another order


@refused(
    [
        ("MixedSamples: flip lets samples influence each other: it moves the samples to where they cannot be followed"),
        "test_refusals.py:N   return h + h.flip(0)",
        "path: x -> mul -> flip",
        KEEP,
    ],
    x(3),
    w(3),
)
def flipped_batch(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return h + h.flip(0)


@accepted(x(3), w(3))
def flipped_features(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return h + h.flip(1)


@refused(
    [
        ("MixedSamples: roll lets samples influence each other: it moves the samples to where they cannot be followed"),
        "test_refusals.py:N   return h * h.roll(1, 0)",
        "path: x -> mul -> roll",
        KEEP,
    ],
    x(3),
    w(3),
)
def rolled_batch(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return h * h.roll(1, 0)


@accepted(x(3), w(3))
def rolled_features(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return h * h.roll(1, 1)


@refused(
    [
        "LostLayout: flip gives a parameter's value to the samples in an order that cannot be followed",
        "test_refusals.py:N   return x.flatten(0, 1) * w.expand(2 * len(x), 3).flip(0)",
        COPIES,
    ],
    x(2, 3),
    w(3),
)
def flipped_copies(x: Tensor, w: Tensor) -> Tensor:
    return x.flatten(0, 1) * w.expand(2 * len(x), 3).flip(0)


@accepted(x(2, 3), w(3))
def copies_moved_in_their_order(x: Tensor, w: Tensor) -> Tensor:
    copies = w.expand(2 * len(x), 3).T.exp().unsqueeze(1)
    return (x.flatten(0, 1) * copies[:, 0].T).view(x.shape)


@refused(
    [
        "LostLayout: expand gives a parameter's value to the samples in an order that cannot be followed",
        "test_refusals.py:N   copies = w.expand(2 * len(x), 3)",
        COPIES,
    ],
    x(2, 3),
    w(3),
)
def copies_in_two_orders(x: Tensor, w: Tensor) -> Tensor:
    copies = w.expand(2 * len(x), 3)
    again = copies.exp()
    rows = (x.flatten(0, 1) * copies).view(x.shape)
    return rows + (x.transpose(0, 1).flatten(0, 1) * again).view(2, -1, 3).transpose(0, 1)


@refused(
    [
        ("MixedSamples: add lets samples influence each other: its operands hold the samples in different orders"),
        "test_refusals.py:N   return h.flatten(0, 1) + h.transpose(0, 1).flatten(0, 1)",
        "path: x -> mul -> flatten -> add",
        KEEP,
    ],
    x(4, 3),
    w(3),
)
def rows_in_two_orders(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return h.flatten(0, 1) + h.transpose(0, 1).flatten(0, 1)


@accepted(x(4, 3), w(3))
def rows_in_one_order(x: Tensor, w: Tensor) -> Any:
    h = x * w
    rows = h.transpose(0, 1).flatten(0, 1) + x.transpose(0, 1).flatten(0, 1)
    return rows.unflatten(0, (4, -1)).transpose(0, 1)


# Pairs of samples


@refused(
    [
        f"MixedSamples: softmax lets samples influence each other: {PAIRS}",
        "test_refusals.py:N   return (h @ h.T).softmax(-1)",
        "path: x -> mul -> matmul -> softmax",
        KEEP,
    ],
    x(3),
    w(3),
)
def similarities_in_the_model(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return (h @ h.T).softmax(-1)


@accepted(x(4, 3), w(3))
def similarities_within_the_sample(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return (h @ h.mT).softmax(-1)


# Embeddings


@refused(
    [
        (
            "UnsupportedOp: embedding with max_norm= has no per-sample gradient: "
            "it renormalises the weight in the forward, for all samples at once"
        ),
        "test_refusals.py:N   return F.embedding(ids, w, max_norm=1.0)",
        "Leave out max_norm=, or freeze the parameter.",
    ],
    ids(7, 4),
    w(7, 3),
)
def embedding_with_max_norm(ids: Tensor, w: Tensor) -> Tensor:
    return F.embedding(ids, w, max_norm=1.0)


@refused(
    [
        (
            "UnsupportedOp: embedding with scale_grad_by_freq= has no per-sample gradient: "
            "it counts an id over the whole batch, so samples influence each other"
        ),
        "test_refusals.py:N   return F.embedding(ids, w, scale_grad_by_freq=True)",
        "Leave out scale_grad_by_freq=, or freeze the parameter.",
    ],
    ids(7, 4),
    w(7, 3),
)
def embedding_scaled_by_frequency(ids: Tensor, w: Tensor) -> Tensor:
    return F.embedding(ids, w, scale_grad_by_freq=True)


@accepted(ids(7, 4), w(7, 3))
def embedding_with_sparse_gradients(ids: Tensor, w: Tensor) -> Tensor:
    return F.embedding(ids, w, sparse=True, norm_type=1.0, scale_grad_by_freq=False)


@accepted(ids(7, 4), w(3))
def max_norm_of_a_table_without_gradient(ids: Tensor, w: Tensor) -> Tensor:
    table = torch.arange(21.0, dtype=w.dtype, device=w.device).view(7, 3)
    return F.embedding(ids, table, max_norm=1.0) * w


# Ops that nobody knows


@torch.library.custom_op("fxgrad_tests::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x * 2


@unknown.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


unknown.register_autograd(lambda ctx, g: g * 2)


@refused(
    [
        "UnknownOp: fxgrad does not know whether fxgrad_tests::unknown treats samples alone",
        "test_refusals.py:N   return unknown(x * w)",
        "path: x -> mul -> fxgrad_tests::unknown",
        "If it does, declare that by fxgrad.register_op. Or write it in terms of PyTorch's own ops.",
    ],
    x(3),
    w(3),
)
def unknown_op(x: Tensor, w: Tensor) -> Any:
    return unknown(x * w)


@accepted(x(3), w(3))
def unknown_op_on_a_constant(x: Tensor, w: Tensor) -> Any:
    return x * w + unknown(torch.ones(3, dtype=w.dtype))


@accepted(x(3), w(3))
def unknown_op_on_a_parameter(x: Tensor, w: Tensor) -> Any:
    return x * unknown(w)


# Lists of tensors


@torch.library.custom_op("refusals::add_to", mutates_args=["places"])
def add_to(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.add_(value)


@refused(
    [
        "UnsupportedOp: refusals::add_to writes a parameter's values into tensors that are not its result",
        "test_refusals.py:N   add_to([h], [w])",
        "path: refusals::add_to",
        "Use an op that returns a new tensor.",
    ],
    x(3),
    w(3),
)
def a_parameter_written_into_a_list(x: Tensor, w: Tensor) -> Tensor:
    h = 2 * w
    add_to([h], [w])
    return x * h


@accepted(x(3), w(3))
def a_parameter_by_foreach(x: Tensor, w: Tensor) -> Tensor:
    h = torch.ones(3, dtype=w.dtype)
    torch._foreach_mul_([h], [w])
    return x * h


@accepted(x(3), w(3))
def a_list_that_takes_constants(x: Tensor, w: Tensor) -> Any:
    h = torch.ones(3, dtype=w.dtype)
    torch._foreach_mul_([h], [2 * h])
    return x * h * w


# Random numbers


@refused(
    [
        (
            "UnsupportedOp: alpha_dropout draws random numbers for a parameter: "
            "the backward would have to draw them again"
        ),
        "test_refusals.py:N   return x * F.alpha_dropout(w, 0.5, training=True)",
        "Apply it to values that hold samples, or put the layer in eval mode.",
    ],
    x(3),
    w(3),
)
def alpha_dropout_of_a_parameter(x: Tensor, w: Tensor) -> Tensor:
    return x * F.alpha_dropout(w, 0.5, training=True)


@accepted(x(3), w(3))
def dropout_of_a_parameter_in_eval_mode(x: Tensor, w: Tensor) -> Tensor:
    return x * F.dropout(w, 0.5, training=False)


# Losses in the model


@refused(
    [
        f"MixedSamples: log lets samples influence each other: {RETURN}",
        "test_refusals.py:N   return (x * w).square().sum().log()",
        "path: x -> mul -> square -> sum -> log",
        KEEP,
    ],
    x(3),
    w(3),
)
def log_of_a_loss(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).square().sum().log()


@refused(
    [
        f"MixedSamples: mul lets samples influence each other: {RETURN}",
        "test_refusals.py:N   return h.sum() * h.square().sum()",
        "path: x -> mul -> sum -> mul",
        KEEP,
    ],
    x(3),
    w(3),
)
def product_of_losses(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return h.sum() * h.square().sum()


@refused(
    [
        f"MixedSamples: mul lets samples influence each other: {RETURN}",
        "test_refusals.py:N   return h * h.mean()",
        "path: x -> mul -> mean -> mul",
        KEEP,
    ],
    x(3),
    w(3),
)
def weights_from_the_loss(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return h * h.mean()


@accepted(x(3), w(3))
def sum_of_scaled_losses(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return 0.5 * h.sum() - h.square().sum(0).sum() / 3


@accepted(x(3), w(3))
def loss_over_statistics_of_the_data(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin().sum() * 2.0


# The batch on a wrong axis


@refused(
    [
        ("MixedSamples: conv1d lets samples influence each other: it gets its samples on another dimension than 0"),
        "test_refusals.py:N   return F.conv1d(x.T, w)",
        "path: x -> T -> conv1d",
        KEEP,
    ],
    x(3),
    w(4, 3, 2),
)
def convolution_along_the_batch(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x.T, w)


@accepted(x(3, 5), w(4, 3, 2))
def convolution_along_positions(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x, w)


@refused(
    [
        ("MixedSamples: adaptive_avg_pool1d lets samples influence each other: it works across the sample dimension"),
        "test_refusals.py:N   return F.adaptive_avg_pool1d((x * w).permute(1, 2, 0), 1)",
        "path: x -> mul -> permute -> adaptive_avg_pool1d",
        KEEP,
    ],
    x(2, 3),
    w(3),
)
def pooling_along_the_batch(x: Tensor, w: Tensor) -> Tensor:
    return F.adaptive_avg_pool1d((x * w).permute(1, 2, 0), 1)


@accepted(x(2, 3), w(3))
def pooling_along_features(x: Tensor, w: Tensor) -> Tensor:
    return F.adaptive_avg_pool1d(x * w, 1)


@refused(
    [
        (
            "MixedSamples: scaled_dot_product_attention lets samples influence each other: "
            "it attends over the sample dimension"
        ),
        "test_refusals.py:N   return F.scaled_dot_product_attention(h, h, h)",
        "path: x -> mul -> transpose -> scaled_dot_product_attention",
        KEEP,
    ],
    x(4, 3),
    w(3),
)
def attention_over_the_batch(x: Tensor, w: Tensor) -> Tensor:
    h = (x * w).transpose(0, 1)
    return F.scaled_dot_product_attention(h, h, h)


@accepted(x(4, 3), w(3))
def attention_within_the_sample(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    return F.scaled_dot_product_attention(h, h, h)


def run(case: Case, device: torch.device, **options: Any) -> None:
    model = fxgrad.transform(case.model(device), backend="eager", **options)
    default_loss(model(*case.inputs(device))).backward()


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.case.name)
def test_refused(refusal: Refusal, device: torch.device) -> None:
    with pytest.raises(fxgrad.FxgradError) as caught:
        run(refusal.case, device)
    assert text_of(caught.value) == refusal.text


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_must_not_fire(case: Case, device: torch.device) -> None:
    assert_per_sample_grads(case.model(device), *case.inputs(device), backend="eager")

"""What users get wrong, and what fxgrad says: each row is a program, its error, and parts of the message.

A message says what is wrong, where, and what to do. A row of PyTorch's or Python's own error stands here if fxgrad
could hide it, or could print something else before it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.compat import call_for_per_sample_grads
from fxgrad.errors import (
    AlreadySet,
    BatchSizeError,
    FxgradError,
    GraphBreak,
    LostLayout,
    MixedSamples,
    NotEnoughMemory,
    OptionError,
    RuleError,
    UnclippedGrad,
    UnknownArgument,
    UnknownOp,
)


class Mistake(NamedTuple):
    program: Callable[[], Any]
    error: type[Exception]
    parts: tuple[str, ...]


MISTAKES: dict[str, Mistake] = {}


def mistake(error: type[Exception], *parts: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a program to the table; its name is the row's."""

    def add(program: Callable[[], Any]) -> Callable[[], Any]:
        name = program.__name__.replace("_", " ").strip()
        assert name not in MISTAKES
        MISTAKES[name] = Mistake(program, error, parts)
        return program

    return add


class Net(nn.Module):
    """An encoder and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.enc(x)


def transformed(model: nn.Module | None = None, **options: Any) -> Any:
    return fxgrad.transform(Net() if model is None else model, **{"backend": "eager", **options})


X = torch.linspace(-1, 1, 24).view(8, 3)
SILENT: Any = fxgrad


# Names


@mistake(UnknownArgument, "transform got an unexpected argument 'quanity'", "Did you mean 'quantity'?")
def misspelt_argument() -> Any:
    SILENT.transform(Net(), quanity=fxgrad.NormSample())


@mistake(UnknownArgument, "unexpected argument 'lr'", "It takes model, quantity, loss_reduction,")
def argument_of_another_library() -> Any:
    SILENT.transform(Net(), lr=0.1)


@mistake(UnknownArgument, "ClippedGrad got an unexpected argument 'max_norm'", "Did you mean 'max_grad_norm'?")
def argument_by_the_name_of_clip_grad_norm() -> Any:
    SILENT.ClippedGrad(max_norm=1.0)


@mistake(UnknownArgument, "NormSample got an unexpected argument 'groupsize'", "Did you mean 'group_size'?")
def misspelt_argument_of_a_quantity() -> Any:
    SILENT.NormSample(groupsize=2)


@mistake(UnknownArgument, "call_for_per_sample_grads got an unexpected", "Did you mean 'batch_size'?")
def misspelt_argument_of_the_expanded_weights() -> Any:
    SILENT.call_for_per_sample_grads(Net(), batchsize=8)


@mistake(OptionError, "backend has to be 'inductor', 'aot_eager', 'eager'", "Did you mean 'inductor'?")
def misspelt_backend() -> Any:
    transformed(backend="inductr")


@mistake(OptionError, "backend has to be", "not 'fxgrad'", "It is the compiler behind fxgrad")
def fxgrad_as_its_own_backend() -> Any:
    transformed(backend="fxgrad")


@mistake(OptionError, "loss_reduction has to be 'sum', 'mean' or a positive number", "Did you mean 'mean'?")
def misspelt_reduction() -> Any:
    transformed(loss_reduction="men")


@mistake(OptionError, "loss_reduction has to be", "not 'none'", "is summed before backward()")
def loss_without_a_reduction() -> Any:
    transformed(loss_reduction="none")


@mistake(OptionError, "accumulate has to be one of error, append, sum, overwrite", "Did you mean 'append'?")
def misspelt_policy() -> Any:
    transformed(accumulate="apend")


@mistake(OptionError, "mixing has to be 'error' or 'allow'", "Did you mean 'allow'?")
def misspelt_mixing() -> Any:
    transformed(mixing="alow")


@mistake(OptionError, "strategy has to be a way", "not 'grams'", "Did you mean 'gram'?")
def misspelt_strategy() -> Any:
    transformed(quantity=fxgrad.NormSample(), strategy="grams")


@mistake(OptionError, "strategy names 'enc.wieght'", "no such parameter", "Did you mean 'enc.weight'?")
def strategy_for_a_misspelt_parameter() -> Any:
    transformed(quantity=fxgrad.NormSample(), strategy={"enc.wieght": "gram"})


@mistake(OptionError, "methods names 'encod'", "no method of Net", "Did you mean 'encode'?")
def misspelt_method() -> Any:
    transformed(methods=("encod",))


@mistake(OptionError, "once: head.bias", "'head.bais' is no trainable parameter: did you mean 'head.bias'?")
def misspelt_parameter_in_groups() -> Any:
    groups = [["enc.weight", "enc.bias"], ["head.weight", "head.bais"]]
    transformed(quantity=fxgrad.ClippedGrad(1.0, groups=groups))(X)


@mistake(OptionError, "weights has to be 'clip', 'automatic' or a function", "Did you mean 'automatic'?")
def misspelt_weights() -> Any:
    SILENT.ClippedGrad(1.0, weights="automtic")


@mistake(OptionError, "groups has to be 'flat', 'per_parameter'", "A group of each layer is a list of names")
def groups_by_the_name_that_opacus_has() -> Any:
    SILENT.ClippedGrad(1.0, groups="layerwise")


@mistake(OptionError, "nonfinite has to be 'zero' or 'raise', not 'error'", "'raise' is an error in the backward")
def nonfinite_error() -> Any:
    SILENT.ClippedGrad(1.0, nonfinite="error")


@mistake(OptionError, "modes holds 'train' and 'eval', not 'trian'", "Did you mean 'train'?")
def misspelt_mode() -> Any:
    fxgrad.warm_up(transformed(), X, modes=["trian"])


# What is not a model, or not a quantity


@mistake(OptionError, "transform takes an nn.Module, not the class Net", "Pass an object, Net(..).")
def class_of_a_model() -> Any:
    SILENT.transform(Net)


@mistake(OptionError, "transform takes an nn.Module, not function", "the forward of a module")
def function_as_a_model() -> Any:
    SILENT.transform(torch.nn.functional.relu)


@mistake(OptionError, "transform takes an nn.Module, not list", "nn.Sequential")
def list_of_models() -> Any:
    SILENT.transform([nn.Linear(3, 2)])


@mistake(OptionError, "transform takes an nn.Module, not generator", "Pass the model itself.")
def parameters_as_a_model() -> Any:
    SILENT.transform(Net().parameters())


@mistake(OptionError, "not <class", "Pass an object, not the class: ClippedGrad(max_grad_norm=1.0).")
def class_of_a_quantity() -> Any:
    transformed(quantity=fxgrad.ClippedGrad)


@mistake(OptionError, "not 'NormSamples'", "Did you mean 'NormSample'?")
def quantity_by_its_name() -> Any:
    transformed(quantity="NormSamples")


@mistake(OptionError, "not 1.0", "The quantities are ClippedGrad, Grad, GradDot,")
def number_as_a_quantity() -> Any:
    SILENT.transform(Net(), 1.0)


@mistake(OptionError, "max_grad_norm has to be a positive number, not '1.0'", "the largest norm of a sample's gradient")
def bound_from_a_file_of_settings() -> Any:
    SILENT.ClippedGrad("1.0")


# Options


@mistake(OptionError, "fullgraph has to be True or False, not 'no'")
def text_for_a_flag() -> Any:
    SILENT.transform(Net(), fullgraph="no")


@mistake(OptionError, "memory_limit has to be a positive number of bytes", "not '1GB'", "an int such as 2 * 10**9")
def memory_with_a_unit() -> Any:
    transformed(memory_limit="1GB")


@mistake(NotEnoughMemory, "a batch of 8 takes 832 B", "Not one sample fits: allow more, or ask for what is made of")
def memory_for_no_sample() -> Any:
    transformed(memory_limit=10)(X)


@mistake(OptionError, "group_size has to be a positive int, not 2.0", "consecutive rows that make one sample")
def group_size_of_a_float() -> Any:
    transformed(quantity=fxgrad.NormSample(group_size=2.0))  # type: ignore[arg-type]


@mistake(OptionError, "batch_size has to be a positive int or None, not '8'", "reads it from the inputs")
def batch_size_of_a_text() -> Any:
    transformed(batch_size="8")


@mistake(OptionError, "in_dims names 'y', which forward does not take", "It takes x.")
def in_dims_for_no_argument() -> Any:
    transformed(in_dims={"y": 0})


@mistake(OptionError, "in_dims names 'z', which encode does not take", "It takes x.")
def in_dims_for_no_argument_of_a_method() -> Any:
    transformed(methods=("encode",), in_dims={"encode": {"z": 0}})


@mistake(OptionError, "in_dims has 3 entries, and forward takes 1: x", "a dict by name")
def in_dims_for_too_many_arguments() -> Any:
    transformed(in_dims=(0, None, None))


@mistake(OptionError, "in_dims holds ints, None, tuples, lists and dicts, not 'x'", "in_dims=(0, None)")
def in_dims_of_a_text() -> Any:
    transformed(in_dims="x")


@mistake(OptionError, "groups has to be 'flat', 'per_parameter' or lists of names", "A group of each layer is a list")
def groups_as_one_list() -> Any:
    SILENT.ClippedGrad(1.0, groups=["enc.weight", "enc.bias"])


# What is not a model, or not a quantity, further


@mistake(OptionError, "transform takes an nn.Module, not SGD\n", "Pass the model itself.")
def optimizer_as_a_model() -> Any:
    SILENT.transform(torch.optim.SGD(Net().parameters(), lr=0.1))


@mistake(OptionError, "transform takes an nn.Module, not dict\n", "nn.ModuleDict")
def dict_of_models() -> Any:
    SILENT.transform({"enc": Net()})


@mistake(OptionError, "transform takes the model itself, not a compiled one", "Transform the model before compiling")
def compiled_model() -> Any:
    transformed(torch.compile(Net()))  # type: ignore[arg-type]


@mistake(OptionError, "nn.DataParallel is not supported", "put the transformed one into DistributedDataParallel")
def model_in_data_parallel() -> Any:
    transformed(nn.DataParallel(Net()))


@mistake(OptionError, "the model is already transformed", "Transform the original model.")
def model_transformed_twice() -> Any:
    transformed(transformed())


@mistake(
    OptionError, "parameter 'enc.weight' is on the meta device", "Give it numbers first: model.to_empty(device=..)"
)
def a_model_without_numbers() -> Any:
    transformed(Net().to("meta"))(X.to("meta"))


@mistake(OptionError, "parameter '0.weight' has no shape yet", "Call the model once under torch.no_grad()")
def lazy_module() -> Any:
    transformed(nn.Sequential(nn.LazyLinear(3)))(X)


@mistake(OptionError, "verify takes an nn.Module, not the class Net", "Pass an object, Net(..).")
def class_in_verify() -> Any:
    SILENT.verify(Net, X)


@mistake(OptionError, "zero_grad takes an nn.Module, not SGD", "Pass the model itself.")
def optimizer_in_zero_grad() -> Any:
    SILENT.zero_grad(torch.optim.SGD(Net().parameters(), lr=0.1))


@mistake(OptionError, "not 'NormSample'", "Pass an object, not its name: NormSample(..).")
def quantity_by_its_exact_name() -> Any:
    transformed(quantity="NormSample")


@mistake(OptionError, "vectors has to be a dict of a tensor for each parameter's name, not list", "each of p's shape")
def directions_without_names() -> Any:
    SILENT.GradDot([1.0, 2.0])


@mistake(OptionError, "each parameter's name, not float as a vector", "each of p's shape")
def direction_of_a_number() -> Any:
    SILENT.GradDot({"enc.bias": 1.0})


@mistake(OptionError, "the vector for 'enc.weight' has shape [3], the parameter [4, 3]", "[K, *shape] for K directions")
def direction_of_another_shape() -> Any:
    transformed(quantity=fxgrad.GradDot({"enc.weight": torch.ones(3)}))(X)


@mistake(OptionError, "vectors for what is no trainable parameter: enc.wieght", "Did you mean 'enc.weight'?")
def direction_for_a_misspelt_parameter() -> Any:
    transformed(quantity=fxgrad.GradDot({"enc.wieght": torch.ones(4, 3)}))(X)


# Inputs


@mistake(RuntimeError, "mat1 and mat2 shapes cannot be multiplied (8x5 and 3x4)")
def inputs_of_another_width() -> Any:
    transformed()(torch.ones(8, 5))


@mistake(RuntimeError, "mat1 and mat2 must have the same dtype, but got Double and Float")
def inputs_of_another_dtype() -> Any:
    transformed()(X.double())


@mistake(RuntimeError, "mat1 and mat2 must have the same dtype, but got Double and Float")
def inputs_of_another_dtype_traced() -> Any:
    transformed(backend="aot_eager")(X.double())


@mistake(BatchSizeError, "input 'x' is of type ndarray of shape [8, 3]", "Pass the batch as tensors (torch.as_tensor)")
def inputs_of_numpy() -> Any:
    transformed()(X.numpy())


@mistake(BatchSizeError, "input 'x' is of type list", "Pass the batch as tensors (torch.as_tensor)")
def inputs_of_lists() -> Any:
    transformed()(X.tolist())


@mistake(BatchSizeError, "the batch is empty: a graph needs samples", "Pass a batch of one or more")
def trace_of_no_samples() -> Any:
    fxgrad.trace(Net(), X[:0])


@mistake(BatchSizeError, "input 'x' is of type Tensor of shape []", "with the samples on dimension 0")
def input_of_one_number() -> Any:
    transformed()(torch.tensor(1.0))


@mistake(BatchSizeError, "the call has no inputs", "Pass the batch as tensors")
def no_inputs() -> Any:
    transformed()()


@mistake(
    BatchSizeError, "input 'x' is of type Tensor of shape [8, 3]", "Name the sample dimension of an input in in_dims="
)
def inputs_that_are_all_shared() -> Any:
    transformed(in_dims=(None,))(X)


@mistake(LostLayout, "linear does not work for every number of samples", "for one sample, pass x.unsqueeze(0)")
def sample_without_a_batch() -> Any:
    transformed()(torch.ones(3))


@mistake(TypeError, "forward() takes 2 positional arguments but 3 were given")
def too_many_inputs() -> Any:
    transformed()(X, X)


@mistake(AssertionError, "three columns, please")
def assert_of_the_model() -> Any:
    class Strict(Net):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == 3, "three columns, please"
            return super().forward(x)

    transformed(Strict())(torch.ones(8, 5))


SAMPLES_AT_1 = "Input 'input' is taken to have its samples on dimension 1. If they are not there, correct"


@mistake(LostLayout, "linear does not work for every number of samples", SAMPLES_AT_1, "in_dims= or batch_first=")
def in_dims_of_a_feature() -> Any:
    transformed(nn.Linear(3, 2), in_dims=1)(X)


@mistake(LostLayout, "linear does not work for every number of samples", SAMPLES_AT_1, "in_dims= or batch_first=")
def batch_first_of_samples_in_front() -> Any:
    transformed(nn.Linear(3, 2), batch_first=False)(X)


# sample_weight


@mistake(UnknownArgument, "sample_weight=, which ClippedGrad(1.0) does not use", "ClippedGrad(.., sample_weight=True)")
def weights_of_samples_that_nothing_uses() -> Any:
    transformed(quantity=fxgrad.ClippedGrad(1.0))(X, sample_weight=torch.ones(8))


@mistake(UnknownArgument, "sample_weight=, which GradSample does not use", "weight the loss of each sample")
def weights_of_samples_without_clipping() -> Any:
    transformed().forward(X, sample_weight=torch.ones(8))


@mistake(OptionError, "sample_weight has to be a tensor of 8 numbers", "not list", "a tensor of shape [B]")
def weights_of_samples_in_a_list() -> Any:
    transformed(quantity=fxgrad.ClippedGrad(1.0, sample_weight=True))(X, sample_weight=[1.0] * 8)


@mistake(OptionError, "sample_weight has to be 0 or more for every sample", "Leave a sample out with the weight 0")
def negative_weights_of_samples() -> Any:
    transformed(quantity=fxgrad.ClippedGrad(1.0, sample_weight=True))(X, sample_weight=-torch.ones(8))


# The model's code


ALL_DECIDE = "how many elements it finds, all samples decide together"


@mistake(UnknownOp, f"nonzero: {ALL_DECIDE}", "path: x -> linear -> gt -> nonzero", "Write torch.where(mask, f(x), x)")
def places_of_a_mask() -> Any:
    class Sparse(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            places = (h > 0).nonzero()
            return h[places[:, 0], places[:, 1]]

    transformed(Sparse())(X)


@mistake(UnknownOp, f"masked_select: {ALL_DECIDE}", "or a sum of x * mask")
def elements_of_a_mask() -> Any:
    class Selecting(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.enc(x)
            return h.masked_select(h > 0)

    transformed(Selecting())(X)


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x if x.sum() > 0 else -x))


@mistake(GraphBreak, "Data-dependent branching", "return self.head(", "pass fullgraph=False", "Use `torch.cond`")
def branch_by_values() -> Any:
    transformed(Branches())(X)


@mistake(MixedSamples, "batch_norm in training mode", "in BatchNorm1d, the model itself")
def a_layer_as_the_model() -> Any:
    transformed(nn.BatchNorm1d(3))(X)


@mistake(MixedSamples, "linear lets samples influence each other", "path: x -> mean -> sub", 'pass mixing="allow"')
def mean_over_samples() -> Any:
    class Centred(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x - x.mean(0)))

    transformed(Centred())(X)


@mistake(LostLayout, "view does not work for every number of samples", "Write sizes in terms of x.shape[0]")
def batch_size_in_the_model() -> Any:
    class Fixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.enc(x)).view(8, 2)

    transformed(Fixed())(X)


# The backward, and results


@mistake(OptionError, "torch.autograd.grad by parameters: GradSample leaves no gradient", "Call backward() on the loss")
def autograd_grad_by_parameters() -> Any:
    model = transformed()
    torch.autograd.grad(model(X).sum(), list(model.parameters()))


@mistake(OptionError, "torch.autograd.grad by parameters: NormSample leaves no gradient", "Call backward() on the loss")
def autograd_grad_by_parameters_that_may_be_unused() -> Any:
    model = transformed(quantity=fxgrad.NormSample(), backend="aot_eager")
    torch.autograd.grad(model(X).sum(), [model.head.bias], allow_unused=True)


@mistake(OptionError, "retain_graph=True: the compiled backward writes over", "donated_buffer = False before the first")
def retained_graph() -> Any:
    transformed(backend="aot_eager")(X).square().sum().backward(retain_graph=True)


@mistake(OptionError, "retain_graph=True: the compiled backward writes over", 'pass backend="eager"')
def retained_graph_of_the_outputs_themselves() -> Any:
    out = transformed(backend="aot_eager")(X)
    out.backward(torch.ones_like(out), retain_graph=True)


@mistake(RuntimeError, "grad can be implicitly created only for scalar outputs")
def backward_of_outputs() -> Any:
    transformed()(X).backward()


@mistake(RuntimeError, "element 0 of tensors does not require grad")
def every_parameter_frozen() -> Any:
    transformed(Net().requires_grad_(False))(X).sum().backward()


@mistake(
    AlreadySet, "grad_sample of 'enc.weight' is still set", "an optimizer's clears p.grad alone", 'accumulate="append"'
)
def zero_grad_of_an_optimizer() -> Any:
    model = transformed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(X).sum().backward()


@mistake(
    OptionError, "accumulate='sum' would add", "NormSample do not add up", 'Pass accumulate="append" or "overwrite"'
)
def sum_of_norms() -> Any:
    transformed(quantity=fxgrad.NormSample(), accumulate="sum")


@mistake(AlreadySet, "grad_variance of 'enc.weight' is still set", 'or pass accumulate="append" or "overwrite".')
def variances_left_over() -> Any:
    model = transformed(quantity=fxgrad.GradVariance())
    for _ in range(2):
        model(X).sum().backward()


@mistake(RuleError, "no argument of linear is an nn.Parameter", "Pass nn.Parameter(w) for each w")
def rule_without_a_parameter() -> Any:
    fxgrad.testing.check_rule(nn.functional.linear, torch.randn(5, 3), torch.randn(2, 3))


@mistake(MixedSamples, "it runs along the sample dimension", "batch_first=False) for x [T, B, in]")
def steps_before_samples() -> Any:
    transformed(nn.LSTM(3, 2))(torch.randn(5, 4, 3))


@mistake(BatchSizeError, "an input is a nested tensor", "torch.nested.to_padded_tensor(x, 0.0)")
def nested_tensor() -> Any:
    transformed()(torch.nested.nested_tensor([X[:2], X[2:]], layout=torch.jagged))


@mistake(BatchSizeError, "an input is a nested tensor", "torch.nested.to_padded_tensor(x, 0.0)")
def nested_tensor_of_the_older_layout() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of a prototype
        ragged = torch.nested.nested_tensor([X[:2], X[2:]])
    transformed()(ragged)


@mistake(BatchSizeError, "no input has batch_size=3", "Pad samples that have different numbers of rows.")
def number_of_graphs() -> Any:
    transformed(batch_size=3)(X)


@mistake(OptionError, "group_size has to be a positive int, not tensor([3, 5])", "losses are multiplied by 0")
def groups_of_different_sizes() -> Any:
    transformed(quantity=fxgrad.NormSample(group_size=torch.tensor([3, 5])))  # type: ignore[arg-type]


class Language(nn.Module):
    """A model with a loss of its own, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        losses = nn.functional.cross_entropy(self.head(x).mT, labels, reduction="sum")
        return losses if num_items_in_batch is None else losses / num_items_in_batch


@mistake(MixedSamples, "the model divides its loss by num_items_in_batch", "compute_loss_func=, a sum over samples")
def number_of_tokens_of_the_batch() -> Any:
    model = transformed(Language(), quantity=fxgrad.ClippedGrad(1.0))
    labels = torch.zeros(2, 5, dtype=torch.long)
    model(torch.ones(2, 5, 3), labels=labels, num_items_in_batch=torch.tensor(8)).backward()


@mistake(
    MixedSamples,
    "cross_entropy lets samples influence each other: its mean is divided by the number of labels in the batch that "
    "are not ignore_index",
    'Take the mean of what reduction="none" returns',
)
def a_mean_over_labels_in_one_graph() -> Any:
    private = transformed(quantity=fxgrad.ClippedGrad(1.0), loss_reduction="mean")
    labels = torch.zeros(8, dtype=torch.long)
    fxgrad.forward_backward(private, lambda model, x, y: nn.functional.cross_entropy(model(x), y))(X, labels)


@mistake(
    MixedSamples,
    "what all labels of the batch weigh together divides every sample's loss",
    'or the mean of what reduction="none" returns, with loss_reduction="mean"',
)
def a_mean_by_class_weights_in_one_graph() -> Any:
    private = transformed(quantity=fxgrad.ClippedGrad(1.0), loss_reduction="mean")
    weight, labels = torch.tensor([1.0, 2.0]), torch.zeros(8, dtype=torch.long)
    loss = nn.CrossEntropyLoss(weight)
    fxgrad.forward_backward(private, lambda model, x, y: loss(model(x), y))(X, labels)


@mistake(AlreadySet, "a forward while grad_sample of 'enc.weight' is still set", "Evaluate under torch.no_grad().")
def evaluation_with_gradients() -> Any:
    model = transformed()
    model(X).sum().backward()
    model.eval()(X)


@mistake(UnclippedGrad, "a gradient that is not clipped arrived at parameter 'head.bias'", "the original model")
def loss_of_the_original_model() -> Any:
    model = Net()
    private = transformed(model, quantity=fxgrad.ClippedGrad(1.0))
    model(X).sum().backward()
    del private


@mistake(
    AlreadySet,
    "two forwards of the model meet in one backward",
    "Transform a module whose forward calls the model twice",
)
def two_forwards() -> Any:
    model = transformed(quantity=fxgrad.NormSample())
    (model(X).sum() + model(-X).sum()).backward()


@mistake(OptionError, "there is no result of NormSample: no backward has run", "Call backward() on a loss")
def result_before_a_backward() -> Any:
    norms = fxgrad.NormSample()
    fxgrad.result(transformed(quantity=norms), norms)


@mistake(OptionError, "transformed for NormSample, not for the class NormSample", "the object, not its class or name")
def result_of_a_class() -> Any:
    SILENT.result(transformed(quantity=fxgrad.NormSample()), fxgrad.NormSample)


@mistake(OptionError, "transformed for NormSample, not for 'NormSample'", "the object, not its class or name")
def result_of_a_name() -> Any:
    SILENT.result(transformed(quantity=fxgrad.NormSample()), "NormSample")


@mistake(OptionError, "GradSample leaves its results on the parameters", "Read p.grad_sample of each parameter p.")
def result_of_gradients() -> Any:
    model = transformed()
    model(X).sum().backward()
    fxgrad.result(model, fxgrad.GradSample())


@mistake(OptionError, "result takes a transformed model", "Pass what fxgrad.transform returned.")
def result_of_the_original_model() -> Any:
    norms, model = fxgrad.NormSample(), Net()
    transformed(model, quantity=norms)(X).sum().backward()
    fxgrad.result(model, norms)


# Ops of one's own


class Scaled(nn.Module):
    """x * w by a function of the user's."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.ones(3)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


def with_rule(returns: Callable[..., Any], of: Any = None) -> None:
    """Run a step of `Scaled` by a new function, with this rule of it."""

    def scale(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    fxgrad.implements_per_sample_grads(scale, of=of, override=True)(returns)
    transformed(Scaled(scale))(X).sum().backward()


@mistake(
    RuleError, "of= names 'weight', and the rule of", "takes x, w", "Name arguments that the rule's function takes"
)
def rule_by_an_argument_that_is_not_there() -> Any:
    with_rule(lambda g, x, w: {"w": g * x}, of=["weight"])


@mistake(RuleError, "returned NoneType, not a dict", "Return a dict from each argument's name")
def rule_that_returns_nothing() -> Any:
    with_rule(lambda g, x, w: None)


@mistake(RuleError, "returned Tensor, not a dict", "Return a dict from each argument's name")
def rule_that_returns_a_tensor() -> Any:
    with_rule(lambda g, x, w: g * x)


@mistake(RuleError, "returned 'weight', and no gradient of 'w'", "Return a dict from each argument's name")
def rule_that_returns_another_name() -> Any:
    with_rule(lambda g, x, w: {"weight": g * x})


@mistake(RuleError, "a gradient of 'w' of shape [1, 3]: it has to be [8, 3]", "keep the samples on dimension 0")
def rule_that_sums_over_samples() -> Any:
    with_rule(lambda g, x, w: {"w": (g * x).sum(0)})


TERM = 'Write the einsum of the gradient, samples first, such as Term("n...o,n...i->noi", g, x)'


@mistake(RuleError, "the equation 'ab,bc' of a Term has no '->'", TERM)
def term_without_an_arrow() -> Any:
    fxgrad.Term("ab,bc", torch.ones(2, 3), torch.ones(3, 4))


@mistake(RuleError, "the equation 'n...i->ni' of a Term has 1 operand(s) for 2 factor(s)", TERM)
def term_with_a_factor_more() -> Any:
    fxgrad.Term("n...i->ni", X, X)


@mistake(RuleError, "the equation 'nki,ni->ni' of a Term has the operand 'nki' for a factor of 2 dimension(s)", TERM)
def term_with_a_dimension_more() -> Any:
    fxgrad.Term("nki,ni->ni", X, X)


@mistake(RuleError, "the equation 'n...i->n...ji' of a Term has 'j' in its result, and in no operand", TERM)
def term_with_a_letter_from_nowhere() -> Any:
    fxgrad.Term("n...i->n...ji", X)


@mistake(RuleError, "the equation 'n?->n' of a Term has '?', which is no letter", TERM)
def term_with_a_question_mark() -> Any:
    fxgrad.Term("n?->n", X)


@mistake(RuleError, "the equation 'n...i->in' of a Term has a result that does not begin with the samples", TERM)
def term_with_samples_behind() -> Any:
    fxgrad.Term("n...i->in", X)


@mistake(RuleError, "the factors of a Term are tensors, and this one has int", TERM)
def term_of_a_number() -> Any:
    SILENT.Term("n->n", 3)


@mistake(RuleError, "a gradient of 'w' of shape [8, 3, 3]: it has to be [8, 3]", "keep the samples on dimension 0")
def term_of_another_shape() -> Any:
    with_rule(lambda g, x, w: {"w": fxgrad.Term("n...o,n...i->noi", g, x)})


@mistake(OptionError, "register_op takes a function or a custom op, not 'aten::mm'", "Pass the object")
def op_by_its_name() -> Any:
    fxgrad.register_op("aten::mm")


@mistake(OptionError, "family has to be a fxgrad.Family, not 'elementwise'", "Did you mean 'ELEMENTWISE'?")
def family_by_its_name() -> Any:
    SILENT.register_op(torch.relu, "elementwise")


# PyTorch's own interface: its sentences, with advice


def by_expanded_weights(module: Any = None, *args: Any, **options: Any) -> None:
    call_for_per_sample_grads(Net() if module is None else module, backend="eager", **options)(*args)


@mistake(
    OptionError, "Module passed must be nn.Module, got str", "Pass the module here, and its inputs to the returned"
)
def expanded_weights_of_a_text() -> Any:
    by_expanded_weights("net")


@mistake(OptionError, "Expected loss_reduction argument to be sum or mean, got none", "Pass the reduction of the loss")
def expanded_weights_without_a_reduction() -> Any:
    by_expanded_weights(loss_reduction="none")


@mistake(OptionError, "Batch size must be positive, got 0", "Pass the number of samples, or leave batch_size out")
def expanded_weights_of_no_samples() -> Any:
    by_expanded_weights(batch_size=0)


@mistake(OptionError, "Batch size passed must be None or an integer, got float", "or leave batch_size out")
def expanded_weights_of_half_a_sample() -> Any:
    by_expanded_weights(batch_size=0.5)


@mistake(BatchSizeError, "with batch size 8 and one with batch size 4", "Pass batch_size=. All samples then share")
def expanded_weights_of_inputs_that_disagree() -> Any:
    by_expanded_weights(None, X, X[:4])


@mistake(BatchSizeError, "Unable to find a tensor in the passed args", "Pass batch_size=, or inputs that are tensors")
def expanded_weights_without_tensors() -> Any:
    by_expanded_weights(None, "text")


# The table itself


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The message has its parts, and stands alone: nothing else is printed or logged."""
    program, error, parts = MISTAKES[name]
    with pytest.raises(error, match=re.escape(parts[0])) as caught:
        program()
    said = str(caught.value)
    for part in parts:
        assert part in said
    printed = capfd.readouterr()
    assert printed.err + printed.out == ""
    if isinstance(caught.value, FxgradError):
        assert caught.value.advice
    assert len(said.splitlines()) <= 10


def test_a_quantity_may_stand_behind_the_model() -> None:
    norms = fxgrad.NormSample()
    model = fxgrad.transform(Net(), norms, backend="eager")
    model(X).sum().backward()
    assert fxgrad.result(model, norms).shape == (8,)


def test_verify_takes_the_weights_of_samples() -> None:
    model = transformed(quantity=fxgrad.ClippedGrad(1.0, sample_weight=True))
    weight = torch.linspace(0, 1, 8)
    assert fxgrad.verify(model, X, sample_weight=weight).ok
    assert str(fxgrad.explain(model, X, sample_weight=weight)) == str(fxgrad.explain(model, X))
    assert str(fxgrad.trace(model, X, sample_weight=weight)) == str(fxgrad.trace(model, X))


def test_a_model_may_take_sample_weight_itself() -> None:
    class Weighted(Net):
        def forward(self, x: Tensor, sample_weight: Tensor | None = None) -> Tensor:
            assert sample_weight is not None
            return super().forward(x) * sample_weight[:, None]

    assert transformed(Weighted())(X, sample_weight=torch.zeros(8)).count_nonzero() == 0


def test_no_advice_is_what_the_model_refuses() -> None:
    with pytest.raises(GraphBreak) as caught:
        transformed(Branches(), quantity=fxgrad.ClippedGrad(1.0))(X)
    assert "fullgraph" not in caught.value.advice


def test_autograd_grad_by_parameters_returns_what_is_for_p_grad() -> None:
    model = transformed(quantity=[fxgrad.Grad(), fxgrad.NormSample()])
    (grad,) = torch.autograd.grad(model(X).sum(), [model.head.bias])
    assert grad.tolist() == [8, 8]


def test_there_are_many_mistakes() -> None:
    assert len(MISTAKES) >= 80

"""nn.RNN, nn.LSTM and nn.GRU, and packed sequences, as Dynamo sees them in a transformed model: one node each.

PyTorch's own forward ends in an op that a trace can follow only by unrolling it, one copy of the step for
every point in time. While fxgrad captures, these modules call ``fxgrad::recurrent_layers`` instead, which has a
shape and no more; `fxgrad.passes.decompose_recurrent` says what it computes. Packing and padding, which Dynamo
skips, become the operators of fxgrad.kernels.recurrent.packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from fxgrad.host.dynamo import graph_break, recurrent_modules_allowed, substitute
from fxgrad.host.rnn import flat_weights, refresh_weights


def _shapes(
    input: Tensor,
    batch_sizes: Tensor | None,
    order: Tensor | None,
    rows: int,
    hx: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    directions = 2 if bidirectional else 1
    out = input.new_empty(input.shape[0], input.shape[1], directions * hx[0].shape[2])
    return out, torch.empty_like(hx[0]), torch.empty_like(hx[-1])


@torch.library.custom_op(
    "fxgrad::recurrent_layers", mutates_args=(), schema=torch.library.infer_schema(_shapes, mutates_args=())
)
def recurrent_layers(*_: Any) -> Any:
    """``[T, B, in] -> [T, B, directions * out]`` and the last states, ``[layers * directions, B, out]``.

    The arguments are those of ``aten::lstm.input`` and its kin. The last result is the LSTM's cell state. Of
    packed data, input and output are padded; ``batch_sizes``, ``order`` and ``rows`` say how it was packed.
    """
    raise NotImplementedError("a pass of fxgrad replaces this op by its definition")


recurrent_layers.register_fake(_shapes)


def _forward_packed(self: nn.RNNBase, input: PackedSequence, hx: Any) -> Any:
    """Return what they compute of packed data; states are in the user's own order."""
    data, batch_sizes, *indices = input
    if data.dim() != 2:
        raise RuntimeError(f"input must have 2 dimensions, got {data.dim()}")
    order, unsorted = _indices(*input)
    sequence = torch.ops.fxgrad.pad_packed(data, batch_sizes, order, batch_sizes.shape[0], 0.0, unsorted)
    out, h, c = _run(self, data, sequence, hx, False, (batch_sizes, order, data.shape[0]))
    packed = PackedSequence(torch.ops.fxgrad.repack(out, batch_sizes, order, data.shape[0]), batch_sizes, *indices)
    return packed, (h, c) if self.mode == "LSTM" else h


def _indices(data: Tensor, batch_sizes: Tensor, order: Any, unsorted: Any) -> tuple[Tensor, Tensor | None]:
    """Return sorted_indices and unsorted_indices: without any, the samples were sorted before they were packed."""
    return torch.ops.fxgrad.sorted_order(data, batch_sizes) if order is None else order, unsorted


def _forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """Return what nn.RNN, nn.LSTM and nn.GRU compute of padded input."""
    if input.dim() not in (2, 3):
        raise ValueError(f"{type(self).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead")
    unbatched = input.dim() == 2
    sequence = input.unsqueeze(1) if unbatched else input.transpose(0, 1) if self.batch_first else input
    out, h, c = _run(self, input, sequence, hx, unbatched, (None, None, 0))
    if unbatched:
        out, h, c = out.squeeze(1), h.squeeze(1), c.squeeze(1)
    elif self.batch_first:
        out = out.transpose(0, 1)
    return out, (h, c) if self.mode == "LSTM" else h


def _run(
    self: nn.RNNBase, input: Tensor, sequence: Tensor, hx: Any, unbatched: bool, packed: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the user's input and states as PyTorch does, and call the operator on the sequence ``[T, B, in]``."""
    weights = flat_weights(self)
    _check_input(self, input, weights[0])
    states = _states(self, sequence, hx, unbatched)
    settings = (self.mode, self.bias, self.num_layers, float(self.dropout), self.training, self.bidirectional)
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.fxgrad.recurrent_layers(
        sequence, *packed, states, weights, *settings
    )
    return result


def _check_input(self: nn.RNNBase, input: Tensor, weight: Tensor) -> None:
    """nn.RNNBase.check_input, which reads a cached weight that may be an old one."""
    if input.dtype != weight.dtype and not torch.is_autocast_enabled(input.device.type):
        raise ValueError(f"RNN input dtype ({input.dtype}) does not match weight dtype ({weight.dtype}).")
    if input.shape[-1] != self.input_size:
        raise RuntimeError(
            f"input.size(-1) must be equal to input_size. Expected {self.input_size}, got {input.shape[-1]}"
        )


def _states(self: nn.RNNBase, sequence: Tensor, hx: Any, unbatched: bool) -> list[Tensor]:
    """Return the given states or zeros, ``[layers * directions, B, out]``, checked as PyTorch checks them."""
    rows, batch = self.num_layers * (2 if self.bidirectional else 1), sequence.shape[1]
    sizes = [(rows, batch, self.proj_size or self.hidden_size)]
    if self.mode == "LSTM":
        sizes.append((rows, batch, self.hidden_size))
    if hx is None:
        return [sequence.new_zeros(size) for size in sizes]
    given = list(hx) if self.mode == "LSTM" else [hx]
    for i, (state, size) in enumerate(zip(given, sizes, strict=True)):
        if state.dim() != (2 if unbatched else 3):
            raise RuntimeError(
                f"For {'unbatched 2-D' if unbatched else 'batched 3-D'} input, hx should also be "
                f"{'2' if unbatched else '3'}-D but got {state.dim()}-D tensor"
            )
        given[i] = state.unsqueeze(1) if unbatched else state
        if tuple(given[i].shape) != size:
            raise RuntimeError(f"Expected hidden[{i}] size {size}, got {list(given[i].shape)}")
    return given


_KINDS: tuple[type[nn.RNNBase], ...] = (nn.RNN, nn.LSTM, nn.GRU)
_depth = 0  # of captures that are in progress


@contextlib.contextmanager
def recurrent_modules(model: nn.Module | None) -> Iterator[None]:
    """Let Dynamo see recurrent modules as one node each; eager calls are what they were.

    Those of the model forget the weights of an earlier functional_call, which Dynamo would look at.

    All threads share the classes, so the caller has Dynamo's lock.
    """
    global _depth
    _substitute()
    for module in model.modules() if model is not None else ():
        if isinstance(module, _KINDS):
            refresh_weights(module)
    originals = [(kind, kind.forward) for kind in _KINDS]
    try:
        _depth += 1
        for kind, forward in originals:
            kind.forward = _captured_or(forward)
        with recurrent_modules_allowed():
            yield
    finally:
        _depth -= 1
        for kind, forward in originals:
            kind.forward = forward


def _captured_or(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return (_forward_packed if isinstance(input, PackedSequence) else _forward)(self, input, hx)
        return original(self, input, hx)

    return forward


def _pack(input: Any, lengths: Any, batch_first: Any = False, enforce_sorted: Any = True) -> Any:
    """torch.nn.utils.rnn.pack_padded_sequence"""
    if not _capturing():
        graph_break()
        return pack_padded_sequence(input, lengths, batch_first, enforce_sorted)
    if not isinstance(lengths, Tensor):
        graph_break(msg=_AS_TENSOR)
    x = input.transpose(0, 1) if batch_first else input
    data, batch_sizes, order = torch.ops.fxgrad.pack(x, lengths, bool(enforce_sorted))
    return PackedSequence(data, batch_sizes) if enforce_sorted else PackedSequence(data, batch_sizes, order)


def _pad(sequence: Any, batch_first: Any = False, padding_value: Any = 0.0, total_length: Any = None) -> Any:
    """torch.nn.utils.rnn.pad_packed_sequence"""
    if not _capturing():
        graph_break()
        return pad_packed_sequence(sequence, batch_first, padding_value, total_length)
    data, batch_sizes, *_ = sequence  # by place: Dynamo of torch 2.12 reads no names of one that it made
    order, unsorted = _indices(*sequence)
    value = float(padding_value)
    if total_length is None:
        out = torch.ops.fxgrad.pad_packed_to_longest(data, batch_sizes, order, value, unsorted)
    else:
        out = torch.ops.fxgrad.pad_packed(data, batch_sizes, order, total_length, value, unsorted)
    lengths = torch.ops.fxgrad.packed_lengths(data, batch_sizes, order, unsorted)
    return out.transpose(0, 1) if batch_first else out, lengths


def _pack_list(sequences: Any, enforce_sorted: Any = True) -> Any:
    """torch.nn.utils.rnn.pack_sequence"""
    if not _capturing():
        graph_break()
        return pack_sequence(sequences, enforce_sorted)
    graph_break(msg=_AS_PADDED)


_AS_TENSOR = (
    "pack_padded_sequence got its lengths as Python numbers, which fix the batch: "
    "pass them as a tensor [B], without tolist()"
)
_AS_PADDED = (
    "pack_sequence takes a Python list with one tensor for each sample, which fixes the batch: pass the model a "
    "PackedSequence, or a padded tensor and its lengths"
)
_POLYFILLS: dict[Callable[..., Any], Callable[..., Any]] = {
    pack_padded_sequence: _pack,
    pad_packed_sequence: _pad,
    pack_sequence: _pack_list,
}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capturing() -> bool:
    return _depth > 0


def _substitute() -> None:
    """Once, at the first call of a transformed model: another torch.compile still breaks its graph there."""
    while _POLYFILLS:
        substitute(*_POLYFILLS.popitem())

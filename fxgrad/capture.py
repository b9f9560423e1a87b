"""Capture: let TorchDynamo trace a model with a symbolic batch, and run what the passes make of it."""

from __future__ import annotations

import contextlib
import itertools
import re
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config as shapes_config
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.backends import opt_einsum
from torch.utils._pytree import tree_leaves

from fxgrad.batch import PACKED_SIZES, Batch, Roles, dynamic_dim
from fxgrad.captured import SAMPLE_DIM, Captured, called_with
from fxgrad.compiler import compile_graph
from fxgrad.context import last_own_line
from fxgrad.distributed import check_whole
from fxgrad.errors import BatchSizeError, FxgradError, GraphBreak, OptionError
from fxgrad.options import Options
from fxgrad.quantities import Quantity
from fxgrad.recurrent.modules import recurrent_modules
from fxgrad.recurrent.packed import as_pytorch_packs, with_indices
from fxgrad.store import Forward, Store, Unseen, watch

MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_hint_overrides",
    "_dynamo_propagated_dynamic_indices",
    "_specialize_on",
    "_has_dynamo_dim_marking",
    SAMPLE_DIM,
)

_COUNT = itertools.count()


class _Capturing:
    """Whether a call of fxgrad's own is under way: what Dynamo traces then is for fxgrad."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1


CAPTURING = _Capturing()


@dataclass
class Engine:
    """Runs one model's transformed calls."""

    model: nn.Module
    options: Options
    roles: Roles
    store: Store
    compiled: dict[tuple[str, ...], Callable[..., Any]] = field(default_factory=dict)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``model(*args)`` or ``model.forward(*args)``, so that backward fills grad_sample.

        A transformed part of a model that fxgrad itself is capturing is the original, inlined. Another
        user's torch.compile stops here and calls the part as it is.
        """
        if torch.compiler.is_dynamo_compiling() and CAPTURING.depth:
            return self._original(method)(*args, **kwargs)
        return self._call(method, args, kwargs)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original = self._original(method)
        parameters = self.trainable() if torch.is_grad_enabled() else {}
        if not parameters:
            self._sample_weight(kwargs)
            return original(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        check_whole(self.model, parameters, leaves)
        check_parameters(parameters)
        check_reverse_mode([*parameters.values(), *leaves])
        weight = self._sample_weight(kwargs)
        given: dict[int, Tensor] = {}
        args, kwargs = with_indices(args, given), with_indices(kwargs, given)
        batch = self.roles.find(args, kwargs)
        size = check_groups(self.options.quantities, batch.size)
        check_sample_weight(weight, size)
        forward = Forward(batch.size, parameters, weight)
        self.store.check_clear(forward, forward.enclosing, "a forward")
        with self.store.during(forward):
            if batch.size == 0:
                outputs = self._on_no_samples(method, forward, args, kwargs)
            else:
                outputs = self._run((method, *parameters), batch, args, kwargs)
        outputs = as_pytorch_packs(outputs, given)
        tensors = [leaf for leaf in _leaves(outputs) if isinstance(leaf, Tensor)]
        watch(tensors, self.store, forward)
        if not self.options.fullgraph:
            forward.outside = used_outside(tensors, self.names())
            for tensor in tensors:
                tensor.__dict__.pop(SAMPLE_DIM, None)  # it was for the next graph
        return outputs

    def _sample_weight(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Take ``sample_weight=`` out of a call's arguments, where a quantity wants it."""
        if not any(getattr(quantity, "sample_weight", False) for quantity in self.options.quantities):
            return None
        weight: Tensor | None = kwargs.pop("sample_weight", None)
        return weight

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def _original(self, method: str) -> Callable[..., Any]:
        return self.model if method == "__call__" else self.model.forward

    def _run(
        self, key: tuple[str, ...], batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Not every version of Dynamo guards on requires_grad: what is trainable is part of the key.
        method = key[0]
        if key not in self.compiled:
            self.compiled[key] = self._compile(method)
        call = partial(self._captured_call, self.compiled[key], batch, args, kwargs)
        try:
            try:
                return call(self.options.fullgraph)
            except Exception as error:
                if not _fixes_the_batch(error):
                    raise
            # PyTorch's shape rules may take the batch for another size that equals it (`where` with two rows): a graph
            # of this size alone. What the passes follow is a symbol all the same.
            return call(False)
        except Exception as error:
            if _fails_without_dynamo(error):
                with torch.no_grad():  # PyTorch's own sentence says it best
                    self._original(method)(*args, **kwargs)
            own = translated(error)
            if own is error:
                raise
            raise own from (None if isinstance(own, FxgradError) else error)

    @staticmethod
    def _captured_call(
        compiled: Callable[..., Any], batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any], every_size: bool
    ) -> Any:
        with marked(batch, every_size), called_with(args, kwargs), sizes_unseen(), CAPTURING:
            return compiled(*args, **kwargs)

    def _compile(self, method: str) -> Callable[..., Any]:
        return torch.compile(
            fresh_function(self._original(method)), backend=self._backend, fullgraph=self.options.fullgraph
        )

    def _backend(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        forward = self.store.current.forward
        assert forward is not None
        return compile_graph(self.captured(gm, examples, forward.size), self.options, self.store)

    def captured(self, gm: fx.GraphModule, examples: Sequence[Any], size: int) -> Captured:
        """A graph from Dynamo, with what the model knows about its inputs."""
        buffers = frozenset(id(buffer) for buffer in self.model.buffers())
        fullgraph, positional = self.options.fullgraph, self.roles.names
        return Captured(gm, examples, size, self.names(), fullgraph, buffers, positional)

    def _on_no_samples(
        self, method: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An empty batch runs as it is: there is nothing to compile and nothing to add up."""
        stand_ins = Unseen.apply(*forward.parameters.values())  # type: ignore[no-untyped-call]
        self.store.began(forward, stand_ins[0].grad_fn)
        with _swapped(self.model, dict(zip(forward.parameters, stand_ins, strict=True))):
            return self._original(method)(*args, **kwargs)


def check_parameters(parameters: Mapping[str, Tensor]) -> None:
    """Only ordinary tensors have a ``grad_sample`` of their shape and dtype."""
    for name, parameter in parameters.items():
        kind = (
            f"a tensor subclass, {type(parameter.data).__name__}"
            if type(parameter.data) is not Tensor
            else "sparse"
            if parameter.layout is not torch.strided
            else "complex"
            if parameter.is_complex()
            else ""
        )
        if kind:
            raise OptionError(
                f"parameter '{name}' is {kind}: it has no per-sample gradient here",
                advice="Freeze it with requires_grad_(False), or make it a dense, real nn.Parameter.",
            )


def check_groups(quantities: Sequence[Quantity], size: int) -> int:
    """How many samples the rows of a batch are, for the quantity that takes weights."""
    for quantity in quantities:
        if size % quantity.group_size:
            raise BatchSizeError(
                f"{size} rows cannot be groups of {quantity.group_size}, as {quantity} has them",
                advice="Fill the batch up, or leave out the last rows.",
            )
    weighted = [quantity for quantity in quantities if getattr(quantity, "sample_weight", False)]
    return weighted[0].units(size) if weighted else size


def check_sample_weight(weight: Any, size: int) -> None:
    """One number, not negative, for each sample."""
    if weight is None:
        return
    if not isinstance(weight, Tensor) or tuple(weight.shape) != (size,) or weight.is_complex():
        found = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise OptionError(f"sample_weight has to be a tensor of {size} numbers, one for each sample, not {found}")
    if size and not bool((weight >= 0).all()):
        raise OptionError("sample_weight has to be 0 or more for every sample")


def check_reverse_mode(values: Sequence[Any]) -> None:
    """Per-sample gradients come from one reverse pass, not from within another transform."""
    func = torch._C._functorch.peek_interpreter_stack() is not None
    if func or any(isinstance(v, Tensor) and torch._C._functorch.is_batchedtensor(v) for v in values):
        raise OptionError(
            "a transformed model does not run inside of torch.func's transforms (grad, jvp, vmap)",
            advice="Call the original model there.",
        )
    if forward_ad._current_level < 0:
        return
    dual = [v for v in values if isinstance(v, Tensor) and forward_ad.unpack_dual(v).tangent is not None]
    if dual:
        raise OptionError(
            "forward-mode AD does not go through a transformed model",
            advice="Call the original model on dual tensors.",
        )


@contextlib.contextmanager
def _swapped(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a model on other tensors in its parameters' places."""
    from torch.nn.utils.stateless import _reparametrize_module

    with _reparametrize_module(model, dict(values), tie_weights=True):
        yield


def fresh_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` as a function with a code object and a name of its own.

    Dynamo keeps its graphs per code object, and what it learnt about changing sizes per name: another
    model's calls are none of this one's business.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    name = f"call_{next(_COUNT)}"
    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, call.__globals__, name, None, call.__closure__)


@contextlib.contextmanager
def marked(batch: Batch, fullgraph: bool = True) -> Iterator[None]:
    """The user's tensors, marked with their roles and dynamic on their sample dims, as long as the call lasts."""
    kept: list[tuple[weakref.ref[Tensor], dict[str, Any]]] = []
    try:
        for tensor, role in batch.roles():
            attributes = tensor.__dict__
            kept.append((weakref.ref(tensor), {k: attributes[k] for k in MARKS if k in attributes}))
            for mark in MARKS:
                attributes.pop(mark, None)
            setattr(tensor, SAMPLE_DIM, role)
            dim = dynamic_dim(role)
            if dim is not None and batch.size > 1:
                # Behind a graph break samples may meet a value whose size Dynamo has not seen vary yet; the
                # longest sample of a packed sequence may be as long as another's.
                sure = fullgraph and role != PACKED_SIZES
                mark = torch._dynamo.mark_dynamic if sure else torch._dynamo.maybe_mark_dynamic
                mark(tensor, dim)
        yield
    finally:
        for reference, before in kept:
            found = reference()
            if found is not None:
                for mark in MARKS:
                    found.__dict__.pop(mark, None)
                found.__dict__.update(before)


@contextlib.contextmanager
def sizes_unseen() -> Iterator[None]:
    """Equal sizes are no reason for one symbol: a sequence may be as long as the batch by chance.

    Nor may sizes choose the order of an einsum: opt_einsum, where installed, makes the batch a number. Where PyTorch
    makes it one, that is no news for the log.
    """
    duck, einsum, silent = shapes_config.use_duck_shape, opt_einsum.enabled, torch._guards.log.disabled
    # Neither `config.patch`, which makes a class at every call, nor opt_einsum's `flags`, which do not nest.
    shapes_config.use_duck_shape = opt_einsum.enabled = False
    torch._guards.log.disabled = True
    try:
        with recurrent_modules():
            yield
    finally:
        shapes_config.use_duck_shape, opt_einsum.enabled, torch._guards.log.disabled = duck, einsum, silent


def _leaves(outputs: Any) -> list[Any]:
    found = []
    for leaf in tree_leaves(outputs):
        if hasattr(leaf, "__dataclass_fields__"):
            found.extend(_leaves([getattr(leaf, name) for name in leaf.__dataclass_fields__]))
        else:
            found.append(leaf)
    return found


def used_outside(outputs: Sequence[Tensor], names: Mapping[int, str]) -> tuple[str, ...]:
    """Parameters that eager code between the graphs used: autograd reaches them past every ghost."""
    found: dict[str, None] = {}
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None or type(node).__name__ in ("GhostsBackward", "UnseenBackward"):
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            found[names[id(variable)]] = None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return tuple(found)


def _fails_without_dynamo(error: Exception) -> bool:
    """Whether it looks like the model's own exception: wrong shapes, wrong arguments."""
    from torch._dynamo import exc

    raised = ("failed to bind arguments", "Observed exception")
    own = isinstance(error, exc.Unsupported) and any(words in str(error) for words in raised)
    return own or isinstance(error, exc.TorchRuntimeError)


def _fixes_the_batch(error: Exception) -> bool:
    """Whether Dynamo found that its graph holds for one batch size only."""
    from torch._dynamo import exc

    user = isinstance(error, exc.UserError) or "ConstraintViolation" in type(error).__name__
    return user and ("mark_dynamic" in str(error) or "Constraints violated" in str(error))


def translated(error: Exception) -> Exception:
    """Dynamo's exceptions as fxgrad's: the reason and the user's line, without the tracer's own stack."""
    from torch._dynamo import exc

    if isinstance(error, exc.BackendCompilerFailed):
        inner = error.inner_exception
        return inner if isinstance(inner, Exception) else error
    text = str(error)
    if isinstance(error, exc.Unsupported):
        return GraphBreak(
            f"the model does not capture as one graph: {_reason(text)}",
            where=_user_line(error),
            advice="Write that line in traceable PyTorch, or pass fullgraph=False.",
        )
    if isinstance(error, exc.TorchRuntimeError):  # an op that works outside of Dynamo, and not on its fake tensors
        said = re.search(r"call_\w+ (\S+?)\(.*: got \w+\([\"'](.+)[\"']\)", text)
        return GraphBreak(
            f"TorchDynamo cannot follow {f'{said[1]}: {said[2]}' if said else 'an op of the model'}",
            where=_user_line(error),
            advice="Write it with another op: torch.compile(model) fails there as well.",
        )
    if isinstance(error, exc.UserError | exc.InternalTorchDynamoError):
        return GraphBreak(
            f"TorchDynamo does not capture the model: {_reason(text)}",
            where=_user_line(error),
            advice="See what torch.compile(model, fullgraph=True) says of it.",
        )
    return error


def _reason(text: str) -> str:
    said = re.search(r"User-inserted graph break\. Message: (?!None)(.+)", text)
    if said:
        return said[1]
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown reason")


_OWN_FILES = str(PurePath(__file__).parent)


def _user_line(error: Exception) -> str:
    for frame in reversed(getattr(error, "real_stack", None) or []):
        if "torch/" not in frame.filename and not frame.filename.startswith(_OWN_FILES):
            return f"{PurePath(frame.filename).name}:{frame.lineno}   {(frame.line or '').strip()}"
    return last_own_line(str(error))

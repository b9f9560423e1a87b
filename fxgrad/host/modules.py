"""nn.Module, optimizers and what wraps them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn, optim
from torch.nn.modules import batchnorm as _batchnorm
from torch.nn.utils import stateless as _stateless
from torch.utils import checkpoint as checkpoints

BatchNorm = _batchnorm._BatchNorm
NormBase = _batchnorm._NormBase
"""The base class of batch norms, SyncBatchNorm included; and that of batch norms and instance norms.

Why: Opacus's validator refuses them by name if they mix samples, and there is no public base class.
Without: subclasses of batch norms, and instance norms that track statistics, pass it and are refused later.
"""

INNER = "_modules"
held_by: Callable[[nn.Module], tuple[dict[str, nn.Parameter | None], dict[str, nn.Module | None]]] = attrgetter(
    "_parameters", INNER
)
"""The attribute of inner modules, as Dynamo's paths have it; and a module's own parameters and inner modules.

Why: errors and pages name a module without it. ``module.parameters()`` may be overridden, and each step compares the
dicts themselves, which is quick.
Without: ``Linear '_modules'`` in errors, and each step would walk the model by its public methods.
"""


def own_parameter(key: str) -> property:
    """Return a property that is a module's own parameter, which Dynamo follows.

    Why: a property of a class stands before the parameters of its objects.
    Without: a class of the user's that gathers a DTensor, and does more, would have to be refused.
    """
    return property(lambda module: module._parameters[key])


wrapped_by_ddp: Callable[[], Any] = partial(getattr, nn.parallel.DistributedDataParallel, "_active_ddp_module")
"""The DistributedDataParallel whose forward is running; None outside of one.

Why: it averages p.grad over its processes, whose number a quantity has to know. Dynamo asks for it, too.
Without: gradients of several processes are scaled wrongly.
"""

step_pre_hooks: Callable[[optim.Optimizer], OrderedDict[int, Any]] = attrgetter("_optimizer_step_pre_hooks")
"""The hooks of `register_step_pre_hook` by their keys, in their order.

Why: the check of a private step stands behind every other hook.
Without: a hook that changes p.grad after the clipping goes unnoticed.
"""


def is_filled(module: nn.Module) -> bool:
    """Return whether a module has its attributes: copies and pickles are made before they are filled.

    Why: a transformed model to which an attribute of the model refers is copied in between.
    Without: AttributeError: 'Sequential' object has no attribute '_parameters'.
    """
    return "_parameters" in vars(module)


VERSIONS = "_metadata"
"""The attribute of a state dict with the versions of its layers, by their names.

Why: a state dict whose names change keeps its versions.
Without: a layer may read what an older version of it saved as its own.
"""

FSDP_MANAGED = "_is_fsdp_managed_module"
FSDP_FLAT = "_flat_param"
"""The attribute that FullyShardedDataParallel sets on modules; and how the names of its flat parameters end.

Why: a model that was put into FSDP before is refused by name.
Without: such a model fails later, with an error of PyTorch's.
"""


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of `register_full_backward_hook` or `register_full_backward_pre_hook`.

    Why: the refusal names the module that has them.
    Without: the refusal does not say which module it is.
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


def refuse_replicas(kind: type[nn.Module], error: Callable[[], Exception]) -> None:
    """Let `nn.DataParallel` raise where it is about to copy a module of this class.

    Why: a replica's parameters are not the model's, and nn.DataParallel calls nothing public before.
    Without: per-sample gradients are delivered to the replicas, and lost.
    """

    def refused(_: Any) -> Any:
        raise error()

    kind._replicate_for_data_parallel = refused  # type: ignore[method-assign]


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called.

    Why: a compiled model is refused by `fxgrad.transform`, which compiles it itself.
    Without: a model that is compiled in place is compiled twice.
    """
    return module._compiled_call_impl is not None


def on_other_tensors(module: nn.Module, values: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
    """Let a module compute on other tensors in its parameters' places, tied ones included.

    Why: `torch.func.functional_call` calls the model itself; we call any of its methods.
    Without: an empty batch cannot run.
    """
    context: contextlib.AbstractContextManager[None] = _stateless._reparametrize_module(
        module, dict(values), tie_weights=True
    )
    return context


class _Called:
    """In the place of PyTorch's reentrant checkpoint: the call as it is."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _called(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of what PyTorch's other checkpoint does before and behind a call: nothing."""
    yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Let ``torch.utils.checkpoint.checkpoint`` call its function, and run nothing again in the backward.

    Why: no option of PyTorch's turns checkpoints off. A model on other tensors, or on local parts, has its own again by
    the backward, and a checkpoint would run on those.
    Without: an empty batch's backward ends in UnclippedGrad where the model has reentrant checkpoints, and in
    CheckpointError where a tensor-parallel one has others.
    """
    ours = {"CheckpointFunction": _Called, "_checkpoint_without_reentrant_generator": _called}
    kept = {name: getattr(checkpoints, name) for name in ours}
    try:
        for name, value in ours.items():
            setattr(checkpoints, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(checkpoints, name, value)


def own_step_hooks(optimizer: Any) -> None:
    """Give an optimizer that never ran ``Optimizer.__init__`` empty hooks around its step.

    Why: `Optimizer.__setstate__` of any optimizer makes the class's step read them.
    Without: Opacus's optimizer fails in its step once another optimizer of its class was copied.
    """
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def has_scaled(scaler: Any) -> bool:
    """Return whether a torch.amp.GradScaler has multiplied a loss.

    Why: one that was made and never used is no reason for a refusal; ``get_scale()`` says the same of both.
    Without: norms of scaled gradients would be clipped, or models with an idle scaler refused.
    """
    return getattr(scaler, "_scale", None) is not None

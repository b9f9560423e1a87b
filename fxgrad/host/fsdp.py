"""FSDP2: the units into which ``fully_shard`` divides a model, and what their hooks would do.

A unit is a module with its own parameters; `State` is what FSDP2 keeps of it. The module of PyTorch is imported only
where the user has imported it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

State: TypeAlias = Any
"""What FSDP2 keeps of a unit, its class FSDPState.

Why: no public object leads to a unit's parameters.
Without: a model that ``fully_shard`` divided is refused as one of DTensors.
"""

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"


def state_of(hook: Any) -> State | None:
    """Return the unit whose hook before or after a forward this is; None for any other hook.

    Why: a hook is all that two objects over one ``__dict__`` share of ``fully_shard``, which registers one of them.
    Without: a model that ``fully_shard`` divided is refused as one of DTensors.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        return None
    bound = inspect.unwrap(hook, stop=lambda one: hasattr(one, "__self__"))  # of several modules it is wrapped
    owner = getattr(bound, "__self__", None)
    return owner if isinstance(owner, module.FSDPState) else None


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a module's hooks before and after its forward.

    Why: FSDP2 gathers and frees parameters in hooks, which Dynamo does not trace.
    Without: see `state_of`.
    """
    return module._forward_pre_hooks, module._forward_hooks


def class_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module had before ``fully_shard``.

    Why: FSDP2 gives a unit's module a class of its own, which Dynamo treats in another way.
    Without: see `state_of`.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        return kind
    sharded = sys.modules["torch.distributed.fsdp"].FSDPModule
    if not issubclass(kind, sharded):
        return kind
    return next(one for one in kind.__mro__ if not issubclass(one, sharded))


def register(module: nn.Module, state: State) -> None:
    """Let the methods of FSDPModule find the unit of one more object.

    Why: FSDP2 knows objects, and a transformed model is another object over the same state.
    Without: ``transformed.set_requires_gradient_sync(False)`` raises.
    """
    sys.modules[_MODULE]._insert_module_state(module, state)


def begin(roots: Sequence[State], module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Do what the outermost units do before a forward, and cast the inputs as the first of them does.

    Why: initialises FSDP2, waits for the optimizer's stream, and moves inputs to the device.
    Without: see `state_of`.
    """
    for root in roots:
        args, kwargs = root._root_pre_forward(module, args, kwargs)
        root._state_ctx.iter_forward_root = None
    return args, kwargs


def is_outermost(state: State) -> bool:
    """Return whether a unit is the root of its units; decided in the first forward of any of them.

    Why: FSDP2 begins and ends a step at roots.
    Without: see `state_of`.
    """
    return state._is_root is not False


def inner_units(root: State) -> list[State]:
    """Return a root's units, itself first, in the order of ``named_modules``.

    Why: a unit that is in no root's list is a root.
    Without: see `state_of`.
    """
    units: list[State] = root._state_ctx.all_states
    return units


def groups(states: Sequence[State]) -> Iterator[Any]:
    """Yield the groups of parameters that communicate together; before PyTorch 2.12 a unit has one, or None.

    Why: FSDP2 gathers and reduces a group at a time.
    Without: see `state_of`.
    """
    for state in states:
        one = [] if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        yield from filter(None, getattr(state, "_fsdp_param_groups", one))


def manages(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any unit has these whole parameters.

    Why: nothing leads from a module to a unit around it.
    Without: an empty batch on one process leaves the others waiting in a reduction.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        return False
    known = sys.modules["torch.distributed._composable_state"]._module_state_mapping.values()
    states = [one() if isinstance(one, weakref.ref) else one for one in known]
    units = [state for state in states if isinstance(state, module.FSDPState)]
    wholes = {id(getattr(one, "_unsharded_param", None)) for group in groups(units) for one in group.fsdp_params}
    return any(id(parameter) in wholes for parameter in parameters)


def gather_group(group: Any) -> None:
    """Put the whole parameters of one group in place of their shards.

    Why: ``FSDPModule.unshard`` belongs to modules, and a transformed model's units are states.
    Without: see `state_of`.
    """
    group.unshard()
    group.wait_for_unshard()


def reshards_after_forward(group: Any) -> bool:
    """Return whether plain FSDP2 frees a group's whole parameters behind its forward.

    Why: the user has said so, and no public attribute tells.
    Without: parameters that the user wants to stay would be gathered twice.
    """
    return bool(group._reshard_after_forward)


def show_wholes(group: Any) -> None:
    """Let the whole parameters of a group stand in its modules while their memory is freed.

    Why: Dynamo traces the modules' parameters, and the graph gathers their values.
    Without: a graph of DTensors.
    """
    if not all(hasattr(one, "_unsharded_param") for one in group.fsdp_params):
        gather_group(group)
        group.reshard()
    if group.is_sharded:
        for one in group.fsdp_params:
            one._unsharded_param.requires_grad_(one.sharded_param.requires_grad)
            one._setattr_on_modules(one._unsharded_param)


def show_shards(group: Any) -> None:
    """Let the shards of a group stand in its modules where its whole parameters are freed.

    Why: see `show_wholes`; a call that raises leaves them there.
    Without: a state dict, or the user, reads freed memory.
    """
    if group.is_sharded:
        for one in group.fsdp_params:
            one._setattr_on_modules(one.sharded_param)


def copies_of(group: Any) -> list[torch.Tensor]:
    """Gather a group's whole parameters, and return them as tensors that FSDP2 does not free.

    Why: FSDP2 frees and fills one tensor for a parameter, and a compiled graph knows nothing of that.
    Without: a graph may read freed memory.
    """
    gather_group(group)
    copies = []
    for one in group.fsdp_params:
        copies.append(one._unsharded_param.detach().clone())
        one.free_unsharded_param()
    group.reshard()
    return copies


def is_sharded(states: Sequence[State]) -> bool:
    """Return whether no unit's parameters are whole.

    Why: ``set_reshard_after_backward(False)`` leaves them whole.
    Without: an evaluation after the step uses old weights.
    """
    return all(group.is_sharded for group in groups(states))


def free(states: Sequence[State]) -> None:
    """Put the shards in place of whole parameters.

    Why: whole parameters that no backward freed may be older than their shards.
    Without: a forward without a backward makes the next step's weights old.
    """
    for group in groups(states):
        group.reshard()


def in_order_of_reduction(roots: Sequence[State]) -> list[Any]:
    """Return all groups of parameters as `reduce` goes through them.

    Why: see `reduce`. Every process has to reduce in one order.
    Without: processes add up gradients of different units, or wait for ever.
    """
    return [group for root in roots for state in inner_units(root) for group in reversed([*groups([state])])]


def reduces_at_once(states: Sequence[State]) -> bool:
    """Return whether the next gradients of every unit are reduced to its shards, and nobody looks at whole ones.

    Why: FSDP2 may be told to wait, keeps what waits, and calls hooks of the shards.
    Without: a backward that raises would leave reduced gradients, and a user's hook would not run.
    """
    return all(
        state._state_ctx.is_last_backward
        and group.reduce_grads
        and group.all_reduce_grads
        and group._partial_reduce_output is None
        and all(
            one.unsharded_accumulated_grad is None
            and one._unsharded_param.grad is None
            and not one.sharded_param._post_accumulate_grad_hooks
            and not one._unsharded_param._post_accumulate_grad_hooks
            for one in group.fsdp_params
        )
        for state in states
        for group in groups([state])
    )


def reduce_group(group: Any, gradients: Sequence[torch.Tensor]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Reduce the gradients of one group's trainable parameters; return each shard and its part, not yet in p.grad.

    Why: FSDP2 reduces a unit where its own hooks run, and adds to p.grad there. Whole parameters stay: the rest of
    the backward may read them.
    Without: the gradients of all units are whole at a time.
    """
    ones = [one for one in group.fsdp_params if one._unsharded_param.requires_grad]
    before = [one.sharded_param.grad for one in ones]
    reshards, group.reshard_after_backward = group.reshard_after_backward, False
    try:
        for one, gradient in zip(ones, gradients, strict=True):
            one.sharded_param.grad, one._unsharded_param.grad = None, gradient
        group._training_state = sys.modules[_MODULE].TrainingState.IDLE
        group.post_backward()
        return [(one.sharded_param, one.sharded_param.grad) for one in ones]
    finally:
        group.reshard_after_backward = reshards
        for one, grad in zip(ones, before, strict=True):
            one.sharded_param.grad, one._unsharded_param.grad = grad, None


def wholes_of(group: Any) -> list[nn.Parameter]:
    """Return the whole parameters of one group, after a first `gather_group`.

    Why: see `reduce_group`.
    Without: see `reduce_group`.
    """
    return [one._unsharded_param for one in group.fsdp_params]


def reduce(roots: Sequence[State], reduced: bool = False) -> None:
    """Do what the outermost units do at the end of a backward: every unit's gradients are reduced and sharded.

    ``reduced``: `reduce_group` has reduced them in this backward, all of them.

    Why: the reduction honours every setting of FSDPModule, and nothing public begins it. A group that a backward has
    reduced before it raised is still marked as reduced.
    Without: see `state_of`.
    """
    kinds = sys.modules[_MODULE].TrainingState
    for root in roots:
        for group in groups(inner_units(root)):
            group._training_state = kinds.POST_BACKWARD if reduced else kinds.IDLE
            if reduced and group.reshard_after_backward:
                group.reshard()
        root._root_post_backward_final_callback()


def pairs(states: Sequence[State]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return each parameter's shard and its whole, after a first `gather_group`.

    Why: results are set on the one, and users ask the other.
    Without: per-sample norms of a parameter are lost.
    """
    return [(one.sharded_param, one._unsharded_param) for group in groups(states) for one in group.fsdp_params]


def precision(state: State) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes to which a unit casts its inputs and its outputs.

    Why: the hooks that cast do not run.
    Without: products of a float32 tensor and a bfloat16 weight fail.
    """
    policy = state._mp_policy
    return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype


def cast_inputs(state: State, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast the inputs of a unit, those in dataclasses included.

    Why: see `precision`.
    Without: see `precision`.
    """
    inputs: tuple[Any, Any] = _cast(precision(state)[0], (args, kwargs))
    return inputs


def cast_outputs(state: State, outputs: Any) -> Any:
    """Cast what a unit returns, dataclasses included.

    Why: see `precision`.
    Without: a loss is computed in the dtype of the parameters.
    """
    return _cast(precision(state)[1], outputs)


def _cast(dtype: torch.dtype | None, values: Any) -> Any:
    if dtype is None:
        return values
    module = sys.modules[_MODULE]
    return module._apply_to_tensors(functools.partial(module._cast_fp_tensor, dtype), values)


def offloads(state: State) -> bool:
    """Return whether a unit's shards lie on the CPU while its device is another.

    Why: refused by name.
    Without: an error of PyTorch's about devices.
    """
    return any(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in groups([state]))


def meshes_of(states: Sequence[State]) -> dict[int, Any]:
    """Return the mesh over which each parameter is sharded and its gradient reduced, by id() of the whole one.

    Why: the mesh of a shard has the dimension of tensor parallelism, too, and does not tell which one it is.
    Without: units over the processes of tensor parallelism average gradients of one batch, and pass for right.
    """
    params = [one for group in groups(states) for one in group.fsdp_params]
    return {id(one._unsharded_param): one.mesh_info.mesh for one in params}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's part on this process, the same object at each call; a tensor of another kind as it is.

    Why: ``to_local`` returns a new view at each call. An op on a DTensor counts in the DTensor's version, and one on
    what ``to_local`` returns in that of this part.
    Without: the ledger of a private model misses changes of sharded gradients.
    """
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def altered_reduction(states: Sequence[State]) -> str:
    """Return what the user has set for which p.grad is not the average over all processes; "" for nothing.

    Why: a private step knows how often and by what FSDP2 has divided a sum.
    Without: a custom divide factor, or a reduction that is left out, would change the privacy of a step.
    """
    for state in states:
        if not state._state_ctx.is_last_backward:
            return "set_is_last_backward(False)"
        for group in groups([state]):
            settings = {
                "set_requires_gradient_sync(False)": not group.reduce_grads,
                "set_requires_all_reduce(False)": not group.all_reduce_grads,
                "set_gradient_divide_factor": group.gradient_divide_factor is not None,
                "set_all_reduce_hook": getattr(group, "_all_reduce_hook", None) is not None,
                "set_custom_reduce_scatter": not _is_own(getattr(group, "_reduce_scatter_comm", None)),
                "MixedPrecisionPolicy": any((group.mp_policy.param_dtype, group.mp_policy.reduce_dtype)),
                "gradients that an earlier backward has not reduced": group._partial_reduce_output is not None
                or any(one.unsharded_accumulated_grad is not None for one in group.fsdp_params),
            }
            found = next((name for name, is_set in settings.items() if is_set), "")
            if found:
                return found
    return ""


def _is_own(collective: Any) -> bool:
    """Return whether a collective is one of PyTorch's."""
    return collective is None or type(collective).__module__.startswith("torch.")

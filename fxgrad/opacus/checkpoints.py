"""Checkpoints: names of Opacus's wrapper and layers in state dicts, the accountant's history, and random generators."""

from __future__ import annotations

import functools
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from opacus.optimizers import DPOptimizer
from torch import Tensor, nn, optim
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils.data import DataLoader

from fxgrad.api import engine_of
from fxgrad.errors import OptionError
from fxgrad.host.modules import VERSIONS
from fxgrad.opacus.processes import WRAPPERS

PREFIXES = ("_module.", "module.")
"""Opacus's GradSampleModule holds the model in its attribute `_module`, and DistributedDataParallel in `module`; either
may be inside the other."""
RECURRENT = re.compile(r"(.*\.)?(l\d+(?:_reverse)?)\.(ih|hh)\.(weight|bias)")
"""The inner names of Opacus's recurrent layers. A state dict of a model that contains such a layer has them beside
those of torch.nn: ``layer.l0.ih.weight`` is ``layer.weight_ih_l0``."""
ATTENTION = re.compile(r"(.*\.)?[qkv]linear\.(weight|bias)")
"""The names of Opacus's attention inside a model."""


def unwrapped(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict of Opacus's wrapper as one of the model itself; any other state dict as it is.

    The names may have the prefixes of Opacus's wrapper, of DistributedDataParallel and of both. Those of Opacus's
    recurrent layers become those of torch.nn, which `fixing.fix` puts in their place.

    Args:
        module: the model or its DistributedDataParallel; it may have submodules `_module` and `module` of its own.
        state: the state dict; it is not changed.

    Raises:
        OptionError: two values of one parameter; or matrices of Opacus's attention for nn.MultiheadAttention.

    >>> import torch
    >>> list(unwrapped(nn.Linear(3, 2), {"_module.weight": torch.ones(2, 3), "_module.bias": torch.ones(2)}))
    ['weight', 'bias']
    """
    own = module.state_dict().keys()
    best = max(_renamed(module, state), key=lambda names: len(own & names.keys()))  # the first of several
    return _of_torch_layers(own, best)


def _renamed(module: nn.Module, state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a state dict as it is; then with ever fewer prefixes, and with that of the module's own wrapper."""
    yield state
    bare = state
    while bare and (prefix := next((one for one in PREFIXES if all(name.startswith(one) for name in bare)), None)):
        bare = _copied(bare)
        consume_prefix_in_state_dict_if_present(bare, prefix)
        yield bare
    if isinstance(module, WRAPPERS):
        yield _copied(bare, "module.")


def _copied(state: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a copy of a state dict with its layers' versions, with a prefix before every name."""
    copied: Any = OrderedDict((prefix + name, value) for name, value in state.items())
    versions = getattr(state, VERSIONS, {})
    setattr(copied, VERSIONS, OrderedDict(((prefix + name).rstrip("."), of) for name, of in versions.items()))
    return copied


def _of_torch_layers(own: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict without the inner names of Opacus's layers that the model does not have."""
    found = {name: new for name in state if name not in own and (new := _in_torch(name)) in own}
    for old, new in found.items():
        if new in state and not state[new].equal(state[old]):
            raise OptionError(
                f"the state dict has two values for '{new}': another one is '{old}', the name inside Opacus's layer",
                advice="Delete one of the two from the state dict.",
            )
    attention = next((name for name in state if name not in own and _is_of_attention(own, name)), None)
    if attention is not None:
        raise OptionError(
            f"the state dict has '{attention}' of Opacus's DPMultiheadAttention, and the model has "
            "nn.MultiheadAttention",
            advice="Load it into the model with Opacus's layer, and call fxgrad.opacus.fix(model) then.",
        )
    if not found:
        return state
    renamed = _copied(state)
    for old, new in found.items():
        renamed[new] = renamed.pop(old)
    return renamed  # type: ignore[no-any-return]


def _in_torch(name: str) -> str:
    """Return the name in torch.nn of a parameter inside Opacus's recurrent layers; "" for any other."""
    parts = RECURRENT.fullmatch(name)
    return "" if parts is None else f"{parts[1] or ''}{parts[4]}_{parts[3]}_{parts[2]}"


def _is_of_attention(own: Any, name: str) -> bool:
    parts = ATTENTION.fullmatch(name)
    return parts is not None and any((parts[1] or "") + one in own for one in ("in_proj_weight", "q_proj_weight"))


def give_wrapper_names(view: nn.Module) -> None:
    """Let a transformed model and its copies have `_module`, the model itself, and load state dicts of the wrapper.

    A model that has an attribute `_module` of its own keeps it. The names are those of the transformed object's class;
    the model itself stays as it was.
    """
    kind: Any = type(view)
    engine = engine_of(view)
    if engine is None or kind in _GIVEN:
        return
    _GIVEN.add(kind)
    load, reduce = kind.load_state_dict, kind.__reduce__

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return load(self, unwrapped(self, state_dict), *args, **kwargs)

    kind.load_state_dict = load_state_dict
    kind.__reduce__ = lambda self: (_rebuilt, reduce(self))
    if not hasattr(view, "_module"):
        kind._module = property(lambda self: engine_of(self).model)  # type: ignore[union-attr]


_GIVEN: weakref.WeakSet[type] = weakref.WeakSet()  # the classes that have Opacus's names


def _rebuilt(rebuild: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """Return a copy of a transformed model that has the names, too."""
    view = rebuild(*arguments)
    give_wrapper_names(view)
    return view


def load_names_of_opacus(wrapper: nn.Module) -> None:
    """Let the wrapper of a transformed model for several processes load state dicts of Opacus's wrapper."""
    wrapper.load_state_dict = functools.partial(_load, wrapper)  # type: ignore[method-assign]


def _load(wrapper: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    return type(wrapper).load_state_dict(wrapper, unwrapped(wrapper, state_dict), *args, **kwargs)


MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""The states of torch.optim that are of the parameter's shape."""


def check_order(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise if an optimizer's state is of parameters in another order; PyTorch compares their number alone."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    for key, parameter in zip(keys, parameters, strict=False):
        for name, value in state["state"].get(key, {}).items():
            if name in MOMENTS and isinstance(value, Tensor) and value.dim() != parameter.dim():
                raise OptionError(
                    f"the state has {name} of shape {list(value.shape)} for a parameter of shape "
                    f"{list(parameter.shape)}: the parameters are in another order",
                    advice="Make the optimizer of the model as it was when the state was saved, and pass make_private "
                    "fix=True. Or leave the optimizer out.",
                )


class Loading:
    """A model for Opacus's load_checkpoint, with state dicts of Opacus's wrapper as the model's own.

    It loads at the end, when the accountant has accepted the checkpoint's history.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.finish: Callable[[], Any] = lambda: None

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        state = unwrapped(self.module, state_dict)
        self.finish = functools.partial(self.module.load_state_dict, state, **kwargs)


History = list[tuple[float, float, int]]
"""What an accountant has counted: noise multiplier, sample rate, and steps of both."""


def continues(longer: Sequence[tuple[float, float, int]], shorter: Sequence[tuple[float, float, int]]) -> bool:
    """Decide whether one history starts with all steps of another.

    >>> continues([(1.0, 0.1, 5)], [(1.0, 0.1, 3)]), continues([(1.0, 0.1, 5)], [(2.0, 0.1, 3)])
    (True, False)
    """
    if not shorter:
        return True
    *before, (sigma, rate, steps) = map(tuple, shorter)
    if len(longer) < len(shorter) or [tuple(entry) for entry in longer[: len(before)]] != before:
        return False
    last = longer[len(before)]
    return tuple(last[:2]) == (sigma, rate) and last[2] >= steps


class Continuing:
    """An accountant for Opacus's load_checkpoint that keeps the longer one of its own history and the checkpoint's.

    Steps that were counted behind the checkpoint have used the samples, too.
    """

    def __init__(self, accountant: Any) -> None:
        self.accountant = accountant

    def load_state_dict(self, state_dict: Any) -> None:
        own, loaded = [*self.accountant.history], (state_dict or {}).get("history")
        if own and loaded is not None and not continues(loaded, own) and not continues(own, loaded):
            raise OptionError(
                "the accountant has counted other steps than the checkpoint's training",
                where=f"counted: {own}; checkpoint: {loaded}",
                path="load_checkpoint -> two histories for one model",
                advice="Call make_private with a new PrivacyEngine, and load the checkpoint with that.",
            )
        self.accountant.load_state_dict(state_dict)
        if not continues(self.accountant.history, own):
            self.accountant.history = own


# Note [Generators of a resumed training]
# A script seeds its noise_generator. Run again to resume from a checkpoint, it would draw the noise of the first steps
# again, and the difference of two releases has no noise. The same holds for a loader's generator, which would draw the
# first batches again. With the generators' states, a checkpoint would give away all later noise to whoever reads it. So
# they are seeded from the operating system: when a checkpoint is loaded, and when make_private gets an engine whose
# accountant has steps that none of its private optimizers made. The noise of a resumed training cannot be repeated.


def draw_anew(optimizer: DPOptimizer, loader: DataLoader[Any] | None) -> None:
    """Seed the generators of noise and batches from the operating system.

    See Note [Generators of a resumed training]. Those of ``secure_mode`` have no state of their own. The default
    generator is left as it is.
    """
    if optimizer.secure_mode:
        return
    owners = (optimizer, loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None))
    generators = {id(found): found for one in owners if (found := getattr(one, "generator", None)) is not None}
    for generator in generators.values():
        try:
            generator.seed()
        except RuntimeError as error:
            raise OptionError(
                "a generator of this training cannot be seeded anew, and would draw noise or batches of earlier steps "
                "again",
                where=f"{type(generator).__name__}.seed: {error}",
                path="load a checkpoint -> the generator as it was at first -> noise that was released before",
                advice="Pass make_private a torch.Generator, or use PrivacyEngine(secure_mode=True).",
            ) from error

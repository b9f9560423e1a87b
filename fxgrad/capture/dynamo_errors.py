"""Dynamo's exceptions as fxgrad's: the reason and the user's line, without the tracer's own stack."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any

from torch import nn

from fxgrad.capture.options import Options
from fxgrad.errors import GraphBreak, OutsideGraph, TooManyGraphs
from fxgrad.graph.context import last_own_line
from fxgrad.host.dynamo import (
    BackendCompilerFailed,
    InternalTorchDynamoError,
    TorchRuntimeError,
    Unsupported,
    UserError,
    failed_guards,
    recompile_limit,
)
from fxgrad.host.modules import has_backward_hooks


def fails_without_dynamo(error: Exception) -> bool:
    """Return whether it looks like the model's own exception: wrong shapes, wrong arguments, an assert."""
    raised = "failed to bind arguments|Observed exception|Assertion failed on symbolic shapes|assertion failed"
    own = isinstance(error, Unsupported) and re.search(raised, str(error))
    return bool(own) or isinstance(error, TorchRuntimeError)


class StatesMoved(Exception):
    """Raised in the backend if inputs turn out to be states of recurrent layers. See Note [States]."""


def moves_states(error: Exception) -> bool:
    """Decide whether a call has to be captured again, with other roles."""
    return isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, StatesMoved)


def captured_nothing(error: Exception) -> bool:
    """Return whether Dynamo was switched off: torch 2.13 says so where one whole graph was asked for."""
    return type(error) is RuntimeError and "found no compiled frames" in str(error)


def fixes_the_batch(error: Exception) -> bool:
    """Return whether Dynamo found that its graph holds for one batch size only."""
    user = isinstance(error, UserError) or "ConstraintViolation" in type(error).__name__
    return user and ("mark_dynamic" in str(error) or "Constraints violated" in str(error))


def translated(error: Exception, options: Options, model: nn.Module) -> Exception:
    """Dynamo's exceptions as fxgrad's: the reason and the user's line, without the tracer's own stack."""
    if isinstance(error, BackendCompilerFailed):
        inner = error.inner_exception
        return inner if isinstance(inner, Exception) else error
    said = _in_our_words(error, str(error), options)
    if said is None:
        return error
    sentence, advice = said
    hooked = _with_backward_hooks(model) if sentence.startswith("a module has a backward hook") else ""
    return GraphBreak(sentence, where=_user_line(error) or hooked, advice=advice)


def _in_our_words(error: Exception, text: str, options: Options) -> tuple[str, str] | None:
    """What is wrong with a line that breaks the graph, and what to do about it; None if the error is not Dynamo's."""
    if isinstance(error, Unsupported):
        for words, sentence, advice in _KNOWN:
            if match := re.search(words, text):
                return sentence.format(*match.groups()), advice
        breaks = ", or pass fullgraph=False" if options.takes(fullgraph=False) else ""
        advice = f"Write that line in traceable PyTorch{breaks}.{_hint(text)}"
        return f"the model does not capture as one graph: {_reason(text)}", advice
    if isinstance(error, TorchRuntimeError):  # an op that works outside of Dynamo, and not on its fake tensors
        said = re.search(r"call_\w+ (\S+?)\(.*: got \w+\([\"'](.+)[\"']\)", text)
        op = f"{said[1]}: {said[2]}" if said else "an op of the model"
        advice = "Write it with another op: torch.compile(model) fails there as well."
        return f"TorchDynamo cannot follow {op}", advice
    if "hook removal" in text:
        sentence = "forward removes a hook (register_hook), which one graph cannot hold"
        return sentence, f"Leave the hook out where it is not wanted. {_HOOK}"
    if isinstance(error, UserError | InternalTorchDynamoError) or "\nfrom user code:\n" in text:
        advice = "See what torch.compile(model, fullgraph=True) says of it."
        return f"TorchDynamo does not capture the model: {_reason(text)}", advice
    return None


def _hint(text: str) -> str:
    """Return what Dynamo itself advises on this line: not what it says of all, nor what fxgrad's options decide."""
    for hint in re.findall(r"^ *Hint: (.+)$", text, re.MULTILINE):
        if not re.search(_NO_ADVICE, hint):
            return f" TorchDynamo says: {hint}"
    return ""


_NO_ADVICE = (
    "^This |^It may be possible|^Your code may|issue|fullgraph|set_stance|graph break|torch.compile|autograd|"
    "capture_scalar_outputs|capture_dynamic_output_shape_ops|allow_rnn"
)


def _with_backward_hooks(model: nn.Module) -> str:
    """Return the modules that have backward hooks, in words."""
    hooked = [name for name, module in model.named_modules() if has_backward_hooks(module)]
    return "on " + ", ".join(f"'{name}'" if name else "the model itself" for name in hooked)


_HOOK = "Compute what the hook computes in an autograd.Function inside of the model, whose backward fxgrad follows."

NAMED_TWICE = (
    "forward sets requires_grad of a tensor that has another name, or comes out of a checkpoint, which one graph "
    "cannot hold",
    "Set it before the model is called, or of a copy: h = h.clone().requires_grad_().",
)

NO_LOSS = "loss_fn returns no loss"

# What Dynamo's message says, and what it means here.
_KNOWN: Sequence[tuple[str, str, str]] = (
    (
        NO_LOSS,
        f"{NO_LOSS}: neither a tensor that depends on the model's parameters, nor a tuple that begins with one",
        "Return the sum over samples of their losses; and in a tuple behind it, what else you want.",
    ),
    (
        "Module-level backwards hooks|[Mm]odule backward hook",
        "a module has a backward hook (register_full_backward_hook), which sees the gradients of the whole batch",
        f"Remove the hook. {_HOOK}",
    ),
    (
        r"retain_grad\(\)",
        "retain_grad() keeps the gradient of a value inside the model, which one graph does not hand out",
        "Return the value from the model, and call torch.autograd.grad or retain_grad() outside.",
    ),
    (
        r"\.register_hook|register_hook\b|HOP: Unsafe side effect[\s\S]*register_hook",
        "a hook on a value inside the model (register_hook) does what one graph cannot hold",
        f"Let it return a gradient and change nothing else. {_HOOK}",
    ),
    (
        r"_ctc_loss",
        "ctc_loss has lengths inside that the data decides, which one graph cannot hold",
        "Let the model return what the loss takes, and compute the loss outside of it, and of forward_backward: there "
        "it may be any function of each sample's own values.",
    ),
    (
        r"Unsupported Tensor\.requires_grad_\(\) call|setattr\(\) on Tensor\.requires_grad",
        "forward sets requires_grad of a tensor, which one graph cannot hold",
        "Set it before the model is called.",
    ),
    (r"intermediate with requires_grad_\(\)|requires_grad_\(\) intermediate", *NAMED_TWICE),
    (
        r"torch\.autograd\.grad",
        "forward calls torch.autograd.grad, which one graph does not hold",
        "Write it with torch.func.grad, torch.func.vjp or torch.func.jacrev.",
    ),
    (
        r"torch\.nn\.Parameter\(\)` constructor",
        "forward makes a Parameter, which none of the model's parameters is",
        "Make it in __init__ as an attribute of the model, or compute with a plain tensor.",
    ),
)


def too_many_graphs(compiled: Callable[..., Any], positional: Sequence[str]) -> TooManyGraphs:
    """Dynamo's limit of graphs for one function: what changes from call to call."""
    reasons = failed_guards(compiled)
    return TooManyGraphs(
        f"calls need one graph each, and {recompile_limit()} are compiled: {_changing(reasons, positional)}",
        where=_guarded_line(reasons[-1]) if reasons else "",
        advice="Pass what changes as a tensor, or keep it the same between calls. If you want that many graphs, raise "
        "torch._dynamo.config.recompile_limit.",
    )


def not_captured(names: Iterable[str]) -> OutsideGraph:
    """The model ran as it is: Dynamo was switched off, or told not to compile this call."""
    return OutsideGraph(
        f"TorchDynamo did not capture the model, so its parameters get ordinary gradients: {', '.join(names)}",
        advice="Switch it on for this call. torch.compiler.set_stance, torch.compiler.disable, TORCHDYNAMO_DISABLE=1 "
        "and torch._dynamo.config.install_free_tensors switch it off.",
    )


def _changing(reasons: Sequence[str], positional: Sequence[str]) -> str:
    """What a guard saw change: ``0/7: original.k == 7   # ..`` is ``self.k was 0, 1, .., 7 and is another now``."""
    said = [_in_words(reason, positional) for reason in reasons]
    if not said:
        return "TorchDynamo does not say what changes"
    what, equal, _ = said[-1].partition(" == ")
    if not equal:
        return said[-1]
    values = dict.fromkeys(one.partition(" == ")[2] for one in said if one.startswith(f"{what} == "))
    return f"{what} was {', '.join(values)}, and is something else now"


def _in_words(reason: str, positional: Sequence[str]) -> str:
    """Return a guard in the user's names: ``self.k`` for ``original.k``, ``x`` for ``args[0]``."""

    def named(found: re.Match[str]) -> str:
        i = int(found[1])
        return positional[i] if i < len(positional) else found[0]

    text = re.sub(r"^\d+/\d+: ", "", reason).split("  #")[0].strip()
    text = re.sub(r"\boriginal\.", "self.", text)
    text = re.sub(r"\bargs\[(\d+)\]", named, text)
    return re.sub(r"\bkwargs\['(\w+)'\]", r"\1", text)


def _guarded_line(reason: str) -> str:
    """Return the user's line that reads what changed: ``model.py:19   return self.layer(x) * self.k``."""
    found = re.search(r"  # (?P<code>.+?)\s+# (?P<file>\S+):(?P<line>\d+) in ", reason)
    return f"{PurePath(found['file']).name}:{found['line']}   {found['code']}" if found else ""


def _reason(text: str) -> str:
    said = re.search(r"User-inserted graph break\. Message: (?!None)(.+)", text)
    if said:
        return said[1]
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown reason")


_OWN_FILES = str(PurePath(__file__).parents[1])


def _user_line(error: Exception) -> str:
    for frame in reversed(getattr(error, "real_stack", None) or []):
        if "torch/" not in frame.filename and not frame.filename.startswith(_OWN_FILES):
            return f"{PurePath(frame.filename).name}:{frame.lineno}   {(frame.line or '').strip()}"
    return last_own_line(str(error))

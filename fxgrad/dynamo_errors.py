"""Dynamo's exceptions as fxgrad's: the reason and the user's line, without the tracer's own stack."""

from __future__ import annotations

import re
from pathlib import PurePath

from torch._dynamo import exc

from fxgrad.context import last_own_line
from fxgrad.errors import GraphBreak


def fails_without_dynamo(error: Exception) -> bool:
    """Whether it looks like the model's own exception: wrong shapes, wrong arguments."""
    raised = ("failed to bind arguments", "Observed exception")
    own = isinstance(error, exc.Unsupported) and any(words in str(error) for words in raised)
    return own or isinstance(error, exc.TorchRuntimeError)


def fixes_the_batch(error: Exception) -> bool:
    """Whether Dynamo found that its graph holds for one batch size only."""
    user = isinstance(error, exc.UserError) or "ConstraintViolation" in type(error).__name__
    return user and ("mark_dynamic" in str(error) or "Constraints violated" in str(error))


def translated(error: Exception) -> Exception:
    """Dynamo's exceptions as fxgrad's: the reason and the user's line, without the tracer's own stack."""
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

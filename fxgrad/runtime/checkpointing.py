"""A selective checkpoint's policy, asked while AOTAutograd traces what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxgrad.host.dispatch import tracer
from fxgrad.host.dynamo import checkpoint_contexts
from fxgrad.ops.facts import Fact
from fxgrad.runtime.targets import Target


class Policy:
    """What ``context_fn`` of one checkpoint says, anew for each trace: a policy may count the ops it is asked about."""

    def __init__(self, context_fn: Callable[[], Any], graph_id: int) -> None:
        self.context_fn, self.graph_id, self.mode = context_fn, graph_id, None

    def begin(self) -> None:
        self.mode = self.context_fn()[0]
        if self.mode is not None:
            self.mode.ac_graph_id = self.graph_id

    def end(self) -> None:
        """Let go of what PyTorch's mode keeps of each op."""
        self.mode = None


POLICY: Fact[Policy] = Fact("policy", "inline_regions", Policy)


def policy_of(body: Any, graph_id: int) -> Policy | None:
    """Return the policy of a checkpoint, which Dynamo leaves on the body; None where its contexts are others."""
    context_fn = checkpoint_contexts(body)
    selects = context_fn is not None and hasattr(context_fn()[0], "policy_fn")
    return Policy(context_fn, graph_id) if selects else None


class AskedTarget(Target):
    """An op of a selective checkpoint. PyTorch's own mode tags each ATen op that it is traced to.

    The partitioner reads those tags. Outside a trace, the op runs as it is.
    """

    def __init__(self, target: Callable[..., Any] | str, policy: Policy, first: bool, last: bool) -> None:
        super().__init__(target if isinstance(target, str) else getattr(target, "__name__", "op"))
        self.target, self.policy, self.first, self.last = target, policy, first, last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracer() is None:
            return self._run(*args, **kwargs)
        if self.first:
            self.policy.begin()
        assert self.policy.mode is not None
        with self.policy.mode:
            result = self._run(*args, **kwargs)
        if self.last:
            self.policy.end()
        return result

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

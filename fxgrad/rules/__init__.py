"""Per-sample-gradient rules, one op each: what differs from PyTorch's own backward, and nothing else."""

from fxgrad.rules import conv, elementwise, linear, lookup, movement, norm, recurrent  # noqa: F401 - they register rules
from fxgrad.rules.registry import OWN_BACKWARDS, RULES, OwnBackward, Rule, rule

__all__ = ["OWN_BACKWARDS", "RULES", "OwnBackward", "Rule", "rule"]

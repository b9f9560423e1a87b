"""Per-sample-gradient rules, one op each: what differs from PyTorch's own backward, and nothing else."""

from fxgrad.rules import conv, elementwise, linear, lookup, movement, norm, recurrent, routing
from fxgrad.rules.registry import OWN_BACKWARDS, RULES, OwnBackward, Rule, rule

__all__ = [
    "OWN_BACKWARDS",
    "RULES",
    "OwnBackward",
    "Rule",
    "conv",
    "elementwise",
    "linear",
    "lookup",
    "movement",
    "norm",
    "recurrent",
    "routing",
    "rule",
]

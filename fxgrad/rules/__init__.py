"""Per-sample-gradient rules, one op each: what differs from PyTorch's own backward, and nothing else."""

from fxgrad.rules import conv, elementwise, linear, lookup, movement, norm
from fxgrad.rules.registry import RULES, Rule, rule

__all__ = ["RULES", "Rule", "conv", "elementwise", "linear", "lookup", "movement", "norm", "rule"]

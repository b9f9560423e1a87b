"""Per-sample gradients of one parameter: the sum of what its uses left, multiplied out late, in parts, or never."""

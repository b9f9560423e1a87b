"""`fxgrad.verify`: the numerical proof that a model's per-sample gradients are right."""

"""`fxgrad.explain`: what fxgrad does with a model, parameter by parameter, and what that costs."""

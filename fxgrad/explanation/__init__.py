"""`fxgrad.explain`: the treatment of each parameter of a model by fxgrad, with its costs."""

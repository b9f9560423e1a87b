"""``python -m fxgrad``: what a shell can ask, ``doctor`` about the installation and ``explain`` about a model."""

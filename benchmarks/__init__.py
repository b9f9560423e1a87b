"""How fast fxgrad is, beside the plain compiled training step and beside other libraries."""

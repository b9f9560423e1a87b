"""An independent proof that samples do not influence each other.

It follows, ATen op by ATen op, which samples each value depends on.
"""

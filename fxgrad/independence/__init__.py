"""An independent proof that samples do not meet: what each value depends on, op by op, where nothing can hide."""

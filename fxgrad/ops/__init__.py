"""Ops and their calls: one name for each, its family, its arguments, what it writes."""

"""What each pass makes of a small program: the graph as it gets it, and as it leaves it.

`EXPECTTEST_ACCEPT=1 pytest tests/passes` writes the pictures anew: read the difference before you commit it.
"""

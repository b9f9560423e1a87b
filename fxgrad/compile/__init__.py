"""From one captured graph to one callable: the list of passes, the inner compiler, and what runs around it."""

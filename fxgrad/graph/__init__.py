"""What the passes share: their context, facts on nodes, edits of a graph, the check of a graph, its printing."""

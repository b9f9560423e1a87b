"""What passes share: context, edits of a graph, records of its calls, spec, printing; and recognisers of one pass."""

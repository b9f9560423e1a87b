"""The opaque operators: what is done at run time, behind one node of the compiled graph, and the libraries it calls."""

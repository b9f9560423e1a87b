"""Recurrent layers and packed sequences as operators: the loops over time, in Python and in C++."""

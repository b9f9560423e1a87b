"""What runs in the forward and the backward: autograd functions, the tape, the store of results, the guard."""

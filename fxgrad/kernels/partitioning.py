"""Tags of the traced graph for AOTAutograd's partitioner.

Note [What stays in the backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A Gram matrix x xᵀ is made of what the forward knows, and the partitioner would move it there and save it. What
only the quantities need is traced under the partitioner's own tag. So are values with their samples first, which
are mostly views: of a forward's input that is saved for the backward Inductor knows that it is, and reads it with
its channels last where a convolution follows; of one whose view is saved it does not. With a single channel that
decided the layout of all that comes behind (an MNIST model's forward took a quarter longer).
"""

from __future__ import annotations

import contextlib

from torch.fx import traceback as fx_traceback

from fxgrad.host.functorch import must_be_in_backward


def in_backward() -> contextlib.AbstractContextManager[None]:
    """See Note [What stays in the backward]."""
    if not fx_traceback.has_preserved_node_meta():  # not inside a trace
        return contextlib.nullcontext()
    return must_be_in_backward()

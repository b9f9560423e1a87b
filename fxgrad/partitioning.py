"""What AOTAutograd's partitioner is told of the traced graph.

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


def in_backward() -> contextlib.AbstractContextManager[None]:
    """See Note [What stays in the backward]."""
    try:
        from torch._functorch._aot_autograd.graph_capture_wrappers import (
            set_partitioner_tag_must_be_in_backward,
        )
    except ImportError:  # where PyTorch has no such tag, the partitioner decides
        return contextlib.nullcontext()
    if not fx_traceback.has_preserved_node_meta():  # nobody is tracing
        return contextlib.nullcontext()
    tagged: contextlib.AbstractContextManager[None] = set_partitioner_tag_must_be_in_backward()
    return tagged

"""Each way of computing per-sample gradients, by name.

Versions that were run: opacus 1.6.0, backpack-for-pytorch 1.7.1, jax 0.10.2, jax-privacy 2.0.0.
"""

from collections.abc import Callable

from benchmarks.peers import backpack, expanded, functional, loop, opacus, ours, xla
from benchmarks.peers.engine import Engine
from benchmarks.tasks import Quantity, Task

PEERS: dict[str, Callable[[Task, Quantity], Engine]] = {
    "fxgrad": ours.fxgrad,
    "forward_backward": ours.forward_backward,
    "opacus_hooks": opacus.hooks,
    "opacus_functorch": opacus.functorch,
    "opacus_ew": opacus.expanded_weights,
    "opacus_ghost": opacus.ghost,
    "vmap": functional.vmap,
    "vmap_compiled": functional.vmap_compiled,
    "expanded_weights": expanded.expanded_weights,
    "backpack": backpack.batch_grad,
    "backpack_l2": backpack.batch_l2,
    "jax": xla.jax_vmap,
    "jax_privacy": xla.jax_privacy,
    "microbatch": loop.microbatch,
}

"""PyTorch's own tensor subclass, ExpandedWeights."""

import importlib

from benchmarks.peers.engine import Engine, copies, grad_sample_engine
from benchmarks.tasks import Quantity, Task


def expanded_weights(task: Task, quantity: Quantity) -> Engine:
    module = importlib.import_module("torch.nn.utils._per_sample_grad")
    model, x, y = copies(task)
    call = module.call_for_per_sample_grads(model, batch_size=len(x), loss_reduction="sum")
    params = dict(model.named_parameters())
    return grad_sample_engine(task, quantity, params, lambda: task.losses(call(x), y).sum().backward())

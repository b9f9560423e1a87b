"""The peak of one warm step."""

import gc

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers.engine import Engine
from benchmarks.tasks import Task
from fxgrad.kernels.memory import blocks


def peak_bytes(task: Task, engine: Engine) -> int:
    """The most the allocator held at once during one warm step, above what it held before."""
    if engine.peak is not None:
        return engine.peak()
    engine.clear()
    gc.collect()
    blocks.release()  # so that the step asks the allocator for what it needs
    if task.x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        engine.step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak

"""The private names of PyTorch that fxgrad needs, each under a name of our own, with why and since when.

All other rooms take them from here: a release of PyTorch that moves one is met in one place. What a step reads is an
alias of PyTorch's own object, without a call in between. A docstring says why fxgrad needs the name and what happens
without it; one behind several names speaks of all of them. A docstring says since when only where the room's sentence
does not hold:

Since: torch 2.11 to 2.13, tested: the tests ran on these releases, and each name stands there.

What we patch
~~~~~~~~~~~~~
Some parts of PyTorch work differently where fxgrad is imported and used:

- Inductor's ``SchedulerNode.recompute_size_and_body``, for the process, from the first compilation by Inductor on and
  before torch 2.14: it keeps the names that writes gave to a loop's inputs. `fxgrad.host.inductor.keep_renames`
  patches; Note [Lost renames] in fxgrad/compile/inductor.py says why.
- ``is_symbol_binding_fx_node`` and ``find_symbol_binding_fx_nodes`` in AOTAutograd's partitioner, for the process, from
  the first compilation by Inductor on: floats that are read from tensors count as symbols, as integers do.
  `fxgrad.host.inductor.bind_floats` patches; Note [Floats that are read] in fxgrad/compile/inductor.py says why.
- ``memory.reorder_for_peak_memory``, ``KernelGroup.codegen_group`` and ``ExternKernel.get_kernel_name`` of Inductor,
  for the process, from the first compilation by Inductor on: while fxgrad compiles, kernels run in another order, may
  begin with C++ that ATen lacks, and call operators directly; for others nothing changes.
  `fxgrad.host.inductor.reordered`, `fxgrad.host.conversions.in_front` and `fxgrad.host.names.called_as` patch.
- Inductor's constraints on the layout of operands, for the process, from then on: while fxgrad compiles, PyTorch's own
  kernels read what lies as it was traced. `fxgrad.host.layouts.read_as_traced` registers them.
- ``forward`` of nn.RNN, nn.LSTM and nn.GRU, while a transformed model's call is captured: Dynamo sees one operator in
  the place of an unrolled loop. fxgrad/capture/recurrent_modules.py patches, and restores. At the first such call it
  takes three functions of ``torch.nn.utils.rnn`` (pack_padded_sequence, pad_packed_sequence, pack_sequence) out of
  Dynamo's table of rules, for good, and gives Dynamo polyfills: `fxgrad.host.dynamo.substitute`. In another's
  torch.compile the polyfills break the graph, as Dynamo's own rule did.
"""

"""Arguments of which an op reads the shape, the dtype or the device, and no value."""

from __future__ import annotations

# What a tensor says of itself without its values.
QUERIES = frozenset(
    """size shape sym_size stride sym_stride storage_offset sym_storage_offset numel sym_numel nelement dim ndim
    ndimension __len__ len dtype device layout itemsize element_size get_device names requires_grad is_leaf grad_fn
    is_floating_point is_complex is_signed is_contiguous is_cuda is_cpu is_sparse is_nested is_quantized is_meta
    is_inference is_conj is_neg is_same_size""".split()
)

SHAPED_AS = frozenset({"expand_as", "view_as", "reshape_as"})  # ops that read only the shape of another tensor
HANDS_OUT = frozenset({"expand", "expand_as", "broadcast_to", "repeat"})  # ops that copy a value along dimensions
_OTHERS = {"type_as": "other", "to": "other"}


def reads_form_alone(op: str, argument: str) -> bool:
    """Return whether an op looks at this argument's shape, dtype and device only.

    >>> reads_form_alone("zeros_like", "input"), reads_form_alone("full_like", "fill_value")
    (True, False)
    """
    if argument == "out":
        return True
    if op.startswith("new_") or op.endswith("_like"):
        return argument == "input"
    return _OTHERS.get(op) == argument

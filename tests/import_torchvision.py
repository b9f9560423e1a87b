"""Makes timm and transformers importable where torchvision's compiled part does not fit the installed torch.

Both libraries import torchvision, whose wheels are built for CUDA. Beside a CPU build of torch its Python part works
as soon as the operators exist that it describes without defining them. None of them is called here.
"""

import sys

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")


def _import_torchvision() -> None:
    missing = ["nms", "qnms"]
    while True:
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:  # operator torchvision::nms does not exist
            if not missing or f"torchvision::{missing[0]} does not exist" not in str(error):
                raise
        else:
            return
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library.define(f"{missing.pop(0)}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_import_torchvision()

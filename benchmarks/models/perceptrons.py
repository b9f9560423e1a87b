"""Linear layers alone: one position per sample."""

from itertools import pairwise

from torch import nn

from benchmarks.tasks import Spec, class_losses, vectors


def perceptron(*widths: int) -> nn.Module:
    """Linear layers of the given widths with a ReLU between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def deep_perceptron() -> nn.Module:
    """50 layers, with weights whose signals neither vanish nor explode."""
    model = perceptron(*[300] * 50, 10)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return model


def _spec(*widths: int, batch: int) -> Spec:
    return Spec(lambda: perceptron(*widths), batch, vectors(widths[0], classes=widths[-1]), class_losses)


PERCEPTRONS: dict[str, Spec] = {
    "MLP-3": _spec(784, 512, 512, 10, batch=128),
    "c01-logistic": _spec(104, 2, batch=256),
    "c01-ffnn": _spec(104, 50, 2, batch=256),
    "c08-mlp": _spec(5120, 2560, 1280, batch=32),
    "c09-ffn50": Spec(deep_perceptron, 32, vectors(300, classes=10), class_losses),
}

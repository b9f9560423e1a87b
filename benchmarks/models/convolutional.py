"""Convolutional networks for images."""

from collections.abc import Callable

from torch import Tensor, nn

from benchmarks.tasks import Spec, class_losses, vectors

CLASSES = 10
NO_GROUP_NORM = {"backpack": "no rule for GroupNorm", "backpack_l2": "no rule for GroupNorm"}


def convolutions(*stages: int) -> nn.Module:
    """Two 3x3 convolutions and an average pool for each stage, then a mean and a linear head."""
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(stages[-1], CLASSES)]
    return nn.Sequential(*_stages(*stages), *head)


def _stages(*stages: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for width in stages:
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.AvgPool2d(2))
    return layers


def mnist_network() -> nn.Module:
    """The usual small network of private MNIST, 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


def cifar_network() -> nn.Module:
    """The usual network of private CIFAR-10, 605,226 parameters; the head is a convolution and a mean."""
    head = [nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, CLASSES, 3, padding=1)]
    return nn.Sequential(*_stages(32, 64, 128), *head, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def simple_network() -> nn.Module:
    """Two convolutions and a wide linear layer, 1.2 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut; norms behind them (ResNet) or before (wide ResNet)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, groups: int, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm1 = nn.GroupNorm(groups, fan_in if norm_first else fan_out)
        self.norm2 = nn.GroupNorm(groups, fan_out)
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        same = stride == 1 and fan_in == fan_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(fan_in, fan_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor
        if self.norm_first:
            z = self.relu1(self.norm1(x))
            y = self.shortcut(x) + self.conv2(self.relu2(self.norm2(self.conv1(z))))
        else:
            z = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
            y = self.relu2(self.shortcut(x) + z)
        return y


def resnet18() -> nn.Module:
    """ResNet-18 for small images (3x3 stem), with GroupNorm in place of BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    channels = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and width > 64 else 1
            layers.append(Residual(channels, width, stride, groups=32, norm_first=False))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def wide_resnet() -> nn.Module:
    """WRN-16-4 with GroupNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    channels = 16
    for width in (64, 128, 256):
        for block in range(2):
            stride = 2 if block == 0 and width > 64 else 1
            layers.append(Residual(channels, width, stride, groups=16, norm_first=True))
            channels = width
    layers += [nn.GroupNorm(16, 256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, CLASSES))


def grouped_blocks(width: int, groups: int) -> nn.Module:
    """Two blocks of a 3x3 convolution in groups and a 1x1 convolution over all of them."""
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Conv2d(width, width, 3, padding=1, groups=groups, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def _spec(build: Callable[[], nn.Module], batch: int, *shape: int, normed: bool = False) -> Spec:
    cannot = NO_GROUP_NORM if normed else {}
    return Spec(build, batch, vectors(*shape, classes=CLASSES), class_losses, cannot=cannot)


CONVOLUTIONAL: dict[str, Spec] = {
    "CNN-6": _spec(lambda: convolutions(32, 64, 128), 64, 3, 32, 32),
    "c02-mnist": _spec(mnist_network, 256, 1, 28, 28),
    "c03-cifar-64": _spec(cifar_network, 64, 3, 32, 32),
    "c03-cifar-256": _spec(cifar_network, 256, 3, 32, 32),
    "c06-simple": _spec(simple_network, 64, 1, 28, 28),
    "c10-resnet18": _spec(resnet18, 32, 3, 32, 32, normed=True),
    "c10-wrn-16-4": _spec(wide_resnet, 32, 3, 32, 32, normed=True),
    "c16-grouped": _spec(lambda: grouped_blocks(64, groups=8), 64, 64, 16, 16, normed=True),
    "c16-depthwise": _spec(lambda: grouped_blocks(64, groups=64), 64, 64, 16, 16, normed=True),
}

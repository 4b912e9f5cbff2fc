"""ResNet-20 for 32 x 32 images (He et al., CVPR 2016, Sec. 4.2: 3 stages of 3 blocks, 16-32-64 channels, shortcuts
without parameters: option A, every second pixel, new channels zero), and ResNet-18 with group norm."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import check
from fedsim.model.cnn import needs_images


class Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.stride, self.new_channels = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm1(self.conv1(x)).relu()
        out = self.norm2(self.conv2(out))
        if self.stride > 1 or self.new_channels:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        total: Tensor = out + x
        return total.relu()


class ResNet20(nn.Module):
    def __init__(self, norm: str, groups: int, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        check.choice("norm", norm, ("batch", "group"))
        check.integer("groups", groups, ge=1)
        if 16 % groups:
            raise check.BadValue("groups", groups, "must divide the narrowest stage's 16 channels: 1, 2, 4, 8 or 16")
        channels, _, _ = needs_images("resnet20", input_shape, 8)
        layer: Callable[[int], nn.Module] = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm = layer(16)
        blocks, width = [], 16
        for stage_width, stride in ((16, 1), (32, 2), (64, 2)):
            for i in range(3):
                blocks.append(Block(width, stage_width, stride if i == 0 else 1, layer))
                width = stage_width
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)  # He et al. initialise from N(0, 2/fan_in)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.conv(x)).relu())
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def resnet18_gn(groups: int, stem: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """torchvision's ResNet-18 with group norm for batch norm (Reddi et al. 2021, on CIFAR-100)."""
    from torchvision.models import resnet18  # here, since it takes longer to import than torch

    check.integer("groups", groups, ge=1)
    check.choice("stem", stem, ("cifar", "imagenet"))
    if 64 % groups:
        raise check.BadValue("groups", groups, "must divide the narrowest stage's 64 channels: 1, 2, 4 ... 64")
    channels, _, _ = needs_images("resnet18_gn", input_shape, 8)
    network = resnet18(num_classes=num_classes, norm_layer=partial(nn.GroupNorm, groups))
    size, stride, padding = (3, 1, 1) if stem == "cifar" else (7, 2, 3)
    network.conv1 = nn.Conv2d(channels, 64, size, stride, padding, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # as its other convolutions
    if stem == "cifar":
        network.maxpool = nn.Identity()
    return network  # type: ignore[no-any-return]

"""The convolutional networks of the papers."""

from torch import nn

from fedsim import check
from fedsim.model.dropout import Dropout


def needs_images(name: str, input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """(channels, height, width), or one clear line."""
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise check.InputError(
            f"model={name} needs images of at least {smallest} x {smallest}; this dataset's samples have shape "
            f"{'x'.join(map(str, input_shape))}"
        )
    channels, height, width = input_shape
    return channels, height, width


class CnnMnist(nn.Sequential):
    """FedNNNN, Table 3: conv 5x5 20, pool, conv 5x5 50, pool, 800-500-10 (for 28 x 28 images)."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        channels, h, w = needs_images("cnn_mnist", input_shape, 16)
        h, w = ((h - 4) // 2 - 4) // 2, ((w - 4) // 2 - 4) // 2
        super().__init__(
            nn.Conv2d(channels, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(50 * h * w, 500),
            nn.ReLU(),
            nn.Linear(500, num_classes),
        )


class CnnCifar(nn.Sequential):
    """FedNNNN, Table 4: (conv3 c, BN, ReLU) x 2 and pool for c = 32, 64, 128, then 2048-382-192-10 (32 x 32 images)."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        channels, h, w = needs_images("cnn_cifar", input_shape, 8)
        layers: list[nn.Module] = []
        for width in (32, 64, 128):
            for _ in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Flatten(), nn.Linear(128 * (h // 8) * (w // 8), 382), nn.ReLU()]
        layers += [nn.Linear(382, 192), nn.ReLU(), nn.Linear(192, num_classes)]
        super().__init__(*layers)


class CnnEmnist(nn.Sequential):
    """Two convolutions and two linear layers, for EMNIST. Reddi et al., "Adaptive Federated Optimization", Table 4:
    conv3 32, conv3 64, pool, dropout 1/4, dense 128, dropout 1/2, dense 62."""

    NAME = "cnn_emnist"

    def __init__(self, dropout: bool, input_shape: tuple[int, ...], num_classes: int) -> None:
        check.boolean("dropout", dropout)
        channels, h, w = needs_images(self.NAME, input_shape, 6)
        super().__init__(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            Dropout(0.25 if dropout else 0.0),
            nn.Flatten(),
            nn.Linear(64 * ((h - 4) // 2) * ((w - 4) // 2), 128),
            nn.ReLU(),
            Dropout(0.5 if dropout else 0.0),
            nn.Linear(128, num_classes),
        )


class CnnPfl(CnnEmnist):
    """The network of pfl-research's speed benchmark on CIFAR-10: these same layers (12544-128-10 after the pool),
    weights Xavier's uniform."""

    NAME = "cnn_pfl"

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(True, input_shape, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)


class Vgg9(nn.Sequential):
    """FedMA's VGG-9 (Wang et al. 2020, Table 5): conv3 32, 64, pool, 128, 128, pool, 256, 256, pool, then
    4096-512-512-10 (32 x 32 images), without batch norm or dropout."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        channels, h, w = needs_images("vgg9", input_shape, 8)
        layers: list[nn.Module] = []
        for widths in ((32, 64), (128, 128), (256, 256)):
            for width in widths:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Flatten(), nn.Linear(256 * (h // 8) * (w // 8), 512), nn.ReLU()]
        layers += [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, num_classes)]
        super().__init__(*layers)

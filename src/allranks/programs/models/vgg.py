"""VGG-16, configuration D of Simonyan and Zisserman 2014, arXiv 1409.1556.

Thirteen convolutions of 3 by 3 and three linear layers, which hold 124 of its 138 million
parameters: much communication for little computation. The tensors have the names and
shapes of torchvision's, so weights published for it load with `load_state_dict`.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # (channels, convolutions), then pooling
PIXELS = 224 // 2 ** len(STAGES)  # of a side after all poolings: 7


class VGG(nn.Module):
    """`features`: convolutions, ReLU and pooling, flat; `classifier`: linear layers and dropout."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        channels = [3, *(width for width, count in STAGES for _ in range(count))]
        convolutions = iter(pairwise(channels))
        layers: list[nn.Module] = []
        for _, count in STAGES:
            for _ in range(count):
                layers += [nn.Conv2d(*next(convolutions), 3, padding=1), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels[-1] * PIXELS**2, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, 224, 224) -> logits (n, classes)."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def vgg16(classes: int = 1000, dropout: float = 0.5) -> VGG:
    """VGG-16 without BatchNorm, for 224 by 224 pixels; 138,357,544 parameters with 1000 classes."""
    return VGG(classes, dropout)


def _initialise(model: nn.Module) -> None:
    """He et al. 2015, arXiv 1502.01852, for convolutions; N(0, 0.01²) for linear layers; biases 0.

    The paper started deep configurations from trained shallow ones, or from Glorot's weights; He's
    keep the variance through ReLU, so no such start is needed.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)

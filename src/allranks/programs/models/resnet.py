"""Residual networks: ResNet-20 for CIFAR, ResNet-50 and 152 for ImageNet. He et al. 2016.

arXiv 1512.03385. Those for ImageNet are the variant that all frameworks now train: the stride of a
block is in its convolution of 3 by 3, not in the first one (Goyal et al. 2017, arXiv 1706.02677).
It has the same parameters as the paper's, and their tensors have torchvision's names and shapes,
so weights published for it load with `load_state_dict`.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

EXPANSION = 4  # a bottleneck gives out this many times its width


class ResNet(nn.Module):
    """A first convolution, three or four stages of residual blocks, a mean over the image, `fc`."""

    def __init__(
        self,
        conv1: nn.Conv2d,
        maxpool: nn.Module,
        stages: list[nn.Sequential],
        fc: nn.Linear,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv1, nn.BatchNorm2d(conv1.out_channels)
        self.maxpool = maxpool
        self.layer1, self.layer2, self.layer3 = stages[:3]
        self.layer4 = stages[3] if len(stages) > 3 else nn.Sequential()
        self.fc = fc

    @property
    def checkpointed_blocks(self) -> list[nn.Module]:
        """The residual blocks of all stages."""
        return [*self.layer1, *self.layer2, *self.layer3, *self.layer4]

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, height, width) -> logits (n, classes)."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two convolutions, for CIFAR. Where the shape changes the shortcut is the paper's option A:

    every second pixel, and zeros for the channels that are new. It has no parameters.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.new_channels = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + shortcut)


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1; the shortcut projects where the shape changes (option B)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = EXPANSION * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.downsample = nn.Sequential()  # of nothing: x itself
        if stride > 1 or channels != wide:
            self.downsample.append(nn.Conv2d(channels, wide, 1, stride, bias=False))
            self.downsample.append(nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + shortcut)


def resnet20(classes: int = 10, zero_gamma: bool = False) -> ResNet:
    """269,722 parameters with 10 classes, the paper's 0.27 M: option A, nothing in shortcuts.

    Other numbers are other networks: 272,474 has projections with BatchNorm in its two shortcuts
    that change the shape (option B), 272,282 has them without BatchNorm, and 274,442 is Keras's,
    which has those, biases on all convolutions, and counts the running statistics.
    """
    conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    stages, channels = [], 16
    for stage, width in enumerate((16, 32, 64)):
        blocks = [
            BasicBlock(width if block else channels, width, 1 if block or not stage else 2)
            for block in range(3)
        ]
        stages.append(nn.Sequential(*blocks))
        channels = width
    model = ResNet(conv1, nn.Sequential(), stages, nn.Linear(channels, classes))
    return _initialised(model, zero_gamma)


def resnet50(classes: int = 1000, zero_gamma: bool = False) -> ResNet:
    """25,557,032 parameters with 1000 classes."""
    return _for_imagenet((3, 4, 6, 3), classes, zero_gamma)


def resnet152(classes: int = 1000, zero_gamma: bool = False) -> ResNet:
    """60,192,808 parameters with 1000 classes."""
    return _for_imagenet((3, 8, 36, 3), classes, zero_gamma)


def _for_imagenet(blocks: tuple[int, int, int, int], classes: int, zero_gamma: bool) -> ResNet:
    """The ResNet with so many bottlenecks in each stage."""
    conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
    stages, channels = [], 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        layers = nn.Sequential(Bottleneck(channels, width, 2 if stage else 1))
        channels = EXPANSION * width
        layers.extend(Bottleneck(channels, width, 1) for _ in range(count - 1))
        stages.append(layers)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return _initialised(ResNet(conv1, pool, stages, nn.Linear(channels, classes)), zero_gamma)


def _initialised(model: ResNet, zero_gamma: bool) -> ResNet:
    """He et al. 2015, arXiv 1502.01852, for convolutions; N(0, 0.01²) for `fc`, whose bias is 0.

    With `zero_gamma` every block starts as its shortcut: the scale of its last BatchNorm is 0,
    which helps large batches (Goyal et al. 2017, section 5.1).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, (BasicBlock, Bottleneck)) and zero_gamma:
            last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
            nn.init.zeros_(last.weight)
    nn.init.normal_(model.fc.weight, std=0.01)
    nn.init.zeros_(model.fc.bias)
    return model

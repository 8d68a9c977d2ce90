"""Networks for images: ResNet, EfficientNet-B2, VGG-16, and a small one for MNIST.

The tensors of all but the last have torchvision's names and shapes, so weights published for it
load with `load_state_dict`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# --- resnet --------------------------------------------------------------------------------------
# ResNet-20 for CIFAR, ResNet-50 and 152 for ImageNet. He et al. 2016, arXiv 1512.03385.
#
# Those for ImageNet are the variant that all frameworks now train: the stride of a block is in its
# convolution of 3 by 3, not in the first one (Goyal et al. 2017, arXiv 1706.02677). It has the same
# parameters as the paper's.


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
    """The model with its first weights. With `zero_gamma` every block starts as its shortcut.

    The scale of its last BatchNorm is 0 then, which helps large batches (Goyal et al. 2017, 5.1).
    """
    _initialise(model)
    for module in model.modules() if zero_gamma else ():
        if isinstance(module, (BasicBlock, Bottleneck)):
            last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
            nn.init.zeros_(last.weight)
    return model


def _initialise(model: nn.Module) -> None:
    """He et al. 2015, arXiv 1502.01852, for convolutions; N(0, 0.01²) for linear layers; biases 0.

    VGG's paper started deep configurations from trained shallow ones, or from Glorot's weights;
    He's keep the variance through ReLU, so no such start is needed.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
            nn.init.zeros_(module.bias)


# --- efficientnet --------------------------------------------------------------------------------
# EfficientNet-B2: Tan and Le 2019, arXiv 1905.11946. Depthwise convolutions, gates, dropped paths.
#
# The baseline B0, 1.1 times as wide and 1.2 times as deep. BatchNorm has torch's defaults, where
# the paper's code has eps 1e-3 and momentum 0.01.


BASELINE = (  # of B0: (expansion, kernel, stride, channels, blocks) of each stage
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
FIRST_CHANNELS, LAST_EXPANSION = 32, 4
DROPPED_PATHS = 0.2  # of the last block; less before it, in proportion


class EfficientNet(nn.Module):
    """B0, `width` times as wide and `depth` times as deep: the compound scaling of the paper."""

    def __init__(self, width: float, depth: float, dropout: float, classes: int) -> None:
        super().__init__()
        channels = scaled_channels(FIRST_CHANNELS, width)
        stages: list[nn.Module] = [_convolution(3, channels, 3, stride=2)]
        depths = [math.ceil(stage[-1] * depth) for stage in BASELINE]
        rates = iter(DROPPED_PATHS * block / sum(depths) for block in range(sum(depths)))
        for (expansion, kernel, stride, base, _), count in zip(BASELINE, depths, strict=True):
            wide = scaled_channels(base, width)
            blocks = nn.Sequential()
            for block in range(count):
                step = 1 if block else stride
                blocks.append(MBConv(channels, wide, expansion, kernel, step, next(rates)))
                channels = wide
            stages.append(blocks)
        stages.append(_convolution(channels, LAST_EXPANSION * channels, 1))
        self.features = nn.Sequential(*stages)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(LAST_EXPANSION * channels, classes)
        )
        _initialise_efficientnet(self)

    @property
    def checkpointed_blocks(self) -> list[nn.Module]:
        """The inverted bottlenecks of all stages."""
        return [module for module in self.features.modules() if isinstance(module, MBConv)]

    def forward(self, images: Tensor) -> Tensor:
        """Images (n, 3, height, width) -> logits (n, classes)."""
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits


class MBConv(nn.Module):
    """An inverted bottleneck: expand, convolve each channel, gate the channels, project.

    If the shape stays, the input is added; in training the block is then skipped for each sample
    with probability `drop`.
    """

    def __init__(
        self, channels: int, wide: int, expansion: int, kernel: int, stride: int, drop: float
    ) -> None:
        super().__init__()
        inner = expansion * channels
        self.block = nn.Sequential()
        if expansion > 1:
            self.block.append(_convolution(channels, inner, 1))
        self.block.append(_convolution(inner, inner, kernel, stride, groups=inner))
        self.block.append(SqueezeExcitation(inner, max(1, channels // 4)))
        self.block.append(_convolution(inner, wide, 1)[:2])  # no activation after it
        self.residual = stride == 1 and channels == wide
        self.stochastic_depth = StochasticDepth(drop if self.residual else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x)
        return self.stochastic_depth(output) + x if self.residual else output


class SqueezeExcitation(nn.Module):
    """A gate for each channel, from the mean of all. Hu et al. 2018, arXiv 1709.01507."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)  # (n, channels, 1, 1)
        gate: Tensor = self.fc2(F.silu(self.fc1(mean))).sigmoid()
        return x * gate


class StochasticDepth(nn.Module):
    """In training, sets whole samples to 0 with probability `drop`, and scales the others up.

    Huang et al. 2016, arXiv 1603.09382. It uses an `nn.Dropout` over one number per sample, so the
    engine keys the draw by shard, and the result does not depend on the ranks.
    """

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.sample_dropout = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.sample_dropout.p == 0:
            return x
        ones = torch.ones(len(x), *(1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
        scale: Tensor = self.sample_dropout(ones)  # 0 or 1 / (1 - drop)
        return x * scale


def efficientnet_b2(classes: int = 1000, dropout: float = 0.3) -> EfficientNet:
    """9,109,994 parameters with 1000 classes. The paper's images have 260 by 260 pixels."""
    return EfficientNet(1.1, 1.2, dropout, classes)


def scaled_channels(channels: int, width: float) -> int:
    """`width` times `channels`, to the nearest multiple of 8, but not below nine tenths of it."""
    wanted = channels * width
    nearest = max(8, int(wanted + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * wanted else nearest + 8


def _convolution(
    channels: int, wide: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution, BatchNorm, SiLU."""
    return nn.Sequential(
        nn.Conv2d(channels, wide, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(wide),
        nn.SiLU(),
    )


def _initialise_efficientnet(model: nn.Module) -> None:
    """As the paper's code: He et al. 2015 by fan-out, which for a depthwise convolution is k²;

    the classifier is uniform in ±1/√classes; biases 0.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = math.prod(module.kernel_size) * module.out_channels / module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.out_features)
            nn.init.uniform_(module.weight, -bound, bound)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# --- vgg -----------------------------------------------------------------------------------------
# VGG-16, configuration D of Simonyan and Zisserman 2014, arXiv 1409.1556.
#
# Thirteen convolutions of 3 by 3 and three linear layers, which hold 124 of its 138 million
# parameters: much communication for little computation.


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


# --- mnist ---------------------------------------------------------------------------------------
# The small convolutional network for MNIST that most frameworks show first.
#
# Two convolutions, one pooling, two linear layers: the network of PyTorch's `mnist` example and of
# the first Keras one. It returns logits, where PyTorch's example returns their log-softmax.


def mnist_cnn(classes: int = 10, dropout: tuple[float, float] = (0.25, 0.5)) -> nn.Sequential:
    """Images (n, 1, 28, 28) -> logits (n, classes); 1,199,882 parameters, torch's initial weights.

    `dropout` is the rate after the convolutions, and that before the last layer.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),  # (n, 64, 12, 12)
        nn.Dropout(dropout[0]),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Dropout(dropout[1]),
        nn.Linear(128, classes),
    )

"""EfficientNet-B2: Tan and Le 2019, arXiv 1905.11946. Depthwise convolutions, gates, dropped paths.

The baseline B0, 1.1 times as wide and 1.2 times as deep. The tensors have torchvision's names and
shapes, so weights published for it load with `load_state_dict`; as there, BatchNorm has torch's
defaults, where the paper's code has eps 1e-3 and momentum 0.01.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
        _initialise(self)

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


def _initialise(model: nn.Module) -> None:
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

"""The small convolutional network for MNIST that most frameworks show first.

Two convolutions, one pooling, two linear layers: the network of PyTorch's `mnist` example and of
the first Keras one. It returns logits, where PyTorch's example returns their log-softmax.
"""

from __future__ import annotations

from torch import nn


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

"""Models of published papers, each with the parameter count of its paper. Plain torch modules.

A task takes one from here, as it would from anywhere: nothing in them knows of ranks, and they
know nothing of the engine. What holds for all:

* Whatever is random while training is drawn by an `nn.Dropout` layer, so that the engine can give
  it to shards; nothing draws from the framework's own generator.
* Samples are dimension 0, and pooling is a plain mean: its gradient is deterministic on GPUs too,
  which that of adaptive pooling is not.
* `checkpointed_blocks`, where a model has it, lists the blocks it repeats: what activation
  checkpointing may compute again, one by one.
"""

from allranks.programs.models.efficientnet import efficientnet_b2
from allranks.programs.models.gpt import GPTShape, gpt, gpt2_124m
from allranks.programs.models.mnist import mnist_cnn
from allranks.programs.models.resnet import resnet20, resnet50, resnet152
from allranks.programs.models.vgg import vgg16
from allranks.programs.models.wide_and_deep import WideAndDeep

__all__ = [
    "GPTShape",
    "WideAndDeep",
    "efficientnet_b2",
    "gpt",
    "gpt2_124m",
    "mnist_cnn",
    "resnet20",
    "resnet50",
    "resnet152",
    "vgg16",
]

"""Models of published papers, each with the parameter count of its paper. Plain torch modules.

They depend neither on ranks nor on the engine. All of them follow these rules:

* Only `nn.Dropout` layers draw random numbers in training, so that the engine can key the draws by
  shard; no layer draws from the framework's own generator.
* Samples are dimension 0, and pooling is a plain mean, whose gradient is deterministic on GPUs;
  that of adaptive pooling is not.
* `checkpointed_blocks`, if a model has it, lists the repeated blocks, which activation
  checkpointing may recompute one by one.
"""

from allranks.programs.models.gpt import GPTShape, gpt, gpt2_124m
from allranks.programs.models.vision import (
    efficientnet_b2,
    mnist_cnn,
    resnet20,
    resnet50,
    resnet152,
    vgg16,
)
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

"""The torch engine: tasks, the trainer, and one file per strategy and reducer.

What a user imports: `Task` to describe a training, `Trainer` for a loop of one's own,
`cross_entropy` for a model whose output layer is cut.
"""

from allranks.torch.task import Task
from allranks.torch.tensor_parallel.vocabulary_loss import cross_entropy
from allranks.torch.trainer import Trainer

__all__ = ["Task", "Trainer", "cross_entropy"]

"""The torch engine: tasks, the trainer, and one file per strategy and reducer.

What a user imports: `Task` to describe a training, `Trainer` for a loop of one's own,
`MixtureOfExperts` as a layer of a model, `cross_entropy` for one whose output layer is cut.
"""

from allranks.torch.parallel.expert.mixture import MixtureOfExperts
from allranks.torch.parallel.tensor.layers import cross_entropy
from allranks.torch.task import Task
from allranks.torch.trainer import Trainer

__all__ = ["MixtureOfExperts", "Task", "Trainer", "cross_entropy"]

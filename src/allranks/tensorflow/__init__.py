"""The TensorFlow engine: Keras models, trained by the strategies of tf.distribute.

What a user imports: `Task` to describe a training, which needs no TensorFlow by itself, so that the
same task can be trained by the torch engine; and `from allranks.tensorflow.trainer import Trainer`
for a loop of one's own.
"""

from allranks.training.keras_task import Task

__all__ = ["Task"]

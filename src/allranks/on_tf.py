"""The TensorFlow engine was here: it is `allranks.tensorflow` now."""

raise ImportError("allranks.on_tf is now allranks.tensorflow: from allranks.tensorflow import Task")

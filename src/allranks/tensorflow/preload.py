"""Imported by the fork server only: TensorFlow and Keras, once, with what every rank would set.

A fork is safe after the import and before the first operation, so nothing is computed here.
"""

from __future__ import annotations

import os

from allranks.catalog import STRATEGIES, TENSORFLOW, load
from allranks.tensorflow.machine import quietly

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no page of notes in the log of every rank

with quietly():
    keras, tensorflow = load("keras"), load("tensorflow")
    for path in STRATEGIES[TENSORFLOW].values():
        load(path)
    _ = (keras.optimizers, keras.layers, tensorflow.distribute, tensorflow.data)  # made when named

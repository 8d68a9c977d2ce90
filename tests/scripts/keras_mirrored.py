"""Keras 3 under MirroredStrategy: one process, all of its devices, `fit`."""

import os
import socket

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
keras.utils.set_random_seed(0)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
inputs = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
target = np.tanh(inputs.sum(axis=1, keepdims=True))
history = model.fit(inputs, target, batch_size=32, epochs=6, verbose=0).history["loss"]
assert strategy.num_replicas_in_sync == 2
print(
    f"rank 0 of 1 on {socket.gethostname()}: loss {history[0]:.6f} -> {history[-1]:.6f}",
    flush=True,
)

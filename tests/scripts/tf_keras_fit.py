"""Legacy Keras (`tf_keras`): `fit` under MultiWorkerMirroredStrategy."""

import json
import os
import socket

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
import tf_keras

config = json.loads(os.environ["TF_CONFIG"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
tf_keras.utils.set_random_seed(0)
inputs = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
target = np.tanh(inputs.sum(axis=1, keepdims=True))
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
data = tf.data.Dataset.from_tensor_slices((inputs, target)).batch(64).with_options(options)
with strategy.scope():
    model = tf_keras.Sequential(
        [
            tf_keras.layers.Input((8,)),
            tf_keras.layers.Dense(32, activation="relu"),
            tf_keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer=tf_keras.optimizers.SGD(0.1), loss="mse")
history = model.fit(data, epochs=6, verbose=0).history["loss"]
print(
    f"rank {config['task']['index']} of {strategy.num_replicas_in_sync} "
    f"on {socket.gethostname()}: loss {history[0]:.6f} -> {history[-1]:.6f}",
    flush=True,
)

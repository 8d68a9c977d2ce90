"""TensorFlow parameter servers: the chief hands out steps, workers and servers only serve."""

import json
import os
import socket

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
config = json.loads(os.environ["TF_CONFIG"])
size = sum(len(addresses) for addresses in config["cluster"].values())
me = f"{resolver.task_type} {resolver.task_id}"

if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        start=True,
    )
    print(f"{me} serves", flush=True)
    server.join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = tf.Variable(tf.zeros([8, 1]))


def dataset():
    inputs = tf.random.stateless_normal([256, 8], seed=[0, 1])
    target = tf.reduce_sum(inputs, axis=1, keepdims=True)
    return tf.data.Dataset.from_tensor_slices((inputs, target)).repeat().batch(64)


@tf.function
def step(iterator):
    inputs, target = next(iterator)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(inputs @ weights - target))
    weights.assign_sub(0.05 * tape.gradient(loss, weights))
    return loss


iterator = iter(coordinator.create_per_worker_dataset(dataset))
futures = [coordinator.schedule(step, args=(iterator,)) for _ in range(40)]
coordinator.join()
history = [float(future.fetch()) for future in futures]
print(
    f"rank {os.environ['RANK']} of {size} on {socket.gethostname()}: "
    f"loss {history[0]:.6f} -> {history[-1]:.6f}",
    flush=True,
)

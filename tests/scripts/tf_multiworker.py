"""TensorFlow MultiWorkerMirroredStrategy with a loop of its own."""

import json
import os
import socket

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
config = json.loads(os.environ["TF_CONFIG"])
assert strategy.num_replicas_in_sync == len(config["cluster"]["worker"])

with strategy.scope():
    weights = tf.Variable(tf.zeros([8, 1]))
    bias = tf.Variable(tf.zeros([1]))


def dataset(context):
    tf.random.set_seed(0)
    inputs = tf.random.stateless_normal([256, 8], seed=[0, 1])
    target = tf.reduce_sum(inputs, axis=1, keepdims=True)
    data = tf.data.Dataset.from_tensor_slices((inputs, target))
    data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.repeat().batch(context.get_per_replica_batch_size(64))


@tf.function
def train_step(iterator):
    def step(batch):
        inputs, target = batch
        with tf.GradientTape() as tape:
            error = tf.square(inputs @ weights + bias - target)
            loss = tf.nn.compute_average_loss(error[:, 0], global_batch_size=64)
        context = tf.distribute.get_replica_context()
        gradients = tape.gradient(loss, [weights, bias])
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        weights.assign_sub(0.1 * summed[0])
        bias.assign_sub(0.1 * summed[1])
        return loss

    losses = strategy.run(step, args=(next(iterator),))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


iterator = iter(strategy.distribute_datasets_from_function(dataset))
history = [float(train_step(iterator)) for _ in range(20)]
print(
    f"rank {config['task']['index']} of {strategy.num_replicas_in_sync} "
    f"on {socket.gethostname()}: loss {history[0]:.6f} -> {history[-1]:.6f}",
    flush=True,
)

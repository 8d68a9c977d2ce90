"""JAX on several processes: one mesh over the devices of all, a step that is sharded over it."""

import os
import socket

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
mesh = Mesh(np.array(jax.devices()), ("batch",))
rank, size = jax.process_index(), jax.process_count()

random = np.random.default_rng(rank)
local = random.normal(size=(32, 8)).astype("float32")
sharding = NamedSharding(mesh, P("batch"))
inputs = jax.make_array_from_process_local_data(sharding, local)
target = jax.make_array_from_process_local_data(sharding, local.sum(axis=1))
weights = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P()))


@jax.jit
def step(weights, inputs, target):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((inputs @ w - target) ** 2))(weights)
    return weights - 0.1 * gradient, loss


losses = []
for _ in range(20):
    weights, loss = step(weights, inputs, target)
    losses.append(float(loss))
assert inputs.shape == (32 * size, 8)
print(
    f"rank {rank} of {size} on {socket.gethostname()}: loss {losses[0]:.6f} -> {losses[-1]:.6f}",
    flush=True,
)
jax.distributed.shutdown()

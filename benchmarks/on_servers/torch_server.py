"""A parameter server on torch.distributed, as one writes it in an afternoon: Gloo, send and recv.

    python torch_server.py RANK WORKERS STORE MODE SIZE

Rank 0 is the server, all others are workers. A worker sends its gradient in one flat tensor, and
receives the weights in another, which the parameters are views of: nothing is copied but the
gradients. `async`: the server applies a gradient from whoever sends one, and answers with the
weights. `sync`: it has one from each worker, applies the mean, and answers all. The server prints
the monotonic time after every step as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from sizes import RATE, SIZES, Size
from task import layers, samples
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD


def serve(workers: int, mode: str, size: Size) -> None:
    """Be the server for all steps."""
    weights = parameters_to_vector(layers(size.widths).parameters()).detach()
    weights.grad, received = torch.zeros_like(weights), torch.zeros_like(weights)
    optimizer = SGD([weights], lr=RATE)
    for worker in range(1, workers + 1):
        dist.send(weights, worker)
    times = []
    for _ in range(size.steps):
        if mode == "async":
            asks = [dist.recv(weights.grad)]
        else:
            asks = list(range(1, workers + 1))
            dist.recv(weights.grad, 1)
            for worker in asks[1:]:
                dist.recv(received, worker)
                weights.grad += received
            weights.grad /= workers
        optimizer.step()
        for worker in asks:
            dist.send(weights, worker)
        times.append(time.monotonic())
    print(json.dumps(times))


def work(rank: int, workers: int, mode: str, size: Size) -> None:
    """Be a worker for its part of the steps: the server counts them."""
    model = layers(size.widths)
    weights = parameters_to_vector(model.parameters()).detach()
    gradient = torch.empty_like(weights)
    vector_to_parameters(weights, model.parameters())
    inputs, labels = samples(size.widths)
    steps = size.steps // workers if mode == "async" else size.steps
    dist.recv(weights, 0)
    for step in range(steps):
        start = (step * workers + rank - 1) * size.batch % (len(labels) - size.batch)
        chosen = slice(start, start + size.batch)
        loss = F.cross_entropy(model(inputs[chosen]), labels[chosen])
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None], out=gradient)
        dist.send(gradient, 0)
        dist.recv(weights, 0)


def main() -> None:
    """Be one process of the training."""
    rank, workers, store, mode, name = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(workers) + 1
    )
    if rank == "0":
        serve(int(workers), mode, SIZES[name])
    else:
        work(int(rank), int(workers), mode, SIZES[name])
    dist.barrier()
    dist.destroy_process_group()


main()

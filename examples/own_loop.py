"""A training loop of one's own: from a model, an optimizer and tensors that are there already.

The same on one process and under any launcher that sets RANK and WORLD_SIZE: no rank arithmetic,
no sampler, no mean. `as_task.py` is the same training as a task.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from allranks.job.job import Job
from allranks.torch import Trainer


def waves(points: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the plane, and whether they lie above a wave."""
    random = torch.Generator().manual_seed(seed)
    points_in_plane = 4 * torch.rand(points, 2, generator=random) - 2
    return points_in_plane, (points_in_plane[:, 1] > points_in_plane[:, 0].mul(3).sin()).long()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    trainer = Trainer.from_parts(
        model,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=lambda output, batch: F.cross_entropy(output, batch[1], reduction="none"),
        train_data=waves(2000, seed=1),
        batch_size=200,  # of one step, over all ranks
        job=Job(bitwise=True),
    )
    with trainer:
        for batch in trainer.batches(epochs=5):
            result = trainer.step(batch)
            if trainer.world.is_leader and result.batch_index % 10 == 0:
                print(f"step {result.batch_index}: loss {result.loss:.4f}")
        weights = {name: tensor.clone() for name, tensor in trainer.weights()}
        leader, judged = trainer.world.is_leader, trainer.evaluate(waves(500, seed=2))
    if leader:
        print(f"held out: loss {judged['loss']:.4f}")
        save_file(weights, Path("own_loop.safetensors"))


if __name__ == "__main__":
    main()

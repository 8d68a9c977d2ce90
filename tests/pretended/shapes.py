"""Eight to 64 ranks of which one is real: torch's `fake` group takes collectives and sends nothing.

All ranks but this one are taken to have what it has. What can be seen is the order of the
collectives, their sizes, and the bytes that are counted: not what they bring.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.torch.comm import join as joining
from allranks.torch.parallel.sharded.call_order import CallOrder
from pretended.tasks import Small

Trail = list[tuple[str, int]]
STEPS = 2


class Collectives(TorchDispatchMode):
    """Notes each collective that torch is given, and the bytes of its tensors.

    What is gathered, or comes from all, is what this rank gave, and what should come from one is
    zero: no number is left to chance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trail: Trail = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
            self.trail.append((func.name(), sum(tensor.nbytes for tensor in given)))
        result = func(*args, **(kwargs or {}))
        if func.name() in ("c10d::_allgather_base_", "c10d::alltoall_base_"):
            received, own = args[:2]
            received.view(-1).copy_(own.view(-1).repeat(received.numel() // max(1, own.numel())))
        if func.name().startswith(("aten::empty", "aten::new_empty")):
            result.zero_()
        return result


def sent_by(strategy: str, rank: int, ranks: int) -> tuple[Trail, float, float]:
    """What one of so many ranks hands to its groups in a step: in order, counted, promised."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    task = Small(batch_size=2 * ranks, shards=ranks, samples=4 * ranks)
    job = Job(program="fake", strategy=strategy, ranks=ranks, steps=STEPS, threads=1, witness="off")
    try:
        with (
            Collectives() as seen,
            Trainer(task, job, world=World(rank=rank, size=ranks)) as trainer,
        ):
            for batch in trainer.batches():
                seen.trail.clear()
                trainer.step(batch)
            counted = trainer.comm.sent_bytes["gradients"] / STEPS
            return seen.trail, counted, trainer.strategy.promised_bytes()
    finally:
        dist.destroy_process_group()


def are_those_of_the_card(cases: list[tuple[str, int]]) -> None:
    """What is counted is what the card promises, and data parallel ranks make the same collectives.

    The last rank of a model that is cut has no samples in its tally: as nobody adds those of the
    first, it takes other ways.
    """
    torch.set_num_threads(1)
    joining._barrier_in = lambda store, world: None  # nobody else comes
    CallOrder.check_sums = lambda self, sums, ranks: None  # of ranks that are not there
    for strategy, ranks in cases:
        first, counted, promised = sent_by(strategy, 0, ranks)
        assert first and abs(counted - promised) <= 1, (strategy, ranks, counted, promised)
        if "tensor" not in strategy:
            last, _, _ = sent_by(strategy, ranks - 1, ranks)
            assert first == last, (strategy, ranks, first, last)

"""What runs in the ranks of the tests of `compare_replicas`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allranks.errors import ReplicasDiffer
from allranks.launcher.world import World
from allranks.torch.comm.join import join
from allranks.torch.witness.replicas import compare_replicas


def compare(argument: dict[str, Any]) -> None:
    """Three tensors, one of them other on the odd ranks; all ranks must be told the same."""
    world = World.from_environment()
    comm = join(world, torch.device("cpu"))
    tensors = {
        "a": torch.zeros(()),
        "b": torch.arange(6).view(2, 3).t(),
        "c": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 2),
        "flags": torch.tensor([True, False]),
    }
    odd = argument["odd"].get(str(world.rank))
    if odd == "+":
        tensors["+"] = torch.ones(2)
    elif odd:
        changed = tensors[odd] = tensors[odd].clone()
        changed.view(-1)[-1:].add_(1) if changed.ndim < 2 else changed[0, 0].add_(1)
    if argument["words"] is None:
        compare_replicas(tensors.items(), comm)
        if not argument["odd"]:
            assert comm.sent_bytes["control"] == (comm.size - 1) * (
                32 + 8
            )  # and the size of the text
    else:
        with pytest.raises(ReplicasDiffer) as raised:
            compare_replicas(tensors.items(), comm)
        assert argument["words"] in str(raised.value), raised.value
    comm.barrier()
    comm.leave()

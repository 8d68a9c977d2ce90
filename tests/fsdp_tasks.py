"""Tasks with what `fully_shard` can get wrong: tied weights, numbers, units, optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.strategies.mesh import SHARD, TENSOR
from allranks.torch import Task, Trainer
from allranks.torch.checkpoint.tree import local
from allranks.torch.optimizers.lamb import LAMB
from allranks.torch.optimizers.lars import LARS
from allranks.torch.sharding.dtensors import mesh_over

OPTIMIZERS = {
    "adamw": AdamW,
    "lars": LARS,
    "lamb": LAMB,
    "adagrad": Adagrad,
    "sgd": SGD,
    "adafactor": Adafactor,
}


@dataclass(kw_only=True)
class Deep(Task):
    """Blocks, an embedding that is the head too, weights that are one number, a GRU, odd sizes."""

    batch_size: int = 24
    epochs: int = 100
    clip_norm: float | None = 0.3
    optimizer_name: str = "adamw"
    units: str = "found"
    draws: bool = False
    skips: bool = False
    hides: str = ""

    def model(self) -> nn.Module:
        return _Hiding(HIDDEN[self.hides]) if self.hides else _Deep(self.draws, self.skips)

    def fsdp_units(self, model: nn.Module) -> Iterable[nn.Module] | None:
        return None if self.units == "found" else []

    def optimizer(self, model: nn.Module) -> Optimizer:
        kind: Any = OPTIMIZERS[self.optimizer_name]
        return kind(model.parameters(), lr=1e-2)  # type: ignore[no-any-return]

    def train_data(self) -> Tensor:
        return torch.randint(13, (101, 7), generator=torch.Generator().manual_seed(3))

    def eval_data(self) -> Tensor:
        return self.train_data()[:10]

    def inputs(self, batch: Any) -> Any:
        return batch[:, :-1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        output = output if isinstance(output, Tensor) else output.read()
        return F.cross_entropy(output.transpose(1, 2), batch[:, 1:], reduction="none")


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class _Deep(nn.Module):
    def __init__(self, draws: bool, skips: bool = False, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(3))
        self.gru = nn.GRU(width, width, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(width, 13)
        self.out.weight = self.embedding.weight
        self.draws, self.skips = draws, skips

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        blocks = list(self.blocks)
        if self.draws and self.training and int(text[0, 0]) % 2:  # another order on some ranks
            blocks = blocks[::-1]
        if self.skips and self.training and int(text[0, 0]) % 2:  # fewer of them
            blocks = [blocks[0], blocks[2]]
        for block in blocks:
            x = block(x)
        return self.out(self.scale * self.gru(x)[0])


class _Plain:
    """A tensor as an attribute, of which torch knows nothing."""

    def __init__(self, x: Tensor) -> None:
        self.all = [x]

    def read(self) -> Tensor:
        return self.all[0]


class _Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def read(self) -> Tensor:
        return self.x


class _Closed:
    def __init__(self, x: Tensor) -> None:
        self.read = lambda: x


HIDDEN: dict[str, Any] = {"plain": _Plain, "slots": _Slots, "closed": _Closed}


class _HidingBlock(_Block):
    kind: Any = None

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, Tensor) else x.read()
        return self.kind(super().forward(x))


class _Hiding(nn.Module):
    """Blocks that return objects of a class of their own, and so does the model."""

    def __init__(self, kind: Any, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.Sequential(*(_HidingBlock(width) for _ in range(3)))
        for block in self.blocks:
            block.kind = kind
        self.out = nn.Linear(width, 13)
        self.kind = kind

    def forward(self, text: Tensor) -> Any:
        return self.kind(self.out(self.blocks(self.embedding(text)).read()))


@dataclass(kw_only=True)
class Refused(Deep):
    """What `fully_shard` cannot cut or keep apart, by name."""

    what: str = "complex"

    def model(self) -> nn.Module:
        model: Any = super().model()
        if self.what in HIDDEN:
            model = _Hiding(HIDDEN[self.what])
        elif self.what == "complex":
            model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        elif self.what == "transposed":
            model.gru.weight_ih_l0 = nn.Parameter(torch.randn(5, 15).t())
        return model

    def fsdp_units(self, model: nn.Module) -> Iterable[nn.Module] | None:
        held: Any = model
        said = {"tied": [held.out], "stranger": [nn.Linear(2, 2)], "list": [held.blocks]}
        return said.get(self.what)

    def inputs(self, batch: Any) -> Any:
        return batch[:, :-1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        losses = super().loss(output, batch)
        if self.what == "backward" and losses.requires_grad:
            losses.sum().backward(retain_graph=True)
        return losses


def holds_its_part(name: str) -> None:
    """After a step the weights, gradients and moments of a rank are its part of the layers' part.

    No rank has held the model whole.
    """
    job = Job(strategy=name, precision="fp64")
    with Trainer(Deep(), job) as trainer:
        assert trainer.built.recorded is not None, trainer.built.why_whole
        trainer.step(next(trainer.batches()))
        strategy = trainer.strategy
        shards = strategy.mesh.size(SHARD)
        if "tensor" in name:
            cut: Any = strategy.model.get_parameter("blocks.0.up.weight")
            assert tuple(cut.shape) == (8 if strategy.axis(TENSOR).rank == 0 else 7, 5)
        whole = parts = rows = 0
        for parameter in strategy.model.parameters():
            whole += parameter.nbytes
            parts += local(parameter).untyped_storage().nbytes()
            rows += max(parameter[:1].nbytes, 8) if parameter.ndim else 8
        placed = strategy.placement(updated=True)
        held = [row for row in placed if row.kind == "parameter"]
        own = sum(row.bytes or 0 for row in held)
        assert own <= parts <= whole / shards + rows
        assert own == sum(row.gradient_bytes or 0 for row in held)
        steps = 8 * len(held)
        assert sum(row.optimizer_bytes or 0 for row in held) <= 2 * own + steps


def cuts_twice(store: str) -> None:
    """What is computed of cut tensors lies on the mesh of this time, not on one that is gone.

    The groups have other names the second time: the first mesh's is a group of one rank now.
    """
    world = World.from_environment()
    for turn, before in enumerate((0, 1)):
        dist.init_process_group(
            "gloo", init_method=f"file://{store}{turn}", rank=world.rank, world_size=world.size
        )
        for _ in range(before):
            dist.new_subgroups(1)
        mesh = mesh_over(dist.new_group(), "cpu", None, (SHARD,))
        part = distribute_tensor(torch.arange(6.0).view(6, 1), mesh, [Shard(0)])
        doubled: Any = part + part
        assert doubled.device_mesh.get_group().group_name == mesh.get_group().group_name
        assert doubled.full_tensor().sum().item() == 30.0
        dist.destroy_process_group()

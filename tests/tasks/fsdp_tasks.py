"""Tasks with what `fully_shard` can get wrong: tied weights, numbers, units, optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.strategies.mesh import SHARD, TENSOR
from allranks.torch import Task, Trainer
from allranks.torch.checkpoint.state import local
from allranks.torch.optimizers.layerwise import LAMB, LARS
from allranks.torch.strategies.layout import mesh_over
from allranks.training.callback import Callback

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


@dataclass(kw_only=True)
class Products(Deep):
    """Blocks whose weights are read by products of all kinds, and a count of copies in 16 bits.

    `twice`: one block is called again. `counts`: none may be there but within its block.
    """

    twice: bool = False
    counts: bool = True

    def model(self) -> nn.Module:
        return _OfProducts(self.twice, self.counts)

    def fsdp_units(self, model: nn.Module) -> Iterable[nn.Module] | None:
        assert isinstance(model, _OfProducts)
        return list(model.blocks)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if self.counts and torch.is_grad_enabled():
            check_no_copies(COPIES)
        return super().loss(output, batch)


COPIES: list[StorageWeakRef] = []
"""The memory of what autograd has kept in 16 bits, in the shape of a weight."""


def check_no_copies(memory: list[StorageWeakRef]) -> None:
    there = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in memory]
    held = {one._cdata: one.nbytes() for one in there if one is not None}
    assert memory or not torch.is_autocast_enabled("cpu"), "no product has kept a weight"
    assert not sum(held.values()), f"{sum(held.values())} bytes in 16 bits in the shape of weights"


class _OfProducts(nn.Module):
    def __init__(self, twice: bool, counts: bool, width: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(_Products(width) for _ in range(3))
        self.out = nn.Linear(width, 13)
        self.twice, self.counts = twice, counts
        shapes = {tuple(p.shape) for p in self.blocks.parameters() if p.ndim > 1}
        self.shapes = shapes | {shape[::-1] for shape in shapes} | {(width, width)}

    def forward(self, text: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            if tensor.itemsize == 2 and tuple(tensor.shape) in self.shapes:
                COPIES.append(StorageWeakRef(tensor.untyped_storage()))
            return tensor

        x = self.embedding(text)
        COPIES.clear()
        blocks = [*self.blocks, self.blocks[0]] if self.twice else list(self.blocks)
        for block in blocks:
            if not (self.counts and torch.is_grad_enabled()):
                x = block(x)
                continue
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
                x = block(x)
            check_no_copies(COPIES)
        found: Tensor = self.out(x)
        return found


class _Products(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.linear, self.frozen = nn.Linear(width, width), nn.Linear(width, width)
        self.frozen.requires_grad_(requires_grad=False)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(2, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        with torch.no_grad():  # a copy that it makes has no graph
            scale = self.linear(x).abs().amax()
        x = x / (1 + scale) + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.linear(F.gelu(self.linear(self.frozen(x))))
        x = x + F.gelu(x) @ self.linear.weight.T
        for expert in self.experts.unbind():
            x = x + F.gelu(x) @ expert
        return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)


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
        elif self.what == "scripted":
            model.out = torch.jit.script(nn.Linear(5, 13))
        elif self.what == "shared":
            model.blocks[0].up.weight = nn.Parameter(model.blocks[1].down.weight.detach().t())
        elif self.what == "hook":
            model.out.weight.register_hook(torch.clone)
        return model

    def optimizer(self, model: Any) -> Optimizer:
        if self.what == "late hook":
            model.blocks[0].up.weight.register_hook(torch.clone)
        return super().optimizer(model)

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
    """After a step a rank has its part of the layers' part: of weights, gradients and moments."""
    job = Job(strategy=name, precision="fp64")
    with Trainer(Deep(), job) as trainer:
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


class _Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x))


class _Looked(nn.Module):
    """Blocks, layers beside them, and `act`, which does with their weights what it likes."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.first, self.teacher, self.last = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 3)
        self.teacher.requires_grad_(False)
        self.blocks = nn.ModuleList(_Step() for _ in range(3))
        self.kept = [self.blocks[0].a.bias]
        self.act, self.steps = act, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        h = self.act(self, self.first(x) + self.teacher(x))
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.last(h)
        return out


def _ensemble(model: Any, x: Tensor) -> Tensor:
    each = [dict(block.named_parameters()) for block in model.blocks]
    stacked = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    out: Tensor = torch.vmap(lambda p: functional_call(model.blocks[0], p, (x,)))(stacked).mean(0)
    return out


def _made_by_another(model: Any, x: Tensor) -> Tensor:
    made = {name: x.mean() + torch.zeros_like(p) for name, p in model.first.named_parameters()}
    made = {"a.weight": made["weight"].mean() + x.new_zeros(16, 16), "a.bias": made["bias"]}
    out: Tensor = functional_call(model.blocks[0], made, (x,))
    return out


def _from(step: int, write: Any) -> Any:
    """From a step on, `write` under `no_grad`."""

    @torch.no_grad()
    def act(model: Any, x: Tensor) -> Tensor:
        if model.training and model.steps >= step:
            write(model)
        return x

    return lambda model, x: act(model, x.detach()) * 0 + x


def _assign(model: Any) -> None:
    model.teacher.weight = nn.Parameter(model.teacher.weight * 0.9, requires_grad=False)


def _set_data(model: Any) -> None:
    model.teacher.weight.data = model.teacher.weight.data * 0.9


def _by_numpy(model: Any) -> None:
    model.teacher.weight.detach().numpy()[:] *= 0.9


def _in_evaluation(model: Any, x: Tensor) -> Tensor:
    if not model.training:
        model.teacher.weight.mul_(0.9)
    return x


def _sizes(model: Any, x: Tensor) -> Tensor:
    kind, weights = next(model.blocks.parameters()).dtype, list(model.parameters())
    return x.to(kind) * len(weights) / 10 * model.blocks[1].a.weight.shape[0] / 16


IN_FORWARD: dict[str, Any] = {
    "reads a block": lambda m, x: F.linear(x, m.blocks[0].a.weight),
    "sums up blocks": lambda m, x: x * (1 + sum(p.pow(2).sum() for p in m.blocks.parameters())),
    "ensemble": _ensemble,
    "hypernetwork": _made_by_another,
    "kept from before": lambda m, x: x + m.kept[0],
    "lerp": _from(1, lambda m: m.teacher.weight.lerp_(m.first.weight, 0.1)),
    "late lerp": _from(4, lambda m: m.teacher.weight.lerp_(m.first.weight, 0.1)),
    "late data": _from(4, lambda m: m.teacher.weight.data.mul_(0.9)),
    "late other data": _from(4, _set_data),
    "late assignment": _from(4, _assign),
    "late unfreezing": _from(4, lambda m: m.teacher.requires_grad_(True)),
    "numpy": _from(1, _by_numpy),
    "in evaluation": _in_evaluation,
    "sizes": _sizes,
    "reads data": lambda m, x: x * (1 + 0.1 * float(m.first.weight.data.norm())),
    "another layer's weights": lambda m, x: (
        x + functional_call(m.last, {"weight": m.last.weight * 0.5}, (x,)).mean(1, keepdim=True)
    ),
}


STARTS: dict[str, Any] = {
    "transposed": lambda: torch.randn(16, 16).t(),
    "orthogonal": lambda: torch.linalg.qr(torch.randn(16, 16))[0],
    "a slice": lambda: torch.randn(16, 32)[:, ::2],
}


@dataclass(kw_only=True)
class Looks(Task):
    """User code that reads and writes weights, in forward and elsewhere."""

    batch_size: int = 22
    epochs: int = 100
    what: str = "nothing"
    start: str = "usual"
    units: str = "found"

    @property
    def loss_over(self) -> str:  # type: ignore[override]
        return "batch" if self.what.endswith("over the batch") else "sample"

    def fsdp_units(self, model: nn.Module) -> Iterable[nn.Module] | None:
        return None if self.units == "found" else []

    def model(self) -> nn.Module:
        self.net = _Looked(IN_FORWARD.get(self.what, lambda model, x: x))
        weight: Any = STARTS.get(self.start)
        if weight is not None:
            self.net.blocks[1].a.weight = nn.Parameter(weight())
        if self.start == "empty":
            self.net.blocks[0].nothing = nn.Parameter(torch.zeros(0, 16))
            self.net.nothing = nn.Parameter(torch.zeros(16, 0))
        return self.net

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def train_data(self) -> Any:
        rows = torch.randn(101, 6, generator=torch.Generator().manual_seed(1))
        return rows, (rows[:, 0] > 0).long()

    def eval_data(self) -> Any:
        return self.train_data()

    def inputs(self, batch: Any) -> Any:
        return batch[0] * self.net.last.weight.norm() if self.what == "inputs" else batch[0]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        losses = F.cross_entropy(output, batch[1], reduction="none")
        what = self.what.removesuffix(" over the batch")
        read = {"loss of a block": self.net.blocks[0].a, "loss": self.net.last}.get(what)
        return losses if read is None else losses + 0.1 * read.weight.norm()

    def metrics(self, output: Tensor, batch: Any) -> Any:
        read = {"metrics of a block": self.net.blocks[0].a, "metrics": self.net.last}
        if self.what not in read:
            return {}
        return {"norm": (read[self.what].weight.norm() * len(output), len(output))}

    def callbacks(self) -> list[Callback]:
        return [_Changes(self.what)]


class _Changes(Callback):
    def __init__(self, what: str) -> None:
        self.what = what

    @torch.no_grad()
    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        model = trainer.strategy.model
        if self.what == "unfreezes" and batch.index == 3:
            model.teacher.requires_grad_(True)
        if self.what == "moves its teacher":
            model.teacher.weight.lerp_(model.first.weight, 0.1)

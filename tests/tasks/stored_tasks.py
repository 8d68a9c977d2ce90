"""Models of some MB, and what a rank stores of them, counted where torch makes it."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allranks.programs.models.gpt import GPTShape, gpt
from allranks.strategies.card import Contents
from allranks.torch import MixtureOfExperts, Task
from contract_workers import _trainer

WIDTH, SAMPLES = 256, 32
ADAMW = 2  # bytes that it keeps for each byte of a weight


class Storages(TorchDispatchMode):
    """Every storage that an operator has made since this was entered, for as long as it is there.

    Nobody asks a strategy: what torch has not let go of is counted, whoever holds it, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does to its parts comes here
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu":
                storage = StorageWeakRef(tensor.untyped_storage())
                self._made[storage.cdata] = storage
        return made

    def live_bytes(self) -> int:
        gc.collect()
        found = map(torch.UntypedStorage._new_with_weak_ptr, self._made)
        return sum(storage.nbytes() for storage in found if storage is not None)


@dataclass(kw_only=True)
class Rows(Task):
    """Eight equal layers: every strategy that cuts a stack cuts it evenly."""

    batch_size: int = 8

    def model(self) -> nn.Module:
        layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
        return nn.Sequential(*(module for pair in layers for module in pair))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-3)

    def train_data(self) -> Any:
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
        return x, x

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output - batch[1]).square().mean(1)

    def cut(self, model: nn.Module) -> list[nn.Parameter]:
        """The weights of which not every rank has all."""
        return list(model.parameters())


class Towers(Rows):
    """Two branches, and a layer that is on every rank."""

    def model(self) -> nn.Module:
        return _Towers()

    def branches(self, model: nn.Module) -> list[str]:
        return ["left", "right"]

    def cut(self, model: Any) -> list[nn.Parameter]:
        return [*model.left.parameters(), *model.right.parameters()]


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.left(x) + self.right(x))
        return found


class Mixed(Rows):
    """Eight experts, and a layer that is on every rank."""

    def model(self) -> nn.Module:
        return _Mixed()

    def cut(self, model: Any) -> list[nn.Parameter]:
        router = {id(parameter) for parameter in model.mixture.router.parameters()}
        return [p for p in model.mixture.parameters() if id(p) not in router]


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixture = nn.Linear(WIDTH, WIDTH), MixtureOfExperts(WIDTH, WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        found: Tensor = hidden + self.mixture(hidden).output
        return found


class Sentences(Rows):
    """A transformer: its norms and positions are cut by no `tensor`."""

    def model(self) -> nn.Module:
        return gpt(GPTShape(vocabulary=2048, context=16, width=128, layers=4, heads=4))

    def train_data(self) -> Any:
        letters = torch.randint(2048, (SAMPLES, 17), generator=torch.Generator().manual_seed(0))
        return letters[:, :-1], letters[:, 1:]

    def loss(self, output: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.mT, batch[1], reduction="none").mean(1)

    def cut(self, model: Any) -> list[nn.Parameter]:
        rest = [model.position_embedding, *(m for m in model.modules() if type(m) is nn.LayerNorm)]
        ids = {id(parameter) for module in rest for parameter in module.parameters()}
        return [p for p in model.parameters() if id(p) not in ids]


class Encoder(Rows):
    """Torch's own encoder: attention by its heads, and norms that are cut by no `tensor`."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def train_data(self) -> Any:
        x = torch.randn(SAMPLES, 2, WIDTH, generator=torch.Generator().manual_seed(0))
        return x, x

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output - batch[1]).square().mean((1, 2))

    def cut(self, model: Any) -> list[nn.Parameter]:
        names = ("norm1", "norm2", "out_proj.bias", "linear2.bias")
        return [p for name, p in model.named_parameters() if not any(n in name for n in names)]


def stores_what_the_card_says(argument: dict[str, Any]) -> None:
    """Between two steps. With `keeps` somebody holds the whole weights beside: too much."""
    task, strategy = globals()[argument["task"]](), argument["job"]["strategy"]
    model = task.model()
    cut = sum(parameter.nbytes for parameter in task.cut(model))
    rest = sum(parameter.nbytes for parameter in model.parameters()) - cut
    with Storages() as storages, _trainer({**argument, "module": __name__}) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        trainer.evaluate(task.train_data())  # what it gathers is gone after it
        if strategy == "fsdp" and argument["task"] == "Sentences":
            with torch.no_grad():  # as a callback may
                trainer.strategy.model(task.train_data()[0])
        del batch
        master = dict(trainer.weights()) if argument.get("keeps") else {}
        stored, has = trainer.strategy.card.stored, Contents(cut, rest, ADAMW, trainer.world.size)
        assert stored is not None
        wanted = stored.of(has, trainer.strategy.context.options)
        until = time.monotonic() + 10  # a thread of Gloo lets go of its tensors a moment later
        while not master and storages.live_bytes() > 1.05 * wanted and time.monotonic() < until:
            time.sleep(0.01)
        assert (storages.live_bytes() == pytest.approx(wanted, rel=0.05)) is not bool(master), (
            f"{strategy} stores {storages.live_bytes()} bytes, and its card says {wanted}"
        )

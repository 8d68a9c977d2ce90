"""Models made of branches, and those that cannot be run so."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import contract_workers
from contract_tasks import Images, Plain

WIDTH = 6


class Tower(nn.Module):
    """BatchNorm and dropout in a branch, which returns a dict; a part of it nobody uses."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, hidden, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(hidden), nn.Dropout(0.3)
        self.out = nn.Linear(hidden, WIDTH, bias=False)
        self.unused = nn.Linear(hidden, 2)

    def forward(self, values: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.drop(torch.relu(self.norm(self.first(values))))
        return {"out": [self.out(hidden) * scale], "unused": self.unused(hidden)}


class Net(nn.Module):
    """A trunk before, between and after; one input for all; one tower twice; tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Linear(72, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh()
        )
        self.towers = nn.ModuleDict({"a": Tower(8), "b": Tower(8), "c": Tower(4)})
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.2)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.towers["b"].out.weight = self.towers["a"].out.weight  # on two ranks
        self.towers["c"].gate = self.gate  # in the trunk, too
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images.flatten(1))
        found = [tower(stem)["out"][0] for tower in self.towers.values()]
        again = self.towers["a"](self.gate(stem[:, [1, 0, 2, 3, 4, 5]]), scale=0.5)["out"][0]
        with torch.no_grad():
            still = self.towers["c"](stem)["out"][0]
        joined = self.relu(found[0]) + found[1] * found[2].sigmoid() + again
        return self.head(self.drop(joined) + stem + still)


@dataclass(kw_only=True)
class Towers(Images):
    """Everything at once."""

    def model(self) -> nn.Module:
        return Net()

    def branches(self, model: nn.Module) -> Any:
        return ["towers.a", "towers.b", "towers.c"]

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return [model.towers["a"], model.head]


class Placed(Towers):
    """The rank of each branch is said."""

    def branches(self, model: nn.Module) -> Mapping[str, int]:
        return {"towers.a": 1, "towers.b": 0, "towers.c": 1}


class Adversarial(Towers):
    """A backward pass of the task's own in forward, through the branches."""

    def model(self) -> nn.Module:
        return Moved()


class Moved(Net):
    def forward(self, images: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(images)
        images = images.detach().requires_grad_()
        (moved,) = torch.autograd.grad(super().forward(images).square().sum(), images)
        return super().forward(images.detach() + 0.1 * moved)


class Frozen(Towers):
    """A tower that is not trained, and no gradient for the stem."""

    def model(self) -> nn.Module:
        model = Net()
        model.towers["b"].requires_grad_(False)
        model.stem.requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class Meeting(nn.Linear):
    """A branch that goes on in forward, and in backward, when the other one is there as well."""

    def __init__(self, name: str, folder: str) -> None:
        super().__init__(4, 4)
        self.name, self.folder, self.calls = name, folder, 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += self.training
        apply: Any = Met.apply
        met: Tensor = apply(super().forward(values), self)
        return met

    def meet(self, where: str) -> None:
        """Wait for the other branch; the first step tells shapes, one branch after the other."""
        if not self.folder or not self.training or self.calls < 2:
            return
        Path(self.folder, f"{self.name}-{where}-{self.calls}").touch()
        other = Path(self.folder, f"{'ba'['ab'.index(self.name)]}-{where}-{self.calls}")
        for _ in range(2000):
            if other.exists():
                return
            time.sleep(0.01)
        raise AssertionError(f"{self.name} is alone in {where}")


class Met(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, at: Meeting) -> Tensor:
        ctx.at = at
        at.meet("forward")
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.at.meet("backward")
        return gradient, None


class Both(nn.Module):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(4, 4), Meeting("a", folder), Meeting("b", folder)

    def forward(self, values: Tensor) -> Tensor:
        stem = self.stem(values)
        left, right = self.a(stem[:, [3, 2, 1, 0]]), self.b(stem.tanh())
        return (left * right).sum(1, keepdim=True)


@dataclass(kw_only=True)
class Meetings(Plain):
    """Two branches that only go on together, each with an input of its own."""

    shards: int = 1
    meet: str = ""

    def model(self) -> nn.Module:
        return Both(self.meet)

    def branches(self, model: nn.Module) -> Any:
        return ["a", "b"]


class Nested(Towers):
    def branches(self, model: nn.Module) -> Any:
        return ["towers.a", "towers.a.first"]


class Listed(Towers):
    def branches(self, model: nn.Module) -> Any:
        return ["towers", "head"]


class Unknown(Towers):
    def branches(self, model: nn.Module) -> Any:
        return ["towers.a", "towers.d"]


class Far(Towers):
    def branches(self, model: nn.Module) -> Any:
        return {"towers.a": 0, "towers.b": 2}


class Unnamed(Towers):
    def branches(self, model: nn.Module) -> Any:
        return None


class Changed(Towers):
    """Two branches, a model of which says what it does with them."""

    def model(self) -> nn.Module:
        return Pair(type(self).__name__)

    def branches(self, model: nn.Module) -> Any:
        return ["left", "right"]


class Pair(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, drop = what, nn.Dropout(0.5)
        self.stem = nn.Linear(72, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        if what == "OneDropout":
            self.left.append(drop)
            self.right.append(drop)
        if what == "Inplace":
            self.right.insert(0, nn.ReLU(inplace=True))
        if what == "Written":
            self.left[0].requires_grad_(False)  # keeps nothing of its input for backward
        if what == "Counting":
            self.right.append(Counter())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, images: Tensor) -> Tensor:
        values = self.stem(images.flatten(1))
        if self.what == "Piecewise":
            return self.head(self.left(values) + self.right[0](values))
        left = self.left(values)
        if self.what == "Written":
            values.mul_(2)
        right = self.right(values)
        if self.what == "Applied":
            apply: Any = Doubled.apply
            right = apply(right)
        return self.head(left + right)


class Counter(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        self.count += 1
        return values


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return 2 * values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class OneDropout(Changed): ...


class Inplace(Changed): ...


class Counting(Changed): ...


class Piecewise(Changed): ...


class Written(Changed):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class Applied(Changed): ...


def bytes_and_memory(argument: dict[str, Any]) -> None:
    """A rank holds the weights of its branches and of the trunk, and what is kept for those."""
    with contract_workers._trainer(argument) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        model, rank = trainer.strategy.model, trainer.world.rank
        elsewhere = {name for name, p in model.named_parameters() if p.is_meta}
        others = ("right.", "left.")[rank]
        assert elsewhere == {n for n, _ in model.named_parameters() if n.startswith(others)}
        assert elsewhere
        kept = trainer.strategy.step.optimizer.state
        assert {p.is_meta for p in kept} == {False}

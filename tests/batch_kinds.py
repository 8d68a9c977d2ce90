"""Batches and outputs of every kind, each of `x` and `y`, and a task that trains with them."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from allranks.torch import Task

SAMPLES = 45
Named = namedtuple("Named", "x y")


class ByAttribute:
    """Entries that are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self["data" if name == "data" else name]  # type: ignore[index]
        except KeyError:
            raise AttributeError(name) from None


class Attributes(ByAttribute, OrderedDict[str, Any]):
    """An ordered dict with an attribute of its own, which is never among the entries."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x=x, y=y)
        self.__dict__["note"] = "kept"


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__({"x": x, "y": y})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As transformers' class of that name: its fields are its entries, and no other keys."""

    x: Any = None
    y: Any = None

    def __post_init__(self) -> None:
        for name in ("x", "y"):
            super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys():
            super().__setitem__(name, value)
        super().__setattr__(name, value)


@dataclass
class Data:
    x: Any
    y: Any
    note: str = "kept"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any


@dataclass(init=False)
class Computed:
    x: Any
    y: Any
    both: list[Any] = field(default_factory=list)

    def __init__(self, given: tuple[Tensor, Tensor]) -> None:
        self.x, self.y = given
        self.both = [{"y": self.y}]


class Plain:
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class Slots:
    __slots__ = ("__hidden", "x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.__hidden = x, y, "kept"


class Registered:
    """Known to torch, which is told of no attribute."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


_pytree.register_pytree_node(
    Registered, lambda value: ([value.x, value.y], None), lambda items, _: Registered(*items)
)


class Movable(Plain):
    """With the methods that an object may have for it; `to` moves the object itself."""

    def to(self, device: Any) -> Movable:
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self

    def pin_memory(self) -> Movable:
        return Movable(self.x.pin_memory(), self.y.pin_memory())

    def clone(self) -> Movable:
        return self


class Shared(Plain):
    """Its copy is the same object."""

    def __deepcopy__(self, memo: Any) -> Shared:
        return self


class Locked(Plain):
    """It cannot be copied."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x, y)
        self.lock = threading.Lock()


class WithArrays(Plain):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x.numpy().copy(), y)


def grouped(x: Any, y: Any) -> Any:
    made = defaultdict(list)
    made["x"], made["y"] = x, y
    return made


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda x, y: torch.cat([x, y[:, None]], 1),
    "tuple": lambda x, y: (x, y),
    "named tuple": Named,
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered dict": lambda x, y: OrderedDict(x=x, y=y),
    "default dict": grouped,
    "dict with attributes": Attributes,
    "user dict": Encoding,
    "model output": ModelOutput,
    "dataclass": Data,
    "frozen": Frozen,
    "with an init": lambda x, y: Computed((x, y)),
    "registered": Registered,
    "slots": Slots,
    "object": Plain,
    "movable": Movable,
    "nested": lambda x, y: {"in": [Plain(Data(x, y), None)]},
}
UNMOVED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "arrays": WithArrays,
    "shared": Shared,
    "locked": Locked,
}
ALL = {**KINDS, **UNMOVED}


def of(batch: Any, name: str) -> Any:
    """`x` or `y` of a batch of any kind."""
    if isinstance(batch, Tensor):
        return batch[:, :-1] if name == "x" else batch[:, -1]
    if isinstance(batch, tuple):
        return batch["xy".index(name)]
    if isinstance(batch, dict) and "in" in batch:
        return getattr(batch["in"][0].x, name)
    if isinstance(batch, (UserDict, dict)):
        return batch[name]
    return getattr(batch, name)


def put(batch: Any, name: str, value: Any) -> None:
    """Set `x` of a batch, where its kind can."""
    if isinstance(batch, dict) and "in" in batch:
        batch["in"][0].x.x = value
    elif isinstance(batch, (dict, UserDict)):
        batch[name] = value
    else:
        setattr(batch, name, value)


class Writes(nn.Module):
    """Two layers, which write on their batch: in `place`, by `attribute`, or not."""

    def __init__(self, how: str, output: str = "") -> None:
        super().__init__()
        self.how, self.output = how, output
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, batch: Any) -> Any:
        x = of(batch, "x")
        if self.how == "attribute":
            put(batch, "x", np.asarray(x) * 2 if isinstance(x, np.ndarray) else x * 2)
            x = of(batch, "x")
        elif self.how == "place":
            x *= 2
        else:
            x = x * 2
        hidden = torch.tanh(self.first(torch.as_tensor(x, dtype=self.first.weight.dtype)))
        return ALL[self.output](self.second(hidden), hidden) if self.output else self.second(hidden)


@dataclass(kw_only=True)
class Kinds(Task):
    """Batches of a `kind` that the model writes on as `how` says; its output may be of one, too."""

    batch_size: int = 12
    epochs: int = 9
    shards: int = 4
    kind: str = "dataclass"
    how: str = "clean"
    output: str = ""

    def model(self) -> nn.Module:
        return Writes(self.how, self.output)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_data(self) -> Any:
        x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
        return [(row, int(row.sum() > 0)) for row in x]

    def eval_data(self) -> Any:
        return self.train_data()[:7]

    def collate(self, samples: list[Any]) -> Any:
        x = torch.stack([row for row, _ in samples])
        return ALL[self.kind](x, torch.tensor([label for _, label in samples]))

    def inputs(self, batch: Any) -> Any:
        return (batch,)

    def loss(self, output: Any, batch: Any) -> Tensor:
        logits = of(output, "x") if self.output and self.output != "tensor" else output
        losses = F.cross_entropy(logits[:, :3], of(batch, "y").long(), reduction="none")
        if self.loss_over == "batch" and self.output != "tensor":
            losses = losses + 0.1 * of(output, "y").mean(0).square().sum()
        return losses


class OverBatch(Kinds):
    loss_over = "batch"

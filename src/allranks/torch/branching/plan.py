"""The rank of each branch of a model, as the task says, with checks. No communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from allranks.errors import RequestError, nearest
from allranks.torch.model.layers import OfShard, every_layer, own_kind
from allranks.torch.task import Task


@dataclass(frozen=True)
class Branch:
    """A branch of a model, and the rank of the line that runs it."""

    number: int
    name: str
    module: nn.Module
    home: int


@dataclass(frozen=True)
class BranchPlan:
    """The branches of a model, in the order in which the task names them.

    `around` are the modules that contain a branch, `trunk` the largest ones that contain none.
    """

    branches: tuple[Branch, ...]
    around: tuple[nn.Module, ...]
    trunk: tuple[nn.Module, ...]

    def holders(self, model: nn.Module, ranks: int) -> dict[str, list[int]]:
        """The ranks with each parameter: its home, or all if the trunk or other homes use it."""
        everyone = list(range(ranks))
        outside = set(map(id, self._outside()))
        homes: dict[int, set[int]] = {}
        for branch in self.branches:
            for parameter in branch.module.parameters():
                homes.setdefault(id(parameter), set()).add(branch.home)
        holders = {}
        for name, parameter in model.named_parameters():
            ranks_of = homes.get(id(parameter), set())
            is_alone = len(ranks_of) == 1 and id(parameter) not in outside
            holders[name] = list(ranks_of) if is_alone else everyone
        return holders

    def _outside(self) -> Iterator[nn.Parameter]:
        """The parameters that are used outside of the branches."""
        for module in self.around:
            yield from module.parameters(recurse=False)
        for module in self.trunk:
            yield from module.parameters()


def holds(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a parameter is one of a module's."""
    return any(other is parameter for other in module.parameters())


def plan_of(task: Task, model: nn.Module, ranks: int, asked: str) -> BranchPlan:
    """The task's plan; raises `RequestError` if it does not fit the model and the ranks."""
    names = task.branches(model)
    if not names:
        raise _refused(
            asked,
            f"no branches of {type(model).__name__}",
            "only the task knows which parts do not wait for each other",
            f"name them in branches(self, model) of the task{_candidates(model)}",
        )
    modules = {name: _module(model, name, asked) for name in names}
    _check_apart(modules, asked)
    homes = dict(names) if isinstance(names, Mapping) else _dealt(modules, names, ranks)
    _check_homes(homes, ranks, asked)
    branches = tuple(
        Branch(number, name, module, homes[name])
        for number, (name, module) in enumerate(modules.items())
    )
    ids = {id(branch.module) for branch in branches}
    around = [
        m for m in model.modules() if ids & {id(inner) for inner in m.modules() if inner is not m}
    ]
    placed = ids | set(map(id, around))
    trunk = [child for m in around for child in m.children() if id(child) not in placed]
    plan = BranchPlan(branches, tuple(around), tuple(dict.fromkeys(trunk)))
    _check_layers(plan, asked)
    return plan


def _module(model: nn.Module, name: str, asked: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    module = modules.get(name)
    if module is None or not name:
        raise _refused(
            asked,
            f"{name!r} in branches(model) of the task",
            "a branch is a module within the model",
            nearest(name, [known for known in modules if known]),
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        members = ", ".join(f"{name}.{member}" for member, _ in module.named_children())
        raise _refused(
            asked,
            f"{name!r}, a {own_kind(module).__name__}, in branches(model) of the task",
            "it is never called itself",
            f"name its members: {members}",
        )
    if any(hasattr(inner, "_flatten_layers") for inner in module.modules()):
        raise _refused(
            asked,
            f"Keras layers in {name!r}",
            "Keras calls them out of torch's sight",
            "--strategy ddp",
        )
    return module


def _check_apart(modules: Mapping[str, nn.Module], asked: str) -> None:
    """Raise `RequestError` for a branch within another one, or named twice."""
    for name, module in modules.items():
        inside = {id(inner) for inner in module.modules()}
        for other, inner in modules.items():
            if other != name and id(inner) in inside:
                raise _refused(
                    asked,
                    f"{other!r} within {name!r} in branches(model) of the task",
                    "what is within a branch runs where the branch does",
                    "name one of the two",
                )


def _dealt(modules: Mapping[str, nn.Module], names: Sequence[str], ranks: int) -> dict[str, int]:
    """Assign each branch, the largest first, to the rank with the fewest bytes of weights."""
    size = {name: sum(p.nbytes for p in modules[name].parameters()) for name in names}
    load, homes = [(0, 0, rank) for rank in range(ranks)], {}
    for name in sorted(size, key=lambda name: -size[name]):
        nbytes, count, rank = min(load)
        load[load.index((nbytes, count, rank))] = nbytes + size[name], count + 1, rank
        homes[name] = rank
    return homes


def _check_homes(homes: Mapping[str, int], ranks: int, asked: str) -> None:
    for name, home in homes.items():
        if type(home) is not int or not 0 <= home < ranks:
            raise _refused(
                asked,
                f"{name!r} on rank {home!r}, of {ranks}",
                "the branches are run by these ranks",
                f"numbers from 0 to {ranks - 1}, or a list of names alone",
            )
    if idle := sorted(set(range(ranks)) - set(homes.values())):
        raise _refused(
            asked,
            f"{len(homes)} branches, and none for rank {idle[0]}",
            "it would compute what all others compute, and nothing else",
            f"fewer ranks: {len(set(homes.values()))}, or name more branches",
        )


def _check_layers(plan: BranchPlan, asked: str) -> None:
    """Raise `RequestError` for a layer in two places: it counts its calls within one process."""
    places = [(repr(b.name), b.module) for b in plan.branches]
    places += [("the rest of the model", module) for module in plan.trunk]
    place_of: dict[int, str] = {}
    for place, module in places:
        for layer in filter(lambda layer: isinstance(layer, OfShard), every_layer(module)):
            first = place_of.setdefault(id(layer), place)
            if first != place:
                raise _refused(
                    asked,
                    f"a {own_kind(layer).__name__} that {first} and {place} share",
                    "what it draws or counts follows how often it was called before",
                    "make a layer of its own for each",
                )


def _candidates(model: nn.Module) -> str:
    """Names of possible branches."""
    names = [
        f"{path}.{member}" if path else member
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict))
        for member, _ in module.named_children()
    ] or [name for name, _ in model.named_children()]
    return f"; of {', '.join(names[:8])}, for example" if names else ""


def _refused(asked: str, found: str, why: str, do: str) -> RequestError:
    return RequestError(asked=asked, found=found, why=why, do=do)

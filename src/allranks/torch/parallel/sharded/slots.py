"""The places of weights in the modules of a model under `fully_shard`, and a guard for them.

A weight is gathered only within the forward of its unit. Elsewhere user code would compute with a
shard, or its writes would be lost, and torch gives no error. The guard refuses a weight that is

    read elsewhere     a `ShardPlaceholder`, with the shape and dtype of the shard, stands for it;
                       any operation on it raises
    kept from before   the tensor that was cut becomes a `StaleParameter`, which raises too
    written            gathered weights are freed after the forward: their version and memory are
                       compared before, and in the first step their content
    replaced           by `functional_call` or an assignment: the next all-gather would undo it

In 16 bits products read a copy of a weight, which is freed and made again with it (`casts`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from allranks.errors import RequestError
from allranks.torch.checkpoint.state import local
from allranks.torch.data.collate import tensors_in
from allranks.torch.model.precision import Casts, with_casts
from allranks.torch.parallel.sharded.collectives import Filling
from allranks.torch.step.trainable import unfrozen_on_the_way
from allranks.torch.strategies.layout import exchanged_at

BASE: Any = torch._C.TensorBase
COMPUTES_AS_TENSORS: Any = torch._C._disabled_torch_function_impl
OF_DTENSORS = frozenset(("_local_tensor", "_spec", "_is_param"))  # their attributes


def is_cut(parameter: Tensor) -> bool:
    """Whether a weight is sharded: not if it is a scalar or empty."""
    return parameter.ndim > 0 and parameter.numel() > 0


class Slots:
    """The places of all sharded weights of `model`, tied ones included."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and is_cut(parameter)
        ]

    def __iter__(self) -> Iterator[tuple[nn.Module, str]]:
        """Each (module, name) of a weight."""
        return iter(self._places)

    def by_id(self) -> dict[int, tuple[nn.Module, str]]:
        """The place of each current weight, by its id."""
        return {id(module._parameters[name]): (module, name) for module, name in self._places}

    def gathered(
        self,
        units: Sequence[Any],
        local_weights: Sequence[Sequence[nn.Parameter]],
        fillings: Sequence[Filling],
    ) -> dict[int, nn.Parameter]:
        """By the id of a shard, the gathered parameter in its place, always the same object.

        Gathers each unit, of which this rank holds `local_weights`.
        """
        slots, gathered = self.by_id(), dict[int, Any]()
        for number, (unit, parts) in enumerate(zip(units, local_weights, strict=True)):
            unit.unshard()
            for parameter in parts:
                module, name = slots[id(parameter)]
                gathered[id(parameter)] = module._parameters[name]
            if fillings:
                fillings[number].weights = [gathered[id(parameter)] for parameter in parts]
            unit.reshard()
        return gathered

    @contextmanager
    def whole(self, device: torch.device) -> Iterator[None]:
        """Within, every weight is full, on `device`, and differentiable to the shards.

        Gathers each once; every rank enters this.
        """
        parts_there: list[Any] = [module._parameters[name] for module, name in self._places]
        parts = {id(part): part for part in parts_there}
        gathered: dict[int, Tensor] = {
            key: part.to(device).full_tensor() for key, part in parts.items()
        }
        with exchanged_at(self._places, [gathered[id(part)] for part in parts_there]):
            yield


class ShardPlaceholder(Tensor):
    """Stands for a weight that is not gathered. Any operation on it raises."""

    _is_param = True
    part: Tensor
    refusal: Callable[[], RequestError]

    __torch_function__ = COMPUTES_AS_TENSORS

    @staticmethod
    def of(
        part: Tensor, shape: Sequence[int], refusal: Callable[[], RequestError]
    ) -> ShardPlaceholder:
        """Has the attributes of `part`; an operation on it raises what `refusal` returns."""
        looks: dict[str, Any] = {"dtype": part.dtype, "device": part.device}
        looks["requires_grad"] = part.requires_grad
        placeholder: Any = Tensor._make_wrapper_subclass(ShardPlaceholder, shape, **looks)
        noted = {name: v for name, v in vars(part).items() if name not in OF_DTENSORS}
        vars(placeholder).update(noted, part=part, refusal=refusal)
        return cast(ShardPlaceholder, placeholder)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _first(cls, args, kwargs).refusal()

    def numpy(self, *, force: bool = False) -> Any:
        raise self.refusal()

    def tolist(self) -> Any:
        raise self.refusal()

    @property
    def requires_grad(self) -> bool:
        return bool(BASE.requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if requires_grad != self.requires_grad:
            raise self.refusal()
        return self


class StaleParameter(nn.Parameter):
    """A weight from before it was cut, which is not updated. Any operation on it raises."""

    refusal: Callable[[], RequestError]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") == "__get__" and function != BASE.data.__get__:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise _first(cls, args, kwargs).refusal()


class Counted:
    """A tensor that records writes through `data`, which torch does not count."""

    views: list[Tensor]

    @property
    def data(self) -> Tensor:
        view: Tensor = BASE.data.__get__(self)
        self.views.append(view)
        return view

    @data.setter
    def data(self, value: Tensor) -> None:
        BASE.data.__set__(self, value)


class CountedParameter(Counted, nn.Parameter):
    """A gathered weight."""


class CastParameter(CountedParameter):
    """A gathered weight whose copies in 16 bits are freed with it."""

    casts: Casts

    __torch_function__: Any = classmethod(with_casts)


@cache
def _counted(kind: type[Tensor]) -> type[Tensor]:
    """The same for a subclass of Tensor, whose operations it keeps."""
    return type(f"Counted{kind.__name__}", (Counted, kind), {})


class Guarded(dict[str, Any]):
    """The parameters of a module, which hides shards from user code."""

    def __init__(self, parameters: Mapping[str, Any], guard: WeightGuard) -> None:
        super().__init__(parameters)
        self.guard = guard

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        return self.guard.shown(parameter) if type(parameter) is DTensor else parameter

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value.part if type(value) is ShardPlaceholder else value)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  it would call itself

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


class Writes:
    """Detects writes into a tensor from now on, and a change of its memory."""

    def __init__(self, tensor: Tensor, kind: type[Tensor]) -> None:
        self.tensor: Any = tensor
        self.memory, self.version = tensor.detach(), tensor._version
        plain = type(tensor) in (Tensor, nn.Parameter)
        if not isinstance(tensor, Counted):
            self.tensor.__class__ = kind if plain else _counted(type(tensor))
        vars(tensor)["views"] = []

    def were_made(self) -> bool:
        tensor = self.tensor
        if tensor.views:
            views, tensor.views = tensor.views, []
            if any(view._version for view in views):
                return True
        is_moved = tensor.data_ptr() != self.memory.data_ptr()
        return is_moved or bool(tensor._version != self.version)


@dataclass
class Weight:
    """The shard of a weight, the gathered parameter, and their places."""

    name: str
    unit: str
    part: nn.Parameter
    gathered: nn.Parameter
    places: list[tuple[nn.Module, str]]
    casts: Casts | None

    def __post_init__(self) -> None:
        is_cast = self.casts is not None and self.gathered.ndim > 1  # biases are added to sums
        self.writes = Writes(self.gathered, CastParameter if is_cast else CountedParameter)
        if is_cast:
            vars(self.gathered)["casts"] = self.casts

    def there(self) -> Iterator[Any]:
        """The current parameters in its places."""
        for module, key in self.places:
            yield dict.get(module._parameters, key)

    def differs(self, rank: int, ranks: int) -> bool:
        """Whether this rank's rows differ from its shard: not every write is counted."""
        rows = -(-len(self.gathered) // ranks)
        part = local(self.part).detach()
        local_rows = self.gathered.detach()[rank * rows :][: len(part)]
        return not torch.equal(_bits(local_rows), _bits(part.to(local_rows.device)))


class WeightGuard:
    """Refuses any use of weights by user code outside of the forward of their unit.

    `is_on` tells whether user code runs. This is the `rank` of so many `ranks` with shards.
    """

    def __init__(self, model: nn.Module, strategy: str, rank: int, ranks: int) -> None:
        self.model, self.strategy = model, strategy
        self.rank, self.ranks = rank, ranks
        self.is_on: Callable[[], bool] = lambda: False
        self.request = f"--strategy {strategy}"
        self.compares = True  # contents too
        self.casts: dict[nn.Module, Casts] = {}  # of units that are freed before backward
        self._whole = [(name, weakref.ref(p)) for name, p in model.named_parameters()]
        self._weights: dict[nn.Module, list[Weight]] = {}
        self._by_part: dict[int, Weight] = {}
        self._by_gathered: dict[int, Weight] = {}
        self._placeholders: dict[int, ShardPlaceholder] = {}

    # --- hooks ----------------------------------------------------------------------------

    def before_free(self, unit: nn.Module) -> RemovableHandle:
        """Call this before `fully_shard`: weights are still gathered in this hook."""
        return unit.register_forward_hook(lambda *_: self._check_unit(unit))

    def before_gathering(self, unit: nn.Module) -> RemovableHandle:
        """Call this after `fully_shard`: weights are not gathered yet in this hook."""
        return unit.register_forward_pre_hook(lambda *_: self._check_places(unit), prepend=True)

    def lay_out(
        self,
        slots: Slots,
        units: Sequence[nn.Module],
        local_weights: Sequence[Sequence[nn.Parameter]],
        gathered: Mapping[int, Any],
    ) -> None:
        """Watch the parameters `gathered` for this rank's shards, unit by unit."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        paths = {module: path for path, module in self.model.named_modules()}
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, key in slots:
            places.setdefault(id(module._parameters[key]), []).append((module, key))
        for unit, parts in zip(units, local_weights, strict=True):
            self._weights[unit] = [
                Weight(
                    name=names[id(p)],
                    unit=paths[unit],
                    part=p,
                    gathered=gathered[id(p)],
                    places=places[id(p)],
                    casts=self.casts.get(unit),
                )
                for p in parts
            ]
        self._by_part = {id(w.part): w for weights in self._weights.values() for w in weights}
        self._by_gathered = {id(w.gathered): w for w in self._by_part.values()}
        self._placeholders = {}
        for module, _ in slots:
            if type(module._parameters) is dict:  # layers of a tensor axis guard their own
                vars(module)["_parameters"] = Guarded(module._parameters, self)
        self._make_stale({id(p) for p in self.model.parameters()})

    def put_parts_back(self) -> None:
        """The shards stand in their places again, wherever a pass was broken off."""
        for weight in self._by_part.values():
            for module, name in weight.places:
                module._parameters[name] = weight.part

    def close(self) -> None:
        """Give the modules plain dicts again."""
        for module in self.model.modules():
            if isinstance(module._parameters, Guarded):
                vars(module)["_parameters"] = dict(module._parameters)

    # --- what is refused ------------------------------------------------------------------

    def shown(self, part: Any) -> Any:
        """What user code sees in place of a shard."""
        weight = self._by_part.get(id(part))
        if weight is None or not self.is_on():
            return part
        if id(part) not in self._placeholders:
            placeholder = ShardPlaceholder.of(part, part.shape, lambda: self._outside(weight))
            self._placeholders[id(part)] = placeholder
        return self._placeholders[id(part)]

    def check(self) -> None:
        """Raise after passes of a step or an evaluation if a weight was written."""
        for weights in self._weights.values():
            for weight in weights:
                if weight.writes.were_made():
                    raise self._written(weight)

    def _check_unit(self, unit: nn.Module) -> None:
        for weight in self._weights.get(unit, ()):
            if any(tensor is not weight.gathered for tensor in weight.there()):
                raise self._written(weight)
            if weight.gathered.requires_grad != weight.part.requires_grad:
                raise unfrozen_on_the_way(self.strategy)
            if weight.writes.were_made() or (
                self.compares and weight.differs(self.rank, self.ranks)
            ):
                raise self._written(weight)

    def _check_places(self, unit: nn.Module) -> None:
        for weight in self._weights.get(unit, ()):
            for tensor in weight.there():
                if tensor is not weight.part and tensor is not weight.gathered:
                    raise self._replaced(weight)

    def _make_stale(self, current: set[int]) -> None:
        for name, reference in self._whole:
            whole = reference()
            if whole is not None and id(whole) not in current and type(whole) is nn.Parameter:
                whole.__class__ = StaleParameter
                vars(whole)["refusal"] = partial(self._stale, name)
        self._whole = []

    def _outside(self, weight: Weight) -> RequestError:
        root = self._weights[self.model]
        is_passing = not any(type(tensor) is DTensor for w in root for tensor in w.there())
        where = f"its block {weight.unit!r}" if weight.unit else "the model"
        whole = "let fsdp_units(model) of the task return [], which gathers all for the whole pass"
        if not weight.unit:
            do = "use it in forward of the model"
        elif is_passing:
            do = whole
        else:
            do = f"use it in forward of the model, and {whole}"
        return RequestError(
            asked=self.request,
            found=f"the weight {weight.name!r} is used outside of the forward of {where}",
            why="a rank holds a part of it, and the whole is gathered for that forward",
            do=f"{do}; or --strategy ddp",
        )

    def _stale(self, name: str) -> RequestError:
        return RequestError(
            asked=self.request,
            found=f"a tensor that was the weight {name!r} before it was cut is used",
            why="ranks update the parts that they hold, and nobody updates that tensor",
            do="keep the module and read its weight where it is used; or --strategy ddp",
        )

    def _written(self, weight: Weight) -> RequestError:
        return RequestError(
            asked=self.request,
            found=f"forward or loss writes the weight {weight.name!r}",
            why="what is written there is lost when the gathered weight is freed",
            do="write it in on_step of a callback, which sees the part of a rank; "
            "or --strategy ddp",
        )

    def _replaced(self, weight: Weight) -> RequestError:
        do = "let fsdp_units(model) of the task return []; or " if weight.unit else ""
        return RequestError(
            asked=self.request,
            found=f"another tensor in the place of the weight {weight.name!r}, put there by "
            "torch.func.functional_call or by an assignment",
            why="the forward of its block gathers the weight again, and would compute with that",
            do=f"{do}--strategy ddp",
        )


def _first(kind: Any, args: Any, kwargs: Any) -> Any:
    return next(t for t in tensors_in((args, kwargs or {})) if isinstance(t, kind))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)

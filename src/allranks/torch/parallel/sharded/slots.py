"""Where the weights of a model stand in its modules, whatever `fully_shard` has put there.

A weight is whole within the forward of its unit, and nowhere else. What user code does with it
otherwise would be computed with a part, or lost, and torch does not say so. Refused is a weight

    read elsewhere     the part is hidden behind a `ShardPlaceholder`, which has a shape and a type
                       and computes nothing
    kept from before   the tensor that was cut becomes a `StaleParameter`, which computes nothing
    written            what is gathered is freed after the forward: its version and its memory are
                       compared before that, in the first step its content, too
    replaced           by `functional_call` or by hand: the next gathering would undo it

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
from allranks.torch.checkpoint.tree import local
from allranks.torch.data.collate import tensors_in
from allranks.torch.model.precision import Casts, with_casts
from allranks.torch.parallel.sharded.collectives import Filling
from allranks.torch.step.trainable import unfrozen_on_the_way

BASE: Any = torch._C.TensorBase
COMPUTES_AS_TENSORS: Any = torch._C._disabled_torch_function_impl
OF_DTENSORS = frozenset(("_local_tensor", "_spec", "_is_param"))  # their attributes


def is_cut(parameter: Tensor) -> bool:
    """Whether ranks hold parts of a weight: not of one number, nor of none."""
    return parameter.ndim > 0 and parameter.numel() > 0


class Slots:
    """The places of all weights of `model` that are cut, those of tied ones too."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and is_cut(parameter)
        ]

    def __iter__(self) -> Iterator[tuple[nn.Module, str]]:
        """Each module that has weights, with the name of each."""
        return iter(self._places)

    def by_id(self) -> dict[int, tuple[nn.Module, str]]:
        """Where each weight is that is there now, by its id."""
        return {id(module._parameters[name]): (module, name) for module, name in self._places}

    def gathered(
        self,
        units: Sequence[Any],
        held: Sequence[Sequence[nn.Parameter]],
        fillings: Sequence[Filling],
    ) -> dict[int, nn.Parameter]:
        """By the id of a part what stands in its place while it is gathered, always the same.

        Gathers each of the units, of which a rank has `held` the parts.
        """
        slots, found = self.by_id(), dict[int, Any]()
        for number, (unit, parts) in enumerate(zip(units, held, strict=True)):
            unit.unshard()
            for parameter in parts:
                module, name = slots[id(parameter)]
                found[id(parameter)] = module._parameters[name]
            if fillings:
                fillings[number].weights = [found[id(parameter)] for parameter in parts]
            unit.reshard()
        return found

    @contextmanager
    def whole(self, device: torch.device) -> Iterator[None]:
        """Within, every weight is whole, on `device`, and autograd leads back to the parts.

        Gathers each once; every rank enters this.
        """
        held: list[Any] = [module._parameters[name] for module, name in self._places]
        parts = {id(part): part for part in held}
        gathered: dict[int, Tensor] = {
            one: part.to(device).full_tensor() for one, part in parts.items()
        }
        for (module, name), part in zip(self._places, held, strict=True):
            module._parameters[name] = gathered[id(part)]  # type: ignore[assignment]
        try:
            yield
        finally:
            for (module, name), part in zip(self._places, held, strict=True):
                module._parameters[name] = part


class ShardPlaceholder(Tensor):
    """What user code finds in the place of a weight that is not gathered. It computes nothing."""

    _is_param = True
    part: Tensor
    refusal: Callable[[], RequestError]

    __torch_function__ = COMPUTES_AS_TENSORS

    @staticmethod
    def of(
        part: Tensor, shape: Sequence[int], refusal: Callable[[], RequestError]
    ) -> ShardPlaceholder:
        """Looks like `part` in that shape; an operation on it raises what `refusal` returns."""
        looks: dict[str, Any] = {"dtype": part.dtype, "device": part.device}
        looks["requires_grad"] = part.requires_grad
        made: Any = Tensor._make_wrapper_subclass(ShardPlaceholder, shape, **looks)
        noted = {name: v for name, v in vars(part).items() if name not in OF_DTENSORS}
        vars(made).update(noted, part=part, refusal=refusal)
        return cast(ShardPlaceholder, made)

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
    """A weight as it was before it was cut, which nobody updates. It computes nothing."""

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
    """A tensor whose writes through `data` are seen, which torch does not count."""

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
    """A tensor of a class of its own, whose operations stay those of that class."""
    return type(f"Counted{kind.__name__}", (Counted, kind), {})


class Guarded(dict[str, Any]):
    """The parameters of a module, of which user code sees no parts."""

    def __init__(self, parameters: Mapping[str, Any], guard: WeightGuard) -> None:
        super().__init__(parameters)
        self.guard = guard

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return self.guard.shown(found) if type(found) is DTensor else found

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value.part if type(value) is ShardPlaceholder else value)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  it would call itself

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


class Writes:
    """Whether somebody has written into a tensor since now, or given it other memory."""

    def __init__(self, tensor: Tensor, kind: type[Tensor]) -> None:
        self.tensor: Any = tensor
        self.memory, self.version = tensor.detach(), tensor._version
        plain = type(tensor) in (Tensor, nn.Parameter)
        if not isinstance(tensor, Counted):
            self.tensor.__class__ = kind if plain else _counted(type(tensor))
        vars(tensor)["views"] = []

    def have_come(self) -> bool:
        tensor = self.tensor
        if tensor.views:
            views, tensor.views = tensor.views, []
            if any(view._version for view in views):
                return True
        is_moved = tensor.data_ptr() != self.memory.data_ptr()
        return is_moved or bool(tensor._version != self.version)


@dataclass
class Weight:
    """What this rank holds of a weight, what is gathered in its place, and where that is."""

    name: str
    unit: str
    part: nn.Parameter
    gathered: nn.Parameter
    places: list[tuple[nn.Module, str]]
    casts: Casts | None

    def __post_init__(self) -> None:
        is_cast = self.casts is not None and self.gathered.ndim > 1  # sums add biases, of one axis
        self.writes = Writes(self.gathered, CastParameter if is_cast else CountedParameter)
        if is_cast:
            vars(self.gathered)["casts"] = self.casts

    def there(self) -> Iterator[Any]:
        """What is in its places now."""
        for module, key in self.places:
            yield dict.get(module._parameters, key)

    def differs(self, rank: int, ranks: int) -> bool:
        """Whether the rows of this rank are others than its part: not every write is counted."""
        rows = -(-len(self.gathered) // ranks)
        part = local(self.part).detach()
        own = self.gathered.detach()[rank * rows :][: len(part)]
        return not torch.equal(_bits(own), _bits(part.to(own.device)))


class WeightGuard:
    """Refuses what user code does with weights, but for using them in the forward of their unit.

    `is_on` says whether that runs. This is the `rank` of so many `ranks` that hold parts.
    """

    def __init__(self, model: nn.Module, strategy: str, rank: int, ranks: int) -> None:
        self.model, self.strategy = model, strategy
        self.rank, self.ranks = rank, ranks
        self.is_on: Callable[[], bool] = lambda: False
        self.asked = f"--strategy {strategy}"
        self.compares = True  # contents too
        self.casts: dict[nn.Module, Casts] = {}  # of units that are freed before backward
        self._whole = [(name, weakref.ref(p)) for name, p in model.named_parameters()]
        self._weights: dict[nn.Module, list[Weight]] = {}
        self._by_part: dict[int, Weight] = {}
        self._by_gathered: dict[int, Weight] = {}
        self._placeholders: dict[int, ShardPlaceholder] = {}

    # --- hooks ----------------------------------------------------------------------------

    def before_free(self, unit: nn.Module) -> RemovableHandle:
        """Called before `fully_shard` is: what is gathered is still there in this hook."""
        return unit.register_forward_hook(lambda *_: self._check_unit(unit))

    def before_gathering(self, unit: nn.Module) -> RemovableHandle:
        """Called after `fully_shard`: nothing is gathered yet in this hook."""
        return unit.register_forward_pre_hook(lambda *_: self._check_places(unit), prepend=True)

    def lay_out(
        self,
        slots: Slots,
        units: Sequence[nn.Module],
        held: Sequence[Sequence[nn.Parameter]],
        gathered: Mapping[int, Any],
    ) -> None:
        """Watch what is `gathered` of the parts that a rank has `held`, unit by unit."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        paths = {module: path for path, module in self.model.named_modules()}
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, key in slots:
            places.setdefault(id(module._parameters[key]), []).append((module, key))
        for unit, parts in zip(units, held, strict=True):
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
            if type(module._parameters) is dict:  # a tensor axis guards those of its own layers
                vars(module)["_parameters"] = Guarded(module._parameters, self)
        self._refuse_what_was_whole({id(p) for p in self.model.parameters()})

    def close(self) -> None:
        """The modules have dicts of torch again."""
        for module in self.model.modules():
            if isinstance(module._parameters, Guarded):
                vars(module)["_parameters"] = dict(module._parameters)

    # --- what is refused ------------------------------------------------------------------

    def shown(self, part: Any) -> Any:
        """What is seen of a part."""
        weight = self._by_part.get(id(part))
        if weight is None or not self.is_on():
            return part
        if id(part) not in self._placeholders:
            made = ShardPlaceholder.of(part, part.shape, lambda: self._outside(weight))
            self._placeholders[id(part)] = made
        return self._placeholders[id(part)]

    def check(self) -> None:
        """After the passes of a step, or one of an evaluation: nothing was written."""
        for weights in self._weights.values():
            for weight in weights:
                if weight.writes.have_come():
                    raise self._written(weight)

    def _check_unit(self, unit: nn.Module) -> None:
        for weight in self._weights.get(unit, ()):
            if any(found is not weight.gathered for found in weight.there()):
                raise self._written(weight)
            if weight.gathered.requires_grad != weight.part.requires_grad:
                raise unfrozen_on_the_way(self.strategy)
            if weight.writes.have_come() or (
                self.compares and weight.differs(self.rank, self.ranks)
            ):
                raise self._written(weight)

    def _check_places(self, unit: nn.Module) -> None:
        for weight in self._weights.get(unit, ()):
            for found in weight.there():
                if found is not weight.part and found is not weight.gathered:
                    raise self._replaced(weight)

    def _refuse_what_was_whole(self, own: set[int]) -> None:
        for name, reference in self._whole:
            whole = reference()
            if whole is not None and id(whole) not in own and type(whole) is nn.Parameter:
                whole.__class__ = StaleParameter
                vars(whole)["refusal"] = partial(self._stale, name)
        self._whole = []

    def _outside(self, weight: Weight) -> RequestError:
        root = self._weights[self.model]
        is_passing = not any(type(found) is DTensor for w in root for found in w.there())
        where = f"its block {weight.unit!r}" if weight.unit else "the model"
        whole = "let fsdp_units(model) of the task return [], which gathers all for the whole pass"
        if not weight.unit:
            do = "use it in forward of the model"
        elif is_passing:
            do = whole
        else:
            do = f"use it in forward of the model, and {whole}"
        return RequestError(
            asked=self.asked,
            found=f"the weight {weight.name!r} is used outside of the forward of {where}",
            why="a rank holds a part of it, and the whole is gathered for that forward",
            do=f"{do}; or --strategy ddp",
        )

    def _stale(self, name: str) -> RequestError:
        return RequestError(
            asked=self.asked,
            found=f"a tensor that was the weight {name!r} before it was cut is used",
            why="ranks update the parts that they hold, and nobody updates that tensor",
            do="keep the module and read its weight where it is used; or --strategy ddp",
        )

    def _written(self, weight: Weight) -> RequestError:
        return RequestError(
            asked=self.asked,
            found=f"forward or loss writes the weight {weight.name!r}",
            why="what is written there is lost when the gathered weight is freed",
            do="write it in on_step of a callback, which sees the part of a rank; "
            "or --strategy ddp",
        )

    def _replaced(self, weight: Weight) -> RequestError:
        do = "let fsdp_units(model) of the task return []; or " if weight.unit else ""
        return RequestError(
            asked=self.asked,
            found=f"another tensor in the place of the weight {weight.name!r}, put there by "
            "torch.func.functional_call or by an assignment",
            why="the forward of its block gathers the weight again, and would compute with that",
            do=f"{do}--strategy ddp",
        )


def _first(kind: Any, args: Any, kwargs: Any) -> Any:
    return next(t for t in tensors_in((args, kwargs or {})) if isinstance(t, kind))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)

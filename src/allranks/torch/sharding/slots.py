"""Where the weights of a model stand in its modules, whatever `fully_shard` has put there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from allranks.torch.sharding.fsdp_collectives import Filling


class Slots:
    """The places of all weights of `model` that have a dimension, those of tied ones too."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.ndim
        ]

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

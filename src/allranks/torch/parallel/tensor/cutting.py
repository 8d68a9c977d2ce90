"""A model cut over an axis: its layers swapped in place, each parameter left with this rank's part.

`cut_layers` is what a strategy calls: it plans, refuses what cannot be, and cuts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from allranks.errors import RequestError
from allranks.job.place import Placed
from allranks.torch.model.layers import own_kind
from allranks.torch.optimizers.elementwise import WeightParts
from allranks.torch.parallel.sharded.gradients import check_no_hooks
from allranks.torch.parallel.tensor.attention import HeadsOfAttention, HeadsOutput
from allranks.torch.parallel.tensor.cut import COLUMN, DIMS, HEADS, ROW, VOCABULARY
from allranks.torch.parallel.tensor.exchange import Along, TensorExchange
from allranks.torch.parallel.tensor.layers import (
    Between,
    ByLeaves,
    ColumnLinear,
    CutLayer,
    OpenChain,
    PaddedEncoderLayer,
    Region,
    RowLinear,
    ShownWhole,
    VocabularyEmbedding,
)
from allranks.torch.parallel.tensor.plan import ELEMENTWISE, CutPlan, default_plan, given_plan
from allranks.torch.random.dropout import ShardDropout
from allranks.torch.task import Task

KINDS: dict[tuple[str, type[nn.Module]], type[nn.Module]] = {
    (COLUMN, nn.Linear): ColumnLinear,
    (ROW, nn.Linear): RowLinear,
    (ROW, NonDynamicallyQuantizableLinear): HeadsOutput,
    (VOCABULARY, nn.Embedding): VocabularyEmbedding,
    (HEADS, nn.MultiheadAttention): HeadsOfAttention,
}
"""By the way that a layer is cut, and its class: its class while it is."""


@dataclass
class CutModel:
    """What became of the parameters: by name, how each is cut."""

    dims: dict[str, Along] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    layers: list[CutLayer] = field(default_factory=list)

    def begin_pass(self) -> None:
        """A pass begins with whole activations, however the last one ended."""
        for region in self.regions:
            region.close()

    def is_in_region(self) -> bool:
        """Whether activations are parts right now, between the columns and the row of a block."""
        return any(region.is_open for region in self.regions)

    def ids(self) -> set[int]:
        """Of what stands in the places of the cut parameters right now."""
        return {id(layer.held(name)) for layer in self.layers for name in layer.dims}

    def part_of(self, name: str, whole: Tensor, exchange: TensorExchange) -> Tensor:
        """What this rank holds of a whole parameter: all of one that is not cut."""
        along = self.dims.get(name)
        return whole if along is None else exchange.own(whole, along).contiguous()

    def cuts(self, model: nn.Module, ranks: int) -> dict[int, WeightParts]:
        """How the parameters of a model are cut, by their `id`."""
        held = dict(model.named_parameters())
        return {
            id(held[name]): WeightParts(tuple(self.shapes[name]), partial(along.parts, ranks))
            for name, along in self.dims.items()
        }

    def whole_shapes(self, model: nn.Module) -> dict[int, torch.Size]:
        """Those of the parameters of a model that are cut, by the `id` of what is held."""
        held = dict(model.named_parameters())
        return {id(held[name]): self.shapes[name] for name in self.dims}

    def placed(self, rows: Iterable[Placed]) -> list[Placed]:
        """What this rank holds, where it is a part with the shape of the whole."""
        return [
            replace(row, whole=tuple(self.shapes[row.name])) if row.name in self.dims else row
            for row in rows
        ]


def cut_layers(
    task: Task, model: nn.Module, exchange: TensorExchange, asked: str, leaves: int = 0
) -> CutModel:
    """Cut what the task plans of `model`, or else all that can be, in place. No communication.

    With `leaves` every layer is cut so that they can be shared out evenly. Raises `RequestError`
    with what was `asked` where nothing can be cut, or what is there cannot be.
    """
    if task.overrides("initialise"):
        raise _no_whole_weights(asked)
    check_no_hooks(model, asked)
    given, parts = task.tensor_plan(model), leaves or exchange.comm.size
    if given is None:
        plan = default_plan(model, parts, even=leaves > 0)
    else:
        plan = given_plan(model, parts, given, even=leaves > 0)
    if not plan.cuts:
        raise nothing_to_cut(asked, parts)
    return cut_model(model, plan, exchange)


def cut_model(
    model: nn.Module, plan: CutPlan, exchange: TensorExchange, of: nn.Module | None = None
) -> CutModel:
    """Cut `model` in place. What the plan does not name is the same on every rank of the axis.

    Where it is made of modules `of` another one, parameters go by their names there, and all that
    hold one have its part.
    """
    of = of or model
    slots = _slots(of, model)
    names = {place: name for name, places in slots.items() for place in places}
    regions: dict[str, Region] = {}
    found = CutModel(shapes={name: p.shape for name, p in of.named_parameters()})
    for cut in plan.cuts.values():
        module: Any = cut.module
        region = None
        if cut.block is not None:
            if cut.block not in regions:
                heads = cut.unit > 1
                block = Region(exchange, cut.units, are_heads=heads, name=cut.name)
                regions[cut.block] = block
            region = regions[cut.block]
        dims = {
            name: along
            for name, along in DIMS[cut.way].items()
            if module._parameters.get(name) is not None
        }
        module.dims, module.sizes, module.lengths = dims, {}, {}
        for name, along in dims.items():
            own = names[module, name]
            if own not in found.dims:
                found.dims[own] = along
                part = held_part(module._parameters[name], along, exchange)
                for holder, attribute in slots[own]:
                    holder._parameters[attribute] = part
            module.sizes[name] = found.shapes[own][along.dim]
            module.lengths[name] = module._parameters[name].shape[along.dim]
        module.exchange, module.region = exchange, region
        module.__class__ = KINDS[cut.way, own_kind(module)]
        module._parameters = ShownWhole(module)
        found.layers.append(module)
    _tell_what_is_between(model, plan, regions, exchange)
    _pad_encoder_layers(model)
    found.regions = list(regions.values())
    return found


def _slots(*models: nn.Module) -> dict[str, set[tuple[nn.Module, str]]]:
    """Where each parameter is held, by its name in the first of the models."""
    names = {id(parameter): name for name, parameter in models[0].named_parameters()}
    found: dict[str, set[tuple[nn.Module, str]]] = {}
    for module in (module for model in models for module in model.modules()):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(names[id(parameter)], set()).add((module, attribute))
    return found


def held_part(whole: Tensor, along: int | Along, exchange: TensorExchange) -> nn.Parameter:
    """This rank's part of a weight, as a parameter of its own."""
    part = exchange.own(whole.detach(), along).clone(memory_format=torch.contiguous_format)
    held = nn.Parameter(part, requires_grad=whole.requires_grad)
    vars(held).update(vars(whole))  # what the optimizer of the task may ask for
    return held


def _tell_what_is_between(
    model: nn.Module, plan: CutPlan, regions: dict[str, Region], exchange: TensorExchange
) -> None:
    """Let dropout between the columns and the row of a block draw for all features.

    And with leaves let what is element-wise there go leaf by leaf.
    """
    between: dict[int, Between] = {}
    for name, region in regions.items():
        if plan.cuts[name].way == HEADS:
            continue  # nothing is between its columns and its row but what it does itself
        parent: Any = model.get_submodule(name.rpartition(".")[0])
        inside = list(parent.modules())
        if isinstance(parent, nn.Sequential):
            last = [c.module for c in plan.cuts.values() if c.block == name and c.way == ROW]
            children = list(parent)
            first = children.index(model.get_submodule(name))
            inside = children[first : children.index(last[0])]
            _open_within(parent, region)
        for module in inside:
            between.setdefault(id(module), Between()).regions.append(region)
    for module in model.modules():
        where, kind = between.get(id(module)), own_kind(module)
        if where is None:
            continue
        inner: Any = module
        if isinstance(module, ShardDropout) and kind is nn.Dropout:
            inner.part_of = where.part_of
        elif kind in ELEMENTWISE and exchange.leaves:
            inner.exchange, inner.between = exchange, where
            inner.__class__ = type(f"{kind.__name__}ByLeaves", (ByLeaves, kind), {})


def _pad_encoder_layers(model: nn.Module) -> None:
    """Let no layer that is cut meet a nested tensor: what it sends must have one shape."""
    for module in model.modules():
        kind = own_kind(module)
        own: Any = getattr(kind, "forward", None)
        if own is not nn.TransformerEncoderLayer.forward or "forward" in vars(module):
            continue
        if any(isinstance(layer, CutLayer) for layer in module.modules()):
            bases = PaddedEncoderLayer, kind
            module.__class__ = type(f"Padded{kind.__name__}", bases, {})


def _open_within(chain: Any, region: Region) -> None:
    """Let the region be active while the chain's own forward runs, and at no other time."""
    region.is_active = False
    if not isinstance(chain, OpenChain):
        kind = own_kind(chain)
        chain.regions, chain.__class__ = [], type(f"Open{kind.__name__}", (OpenChain, kind), {})
    chain.regions.append(region)


def nothing_to_cut(asked: str, ranks: int) -> RequestError:
    return RequestError(
        asked=f"{asked} on {ranks} ranks of the tensor axis",
        found="no layer of the model that can be cut into so many parts",
        why="every rank would hold all of it, and compute the same as all others",
        do="fewer ranks of that axis, a plan of your own (tensor_plan), or --strategy ddp",
    )


def _no_whole_weights(asked: str) -> RequestError:
    return RequestError(
        asked=f"{asked} with initialise(model, inputs) of the task",
        found="weights that are set from the first batch",
        why="each rank holds a part of them by then",
        do="set them in model(), or --strategy ddp",
    )

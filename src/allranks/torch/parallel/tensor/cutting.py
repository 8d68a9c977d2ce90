"""Cuts a model over the tensor axis: replaces layers in place, and parameters by this rank's part.

A strategy calls `cut_layers`: it plans, refuses what cannot be cut, and cuts.
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
from allranks.torch.parallel.tensor.plan import (
    COLUMN,
    DIMS,
    ELEMENTWISE,
    HEADS,
    ROW,
    VOCABULARY,
    CutPlan,
    default_plan,
    explicit_plan,
)
from allranks.torch.random.dropout import ShardDropout
from allranks.torch.task import Task

KINDS: dict[tuple[str, type[nn.Module]], type[nn.Module]] = {
    (COLUMN, nn.Linear): ColumnLinear,
    (ROW, nn.Linear): RowLinear,
    (ROW, NonDynamicallyQuantizableLinear): HeadsOutput,
    (VOCABULARY, nn.Embedding): VocabularyEmbedding,
    (HEADS, nn.MultiheadAttention): HeadsOfAttention,
}
"""By the way a layer is cut, and its class: its class while it is cut."""


@dataclass
class CutModel:
    """The cut of a model: by name, how each parameter is cut."""

    dims: dict[str, Along] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    layers: list[CutLayer] = field(default_factory=list)

    def begin_pass(self) -> None:
        """Begin a pass with full activations, however the last one ended."""
        for region in self.regions:
            region.close()

    def is_in_region(self) -> bool:
        """Whether activations are cut now, between the columns and the row of a block."""
        return any(region.is_open for region in self.regions)

    def ids(self) -> set[int]:
        """The ids of the parameters that are now in the places of the cut ones."""
        return {id(layer.local_param(name)) for layer in self.layers for name in layer.dims}

    def part_of(self, name: str, whole: Tensor, exchange: TensorExchange) -> Tensor:
        """This rank's part of a full parameter: all of it, if it is not cut."""
        along = self.dims.get(name)
        return whole if along is None else exchange.local_part(whole, along).contiguous()

    def cuts(self, model: nn.Module, ranks: int) -> dict[int, WeightParts]:
        """The cuts of the parameters of a model, by `id`."""
        params = dict(model.named_parameters())
        return {
            id(params[name]): WeightParts(tuple(self.shapes[name]), partial(along.parts, ranks))
            for name, along in self.dims.items()
        }

    def whole_shapes(self, model: nn.Module) -> dict[int, torch.Size]:
        """The full shapes of cut parameters, by the `id` of this rank's part."""
        params = dict(model.named_parameters())
        return {id(params[name]): self.shapes[name] for name in self.dims}

    def placed(self, rows: Iterable[Placed]) -> list[Placed]:
        """The placement of parameters, with the full shape of those that are cut."""
        return [
            replace(row, whole=tuple(self.shapes[row.name])) if row.name in self.dims else row
            for row in rows
        ]


def cut_layers(
    task: Task, model: nn.Module, exchange: TensorExchange, asked: str, leaves: int = 0
) -> CutModel:
    """Cut `model` in place by the plan of the task, or by the default. No communication.

    With `leaves` every layer is cut so that leaves can be distributed evenly. Raises `RequestError`
    with `asked` if nothing can be cut, or the model is not supported.
    """
    if task.overrides("initialise"):
        raise _no_whole_weights(asked)
    check_no_hooks(model, asked)
    task_plan, parts = task.tensor_plan(model), leaves or exchange.comm.size
    if task_plan is None:
        plan = default_plan(model, parts, even=leaves > 0)
    else:
        plan = explicit_plan(model, parts, task_plan, even=leaves > 0)
    if not plan.cuts:
        raise nothing_to_cut(asked, parts)
    return cut_model(model, plan, exchange)


def cut_model(
    model: nn.Module, plan: CutPlan, exchange: TensorExchange, of: nn.Module | None = None
) -> CutModel:
    """Cut `model` in place. Layers that are not in the plan are the same on every rank.

    If it consists of modules `of` another model, parameters have their names there, and each of
    their holders gets the part.
    """
    of = of or model
    slots = _slots(of, model)
    names = {place: name for name, places in slots.items() for place in places}
    regions: dict[str, Region] = {}
    result = CutModel(shapes={name: p.shape for name, p in of.named_parameters()})
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
            path = names[module, name]
            if path not in result.dims:
                result.dims[path] = along
                part = local_parameter(module._parameters[name], along, exchange)
                for holder, attribute in slots[path]:
                    holder._parameters[attribute] = part
            module.sizes[name] = result.shapes[path][along.dim]
            module.lengths[name] = module._parameters[name].shape[along.dim]
        module.exchange, module.region = exchange, region
        module.__class__ = KINDS[cut.way, own_kind(module)]
        module._parameters = ShownWhole(module)
        result.layers.append(module)
    _attach_regions(model, plan, regions, exchange)
    _pad_encoder_layers(model)
    result.regions = list(regions.values())
    return result


def _slots(*models: nn.Module) -> dict[str, set[tuple[nn.Module, str]]]:
    """The places of each parameter, by its name in the first of the models."""
    names = {id(parameter): name for name, parameter in models[0].named_parameters()}
    places: dict[str, set[tuple[nn.Module, str]]] = {}
    for module in (module for model in models for module in model.modules()):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(names[id(parameter)], set()).add((module, attribute))
    return places


def local_parameter(whole: Tensor, along: int | Along, exchange: TensorExchange) -> nn.Parameter:
    """This rank's part of a weight, as a new parameter."""
    part = exchange.local_part(whole.detach(), along).clone(memory_format=torch.contiguous_format)
    param = nn.Parameter(part, requires_grad=whole.requires_grad)
    vars(param).update(vars(whole))  # attributes that the optimizer of the task may read
    return param


def _attach_regions(
    model: nn.Module, plan: CutPlan, regions: dict[str, Region], exchange: TensorExchange
) -> None:
    """Let dropout between the columns and the row of a block draw for all features.

    With leaves, let element-wise layers there be applied leaf by leaf.
    """
    between: dict[int, Between] = {}
    for name, region in regions.items():
        if plan.cuts[name].way == HEADS:
            continue  # there are no other layers between its columns and its row
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
    """Keep nested tensors from cut layers, whose messages need one shape on all ranks."""
    for module in model.modules():
        kind = own_kind(module)
        forward: Any = getattr(kind, "forward", None)
        if forward is not nn.TransformerEncoderLayer.forward or "forward" in vars(module):
            continue
        if any(isinstance(layer, CutLayer) for layer in module.modules()):
            bases = PaddedEncoderLayer, kind
            module.__class__ = type(f"Padded{kind.__name__}", bases, {})


def _open_within(chain: Any, region: Region) -> None:
    """Let the region be active only while the forward of the chain runs."""
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

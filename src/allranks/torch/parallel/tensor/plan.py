"""Which layers of a model are cut over the tensor axis, and how: by the task, or by default.

A plan maps names of modules (with `*`) to a way to cut, or to (way, unit) if `unit` features belong
together, as in a head:

    column       rows of weight and bias: some of the output's features
    row          columns of the weight: a part of every sum
    vocabulary   rows of a table
    heads        rows of query, key and value that belong to some heads      `.cutting`
    within       not cut, but between the columns and the row of a block, as a norm of each head

The default cuts every `nn.Linear`, `nn.Embedding` and `nn.MultiheadAttention` that it can. Blocks
of columns and a row are those of a module with a `tensor_plan`, the heads of attention, and two
Linear of a plain `nn.Sequential` with only element-wise layers in between. Other layers are cut
separately, with full inputs and outputs, except the smallest ones, whose messages cost more than
they save. A block has no layer with hooks, which would see a part, and no Linear that is in several
places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from allranks.errors import RequestError
from allranks.torch.model.layers import has_hooks, is_chain, own_kind
from allranks.torch.strategies.layout import Along, part_sizes

COLUMN, ROW, VOCABULARY, HEADS = "column", "row", "vocabulary", "heads"
WITHIN = "within"  # only in the `tensor_plan` of a module
WAYS: dict[str, type[nn.Module]] = {
    COLUMN: nn.Linear,
    ROW: nn.Linear,
    VOCABULARY: nn.Embedding,
    HEADS: nn.MultiheadAttention,
}
DIMS = {
    COLUMN: {"weight": Along(0), "bias": Along(0)},
    ROW: {"weight": Along(1)},
    VOCABULARY: {"weight": Along(0)},
    HEADS: {
        **{"in_proj_weight": Along(0, runs=3), "in_proj_bias": Along(0, runs=3)},
        **{f"{name}_proj_weight": Along(0) for name in "qkv"},
    },
}
"""By way: how each parameter is cut."""

LENGTHS = {
    **{COLUMN: "out_features", ROW: "in_features"},
    **{VOCABULARY: "num_embeddings", HEADS: "embed_dim"},
}
"""By way: the attribute of a layer with the length that is cut."""


@dataclass
class LayerCut:
    """One layer to be cut. `block` is the first layer of its block, if it is in one."""

    name: str
    module: Any  # a Linear, an Embedding or an attention
    way: str
    unit: int = 1
    block: str | None = None

    @property
    def size(self) -> int:
        """How many features or rows there are along the dimension that is cut."""
        return int(getattr(self.module, LENGTHS[self.way]))

    @property
    def units(self) -> int:
        return self.size // self.unit

    def fits(self, ranks: int, *, even: bool = False) -> bool:
        """Whether every rank gets a part, with `even` an equal one, and no unit is divided."""
        whole = even or self.unit > 1 or self.way == HEADS
        if whole and (self.size % self.unit or self.units % ranks):
            return False
        return part_sizes(self.size, ranks)[-1] > 0


def can_be_cut(module: nn.Module) -> bool:
    """Whether a layer is a plain, unmodified Linear or Embedding."""
    if own_kind(module) not in (nn.Linear, nn.Embedding) or "forward" in vars(module):
        return False
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return False  # weight normalisation keeps it under another name
    special = ("max_norm", "sparse", "scale_grad_by_freq")
    return not any(getattr(module, name, None) for name in special)


def has_heads(module: nn.Module) -> bool:
    """Whether a layer is torch's own attention, whose heads are independent.

    One with an additional key and value (`add_bias_kv`, `add_zero_attn`) is not cut.
    """
    if own_kind(module) is not nn.MultiheadAttention or "forward" in vars(module):
        return False
    attention: Any = module
    output = attention.out_proj
    if own_kind(output) is not NonDynamicallyQuantizableLinear or "forward" in vars(output):
        return False
    names = ["in_proj_weight"] if attention._qkv_same_embed_dim else []
    names = names or [f"{name}_proj_weight" for name in "qkv"]
    held_weights = [attention._parameters.get(name) for name in names]
    held_weights.append(output._parameters.get("weight"))
    if not all(isinstance(weight, nn.Parameter) for weight in held_weights):
        return False
    return attention.bias_k is None and attention.bias_v is None and not attention.add_zero_attn


def by_heads(name: str, attention: Any) -> list[LayerCut]:
    """The block of attention: its input projections and its output projection."""
    unit, out = attention.head_dim, f"{name}.out_proj" if name else "out_proj"
    return [LayerCut(name, attention, HEADS, unit), LayerCut(out, attention.out_proj, ROW, unit)]


FEED_FORWARD = {"linear1": COLUMN, "linear2": ROW}
BLOCKS: dict[type[nn.Module], Mapping[str, Any]] = {
    nn.TransformerEncoderLayer: FEED_FORWARD,
    nn.TransformerDecoderLayer: FEED_FORWARD,
}
"""Blocks inside of torch's own modules."""

ELEMENTWISE = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus),
    *(nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Dropout),
)
"""Layers that treat every feature separately and alike, without weights."""

LEAST_SHARE = 20
"""Separate layers that together are less than 1/20 of a rank's weights are not cut."""


@dataclass
class CutPlan:
    """The layers that are cut, by name, in the order of the model."""

    ranks: int
    even: bool = False
    cuts: dict[str, LayerCut] = field(default_factory=dict)
    within: list[nn.Module] = field(default_factory=list)
    """Modules that see parts of activations: each rank has a part of their gradients' sums."""

    def add_block(self, layers: list[LayerCut]) -> bool:
        """Add columns and a row as a block, if they match; returns whether they do.

        What is `within` may add numbers in another order in parts, so no such block is cut evenly.
        """
        cuts = [cut for cut in layers if cut.way != WITHIN]
        within = [cut.module for cut in layers if cut.way == WITHIN]
        if within and self.even:
            return False
        units = {cut.units for cut in cuts}
        ways = {cut.way for cut in cuts}
        if len(units) > 1 or ROW not in ways or ways == {ROW}:
            return False
        if not all(cut.fits(self.ranks, even=self.even) for cut in cuts):
            return False
        for cut in cuts:
            cut.block = cuts[0].name
            self.cuts[cut.name] = cut
        self.within += within
        return True


def default_plan(model: nn.Module, ranks: int, *, even: bool = False) -> CutPlan:
    """Cut what can be cut of a model; with `even`, only into even parts."""
    plan = CutPlan(ranks, even)
    holders = holders_of_weights(model)
    ties = [set(names) for names in holders.values() if len(names) > 1]
    torn = {n for names in ties for n in names if not can_be_cut(model.get_submodule(n))}
    while more := {n for names in ties if names & torn for n in names} - torn:
        torn |= more  # as of an embedding whose head has its bias from a layer that stays whole
    tied = set().union(*ties)
    uses = _uses(model)
    for name, parent in model.named_modules():
        for block in _blocks_in(name, parent):
            if _can_be_block(block, parent, uses) and not tied & {cut.name for cut in block}:
                plan.add_block(block)
    alone = []
    for name, module in model.named_modules():
        if name in plan.cuts or name in torn or not can_be_cut(module):
            continue
        ways = [LayerCut(name, module, way) for way in _ways_of(module, is_tied=name in tied)]
        alone += [cut for cut in ways if cut.fits(ranks, even=even)][:1]
    small = _too_small(alone, sum(p.numel() for p in model.parameters()), ranks)
    worth = [cut for cut in alone if id(cut.module.weight) not in small]
    if not plan.cuts:  # else there would be nothing to cut
        worth = worth or alone
    plan.cuts.update((cut.name, cut) for cut in worth)
    return plan


def _too_small(alone: list[LayerCut], weights: int, ranks: int) -> set[int]:
    """The ids of the weights of layers that are too small to be cut separately.

    The smallest ones: together at most a twentieth of a rank's weights.
    """
    budget, small = weights // (LEAST_SHARE * ranks), set[int]()
    sizes = {id(cut.module.weight): cut.module.weight.numel() for cut in alone}
    for weight, size in sorted(sizes.items(), key=lambda pair: pair[1]):
        budget -= size
        if budget < 0:
            break
        small.add(weight)
    return small


def explicit_plan(
    model: nn.Module,
    ranks: int,
    task_plan: Mapping[str, Any],
    *,
    even: bool = False,
    of: nn.Module | None = None,
) -> CutPlan:
    """The plan of a task; raises `RequestError` if it is impossible.

    The names in `task_plan` are those of modules `of` a model that `model` is made of.
    """
    plan, cuts, uses = CutPlan(ranks, even), dict[str, LayerCut](), _uses(model)
    name_of = {module: name for name, module in model.named_modules()}
    for pattern, how in task_plan.items():
        named = (model if of is None else of).named_modules()
        modules = [module for name, module in named if fnmatchcase(name, pattern)]
        if not modules:
            raise refused(f"{pattern!r}", "no module has such a name", "look at named_modules()")
        for name, module in ((name_of[m], m) for m in modules if m in name_of):
            cuts[name] = _checked(name, module, how, plan)
    for name, parent in model.named_modules():
        inside = [cuts[n] for n, _ in _children(name, parent) if n in cuts]
        inside = [cut for cut in inside if cut.way in (COLUMN, ROW)]
        rows = [cut for cut in inside if cut.way == ROW]
        if isinstance(parent, nn.Sequential):
            for pair in _pairs_in(name, parent, {n: cut.way for n, cut in cuts.items()}):
                if _can_be_block(pair, parent, uses):
                    plan.add_block([cuts[cut.name] for cut in pair])
        elif 0 < len(rows) < len(inside) and _can_be_block(inside, parent, uses):
            if plan.add_block(inside):
                continue
            found = ", ".join(f"{cut.name}: {cut.way} of {cut.units}" for cut in inside)
            why = "the columns and the row of a block are cut into the same parts"
            raise refused(found, why, "give them the same number of features or heads")
    for name, cut in cuts.items():
        if cut.way == HEADS:
            plan.add_block(by_heads(name, cut.module))
        plan.cuts.setdefault(name, cut)
    _check_tied(model, plan)
    return plan


def holders_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """By the id of each parameter, the names of the modules that hold it."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    return holders


def refused(found: str, why: str, do: str) -> RequestError:
    """The error for an impossible plan."""
    return RequestError(asked="tensor_plan() for --strategy tensor", found=found, why=why, do=do)


def _checked(name: str, module: Any, how: Any, plan: CutPlan) -> LayerCut:
    way, unit = how if isinstance(how, tuple) else (how, getattr(module, "head_dim", 1))
    if way not in WAYS:
        raise refused(f"{name}: {how!r}", f"a way is one of {', '.join(WAYS)}", "name one of them")
    can = has_heads(module) if way == HEADS else can_be_cut(module)
    if own_kind(module) is not WAYS[way] or not can:
        found = f"{name}: {way}, which is a {own_kind(module).__name__}"
        without = "add_bias_kv, add_zero_attn" if way == HEADS else "max_norm, sparse"
        why = f"it cuts an nn.{WAYS[way].__name__} without {without} or a forward of its own"
        raise refused(found, why, "leave it out: it is then the same on every rank")
    cut = LayerCut(name, module, way, unit)
    if not cut.fits(plan.ranks, even=plan.even):
        parts = f"{plan.ranks} leaves" if plan.even else f"{plan.ranks} ranks"
        found = f"{name}: {way} of {cut.units} features, rows or heads, for {parts}"
        why = "every rank must have a part, and all the same number of heads"
        raise refused(found, why, "fewer ranks, or leave it out of the plan")
    return cut


def _check_tied(model: nn.Module, plan: CutPlan) -> None:
    """Check that a weight of several modules is cut by rows in all of them, or in none."""
    for names in holders_of_weights(model).values():
        cuts = [plan.cuts.get(name) for name in names]
        if len(names) == 1 or not any(cuts):
            continue
        if any(cut is None or cut.way == ROW or cut.block for cut in cuts):
            found = " and ".join(names) + ", which share a weight"
            why = "it is cut by its rows in all modules that hold it"
            raise refused(found, why, "column for each Linear, vocabulary for the Embedding")


def _uses(model: nn.Module) -> Counter[int]:
    """In how many places each module is used."""
    return Counter(id(child) for parent in model.modules() for child in parent._modules.values())


def _can_be_block(cuts: Sequence[LayerCut], parent: nn.Module, uses: Counter[int]) -> bool:
    """Whether only the layers of the block see the activations between columns and row."""
    if any(uses[id(cut.module)] > 1 for cut in cuts):
        return False
    inside = [module for module in parent.modules() if module is not parent]
    if isinstance(parent, nn.Sequential):
        children = list(parent)
        first, last = (children.index(cut.module) for cut in (cuts[0], cuts[-1]))
        inside = children[first : last + 1]
    return not any(has_hooks(module) for module in inside)


def _children(name: str, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child, module in parent._modules.items():  # a layer may come twice
        if module is None:
            continue
        yield (f"{name}.{child}" if name else child), module


def _blocks_in(name: str, parent: nn.Module) -> Iterator[list[LayerCut]]:
    """Blocks of columns and a row directly below a module."""
    if isinstance(parent, nn.Sequential):
        yield from _pairs_in(name, parent)
        return
    if has_heads(parent):
        yield by_heads(name, parent)
        return
    plan: Any = getattr(parent, "tensor_plan", None) or BLOCKS.get(own_kind(parent))
    if not isinstance(plan, Mapping):
        return
    below = {path.rpartition(".")[2]: (path, module) for path, module in _children(name, parent)}
    layers = [(*below[child], how) for child, how in plan.items() if child in below]
    activation = getattr(parent, "activation", F.relu)
    if own_kind(parent) in BLOCKS and not _is_elementwise(activation):
        return
    if all(how == WITHIN or can_be_cut(module) for _, module, how in layers):
        pairs = [(p, m, how if isinstance(how, tuple) else (how, 1)) for p, m, how in layers]
        yield [LayerCut(path, module, *how) for path, module, how in pairs]


def _is_elementwise(function: Any) -> bool:
    if isinstance(function, nn.Module):
        return own_kind(function) in ELEMENTWISE and "forward" not in vars(function)
    return function in (F.relu, F.gelu, F.silu, torch.relu, torch.tanh)


def _pairs_in(
    name: str, stack: nn.Sequential, ways: Mapping[str, str] | None = None
) -> Iterator[list[LayerCut]]:
    """Pairs of Linear with only element-wise layers in between.

    With `ways` the first must be a column there, and the second a row. A stack with its own forward
    has no pairs: it may do anything in between.
    """
    if not is_chain(stack):
        return
    first: LayerCut | None = None
    for path, module in _children(name, stack):
        linear: Any = module
        if own_kind(module) is nn.Linear and can_be_cut(module):
            if first is not None and (ways is None or ways.get(path) == ROW):
                yield [first, LayerCut(path, linear, ROW)]
                first = None
            else:
                is_first = ways is None or ways.get(path) == COLUMN
                first = LayerCut(path, linear, COLUMN) if is_first else None
        elif not _is_elementwise(module):
            first = None


def _ways_of(module: nn.Module, *, is_tied: bool) -> tuple[str, ...]:
    if isinstance(module, nn.Embedding):
        return (VOCABULARY,)
    return (COLUMN,) if is_tied else (COLUMN, ROW)

"""Cuts a model over the tensor axis: replaces layers in place, and parameters by this rank's part.

A strategy calls `cut_layers`: it plans, refuses what cannot be cut, and cuts. The heads of an
`nn.MultiheadAttention` are cut as

    in_proj_weight    rows of this rank's heads, of query, key and value each    (3 · e/N, e)
    in_proj_bias      the same rows                                                  (3 · e/N)
    out_proj.weight   columns of this rank's heads: a part of every sum       (e, e/N)

In between, a rank computes the attention of its heads and sends nothing. A block sends its output,
and in backward the gradient of its input. Attention weights that a caller wants (`need_weights`,
torch's default) are summed or gathered over the ranks; `need_weights=False` sends none. Dropout
draws for each head the same numbers as one process. Shoeybi et al. 2019, Megatron-LM,
arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from allranks.errors import RequestError
from allranks.torch.model.layers import own_kind
from allranks.torch.parallel.sharded.gradients import check_no_hooks
from allranks.torch.parallel.tensor.exchange import Joined, TensorExchange
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
    aligned,
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
from allranks.torch.parallel.tensor.scattered import ScatteredExchange
from allranks.torch.random.dropout import ShardDropout
from allranks.torch.random.torch_functions import bernoulli_of_part
from allranks.torch.strategies.layout import Along, Cut, places_of
from allranks.torch.task import Task

BATCHED = 3  # dimensions of (sample, position, feature)
HEADS_DIM = 1  # of (sample, head, query, key)


class HeadsOutput(RowLinear, NonDynamicallyQuantizableLinear):
    """`out_proj`: the columns of this rank's heads. Closes the region of the heads."""


@dataclass(frozen=True)
class AttentionOptions:
    """The options of a call. `mask` is added to the scores of this rank's heads.

    It is (1 or n, 1 or heads, queries, keys), or `None` for no mask or a purely causal one.
    """

    mask: Tensor | None
    is_causal: bool
    weights: bool

    def of_heads(self, start: int, heads: int) -> Tensor | None:
        """The mask of some of this rank's heads."""
        if self.mask is None or self.mask.shape[HEADS_DIM] == 1:
            return self.mask
        return self.mask.narrow(HEADS_DIM, start, heads)


class HeadsOfAttention(CutLayer, nn.MultiheadAttention):
    """Some heads of attention. Input and output are full, and the same on all ranks."""

    region: Region

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """`False`, so that no layer of torch passes full weights to a kernel in evaluation."""
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `nn.MultiheadAttention.forward`."""
        is_batched = query.dim() == BATCHED
        samples = 0 if self.batch_first or not is_batched else 1
        inputs = [query, key, value]
        if not is_batched:
            batched = {id(tensor): tensor.unsqueeze(0) for tensor in inputs}
            inputs = [batched[id(tensor)] for tensor in inputs]
        leaves = [self._by_heads(some, samples) for some in self._projected(*inputs)]
        options = self._options(
            leaves[0], attn_mask, key_padding_mask, causal=is_causal, need_weights=need_weights
        )
        outputs, weights = self._attended(leaves, options)
        joined = [
            heads.permute(0, 2, 1, 3) if samples == 0 else heads.permute(2, 0, 1, 3)
            for heads in outputs
        ]
        flat = [heads.flatten(2) for heads in joined]
        features = flat[0] if len(flat) == 1 else Joined.apply(*flat)  # type: ignore[no-untyped-call]
        output = self.out_proj(features)
        if not need_weights:
            return output if is_batched else output.squeeze(0), None
        shown = self._whole_weights(weights, average=average_attn_weights)
        return (output, shown) if is_batched else (output.squeeze(0), shown.squeeze(0))

    # --- columns --------------------------------------------------------------------------

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[list[Tensor]]:
        """Queries, keys and values of this rank's heads, for each leaf."""
        packed, bias = self.part("in_proj_weight"), self.part("in_proj_bias")
        if packed is not None and query is key and key is value:
            return [list(p.chunk(3, -1)) for p in self._products(query, packed, bias, runs=3)]
        if packed is None:
            weights: Sequence[Any] = [self.part(f"{name}_proj_weight") for name in "qkv"]
        else:
            weights = packed.chunk(3)
        biases: Sequence[Tensor | None] = [None] * 3 if bias is None else bias.chunk(3)
        triples = zip((query, key, value), weights, biases, strict=True)
        products = [self._products(x, weight, bias, runs=1) for x, weight, bias in triples]
        return [list(leaf) for leaf in zip(*products, strict=True)]

    def _products(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, *, runs: int
    ) -> list[Tensor]:
        """The features of this rank's heads, for each leaf; `weight` has so many `runs`."""
        exchange, region = self.exchange, self.region
        if isinstance(exchange, ScatteredExchange) and exchange.lies_along(self, input):
            return [region.enter_rows(exchange, input).linear(weight, bias)]
        copies = region.enter(input)
        if not exchange.leaves:
            return [F.linear(copies[0], weight, bias)]

        def leaf(rows: Tensor, at: int) -> Tensor:
            return aligned(rows.unflatten(0, (runs, len(copies), -1))[:, at].flatten(0, 1))

        return [
            F.linear(copy, leaf(weight, at), None if bias is None else leaf(bias, at))
            for at, copy in enumerate(copies)
        ]

    def _by_heads(self, some: list[Tensor], samples: int) -> list[Tensor]:
        """Each as (n, heads, positions, features of a head)."""
        order = (0, 2, 1, 3) if samples == 0 else (1, 2, 0, 3)
        return [part.unflatten(-1, (-1, self.head_dim)).permute(order) for part in some]

    # --- heads ----------------------------------------------------------------------------

    def _attended(
        self, leaves: list[list[Tensor]], options: AttentionOptions
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Attention of this rank's heads, leaf by leaf, and its weights if they are computed."""
        keeps, outputs, weights, start = self._dropout_mask(leaves, options), [], [], 0
        for query, key, value in leaves:
            heads = query.shape[HEADS_DIM]
            mask = options.of_heads(start, heads)
            if keeps is None and not options.weights:
                outputs.append(
                    F.scaled_dot_product_attention(
                        query, key, value, mask, is_causal=options.is_causal and mask is None
                    )
                )
            else:
                some = _softmax(query, key, mask, as_kernel=not options.weights)
                if keeps is not None:
                    some = some * keeps.narrow(HEADS_DIM, start, heads).to(some.dtype)
                weights.append(some)
                outputs.append(some @ value)
            start += heads
        return outputs, weights

    def _dropout_mask(self, leaves: list[list[Tensor]], options: AttentionOptions) -> Tensor | None:
        """The dropout mask for the weights of this rank's heads; `None` if dropout is off."""
        if not self._draws():
            return None
        query, key = leaves[0][:2]
        n, sizes = query.shape[0], (query.shape[2], key.shape[2])
        mask: Tensor
        region, rate = self.region, 1 - self.dropout
        if options.weights:  # one process draws for (n · heads) rows here
            shape = n * region.units, *sizes
            rows = bernoulli_of_part(query.new_empty(shape), rate, shape)
            mask = rows.unflatten(0, (n, -1)).narrow(HEADS_DIM, region.start, region.local_units)
        else:
            like = query.new_empty(n, region.local_units, *sizes)
            mask = bernoulli_of_part(like, rate, (n, region.units, *sizes), region.start)
        return mask / rate if rate else mask

    def _whole_weights(self, leaves: list[Tensor], *, average: bool) -> Tensor:
        """The weights of all heads, or their mean, over the ranks."""
        if not average:
            return self.exchange.whole(torch.cat(leaves, HEADS_DIM), HEADS_DIM, self.num_heads)
        parts = [some.sum(HEADS_DIM) / self.num_heads for some in leaves]
        if self.exchange.leaves:
            return self.exchange.summed_leaves(parts)
        return self.exchange.summed(parts[0])

    # --- masks ----------------------------------------------------------------------------

    def _options(
        self,
        some: list[Tensor],
        mask: Tensor | None,
        padding: Tensor | None,
        *,
        causal: bool,
        need_weights: bool,
    ) -> AttentionOptions:
        """Combine both masks; `causal` is a hint that `mask` is causal.

        Raises `RequestError` for masks that `nn.MultiheadAttention` refuses.
        """
        like, key = some[:2]
        n, queries, keys = like.shape[0], like.shape[2], key.shape[2]
        if causal and mask is None:
            raise _no_mask("is_causal=True without attn_mask", "attn_mask says what is causal")
        if causal and padding is None and not need_weights and not self._draws():
            return AttentionOptions(None, True, need_weights)
        added = None
        if mask is not None:
            many = (n * self.num_heads, queries, keys)
            if mask.shape not in ((queries, keys), many):
                found = f"attn_mask of shape {tuple(mask.shape)}"
                raise _no_mask(found, f"it is {(queries, keys)} or {many}")
            rows = mask.unsqueeze(0) if mask.dim() < BATCHED else mask
            heads = self.num_heads if len(rows) > 1 else 1
            added = _added(rows, like.dtype).unflatten(0, (-1, heads))
            if heads > 1:
                added = added.narrow(HEADS_DIM, self.region.start, self.region.local_units)
        if padding is not None:
            if padding.numel() != n * keys:
                found = f"key_padding_mask of shape {tuple(padding.shape)}"
                raise _no_mask(found, f"it is {(n, keys)}")
            of_keys = _added(padding, like.dtype).view(n, 1, 1, keys)
            added = of_keys if added is None else added + of_keys
        return AttentionOptions(added, False, need_weights)

    def _draws(self) -> bool:
        return self.training and self.dropout > 0


def _softmax(query: Tensor, key: Tensor, mask: Tensor | None, *, as_kernel: bool) -> Tensor:
    """Attention weights; fully masked queries get zeros if the kernel would give zeros."""
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)
    if mask is None:
        return scores.softmax(-1)
    scores = scores + mask
    if not as_kernel:
        return scores.softmax(-1)
    sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(sees_nothing, 0.0).softmax(-1).masked_fill(sees_nothing, 0.0)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores; in a boolean mask, True means masked."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def _no_mask(found: str, why: str) -> RequestError:
    return RequestError(
        asked="nn.MultiheadAttention whose heads are cut over the ranks",
        found=found,
        why=f"torch refuses it, too: {why}",
        do="call it as nn.MultiheadAttention says",
    )


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

    cuts: dict[str, Cut] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    layers: list[CutLayer] = field(default_factory=list)
    summed: set[str] = field(default_factory=set)
    """Parameters that are not cut, of whose gradients each rank has a part of the sum."""

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


def cut_layers(
    task: Task,
    model: nn.Module,
    exchange: TensorExchange,
    asked: str,
    leaves: int = 0,
    inside: nn.Module | None = None,
) -> CutModel:
    """Cut `model` in place by the plan of the task, or by the default. No communication.

    With `leaves` every layer is cut so that leaves can be distributed evenly. Only layers `inside`
    a part of the model are cut, such as its stages; a block lies in one of them. Raises
    `RequestError` with `asked` if nothing can be cut, or the model is not supported.
    """
    if task.overrides("initialise"):
        raise no_whole_weights(asked)
    check_no_hooks(model, asked)
    task_plan, parts = task.tensor_plan(model), leaves or exchange.comm.size
    inside = model if inside is None else inside
    if task_plan is None:
        plan = default_plan(inside, parts, even=leaves > 0)
    else:
        plan = explicit_plan(inside, parts, task_plan, even=leaves > 0, of=model)
    if not plan.cuts:
        raise nothing_to_cut(asked, parts)
    return cut_model(inside, plan, exchange, model)


def cut_model(
    model: nn.Module, plan: CutPlan, exchange: TensorExchange, of: nn.Module | None = None
) -> CutModel:
    """Cut `model` in place. Layers that are not in the plan are the same on every rank.

    If it consists of modules `of` another model, parameters have their names there, and each of
    their holders gets the part.
    """
    of = of or model
    slots = places_of(of, model)
    names = {place: name for name, places in slots.items() for place in places}
    regions: dict[str, Region] = {}
    shapes, result = {name: p.shape for name, p in of.named_parameters()}, CutModel()
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
            if path not in result.cuts:
                result.cuts[path] = Cut(torch.empty(shapes[path], device="meta"), along)
                part = local_parameter(module._parameters[name], along, exchange)
                for holder, attribute in slots[path]:
                    holder._parameters[attribute] = part
            module.sizes[name] = shapes[path][along.dim]
            module.lengths[name] = module._parameters[name].shape[along.dim]
        module.exchange, module.region = exchange, region
        module.__class__ = KINDS[cut.way, own_kind(module)]
        module._parameters = ShownWhole(module)
        result.layers.append(module)
    inside = {part for module in plan.within for part in module.modules()}
    result.summed = {name for (holder, _), name in names.items() if holder in inside}
    _attach_regions(model, plan, regions, exchange)
    _pad_encoder_layers(model)
    result.regions = list(regions.values())
    return result


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


def no_whole_weights(asked: str) -> RequestError:
    """The error for weights that a task sets from its first batch, where ranks hold parts."""
    return RequestError(
        asked=f"{asked} with initialise(model, inputs) of the task",
        found="weights that are set from the first batch",
        why="each rank holds a part of them by then",
        do="set them in model(), or --strategy ddp",
    )

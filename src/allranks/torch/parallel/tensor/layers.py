"""Layers cut over the tensor axis: Linear by rows or columns, Embedding.

    column       weight (out/N, in)    every rank computes some of the output's features
    row          weight (out, in/N)    every rank computes a part of the sum; all-reduce, + bias
    vocabulary   weight (rows/N, d)    every rank looks up its rows; all-reduce

Between the columns and the row of a `Region` activations stay cut, and a block sends only one
all-reduce in forward and one in backward. Elsewhere a column gathers its output, and a row uses its
part of the full input. Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053.

User code within a pass sees full weights (`.whole_weight`). A layer that gets full weights in place
of its own, as by `torch.func.functional_call`, uses its part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.torch.model.layers import Swapped, has_hooks, own_kind
from allranks.torch.parallel.context.exchange import POSITIONS
from allranks.torch.parallel.tensor.exchange import Joined, TensorExchange
from allranks.torch.parallel.tensor.scattered import AllRows, ScatteredExchange
from allranks.torch.parallel.tensor.whole_weight import WholeWeight, shown
from allranks.torch.random.dropout import TensorPart
from allranks.torch.strategies.layout import Along, part_sizes

ATTENTION_DIMS = 4  # (sample, head, position, feature or position)


class Region:
    """From the columns of a block to its row: in between, activations are cut along `units`.

    A unit is a feature, or a head of attention. Columns with the same input, as those of query, key
    and value, send its gradient once. While the region is not active, columns and rows work as
    separate layers.
    """

    def __init__(self, exchange: TensorExchange, units: int, *, are_heads: bool, name: str) -> None:
        self.exchange, self.units, self.are_heads, self.name = exchange, units, are_heads, name
        sizes = part_sizes(units, exchange.comm.size)
        self.start, self.local_units = sum(sizes[: exchange.comm.rank]), sizes[exchange.comm.rank]
        self._input: Tensor | None = None
        self._copies: tuple[Tensor, ...] = ()
        self.rows: AllRows | None = None  # if the input is some positions of a sequence
        self.is_open, self.is_active = False, True

    def close(self) -> None:
        """End the region: the next activations are full."""
        self._input, self._copies, self.rows = None, (), None
        self.is_open = False

    def enter_rows(self, exchange: ScatteredExchange, input: Tensor) -> AllRows:
        """The input of a column, which is this rank's positions of a sequence."""
        if self.rows is None or self._input is not input:
            self._input, self.rows = input, exchange.rows_of_all(input)
        self.is_open = True
        return self.rows

    def enter(self, input: Tensor) -> tuple[Tensor, ...]:
        """The input of a column, once for each of its leaves."""
        if self._input is not input:
            self._input, self._copies = input, copies_of(self.exchange, input)
        self.is_open = True
        return self._copies

    def part_of(self, tensor: Tensor) -> TensorPart | None:
        """Which part of a full activation a tensor is; `None` if it is full."""
        if not self.is_open:
            return None
        if self.are_heads and tensor.ndim == ATTENTION_DIMS and tensor.shape[1] == self.local_units:
            return TensorPart(1, self.start, self.units)
        each, remainder = divmod(tensor.shape[-1], self.local_units)
        if remainder:
            raise RequestError(
                asked=f"a tensor-parallel block at {self.name!r}",
                found=f"dropout on a tensor of shape {tuple(tensor.shape)}",
                why=f"between its columns and its row this rank has {self.local_units} of "
                f"{self.units} features or heads",
                do="leave the block out of tensor_plan(), or --strategy ddp",
            )
        return TensorPart(-1, self.start * each, self.units * each)


class Between:
    """The regions of an element-wise layer, which may be used in several blocks, and outside."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def open_region(self) -> Region | None:
        """The innermost open region."""
        return next((region for region in reversed(self.regions) if region.is_open), None)

    def part_of(self, tensor: Tensor) -> TensorPart | None:
        """Which part of a full activation a tensor is; `None` if it is full."""
        region = self.open_region()
        return None if region is None else region.part_of(tensor)


class OpenChain(Swapped, nn.Sequential):
    """An `nn.Sequential` with blocks in it: their regions are active while its forward runs.

    Other code may call its members too, or a slice of it, which has no `regions`.
    """

    regions: list[Region]

    def forward(self, input: Any) -> Any:
        regions = vars(self).get("regions", ())
        for region in regions:
            region.is_active = True
        try:
            return super().forward(input)  # type: ignore[no-untyped-call]
        finally:  # recomputation in backward may stop early
            for region in regions:
                region.close()
                region.is_active = False


def copies_of(exchange: TensorExchange, input: Tensor) -> tuple[Tensor, ...]:
    """The input of a column, once for each of its leaves."""
    return exchange.copied_leaves(input) if exchange.leaves else (exchange.copied(input),)


class CutLayer(Swapped):
    """A layer of which this rank holds a part. `region` is that of its block, if any."""

    exchange: TensorExchange
    region: Region | None
    dims: dict[str, Along]
    sizes: dict[str, int]
    lengths: dict[str, int]
    _parameters: dict[str, nn.Parameter | None]

    @property
    def block(self) -> Region | None:
        """The active region of the layer; `None` if it works separately."""
        region = self.region
        return region if region is not None and region.is_active else None

    @property
    def kind(self) -> str:
        """The name of the layer's original class."""
        layer: Any = self
        return own_kind(layer).__name__

    def local_param(self, name: str) -> nn.Parameter | None:
        """The parameter that is stored, usually this rank's part."""
        return dict.__getitem__(self._parameters, name)

    def part(self, name: str) -> Tensor | None:
        """This rank's part: the stored one, or that of a full weight that user code put there."""
        param, along = self.local_param(name), self.dims.get(name)
        if param is None or along is None or param.shape[along.dim] == self.lengths[name]:
            return param
        if param.shape[along.dim] != self.sizes[name]:
            raise _not_a_weight(self, name, param)
        return self.exchange.own_part(param, along)

    def shown(self, name: str) -> Tensor | None:
        """A parameter as user code sees it: full in a pass, elsewhere this rank's part."""
        param, along = self.local_param(name), self.dims.get(name)
        if param is None or along is None or not self.exchange.is_open:
            return param
        if isinstance(param, DTensor):  # cut over another axis too
            return self._not_there(name, param) if self.exchange.refuses_parts else param
        if param.shape[along.dim] != self.lengths[name]:
            return param  # user code has put it there
        return shown(self.exchange, param, along, self.sizes[name])

    def _not_there(self, name: str, param: Tensor) -> Tensor:
        """A stand-in with full shape, dtype and device; any operation on it raises."""
        shape = list(param.shape)
        shape[self.dims[name].dim] = self.sizes[name]

        def collect() -> Tensor:
            raise _not_gathered(self, name)

        return WholeWeight.of(shape, param, collect)


def aligned(leaf: Tensor) -> Tensor:
    """A copy in its own memory: the rounding of a product may depend on alignment."""
    return leaf.clone(memory_format=torch.contiguous_format)


class ByLeaves(Swapped, nn.Module):
    """An element-wise layer that is applied leaf by leaf to cut activations.

    Torch rounds the last elements of a tensor, which fill no vector register, in another way.
    """

    exchange: TensorExchange
    between: Between

    def forward(self, input: Tensor) -> Tensor:
        leaves, apply = self.exchange.leaves, super().forward
        if self.between.open_region() is None or input.shape[-1] % leaves:
            return apply(input)  # type: ignore[no-any-return]
        parts = (apply(aligned(leaf)) for leaf in input.chunk(leaves, -1))
        output: Tensor = Joined.apply(*parts)  # type: ignore[no-untyped-call]
        return output


class PaddedEncoderLayer(Swapped, nn.TransformerEncoderLayer):
    """An encoder layer with cut layers in it, which pads nested tensors.

    In evaluation `nn.TransformerEncoder` makes a nested tensor by its padding mask.
    """

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not src.is_nested:
            return super().forward(src, *args, **kwargs)
        lengths = [len(sample) for sample in src.unbind()]
        padded = src.to_padded_tensor(0.0)  # (sample, position, feature)
        positions = torch.arange(padded.shape[1], device=padded.device)
        is_padding = positions >= torch.tensor(lengths, device=padded.device)[:, None]
        output = super().forward(padded, src_key_padding_mask=is_padding)
        return torch._nested_tensor_from_mask(output, ~is_padding, mask_check=False)


class ShownWhole(dict[str, Any]):
    """The parameters of a cut layer, as `CutLayer.shown` shows them to user code."""

    def __init__(self, layer: CutLayer) -> None:
        super().__init__(layer._parameters)
        self.layer = layer

    def __getitem__(self, name: str) -> Any:
        return self.layer.shown(name)

    def __setitem__(self, name: str, value: Any) -> None:
        part = value.part if isinstance(value, WholeWeight) else None
        super().__setitem__(name, value if part is None else part)

    def __iter__(self) -> Iterator[str]:  # so that dict(…) calls `__getitem__`
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if super().__contains__(name) else default

    def items(self) -> Any:
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (self[name] for name in self)


class ColumnLinear(CutLayer, nn.Linear):
    """Rows of the weight and the bias: some of the output's features. The input is full."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.part("weight"), self.part("bias")
        assert weight is not None
        block, exchange = self.block, self.exchange
        if isinstance(exchange, ScatteredExchange) and exchange.lies_along(self, input):
            rows = block.enter_rows(exchange, input) if block else exchange.rows_of_all(input)
            output = rows.linear(weight, bias)
            return output if block else self._own_positions(exchange, output)
        enter = partial(copies_of, self.exchange) if block is None else block.enter
        copies = enter(input)
        if self.exchange.leaves:
            output = self._by_leaves(copies, weight, bias)
        else:
            output = F.linear(copies[0], weight, bias)
        return output if block else self.exchange.whole(output, -1, self.out_features)

    def _own_positions(self, exchange: ScatteredExchange, output: Tensor) -> Tensor:
        """All features of this rank's positions."""
        return exchange.own_part(exchange.whole(output, -1, self.out_features), POSITIONS)

    def _by_leaves(self, copies: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> Tensor:
        """A product for each leaf of features, of one shape on any number of ranks."""
        weights = [aligned(rows) for rows in weight.chunk(len(copies))]
        biases = [None] * len(copies) if bias is None else bias.chunk(len(copies))
        output: Tensor = Joined.apply(*map(F.linear, copies, weights, biases))  # type: ignore[no-untyped-call]
        return output


class RowLinear(CutLayer, nn.Linear):
    """Columns of the weight: a part of every sum. The bias is full, and added once."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.part("weight"), self.part("bias")
        assert weight is not None
        block, exchange = self.block, self.exchange
        scatters = False
        if block is None:
            if isinstance(exchange, ScatteredExchange) and exchange.lies_along(self, input):
                assert exchange.span is not None
                input, scatters = exchange.whole_rows(input, exchange.span, is_last=False), True
            input = exchange.own_part(input, -1)
        else:
            scatters = block.rows is not None
            block.close()
        if input.shape[-1] != weight.shape[1]:
            raise _not_cut(self, input)
        if scatters:
            assert isinstance(exchange, ScatteredExchange)
            output = exchange.own_sum(F.linear(input, weight), block.name if block else "")
        else:
            output = self._sum(input, weight)
        return output if bias is None else output + bias

    def _sum(self, input: Tensor, weight: Tensor) -> Tensor:
        """The product over the features of all ranks."""
        leaves = self.exchange.leaves
        if not leaves:
            return self.exchange.summed(F.linear(input, weight))
        pairs = zip(input.chunk(leaves, -1), weight.chunk(leaves, 1), strict=True)
        parts = [F.linear(aligned(some), aligned(columns)) for some, columns in pairs]
        return self.exchange.summed_leaves(parts)


class VocabularyEmbedding(CutLayer, nn.Embedding):
    """Rows of the table: this rank looks up the tokens that it has; others add zero.

    A token out of range goes to the first or the last rank, where torch raises.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, comm = self.part("weight"), self.exchange.comm
        assert weight is not None
        sizes = part_sizes(self.num_embeddings, comm.size)
        start, rows = sum(sizes[: comm.rank]), sizes[comm.rank]
        indices = input - start
        elsewhere = torch.zeros_like(indices, dtype=torch.bool)
        if comm.rank > 0:
            elsewhere |= indices < 0
        if comm.rank < comm.size - 1:
            elsewhere |= indices >= rows
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < rows:
            padding = None
        embedded = F.embedding(indices.masked_fill(elsewhere, 0), weight, padding)
        return self.exchange.summed(embedded.masked_fill(elsewhere.unsqueeze(-1), 0))


def _not_gathered(layer: CutLayer, name: str) -> RequestError:
    return RequestError(
        asked=f"{name!r} of a {layer.kind}, in forward, loss or metrics",
        found="a layer whose unit of fsdp has let go of its weights",
        why="each rank holds a part of a part of it outside of the forward of its unit",
        do="let fsdp_units(model) return a module that does all of this within its forward, or [] "
        "(then loss in training may read weights, too), or --strategy tensor",
    )


def _not_a_weight(layer: CutLayer, name: str, found: Tensor) -> RequestError:
    dim, size = layer.dims[name].dim, layer.sizes[name]
    return RequestError(
        asked=f"a {layer.kind} that is cut over the ranks",
        found=f"{name!r} of shape {tuple(found.shape)} in the place of its own",
        why=f"it takes its part of a whole weight, with {size} along dimension {dim}",
        do="give it a whole weight (parameters() has them within forward and loss), or leave the "
        "layer out of tensor_plan()",
    )


def _not_cut(layer: RowLinear, input: Tensor) -> RequestError:
    name = layer.region.name if layer.region is not None else ""
    return RequestError(
        asked=f"a row-parallel Linear in {name!r}",
        found=f"an input of shape {tuple(input.shape)}, of {layer.in_features} features when whole",
        why="between the columns and the row of a block each rank has its part of the features, "
        "and something there has changed how many there are",
        do="leave that block out of tensor_plan()",
    )


# --- vocabulary loss -----------------------------------------------------------------------------
# Cross entropy of an output layer that is cut over its classes: no rank has all logits.
#
#     every rank    logits of its classes (tokens, classes/N), their maximum and their sum
#     exchanged     a maximum, a sum of exponentials and a target's logit for each token
#
# Logits for a large vocabulary are most of the activations of a small language model, and would be
# most of its messages if gathered. Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3.


def cross_entropy(
    head: nn.Linear, hidden: Tensor, target: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """The cross entropy of `head(hidden)` for each target, (…): `hidden` is (…, features).

    For the forward of a model, whose output is then the loss. If `--strategy tensor` cuts `head`
    over its classes, logits are not gathered, and ranks exchange three numbers for each target.
    Otherwise, and with `exact=yes`, it is torch's own, of full logits. A target that equals
    `ignore_index` has a loss of 0.
    """
    if not isinstance(head, ColumnLinear) or head.exchange.leaves or has_hooks(head):
        logits = head(hidden).flatten(0, -2)
        flat = target.flatten()
        whole = F.cross_entropy(logits, flat, ignore_index=ignore_index, reduction="none")
        return whole.view(target.shape)
    if head.block is not None:
        raise _within_a_block(head)
    if _are_functorch_transforms_active():
        raise _first_order("it is called within vmap, grad or another transform of torch.func")
    weight, bias = head.part("weight"), head.part("bias")
    assert weight is not None, "a Linear without one is not cut"
    logits = F.linear(copies_of(head.exchange, hidden)[0], weight, bias).flatten(0, -2)
    if logits.itemsize < 4:  # as torch's own does under autocast
        logits = logits.float()
    sizes = part_sizes(head.out_features, head.exchange.comm.size)
    start = sum(sizes[: head.exchange.comm.rank])
    apply: Any = _OverClasses.apply
    losses: Tensor = apply(head.exchange, logits, target.flatten(), start, ignore_index)
    return losses.view(target.shape)


class _OverClasses(torch.autograd.Function):
    """Logits of some classes (tokens, classes/N) -> the loss of each token, on every rank."""

    @staticmethod
    def forward(
        ctx: Any, exchange: TensorExchange, logits: Tensor, target: Tensor, start: int, ignored: int
    ) -> Tensor:
        comm = exchange.comm
        most = exchange.all(logits.amax(1)[None], 0, comm.size).amax(0)
        exponentials = (logits - most[:, None]).exp_()
        indices, is_ignored = target - start, target == ignored
        is_here = ~is_ignored
        if comm.rank > 0:  # out of range: the first or the last rank, where torch raises
            is_here &= indices >= 0
        if comm.rank < comm.size - 1:
            is_here &= indices < logits.shape[1]
        at = indices.masked_fill(~is_here, 0)[:, None]
        picked = (logits.gather(1, at)[:, 0] - most).masked_fill(~is_here, 0)
        total, of_target = exchange.sum_(torch.stack([exponentials.sum(1), picked]))
        ctx.save_for_backward(exponentials.div_(total[:, None]), at, is_here, is_ignored)
        losses: Tensor = (total.log() - of_target).masked_fill(is_ignored, 0)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise _first_order("its gradient is differentiated, as by create_graph=True")
        probabilities, at, is_here, is_ignored = ctx.saved_tensors
        each = gradient.masked_fill(is_ignored, 0)[:, None]
        grad_logits = probabilities * each
        grad_logits.scatter_add_(1, at, -each * is_here[:, None])
        return None, grad_logits, None, None, None


def _first_order(found: str) -> RequestError:
    return RequestError(
        asked="cross_entropy(head, …) of allranks.torch, with a head that is cut over its classes",
        found=found,
        why="no rank has all logits, and its gradient is made for one backward pass",
        do="torch.nn.functional.cross_entropy(head(hidden), target), or --strategy ddp",
    )


def _within_a_block(head: ColumnLinear) -> RequestError:
    name = head.region.name if head.region is not None else ""
    return RequestError(
        asked="cross_entropy(head, …) of allranks.torch",
        found=f"a head that is a column of the block at {name!r}",
        why="its output goes on in parts there, and is not the logits of a loss",
        do="leave the head out of that block in tensor_plan()",
    )

"""A pass in which the blocks of a model compute a rank's positions of each sequence.

    embeddings, positions      whole, the same on all ranks
    first block                cut: (n, t, d) -> this rank's (n, t/P, d)
    blocks                     local positions; attention over all of them            `attention`
    last block                 gathered: (n, t/P, d) -> (n, t, d); also a block whose output the
                               model uses before the next block
    head, loss                 whole, the same on all ranks

The first pass in training, and the first in evaluation, runs the model whole, to record the order
of the blocks. Then it compares each block, and the output, with those of the whole sequence
(`blocks`). Later passes must call the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.data.collate import map_arguments, tensors_of_arguments
from allranks.torch.model.activation_checkpointing import recomputed
from allranks.torch.parallel.context.exchange import POSITIONS, SequenceExchange, Span
from allranks.torch.random.dropout import TensorPart

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
DIMS = 3  # (sample, position, feature)

REFUSALS = {
    "nothing to cut": (
        "{found}",
        "the strategy cuts activations of (sample, position, feature), from the first repeated "
        "block to the last",
        "let blocks(model) of the task return the blocks that take such, or --strategy ddp",
    ),
    "no positions": (
        "{span.whole} positions in a sequence: {sizes} of them",
        "every rank has some positions of each sequence",
        "fewer ranks, data=…, or longer sequences",
    ),
    "several tensors": (
        "a block that returns more tensors than its activations",
        "it is not known whether they belong to this rank's positions or to all",
        "return the activations alone, or --strategy ddp",
    ),
    "several positions": (
        "the block {name!r} is given a tensor of shape {shape}, with {length} positions",
        "it is not known along which dimension to cut it",
        "another length of the sequence, or --strategy ddp",
    ),
    "also so long": (
        "the block {name!r} is given another tensor of shape {shape}, and a rank has {span.local} "
        "positions of {span.whole}",
        "a layer with this input would gather it as if it were this rank's positions",
        "another length of one of the sequences, or --strategy ddp",
    ),
    "other blocks": (
        "other calls of blocks than in the first pass, at {name!r}",
        "the sequence is cut before the first block and gathered after the last",
        "blocks that are always called, in one order, or --strategy ddp",
    ),
    "other argument": (
        "the block {name!r} is given a tensor of shape {shape}, with {span.whole} positions, "
        "another one than in the first pass",
        "the first pass determined, and proved, which dimension has positions",
        "arguments of one layout in every pass, or --strategy ddp",
    ),
    "other length": (
        "{what} at the block {name!r}",
        "between blocks a rank has {span.local} of {span.whole} positions along dimension 1",
        "what changes the sequence before the first block or after the last, or --strategy ddp",
    ),
}
"""What cannot be cut, by name: (found, why, do), with the facts of the case in braces."""


def refused(asked: str, case: str, **facts: Any) -> RequestError:
    """The error for one of `REFUSALS`; `asked` names the strategy."""
    found, why, do = (text.format(**facts) for text in REFUSALS[case])
    return RequestError(asked=asked, found=found, why=why, do=do)


@dataclass(frozen=True)
class Call:
    """A call of a block in a pass, with its number of positions; 0 if it is not cut.

    `follows`: its input is the tensor which the block before returned. `cuts`: for each other
    tensor argument in the first pass its number of dimensions, and the one that was cut.
    """

    block: CutBlock
    length: int
    follows: bool
    cuts: list[tuple[int, int | None]] = field(default_factory=list)


class CutBlock:
    """Replaces the forward of a block while the strategy has the model."""

    def __init__(self, name: str, module: nn.Module, passes: BlockPasses) -> None:
        self.name, self.module, self.passes = name, module, passes
        self.before = vars(module).get("forward")  # of activation checkpointing
        again, forward = recomputed(module), module.forward
        if again is None:
            self.run: Callable[..., Any] = partial(_opened, passes, forward)
        else:  # the recomputation in backward needs the span, too
            how: Any = forward
            self.run = partial(how.func, partial(_opened, passes, how.args[0]), again)
        vars(module)["forward"] = self.called

    def called(self, *args: Any, **keywords: Any) -> Any:
        return self.passes.called(self, args, keywords)

    def restore(self) -> None:
        """Restore the module's own forward."""
        del vars(self.module)["forward"]
        if self.before is not None:
            vars(self.module)["forward"] = self.before


def _opened(
    passes: BlockPasses,
    forward: Callable[..., Any],
    span: Span | None,
    /,
    *args: Any,
    **keywords: Any,
) -> Any:
    """A block's own forward, on this rank's positions of `span`."""
    if span is None:
        return forward(*args, **keywords)
    with passes.within(span):
        return forward(*args, **keywords)


class Pass:
    """Handles the calls of blocks; this class runs them unchanged."""

    is_inside = False  # in a block, or in the strategy's code before it

    def called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return block.run(None, *args, **keywords)


class WholePass(Pass):
    """Runs every block whole, and records which can be cut."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.last: Tensor | None = None

    def called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        output = super().called(block, args, keywords)
        hidden, result = hidden_of((args, keywords)), hidden_of(((output,), {}))
        fits = hidden is not None and result is not None and hidden.shape[:2] == result.shape[:2]
        length = hidden.shape[POSITIONS] if fits and hidden is not None else 0
        self.calls.append(Call(block, length, follows=hidden is not None and hidden is self.last))
        self.last = result
        return output


class CutPass(Pass):
    """Runs blocks on this rank's positions, following `calls`; calls `prove` for each."""

    def __init__(
        self,
        exchange: SequenceExchange,
        calls: list[Call],
        prove: Callable[[CutBlock, Span, Arguments, Arguments], None] | None = None,
    ) -> None:
        self.exchange, self.calls, self.prove = exchange, calls, prove
        self.asked = exchange.asked
        self.at = 0
        self.span: Span | None = None
        self.last: Tensor | None = None  # this rank's positions, on their way to the next block
        self.handed: list[Tensor] = []  # in a proof, all tensors between blocks

    def called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.is_inside = True
        try:
            return self._called(block, args, keywords)
        finally:
            self.is_inside = False

    def _called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        call = self.calls[self.at] if self.at < len(self.calls) else None
        if call is None or call.block is not block:
            raise refused(self.asked, "other blocks", name=block.name)
        self.at += 1
        if not call.length:
            return super().called(block, args, keywords)
        inputs = args, keywords
        is_first, hidden = self.span is None, hidden_of(inputs)
        if hidden is None:
            raise refused(self.asked, "other blocks", name=block.name)
        span = self.span = self.span or span_of(hidden, self.exchange)
        if not is_first and not _is_same(hidden, self.last):
            raise refused(self.asked, "other blocks", name=block.name)
        local_inputs = self._local_inputs(call, inputs, span, hidden, is_first=is_first)
        if self.prove is not None:
            self.prove(block, span, inputs, local_inputs)
        output = block.run(span, *local_inputs[0], **local_inputs[1])
        result = hidden_of(((output,), {}))
        if result is None or result.shape[POSITIONS] != span.local:
            shape = None if result is None else tuple(result.shape)
            what = "no activations" if shape is None else f"activations of shape {shape}"
            raise refused(self.asked, "other length", name=block.name, what=what, span=span)
        following = self.calls[self.at :]
        if not _ends(call, following):
            self.last = result
            if self.prove is not None:
                self.handed.append(result)
            return output
        self.span = None
        is_last = not any(call.length for call in following)
        return with_hidden(
            self.asked, output, self.exchange.whole_rows(result, span, is_last=is_last)
        )

    def _local_inputs(
        self, call: Call, inputs: Arguments, span: Span, hidden: Tensor, *, is_first: bool
    ) -> Arguments:
        """This rank's positions of a block's inputs, cut as in the proved pass."""
        known, name = iter(call.cuts), call.block.name

        def cut(tensor: Tensor) -> Tensor:
            if tensor is hidden:
                return self.exchange.own_rows(tensor, span) if is_first else tensor
            if not self.exchange.cuts_arguments:
                return _whole(tensor, self.asked, name, span)
            if self.prove is not None:
                call.cuts.append((tensor.ndim, position_dim(tensor, span.whole, self.asked, name)))
            dims, dim = next(known, (-1, None))
            if tensor.ndim != dims or (dim is not None and tensor.shape[dim] != span.whole):
                shape = tuple(tensor.shape)
                raise refused(self.asked, "other argument", name=name, shape=shape, span=span)
            return tensor if dim is None else self.exchange.own_rows(tensor, span, dim)

        args, keywords = map_arguments(cut, inputs)
        return args, keywords

    def close(self) -> None:
        """End the pass; raises `RequestError` if it has not called all blocks."""
        if self.at != len(self.calls):
            raise refused(self.asked, "other blocks", name=self.calls[self.at].block.name)


class BlockPasses:
    """The blocks of a model, and the current pass. `span` is set within a block, in the context of
    `inside(span)`."""

    def __init__(
        self,
        exchange: SequenceExchange,
        inside: Callable[[Span], AbstractContextManager[Any]],
        blocks: Mapping[str, nn.Module],
    ) -> None:
        self.exchange, self.inside = exchange, inside
        self.current = Pass()
        self.span: Span | None = None
        self.blocks = [CutBlock(name, module, self) for name, module in blocks.items()]

    def enter(self, *_: Any) -> None:
        """A block comes next; the strategy may run code before it."""
        self.current.is_inside = True

    def called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return self.current.called(block, args, keywords)

    @contextmanager
    def passing(self, chosen: Pass) -> Iterator[None]:
        """Within, this pass handles the calls of blocks."""
        before, self.current = self.current, chosen
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def within(self, span: Span) -> Iterator[None]:
        """Within, a block computes this rank's positions."""
        before, self.span = self.span, span
        try:
            with self.inside(span):
                yield
        finally:
            self.span = before

    def part_of(self, tensor: Tensor) -> TensorPart | None:
        """The part of the whole that an activation is, for dropout within a block."""
        span = self.span
        if span is None:
            return None
        if tensor.ndim <= POSITIONS or tensor.shape[POSITIONS] != span.local:
            raise RequestError(
                asked=self.exchange.asked,
                found=f"dropout in a block, on a tensor of shape {tuple(tensor.shape)}",
                why="it draws for the whole sequence, of which this rank has "
                f"{span.local} positions along dimension 1",
                do="dropout on (sample, position, feature), or --strategy ddp",
            )
        stretches = span.stretches[span.rank]
        pieces = tuple(stretch[:2] for stretch in stretches)
        return TensorPart(POSITIONS, stretches[0].start, span.whole, pieces)

    def restore(self) -> None:
        """Restore the forwards of the blocks."""
        for block in self.blocks:
            block.restore()


def _ends(call: Call, following: list[Call]) -> bool:
    """Whether the next call is not of a sibling block on this one's output."""
    if not following or following[0].length != call.length or not following[0].follows:
        return True
    return parent_of(following[0].block.name) != parent_of(call.block.name)


def _is_same(hidden: Tensor, last: Tensor | None) -> bool:
    """Whether a block's input is the last one's output, or a view of all of it, as under
    `fully_shard`."""
    if hidden is last or last is None:
        return hidden is last
    root = last if last._base is None else last._base
    return hidden._base is root and (hidden.shape, hidden.stride(), hidden.storage_offset()) == (
        last.shape,
        last.stride(),
        last.storage_offset(),
    )


def hidden_of(inputs: Arguments) -> Tensor | None:
    """The hidden state: the first argument, if it is (sample, position, feature)."""
    args, keywords = inputs
    first = args[0] if args else next(iter(keywords.values()), None)
    if isinstance(first, (tuple, list)) and first:
        first = first[0]
    return first if isinstance(first, Tensor) and is_hidden(first) else None


def is_hidden(tensor: Tensor) -> bool:
    """Whether a tensor may be activations, (sample, position, feature)."""
    return tensor.ndim == DIMS and tensor.is_floating_point()


def with_hidden(asked: str, output: Any, hidden: Tensor) -> Any:
    """A block's output with its first tensor replaced; it may have no other one."""
    if isinstance(output, Tensor):
        return hidden
    if any(True for _ in tensors_of_arguments(output[1:])):
        raise refused(asked, "several tensors")
    return type(output)([hidden, *output[1:]])


def span_of(hidden: Tensor, exchange: SequenceExchange) -> Span:
    """The parts of a sequence on the ranks; raises `RequestError` if one would have none."""
    span = exchange.span_of(hidden.shape[POSITIONS])
    if 0 in span.sizes:
        asked = f"{exchange.asked} on {len(span.sizes)} ranks of the axis"
        sizes = "-".join(map(str, span.sizes))
        raise refused(asked, "no positions", span=span, sizes=sizes)
    return span


def position_dim(tensor: Tensor, length: int, asked: str, name: str) -> int | None:
    """The dimension of positions in another argument of a block; `None` if it stays whole.

    Masks stay whole: (…, position, position), and (sample, 1, 1, position).
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size == length]
    last = tuple(tensor.shape[-2:])
    if not dims or last == (length, length) or (tensor.ndim > DIMS and last == (1, length)):
        return None
    if len(dims) > 1:
        shape = tuple(tensor.shape)
        raise refused(asked, "several positions", name=name, shape=shape, length=length)
    return dims[0]


def _whole(tensor: Tensor, asked: str, name: str, span: Span) -> Tensor:
    """Another argument of a block, which must not look like this rank's positions."""
    if is_hidden(tensor) and tensor.shape[POSITIONS] == span.local:
        shape = tuple(tensor.shape)
        raise refused(asked, "also so long", name=name, shape=shape, span=span)
    return tensor


def parent_of(name: str) -> str:
    """The name of the module which contains a block."""
    return name.rpartition(".")[0]

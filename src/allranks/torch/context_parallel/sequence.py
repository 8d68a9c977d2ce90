"""A pass in which the blocks of a model work on a rank's positions of each sequence.

    embeddings, positions      whole, alike on all ranks
    first block                cut: (n, t, d) -> this rank's (n, t/P, d)
    blocks                     own positions; attention over all of them              `attention`
    last block                 gathered: (n, t/P, d) -> (n, t, d); so is one behind which the model
                               does anything before the next block
    head, loss                 whole, alike on all ranks

The first pass in training, and the first in evaluation, first goes through the model whole, to see
which blocks are called in which order; then each block, and then the output, is compared with what
it is where nothing is cut (`proof`). What later passes call must be the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.torch.context_parallel.exchange import POSITIONS, SequenceExchange, Span
from allranks.torch.context_parallel.refusals import (
    also_so_long,
    no_positions,
    other_argument,
    other_blocks,
    other_length,
    several_positions,
    several_tensors,
)
from allranks.torch.data.collate import map_arguments, tensors_of_arguments
from allranks.torch.model.activation_checkpointing import recomputed
from allranks.torch.random.dropout import TensorPart

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
DIMS = 3  # (sample, position, feature)


@dataclass(frozen=True)
class Call:
    """A call of a block in a pass: of how many positions, 0 where it is not cut.

    `follows`: it is given the very tensor that the block before returned. `cuts`: of each other
    tensor that it was given in the first pass, how many dimensions it has, and which was cut.
    """

    block: CutBlock
    length: int
    follows: bool
    cuts: list[tuple[int, int | None]] = field(default_factory=list)


class CutBlock:
    """The forward of a block, in its place while the strategy holds the model."""

    def __init__(self, name: str, module: nn.Module, passes: BlockPasses) -> None:
        self.name, self.module, self.passes = name, module, passes
        self.before = vars(module).get("forward")  # of activation checkpointing
        again, forward = recomputed(module), module.forward
        if again is None:
            self.run: Callable[..., Any] = partial(_opened, passes, forward)
        else:  # the span goes along to where backward computes the block again
            how: Any = forward
            self.run = partial(how.func, partial(_opened, passes, how.args[0]), again)
        vars(module)["forward"] = self.called

    def called(self, *args: Any, **keywords: Any) -> Any:
        return self.passes.called(self, args, keywords)

    def restore(self) -> None:
        """The module's own forward again."""
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
    """A block's own forward, of positions that lie on the ranks as `span` says."""
    if span is None:
        return forward(*args, **keywords)
    with passes.within(span):
        return forward(*args, **keywords)


class Pass:
    """What happens where a block is called; this one runs it as it is."""

    is_inside = False  # a block, or what a strategy does in front of it

    def called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return block.run(None, *args, **keywords)


class WholePass(Pass):
    """Runs every block whole, and notes which could be cut."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.last: Tensor | None = None

    def called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        output = super().called(block, args, keywords)
        given, found = hidden_of((args, keywords)), hidden_of(((output,), {}))
        fits = given is not None and found is not None and given.shape[:2] == found.shape[:2]
        length = given.shape[POSITIONS] if fits and given is not None else 0
        self.calls.append(Call(block, length, follows=given is not None and given is self.last))
        self.last = found
        return output


class CutPass(Pass):
    """Runs blocks on this rank's positions, as `calls` says; `prove` is called with each."""

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
        self.handed: list[Tensor] = []  # all that were on their way, where it is proved

    def called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.is_inside = True
        try:
            return self._called(block, args, keywords)
        finally:
            self.is_inside = False

    def _called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        call = self.calls[self.at] if self.at < len(self.calls) else None
        if call is None or call.block is not block:
            raise other_blocks(self.asked, block.name)
        self.at += 1
        if not call.length:
            return super().called(block, args, keywords)
        given = args, keywords
        is_first, hidden = self.span is None, hidden_of(given)
        if hidden is None:
            raise other_blocks(self.asked, block.name)
        span = self.span = self.span or span_of(hidden, self.exchange)
        if not is_first and not _is_same(hidden, self.last):
            raise other_blocks(self.asked, block.name)
        own = self._own(call, given, span, hidden, is_first=is_first)
        if self.prove is not None:
            self.prove(block, span, given, own)
        output = block.run(span, *own[0], **own[1])
        found = hidden_of(((output,), {}))
        if found is None or found.shape[POSITIONS] != span.own:
            raise other_length(self.asked, block.name, found, span)
        rest = self.calls[self.at :]
        if not _ends(call, rest):
            self.last = found
            if self.prove is not None:
                self.handed.append(found)
            return output
        self.span = None
        is_last = not any(one.length for one in rest)
        return with_hidden(
            self.asked, output, self.exchange.whole_rows(found, span, is_last=is_last)
        )

    def _own(
        self, call: Call, given: Arguments, span: Span, hidden: Tensor, *, is_first: bool
    ) -> Arguments:
        """This rank's positions of what a block is given, cut as in the pass that was proved."""
        known, name = iter(call.cuts), call.block.name

        def own(tensor: Tensor) -> Tensor:
            if tensor is hidden:
                return self.exchange.own_rows(tensor, span) if is_first else tensor
            if not self.exchange.cuts_arguments:
                return _whole(tensor, self.asked, name, span)
            if self.prove is not None:
                call.cuts.append((tensor.ndim, position_dim(tensor, span.whole, self.asked, name)))
            dims, dim = next(known, (-1, None))
            if tensor.ndim != dims or (dim is not None and tensor.shape[dim] != span.whole):
                raise other_argument(self.asked, name, tensor, span)
            return tensor if dim is None else self.exchange.own_rows(tensor, span, dim)

        args, keywords = map_arguments(own, given)
        return args, keywords

    def close(self) -> None:
        """The pass is over; raises `RequestError` if it has not called all blocks."""
        if self.at != len(self.calls):
            raise other_blocks(self.asked, self.calls[self.at].block.name)


class BlockPasses:
    """The blocks of a model, and the pass that goes through them. `span` is set within a block,
    and what `inside` makes of it is entered there."""

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
        """A block comes next, and a strategy does its own in front of it."""
        self.current.is_inside = True

    def called(self, block: CutBlock, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return self.current.called(block, args, keywords)

    @contextmanager
    def passing(self, one: Pass) -> Iterator[None]:
        """Within, blocks are called by this pass."""
        before, self.current = self.current, one
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def within(self, span: Span) -> Iterator[None]:
        """Within, a block works on a rank's positions."""
        before, self.span = self.span, span
        try:
            with self.inside(span):
                yield
        finally:
            self.span = before

    def part_of(self, tensor: Tensor) -> TensorPart | None:
        """Which part of the whole an activation is, for dropout within a block."""
        span = self.span
        if span is None:
            return None
        if tensor.ndim <= POSITIONS or tensor.shape[POSITIONS] != span.own:
            raise RequestError(
                asked=self.exchange.asked,
                found=f"dropout in a block, on a tensor of shape {tuple(tensor.shape)}",
                why=f"it draws for the whole sequence, of which this rank has {span.own} positions "
                "along dimension 1",
                do="dropout on (sample, position, feature), or --strategy ddp",
            )
        held = span.stretches[span.rank]
        return TensorPart(POSITIONS, held[0].start, span.whole, tuple(one[:2] for one in held))

    def restore(self) -> None:
        """The model's own blocks again."""
        for block in self.blocks:
            block.restore()


def _ends(call: Call, rest: list[Call]) -> bool:
    """Whether something else comes than a block beside this one, on what this one returns."""
    if not rest or rest[0].length != call.length or not rest[0].follows:
        return True
    return parent_of(rest[0].block.name) != parent_of(call.block.name)


def _is_same(found: Tensor, last: Tensor | None) -> bool:
    """Whether a block is given what the last one returned, or as `fully_shard` hands it on: a view
    of all of it."""
    if found is last or last is None:
        return found is last
    root = last if last._base is None else last._base
    return found._base is root and (found.shape, found.stride(), found.storage_offset()) == (
        last.shape,
        last.stride(),
        last.storage_offset(),
    )


def hidden_of(given: Arguments) -> Tensor | None:
    """What a block changes: the first of its arguments, if it is of (sample, position, feature)."""
    args, keywords = given
    first = args[0] if args else next(iter(keywords.values()), None)
    if isinstance(first, (tuple, list)) and first:
        first = first[0]
    return first if isinstance(first, Tensor) and is_hidden(first) else None


def is_hidden(tensor: Tensor) -> bool:
    """Whether a tensor may be activations, (sample, position, feature)."""
    return tensor.ndim == DIMS and tensor.is_floating_point()


def with_hidden(asked: str, output: Any, hidden: Tensor) -> Any:
    """What a block returns, with its first tensor replaced; it has no other one."""
    if isinstance(output, Tensor):
        return hidden
    if any(True for _ in tensors_of_arguments(output[1:])):
        raise several_tensors(asked)
    return type(output)([hidden, *output[1:]])


def span_of(hidden: Tensor, exchange: SequenceExchange) -> Span:
    """How the sequence lies on the ranks; raises `RequestError` where one would have none of it."""
    span = exchange.span_of(hidden.shape[POSITIONS])
    if 0 in span.sizes:
        raise no_positions(exchange.asked, span)
    return span


def position_dim(tensor: Tensor, length: int, asked: str, name: str) -> int | None:
    """Along which dimension another argument of a block has positions; `None` if it stays whole.

    Masks stay whole: (…, position, position), and (sample, 1, 1, position).
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size == length]
    last = tuple(tensor.shape[-2:])
    if not dims or last == (length, length) or (tensor.ndim > DIMS and last == (1, length)):
        return None
    if len(dims) > 1:
        raise several_positions(asked, name, tensor, length)
    return dims[0]


def _whole(tensor: Tensor, asked: str, name: str, span: Span) -> Tensor:
    """Another argument of a block, which nobody must take for this rank's positions."""
    if is_hidden(tensor) and tensor.shape[POSITIONS] == span.own:
        raise also_so_long(asked, name, tensor, span)
    return tensor


def parent_of(name: str) -> str:
    """The module in which a block stands."""
    return name.rpartition(".")[0]

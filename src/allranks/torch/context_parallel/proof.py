"""The proof that a cut sequence gives what a whole one does, made in the first pass.

A block that looks along the sequence anywhere but in `scaled_dot_product_attention` (positions
counted from its own length, a convolution or a mean over time, an RNN, attention written out), or
draws by the shape of what it is given, runs without an error on a part of the sequence, and is
wrong. So each block goes through forward and backward once whole and once cut, from the same
activations, with the same draws; output, gradient of the input and gradient of each weight must
agree, up to rounding, which is that of the weights: blocks are compared without autocast and
TF32. Then the model's output must be that of the whole pass, and nothing may have been done with a
part of it between two blocks. Costs about two more passes, and in each of them one block of whole
length at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.errors import AllranksError, RequestError
from allranks.torch.context_parallel.exchange import POSITIONS, SequenceExchange, Span
from allranks.torch.context_parallel.sequence import (
    Arguments,
    BlockPasses,
    Call,
    CutBlock,
    CutPass,
    WholePass,
    hidden_of,
)
from allranks.torch.data.nested import map_arguments, tensors_in
from allranks.torch.model.layers import Scope
from allranks.torch.state import kept_random_streams
from allranks.torch.step.user_buffers import Copy, UserBuffers, put_back

ROUNDED = {torch.float64: (1e-8, 1e-11), torch.float32: (1e-3, 1e-5)}
HALF = 5e-2, 5e-2
FULL = 4  # bytes of a float32
"""By type: how far a change may be off, by its own size and by that of what it is part of."""
WHY = (
    "a rank has some positions of the sequence there, so a block may look along it in "
    "scaled_dot_product_attention alone: not by positions that it counts itself, a convolution, a "
    "mean, an RNN or attention written out, nor draw by torch.nn.functional.dropout"
)
DO = "hand positions to each block as an argument, use nn.Dropout, or --strategy fsdp"


@dataclass(frozen=True)
class Ran:
    """What a block gave for its input, and for a gradient of its output."""

    input: Tensor
    output: Tensor
    of_input: Tensor
    of_weights: list[Tensor]


class Proof:
    """Makes the first pass of a model, in training or in evaluation; every rank calls it alike."""

    def __init__(
        self, passes: BlockPasses, model: nn.Module, scope: Scope, *, is_half: bool
    ) -> None:
        self.passes, self.model, self.scope, self.is_half = passes, model, scope, is_half
        self.exchange: SequenceExchange = passes.exchange

    def first_pass(self, run: Callable[[], Any]) -> tuple[Any, list[Call]]:
        """The output of a cut pass that was compared with a whole one, and the calls of blocks.

        Raises `RequestError` where they differ.
        """
        whole = WholePass()
        with self._untraced(), torch.no_grad(), self.passes.passing(whole):
            wanted = run()
        if not any(call.length for call in whole.calls):
            raise nothing_to_cut(f"blocks of other shapes, in {type(self.model).__name__}")
        cut = CutPass(self.exchange, whole.calls, self._prove)
        name = type(self.model).__name__
        with _refused(f"the model {name}"), self.passes.passing(cut), _Between(cut, name):
            output = run()
        cut.close()
        self._compare_outputs(wanted, output)
        return output, whole.calls

    @contextmanager
    def _untraced(self) -> Iterator[None]:
        """Within, passes draw what the next one will, and nothing of them stays."""
        shortens = self.scope.shortens
        buffers = [(copy, copy[2]._version) for copy in UserBuffers(self.model).copies()]
        self.scope.shortens = False
        try:
            with (
                self.exchange.opened("control"),
                kept_random_streams(self.scope.device),
                self.scope.again(self.scope.moment()),
            ):
                yield
        finally:
            self.scope.shortens = shortens
            put_back([copy for copy, version in buffers if _changed(copy, version)])

    def _prove(self, block: CutBlock, span: Span, given: Arguments, own: Arguments) -> None:
        """Compare a block, whole and cut; raises `RequestError` on all ranks of the axis."""
        hidden = hidden_of(own)
        assert hidden is not None
        with self.exchange.opened("control"):
            whole_hidden = self.exchange.all(hidden.detach(), POSITIONS, span.whole)
        with _refused(f"the block {block.name!r}"), _exactly(self.scope.device) as exact:
            given, own, whole_hidden, hidden = map_arguments(
                exact, (given, own, whole_hidden, hidden.detach())
            )
            whole = self._ran(block, None, given, whole_hidden, span)
            cut = self._ran(block, span, own, hidden, span)
        self._compare(block, span, whole, cut)

    @torch.enable_grad()
    def _ran(
        self, block: CutBlock, span: Span | None, given: Arguments, hidden: Tensor, lies: Span
    ) -> Ran:
        """Forward and backward of a block by itself, for a gradient that all ranks draw alike."""
        leaf, first = hidden.clone().requires_grad_(), hidden_of(given)
        versions = [buffer._version for buffer in block.module.buffers()]
        with self._untraced():
            args, keywords = map_arguments(
                lambda tensor: leaf.clone() if tensor is first else tensor.detach(), given
            )
            output = hidden_of(((block.run(span, *args, **keywords),), {}))
            if versions != [buffer._version for buffer in block.module.buffers()]:
                raise _refusal(f"the block {block.name!r} writes a buffer in its forward pass")
            assert output is not None
            gradient = _drawn(output, lies)
            if span is not None:
                gradient = span.own_part(gradient, POSITIONS)
            weights = _weights(block.module)
            found = torch.autograd.grad(
                output, [leaf, *weights], gradient.to(output), allow_unused=True
            )
        grads = [
            torch.zeros_like(one) if grad is None else grad.to_dense()
            for one, grad in zip([leaf, *weights], found, strict=True)
        ]
        return Ran(hidden, output.detach(), grads[0], grads[1:])

    def _compare(self, block: CutBlock, span: Span, whole: Ran, cut: Ran) -> None:
        rows: list[tuple[str, Tensor, Tensor, Tensor]] = []  # what, off by, changed by, size

        def add(what: str, found: Tensor, wanted: Tensor, size: Tensor, start: Tensor) -> None:
            change = wanted - start if start.shape == wanted.shape else wanted
            rows.append((what, _square(found - wanted), _square(change), size))

        wanted = span.own_part(whole.output, POSITIONS)
        add("its output", cut.output, wanted, _square(wanted), cut.input)
        wanted = span.own_part(whole.of_input, POSITIONS)
        passed = span.own_part(_drawn(whole.output, span), POSITIONS)
        add("the gradient of its input", cut.of_input, wanted, _square(wanted), passed)
        names = [name for name, one in block.module.named_parameters() if _is_trained(one)]
        with self.exchange.opened("control"):
            sums = [self.exchange.sum_(part.contiguous().clone()) for part in cut.of_weights]
        all_weights = torch.stack([_square(part) for part in (*whole.of_weights, whole.input)])
        size = all_weights[:-1].sum()
        for name, found, weight in zip(names, sums, whole.of_weights, strict=True):
            add(f"the gradient of {name!r}", found, weight, size, weight.new_zeros(0))
        own, whole_length = span.own, span.whole
        where = f"the block {block.name!r}, where a rank has {own} of {whole_length} positions"
        self._judge(where, rows, whole.output.dtype)

    def _compare_outputs(self, wanted: Any, output: Any) -> None:
        where = (
            f"the output of {type(self.model).__name__}, though each of its blocks is the same: it "
            "is what forward does between two blocks, where a rank has some positions"
        )
        pairs = list(zip(tensors_in(wanted), tensors_in(output), strict=False))
        if any(one.shape != other.shape for one, other in pairs):
            raise _refusal(f"another shape of {where}")
        rows = [
            ("it", _square(cut.detach() - whole), _square(whole), _square(whole))
            for whole, cut in pairs
            if whole.is_floating_point()
        ]
        if rows:
            kind = torch.bfloat16 if self.is_half else next(tensors_in(output)).dtype
            self._judge(where, rows, kind)

    def _judge(
        self, where: str, rows: list[tuple[str, Tensor, Tensor, Tensor]], kind: torch.dtype
    ) -> None:
        """Raise on all ranks of the axis if something is off on one of them."""
        numbers = torch.stack([torch.stack([one.double() for one in row[1:]]) for row in rows])
        with self.exchange.opened("control"):
            self.exchange.sum_(numbers)
        share, floor = ROUNDED.get(kind, HALF)
        for (what, *_), (off, change, size) in zip(rows, numbers.sqrt().tolist(), strict=True):
            if not off <= share * change + floor * size:
                raise _refusal(f"{what} differs by {off:.2g} (of {size:.2g}) in {where}")


@contextmanager
def _exactly(device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within, nothing is rounded below the type of the weights; yields what casts an activation."""
    is_cast, rounds = torch.is_autocast_enabled(device.type), torch.get_float32_matmul_precision()

    def exact(tensor: Tensor) -> Tensor:
        is_low = is_cast and tensor.is_floating_point() and tensor.itemsize < FULL
        return tensor.float() if is_low else tensor

    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield exact
    finally:
        torch.set_float32_matmul_precision(rounds)


class _Between(TorchDispatchMode):
    """Refuses what a model does with a rank's positions on their way from block to block."""

    def __init__(self, cut: CutPass, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cut, self.name = cut, name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.cut.is_inside:
            used = {_storage(tensor) for tensor in tensors_in((args, kwargs or {}))}
            if used & {_storage(part) for part in self.cut.handed}:
                raise _refusal(
                    f"{func} in what {self.name}.forward does with what a block returns, "
                    "beside giving it to the next block"
                )
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _changed(copy: Copy, version: int) -> bool:
    """Whether a buffer was written, or replaced, since; who puts it back writes it, too."""
    holder, name, buffer, _ = copy
    return holder[name] is not buffer or buffer._version != version


def _drawn(like: Tensor, span: Span) -> Tensor:
    """The gradient of the whole output for which blocks are compared, the same on all ranks."""
    shape = list(like.shape)
    shape[POSITIONS] = span.whole
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def _is_trained(weight: nn.Parameter) -> bool:
    return weight.requires_grad and weight.is_floating_point()


def _weights(block: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in block.parameters() if _is_trained(weight)]


def _square(tensor: Tensor) -> Tensor:
    return tensor.double().square().sum()


@contextmanager
def _refused(where: str) -> Iterator[None]:
    """Within, what a block says of a part of the sequence is a refusal."""
    try:
        yield
    except AllranksError:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise _refusal(f"{where} fails: {type(error).__name__}: {lines[0][:200]}") from error


def _refusal(found: str) -> RequestError:
    return RequestError(asked="--strategy context", found=found, why=WHY, do=DO)


def nothing_to_cut(found: str) -> RequestError:
    """What to say of a model without blocks that take a sequence."""
    return RequestError(
        asked="--strategy context",
        found=found,
        why="what is cut are activations of (sample, position, feature), from the first repeated "
        "block to the last",
        do="let blocks(model) of the task return the blocks that take such, or --strategy ddp",
    )

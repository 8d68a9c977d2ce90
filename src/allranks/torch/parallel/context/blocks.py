"""The blocks of a model whose sequences are cut: their checks, their passes, and the proof of both.

A strategy creates one `CutBlocks` before its first pass; all ranks of its axis make the same
passes. The first pass proves that a cut sequence gives the results of a whole one.

Some blocks use positions other than through `scaled_dot_product_attention` (positions counted from
the length, a convolution or a mean over time, an RNN, attention written out), or draw by the shape
of their input. On a part of the sequence they run without an error, and are wrong. So each block
runs forward and backward once whole and once cut, on the same activations, with the same draws.
Output, gradient of the input and gradient of each weight must agree up to the rounding of the
weights' type: blocks are compared without autocast and TF32. Then the model's output must be that
of the whole pass, and the model must not use a part of it between two blocks. Costs about two more
passes, each with one block of whole length at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.errors import AllranksError, RequestError
from allranks.torch.checkpoint.state import kept_random_streams
from allranks.torch.data.collate import map_arguments, tensors_of_arguments
from allranks.torch.model.layers import Scope, normalising_layers
from allranks.torch.model.precision import Precision
from allranks.torch.parallel.context.exchange import POSITIONS, SequenceExchange, Span
from allranks.torch.parallel.context.sequence import (
    Arguments,
    BlockPasses,
    Call,
    CutBlock,
    CutPass,
    WholePass,
    hidden_of,
    refused,
)
from allranks.torch.parallel.expert.mixture import MixtureOfExperts
from allranks.torch.random.dropout import ShardDropout, TensorPart
from allranks.torch.step.user_buffers import Copy, UserBuffers, put_back
from allranks.torch.task import Task


def blocks_of(task: Task, model: nn.Module, asked: str) -> dict[str, nn.Module]:
    """The blocks of a task by name, none within another; raises `RequestError` for those that
    cannot work on a part of a sequence."""
    candidates = dict.fromkeys(task.blocks(model))
    inside = {m for block in candidates for m in block.modules() if m is not block}
    names = {module: name for name, module in model.named_modules()}
    blocks = {names[m]: m for m in candidates if m in names and m not in inside}
    if not blocks:
        raise refused(asked, "nothing to cut", found=f"no blocks in {type(model).__name__}")
    norms = normalising_layers(model)
    for name, block in blocks.items():
        if any(module in norms for module in block.modules()):
            raise _batch_norm(asked, f"BatchNorm in the block {name!r}")
        if any(_has_capacity(module) for module in block.modules()):
            raise RequestError(
                asked=asked,
                found=f"a MixtureOfExperts with capacity_factor in the block {name!r}",
                why="which tokens an expert drops depends on all positions of a sequence",
                do="capacity_factor=None, or --strategy ddp",
            )
    if norms and task.batchnorm == "whole":
        raise _batch_norm(asked, 'batchnorm = "whole"')
    return blocks


class CutBlocks:
    """The blocks which compute parts of sequences, in the way that the first pass has proved.

    Blocks run in the context of `inside`. Dropout in them draws for the whole sequence.
    """

    def __init__(
        self,
        exchange: SequenceExchange,
        inside: Callable[[Span], AbstractContextManager[Any]],
        model: nn.Module,
        blocks: dict[str, nn.Module],
    ) -> None:
        self.exchange, self.model = exchange, model
        self.blocks, self.passes = blocks, BlockPasses(exchange, inside, blocks)
        self.calls: dict[tuple[int, tuple[bool, ...]], list[Call]] = {}
        for layer in {layer for block in blocks.values() for layer in block.modules()}:
            if isinstance(layer, ShardDropout):
                layer.part_of = partial(_part_of, layer.part_of, self.passes.part_of)

    def weights(self) -> Iterator[nn.Parameter]:
        """All weights of the blocks, repeated if blocks share them."""
        with self.exchange.closed():
            yield from (w for block in self.blocks.values() for w in block.parameters())

    def check_own_weights(self, is_summed: Callable[[nn.Parameter], bool]) -> None:
        """Raise `RequestError` for a summed weight that is used in blocks and elsewhere: only the
        part of its gradient from the blocks may be summed over the ranks."""
        within = {module for block in self.blocks.values() for module in block.modules()}
        in_blocks = {id(weight): weight for weight in self.weights()}
        for name, module in self.model.named_modules():
            for attr, weight in module.named_parameters(recurse=False):
                if module not in within and id(weight) in in_blocks and is_summed(weight):
                    raise RequestError(
                        asked=self.exchange.asked,
                        found=f"the weight {f'{name}.{attr}'.strip('.')!r}, which a block has, too",
                        why="its gradient is that of some positions in the block, to be summed "
                        "over the ranks, and elsewhere that of all",
                        do="a weight of their own for the blocks, or leave sequence=yes out",
                    )

    def passed(
        self, run: Callable[[], Any], precision: Precision, scope: Scope, stage: int = 0
    ) -> Any:
        """The output of the model, or of a stage, by a pass in which sequences are cut.

        A proof holds for one set of trained weights; it is repeated when that changes.
        """
        with self.exchange.closed():
            trained = [weight.requires_grad for weight in self.model.parameters()]
        mode = stage, (self.model.training, *trained)
        calls = self.calls.get(mode)
        if calls is None:
            rounds = torch.get_float32_matmul_precision() != "highest"
            is_half = precision.compute is not None or rounds
            proof = Proof(self.passes, self.model, scope, is_half=is_half)
            output, self.calls[mode] = proof.first_pass(run)
            return output
        cut = CutPass(self.exchange, calls)
        with self.passes.passing(cut):
            output = run()
        cut.close()
        return output


Which = Callable[[Tensor], TensorPart | None]


def _part_of(features: Which | None, positions: Which, tensor: Tensor) -> TensorPart | None:
    """The part of the whole in `tensor`: some features, or else some positions."""
    part = None if features is None else features(tensor)
    return positions(tensor) if part is None else part


def _has_capacity(module: nn.Module) -> bool:
    return isinstance(module, MixtureOfExperts) and module.capacity_factor is not None


def _batch_norm(asked: str, found: str) -> RequestError:
    return RequestError(
        asked=asked,
        found=found,
        why="its statistics would be those of some positions, or of another pass",
        do="LayerNorm, or --strategy ddp",
    )


ROUNDED = {torch.float64: (1e-8, 1e-11), torch.float32: (1e-3, 1e-5)}
HALF = 5e-2, 5e-2
"""By type: the tolerances relative to a change, and to the size of the changed tensor."""
FULL = 4  # bytes of a float32
SMALL = 0.1  # standard deviation of the draws that replace zeros


@dataclass(frozen=True)
class Ran:
    """The output and the gradients of a block, for its input and a gradient of its output."""

    input: Tensor
    output: Tensor
    of_input: Tensor
    of_weights: list[Tensor]
    of_arguments: list[Tensor]


class Proof:
    """Makes the first pass of a model, in training or in evaluation; all ranks call it."""

    def __init__(
        self, passes: BlockPasses, model: nn.Module, scope: Scope, *, is_half: bool
    ) -> None:
        self.passes, self.model, self.scope, self.is_half = passes, model, scope, is_half
        self.exchange: SequenceExchange = passes.exchange
        self.refusal = self.exchange.refusal

    def first_pass(self, run: Callable[[], Any]) -> tuple[Any, list[Call]]:
        """The output of a cut pass and the calls of its blocks, compared with a whole pass.

        Raises `RequestError` if they differ.
        """
        whole, name = WholePass(), type(self.model).__name__
        with self._untraced(), torch.no_grad(), self.passes.passing(whole):
            wanted = run()
        if not any(call.length for call in whole.calls):
            found = f"blocks of other shapes, in {name}"
            raise refused(self.exchange.asked, "nothing to cut", found=found)
        cut = CutPass(self.exchange, whole.calls, self._prove)
        failing = _failing(self.refusal, f"the model {name}")
        with self.exchange.proved(), failing, self.passes.passing(cut), _Between(cut, name):
            output = run()
        cut.close()
        self._compare_outputs(wanted, output)
        return output, whole.calls

    @contextmanager
    def _untraced(self) -> Iterator[None]:
        """Within, passes draw the same as the next one, and leave no trace."""
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

    def _prove(self, block: CutBlock, span: Span, inputs: Arguments, local: Arguments) -> None:
        """Compare a block, whole and cut; raises `RequestError` on all ranks of the axis."""
        hidden = hidden_of(local)
        assert hidden is not None
        with self.exchange.opened("control"):
            whole_hidden = self.exchange.all_rows(hidden.detach(), span)
        failing = _failing(self.refusal, f"the block {block.name!r}")
        with failing, _exactly(self.scope.device) as exact:
            inputs, local, whole_hidden, hidden = map_arguments(
                exact, (inputs, local, whole_hidden, hidden.detach())
            )
            with _without_zeros(self._weights(block.module)):
                whole = self._ran(block, None, inputs, whole_hidden, span)
                cut = self._ran(block, span, local, hidden, span)
        self._compare(block, span, whole, cut)

    @torch.enable_grad()
    def _ran(
        self, block: CutBlock, span: Span | None, inputs: Arguments, hidden: Tensor, lies: Span
    ) -> Ran:
        """Forward and backward of one block, for a gradient that is the same on all ranks."""
        leaf, first = hidden.clone().requires_grad_(), hidden_of(inputs)
        versions = [buffer._version for buffer in block.module.buffers()]
        others: list[Tensor] = []

        def argument(tensor: Tensor) -> Tensor:
            if tensor is first:
                return leaf.clone()
            detached = tensor.detach()
            if tensor.requires_grad and not self.exchange.cuts_arguments:
                others.append(detached.requires_grad_())
            return detached

        with self._untraced():
            args, keywords = map_arguments(argument, inputs)
            output = hidden_of(((block.run(span, *args, **keywords),), {}))
            if versions != [buffer._version for buffer in block.module.buffers()]:
                raise self.refusal(f"the block {block.name!r} writes a buffer in its forward pass")
            assert output is not None
            gradient = _drawn(output, lies)
            if span is not None:
                gradient = span.own_part(gradient, POSITIONS)
            weights, strangers = self._weights(block.module), self._strangers(block.module)
            targets = [leaf, *weights, *others, *strangers.values()]
            results = torch.autograd.grad(output, targets, gradient.to(output), allow_unused=True)
        grads = [
            torch.zeros_like(target) if grad is None else grad.to_dense()
            for target, grad in zip(targets, results, strict=True)
        ]
        of_weights, of_others = grads[1 : 1 + len(weights)], results[1 + len(weights) :]
        for name, grad in zip(strangers, of_others[len(others) :], strict=True):
            if grad is not None:
                raise self.refusal(f"the block {block.name!r} uses {name!r}, not its own")
        for other, grad in zip(others, of_others, strict=False):
            if span is None and grad is not None and not grad.any():
                shape = f"an argument of shape {tuple(other.shape)}, of zero gradient"
                raise self.refusal(f"{shape}, which proves nothing, in the block {block.name!r}")
        arguments = grads[1 + len(weights) :][: len(others)]
        return Ran(hidden, output.detach(), grads[0], of_weights, arguments)

    def _weights(self, block: nn.Module) -> list[nn.Parameter]:
        """The trained weights of a block, in the form this rank has them."""
        with self.exchange.closed():
            return [weight for weight in block.parameters() if _is_trained(weight)]

    def _strangers(self, block: nn.Module) -> dict[str, nn.Parameter]:
        """The weights outside a block, by name: it must not use them (nothing sums them)."""
        if self.exchange.cuts_arguments:
            return {}
        with self.exchange.closed():
            in_block = {id(weight) for weight in block.parameters()}
            named = list(self.model.named_parameters())
        return {name: w for name, w in named if id(w) not in in_block and _is_trained(w)}

    def _compare(self, block: CutBlock, span: Span, whole: Ran, cut: Ran) -> None:
        rows: list[tuple[str, Tensor, Tensor, Tensor]] = []  # what, off by, changed by, size

        def add(label: str, result: Tensor, wanted: Tensor, size: Tensor, start: Tensor) -> None:
            change = wanted - start if start.shape == wanted.shape else wanted
            rows.append((label, _square(result - wanted), _square(change), size))

        wanted = span.own_part(whole.output, POSITIONS)
        add("its output", cut.output, wanted, _square(wanted), cut.input)
        wanted = span.own_part(whole.of_input, POSITIONS)
        passed = span.own_part(_drawn(whole.output, span), POSITIONS)
        add("the gradient of its input", cut.of_input, wanted, _square(wanted), passed)
        with self.exchange.closed():
            named = [(n, w) for n, w in block.module.named_parameters() if _is_trained(w)]
        with self.exchange.opened("control"):
            sums = [
                self.exchange.sum_(part.contiguous().clone())
                if self.exchange.is_summed(weight)
                else part
                for (_, weight), part in zip(named, cut.of_weights, strict=True)
            ]
        all_weights = torch.stack([_square(part) for part in (*whole.of_weights, whole.input)])
        size = all_weights[:-1].sum()
        for result, wanted in zip(cut.of_arguments, whole.of_arguments, strict=True):
            label = f"the gradient of an argument of shape {tuple(wanted.shape)}"
            add(label, result, wanted, _square(wanted), wanted.new_zeros(0))
        for (name, _), result, weight in zip(named, sums, whole.of_weights, strict=True):
            add(f"the gradient of {name!r}", result, weight, size, weight.new_zeros(0))
        local, whole_length = span.local, span.whole
        where = f"the block {block.name!r}, where a rank has {local} of {whole_length} positions"
        self._judge(where, rows, whole.output.dtype)

    def _compare_outputs(self, wanted: Any, output: Any) -> None:
        where = (
            f"the output of {type(self.model).__name__}, though each of its blocks is the same: it "
            "is what forward does between two blocks, where a rank has some positions"
        )
        pairs = list(zip(tensors_of_arguments(wanted), tensors_of_arguments(output), strict=False))
        if any(first.shape != second.shape for first, second in pairs):
            raise self.refusal(f"another shape of {where}")
        rows = [
            ("it", _square(cut.detach() - whole), _square(whole), _square(whole))
            for whole, cut in pairs
            if whole.is_floating_point()
        ]
        if rows:
            kind = torch.bfloat16 if self.is_half else next(tensors_of_arguments(output)).dtype
            self._judge(where, rows, kind)

    def _judge(
        self, where: str, rows: list[tuple[str, Tensor, Tensor, Tensor]], kind: torch.dtype
    ) -> None:
        """Raise on all ranks of the axis if a difference is too large on any of them."""
        numbers = torch.stack([torch.stack([n.double() for n in row[1:]]) for row in rows])
        with self.exchange.opened("control"):
            self.exchange.sum_(numbers)
        share, floor = ROUNDED.get(kind, HALF)
        with self.exchange.comm.reading():
            sums = numbers.sqrt().tolist()
        for (label, *_), (off, change, size) in zip(rows, sums, strict=True):
            if not off <= share * change + floor * size:
                raise self.refusal(f"{label} differs by {off:.2g} (of {size:.2g}) in {where}")


@contextmanager
def _exactly(device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within, nothing is rounded below the weights' type; yields a cast for activations."""
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
    """Refuses operations on a rank's positions between two blocks."""

    def __init__(self, cut: CutPass, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cut, self.name, self.refusal = cut, name, cut.exchange.refusal

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.cut.is_inside:
            used = {_storage(tensor) for tensor in tensors_of_arguments((args, kwargs or {}))}
            if used & {_storage(part) for part in self.cut.handed}:
                raise self.refusal(
                    f"{func} in what {self.name}.forward does with what a block returns, "
                    "beside giving it to the next block"
                )
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _changed(copy: Copy, version: int) -> bool:
    """Whether a buffer was written or replaced since `version`."""
    holder, name, buffer, _ = copy
    return holder[name] is not buffer or buffer._version != version


def _drawn(like: Tensor, span: Span) -> Tensor:
    """The gradient of the whole output used in comparisons, the same on all ranks."""
    shape = list(like.shape)
    shape[POSITIONS] = span.whole
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def _is_trained(weight: nn.Parameter) -> bool:
    return weight.requires_grad and weight.is_floating_point()


@contextmanager
def _without_zeros(weights: list[nn.Parameter]) -> Iterator[None]:
    """Within, weights of zeros are random: zeros hide the gradients of the layers before them.

    All ranks draw the same for a weight that is not cut.
    """
    generator, replaced = torch.Generator(), []
    for number, weight in enumerate(weights):
        if not weight.any():
            drawn = torch.randn(weight.shape, generator=generator.manual_seed(number))
            replaced.append((weight, weight.data))
            weight.data = torch.empty_like(weight.data).copy_(drawn * SMALL)
    try:
        yield
    finally:
        for weight, zeros in replaced:
            weight.data = zeros


def _square(tensor: Tensor) -> Tensor:
    return tensor.double().square().sum()


@contextmanager
def _failing(refusal: Callable[[str], RequestError], where: str) -> Iterator[None]:
    """Within, an error of a block on a part of the sequence becomes a refusal."""
    try:
        yield
    except AllranksError:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise refusal(f"{where} fails: {type(error).__name__}: {lines[0][:200]}") from error

"""Errors for models whose sequences cannot be cut; `asked` names the strategy."""

from __future__ import annotations

from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.parallel.context.exchange import Span


def nothing_to_cut(asked: str, found: str) -> RequestError:
    """A model without blocks that take a sequence."""
    return RequestError(
        asked=asked,
        found=found,
        why="the strategy cuts activations of (sample, position, feature), from the first repeated "
        "block to the last",
        do="let blocks(model) of the task return the blocks that take such, or --strategy ddp",
    )


def no_positions(asked: str, span: Span) -> RequestError:
    """A sequence with fewer positions than ranks."""
    return RequestError(
        asked=f"{asked} on {len(span.sizes)} ranks of the axis",
        found=f"{span.whole} positions in a sequence: {'-'.join(map(str, span.sizes))} of them",
        why="every rank has some positions of each sequence",
        do="fewer ranks, data=…, or longer sequences",
    )


def several_tensors(asked: str) -> RequestError:
    """A block that returns more than the input of the next one."""
    return RequestError(
        asked=asked,
        found="a block that returns more tensors than its activations",
        why="it is not known whether they belong to this rank's positions or to all",
        do="return the activations alone, or --strategy ddp",
    )


def several_positions(asked: str, name: str, tensor: Tensor, length: int) -> RequestError:
    """An argument of a block that may be cut along two dimensions."""
    return RequestError(
        asked=asked,
        found=f"the block {name!r} is given a tensor of shape {tuple(tensor.shape)}, with "
        f"{length} positions",
        why="it is not known along which dimension to cut it",
        do="another length of the sequence, or --strategy ddp",
    )


def also_so_long(asked: str, name: str, tensor: Tensor, span: Span) -> RequestError:
    """A whole argument of a block with as many positions as a rank has of the sequence."""
    return RequestError(
        asked=asked,
        found=f"the block {name!r} is given another tensor of shape {tuple(tensor.shape)}, and a "
        f"rank has {span.local} positions of {span.whole}",
        why="a layer with this input would gather it as if it were this rank's positions",
        do="another length of one of the sequences, or --strategy ddp",
    )


def other_blocks(asked: str, name: str) -> RequestError:
    """Blocks whose calls differ from those of the proved pass."""
    return RequestError(
        asked=asked,
        found=f"other calls of blocks than in the first pass, at {name!r}",
        why="the sequence is cut before the first block and gathered after the last",
        do="blocks that are always called, in one order, or --strategy ddp",
    )


def other_argument(asked: str, name: str, tensor: Tensor, span: Span) -> RequestError:
    """An argument with another layout than in the proved pass."""
    return RequestError(
        asked=asked,
        found=f"the block {name!r} is given a tensor of shape {tuple(tensor.shape)}, with "
        f"{span.whole} positions, another one than in the first pass",
        why="the first pass determined, and proved, which dimension has positions",
        do="arguments of one layout in every pass, or --strategy ddp",
    )


def other_length(asked: str, name: str, found: Tensor | None, span: Span) -> RequestError:
    shape = "no activations" if found is None else f"activations of shape {tuple(found.shape)}"
    return RequestError(
        asked=asked,
        found=f"{shape} at the block {name!r}",
        why=f"between blocks a rank has {span.local} of {span.whole} positions along dimension 1",
        do="what changes the sequence before the first block or after the last, or --strategy ddp",
    )

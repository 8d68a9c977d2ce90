"""Cross entropy of an output layer that is cut over its classes: no rank has all logits.

    every rank    logits of its classes (tokens, classes/N), their maximum, what they sum up to
    exchanged     a maximum, a sum of exponentials and a target's logit for each token

Logits for a large vocabulary are most of the activations of a small language model; gathered, they
are most of its messages, too. Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.torch.model.layers import has_hooks
from allranks.torch.tensor_parallel.exchange import Exchange, part_sizes
from allranks.torch.tensor_parallel.layers import ColumnLinear, copies_of


def cross_entropy(
    head: nn.Linear, hidden: Tensor, target: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """The cross entropy of `head(hidden)` for each target, (…): `hidden` is (…, features).

    For the forward of a model, whose output is then the loss. Where `--strategy tensor` cuts `head`
    over its classes, logits stay where they are computed, and three numbers for each target go over
    the ranks; elsewhere, and with `exact=yes`, it is torch's own, of whole logits. A target that is
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
    """Logits of some classes (tokens, own) -> the loss of each token, the same on every rank."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, logits: Tensor, target: Tensor, start: int, ignored: int
    ) -> Tensor:
        comm = exchange.comm
        most = exchange.all(logits.amax(1)[None], 0, comm.size).amax(0)
        exponentials = (logits - most[:, None]).exp_()
        own, is_ignored = target - start, target == ignored
        is_here = ~is_ignored
        if comm.rank > 0:  # what is no class is the first rank's, or the last one's: torch tells
            is_here &= own >= 0
        if comm.rank < comm.size - 1:
            is_here &= own < logits.shape[1]
        at = own.masked_fill(~is_here, 0)[:, None]
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
        found = probabilities * each
        found.scatter_add_(1, at, -each * is_here[:, None])
        return None, found, None, None, None


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

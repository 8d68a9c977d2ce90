"""Do all ranks hold the same weights? Digests are compared, and what differs first is named.

Replicas are updated alike from the same sums, so they stay equal bit for bit; when they do not, a
memory or a chip is at fault, or a race in somebody's code, and no loss would show it. The trainer
calls this every `verify_every` steps, and before a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import allranks.torch.accelerator as accelerator
from allranks.errors import ReplicasDiffer
from allranks.strategies.mesh import REPLICATE
from allranks.torch.checkpoint.tree import is_dtensor, local
from allranks.torch.comm.comm import Comm
from allranks.torch.strategies.base import Strategy

DIGEST_BYTES = 16
SIDE_BY_SIDE, WORD = 1 << 13, 8
"""Columns of a sum over large tensors, which stay in a cache, and the bytes of a number there."""
LARGE_BYTES = 1 << 14
"""From here on adding up a tensor takes less time than its digest."""
_EMPTY: NDArray[np.uint64] = np.zeros(0, np.uint64)
LOW_BITS = np.uint64(7)
CAUSES = (
    "Memory or a chip of that machine may be failing, or the task writes to weights on some ranks "
    "only."
)


def compare_replicas(
    named_tensors: Iterable[tuple[str, Tensor]], comm: Comm, causes: str = CAUSES
) -> None:
    """Raise `ReplicasDiffer` on all ranks unless their tensors are equal; every rank calls this.

    `causes` says what may have done it.
    Sends 32 bytes to each other rank where all is equal, and else the digest of each name. A name
    that not all ranks give is left out.
    """
    if comm.size == 1:
        return
    named = list(named_tensors)
    if len(set(comm.gather_texts(digest(*(tensor for _, tensor in named))))) == 1:
        return
    digests = {name: digest(tensor) for name, tensor in named}
    rows = [json.loads(text) for text in comm.gather_texts(json.dumps(digests))]
    for name in digests:
        found = [row.get(name) for row in rows]
        if None not in found and len(set(found)) > 1:
            raise ReplicasDiffer(f"{_told(name, found)} {causes}")


def verify(strategy: Strategy, causes: str = CAUSES) -> None:
    """Compare the ranks that hold the same of one training; every rank calls this.

    Where weights are cut, ranks with the same part compare it, and all ranks what is not cut.
    """
    agreement = strategy.agreement
    with strategy.comm.reading():  # what is read after this is there on this rank
        accelerator.synchronize([strategy.comm.device])
    if agreement.is_one_training:
        compare_replicas(replicated(strategy), strategy.axis(REPLICATE), causes)
    if agreement.weights == "sharded":
        compare_replicas(_not_cut(strategy), strategy.comm, causes)


def replicated(strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    """What must be equal on all ranks: weights, buffers, optimizer, in the order of the model.

    Without the buffers that the model writes in forward: those follow the samples of a rank.
    """
    step = strategy.step
    yield from ((n, p) for n, p in strategy.model.named_parameters() if not p.is_meta)
    yield from _same_buffers(strategy)
    if strategy.agreement.cuts_optimizer:
        return
    for name, parameter in zip(step.names, step.parameters, strict=True):
        for key, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{key} of {name}, in the optimizer", value


def _not_cut(strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    """Of weights that are cut, those and the buffers of which every rank has all."""
    for name, parameter in strategy.model.named_parameters():
        if not is_dtensor(strategy.as_saved(name, parameter.detach())):
            yield name, parameter
    yield from _same_buffers(strategy)


def _same_buffers(strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in strategy.model.named_buffers():
        if name not in strategy.step.user_buffers.written:
            yield name, buffer


def digest(*tensors: Tensor) -> str:
    """Equal where all bytes are that this rank holds of them; one other word is always seen.

    Of large tensors words are added up side by side, and their sums so far as well, as Fletcher's
    checksum does, at the speed of memory: what two faults do in one column may cancel out there.
    The sums so far lose their low bits first: another highest bit in each row, as of a lane that
    turns signs, adds 2**63 each time, and four rows of that are nothing modulo 2**64.
    """
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    added = sums = of_sums = high = _EMPTY  # most tensors are small, and a model may have many
    for flat in map(_bytes_of, tensors):
        count = len(flat) // WORD if len(flat) >= LARGE_BYTES else 0
        if count and not added.size:
            added = np.zeros((2, SIDE_BY_SIDE), np.uint64)
            (sums, of_sums), high = added, np.empty(SIDE_BY_SIDE, np.uint64)
        words = flat[: count * WORD].view(np.uint64)
        for start in range(0, count, SIDE_BY_SIDE):
            part = words[start : start + SIDE_BY_SIDE]
            sums[: len(part)] += part
            of_sums += np.right_shift(sums, LOW_BITS, out=high)
        found.update(flat[count * WORD :].data)
    if added.any():
        found.update(added.data)
    return found.hexdigest()


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """What this rank holds of a tensor, in the order of its elements, on the host."""
    tensor = local(tensor).detach()
    plain = tensor if tensor.layout is torch.strided else tensor.to_dense()
    flat = plain.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy()


def _told(name: str, found: list[Any]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, digest in enumerate(found):
        groups.setdefault(digest, []).append(rank)
    *rest, most = sorted(groups.values(), key=len)
    if 2 * len(most) > len(found):
        odd = sorted(rank for ranks in rest for rank in ranks)
        differ = f"{_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from {_ranks(most)}"
    else:
        sides = " / ".join(_ranks(ranks) for ranks in sorted(groups.values()))
        differ = f"{sides} differ from each other, and no majority tells which is right"
    return f"ranks that must hold the same weights do not: {differ}; first in {name}."


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

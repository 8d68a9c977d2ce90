"""Checks that all ranks hold the same weights: compares digests, and names the first difference.

All replicas are updated with the same sums, so they stay equal bit for bit. If they do not, a
memory or a chip is at fault, or a race in user code, and no loss would show it. The trainer calls
this every `verify_every` steps, and before a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import allranks.torch.accelerator as accelerator
from allranks.errors import PeerLost, ReplicasDiffer
from allranks.strategies.mesh import REPLICATE
from allranks.torch.checkpoint.state import local
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
    named_tensors: Iterable[tuple[str, Tensor]],
    comm: Comm,
    causes: str = CAUSES,
    only: Collection[int] = (),
    new: Collection[int] = (),
) -> None:
    """Raise `ReplicasDiffer` on all ranks unless their tensors are equal; every rank calls this.

    `causes` names likely causes in the error. With `only` the tensors of these ranks are compared.
    Sends 32 bytes to each other rank if all are equal, else the digest of each name. A name that
    some rank does not have is left out. `new` are ranks of the job that have just received their
    state: if these alone differ, they raise `ReplicasDiffer`, and the other ranks `PeerLost`.
    """
    if comm.size == 1:
        return
    named = list(named_tensors)
    takes_part = not only or comm.rank in only
    texts = comm.gather_texts(digest(*(tensor for _, tensor in named)) if takes_part else "")
    if len(set(filter(None, texts))) == 1:
        return
    digests = {name: digest(tensor) for name, tensor in named}
    rows = comm.gather_values(digests)
    ranks = comm.members or range(comm.size)
    before = [place for place, rank in enumerate(ranks) if rank not in new] or range(comm.size)
    first = rows[before[0]]
    for name in first:
        values = {place: rows[place].get(name) for place in before}
        if None not in values.values() and len(set(values.values())) > 1:
            raise ReplicasDiffer(f"{_difference(name, values)} {causes}")
    names = {
        place: next((name for name in first if row.get(name) != first[name]), "")
        for place, row in enumerate(rows)
        if place not in before
    }
    if name := names.get(comm.rank):
        raise ReplicasDiffer(f"this rank holds another state than it was sent; first in {name}")
    if name := next(filter(None, names.values()), ""):
        raise PeerLost(f"a new rank holds another state than it was sent; first in {name}")


def verify(
    strategy: Strategy,
    causes: str = CAUSES,
    only: Collection[int] = (),
    new: Collection[int] = (),
) -> None:
    """Compare the ranks that hold the same tensors of one training; every rank calls this.

    If weights are cut, ranks with the same part compare it, and all ranks compare uncut tensors.
    `only` is for replicas of the whole state, and `new` as in `compare_replicas`.
    """
    agreement = strategy.agreement
    if strategy.comm.on_device:
        with strategy.comm.reading():  # reads after this do not wait for the device
            accelerator.synchronize([strategy.comm.device])
    if agreement.is_one_training:
        compare_replicas(replicated(strategy), strategy.axis(REPLICATE), causes, only, new)
    if agreement.weights == "sharded":
        compare_replicas(_not_cut(strategy), strategy.comm, causes, new=new)


def replicated(strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    """The tensors that must be equal on all ranks: weights, buffers, optimizer, in model order.

    Excludes buffers that the model writes in forward: those depend on the samples of a rank.
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
    """If weights are cut: those, and the buffers, that every rank holds whole."""
    for name, parameter in strategy.model.named_parameters():
        if not strategy.layout.is_cut(name, parameter.detach()):
            yield name, parameter
    yield from _same_buffers(strategy)


def _same_buffers(strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in strategy.model.named_buffers():
        if name not in strategy.step.user_buffers.written:
            yield name, buffer


def digest(*tensors: Tensor) -> str:
    """A digest of the bytes of this rank's parts; it detects any change of one word.

    For large tensors, columns of words are summed, and so are their running sums, as in Fletcher's
    checksum, at the speed of memory; two faults in one column may cancel out. The running sums
    drop their low bits first. Otherwise a flipped highest bit in each row, as from a lane that
    flips signs, adds 2**63 each time, and four such rows add nothing modulo 2**64.
    """
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
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
        total.update(flat[count * WORD :].data)
    if added.any():
        total.update(added.data)
    return total.hexdigest()


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of this rank's part of a tensor, in the order of its elements, on the host."""
    tensor = local(tensor).detach()
    plain = tensor if tensor.layout is torch.strided else tensor.to_dense()
    flat = plain.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy()


def _difference(name: str, digests: dict[int, Any]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, digest in digests.items():
        groups.setdefault(digest, []).append(rank)
    *minority, most = sorted(groups.values(), key=len)
    if 2 * len(most) > len(digests):
        odd = sorted(rank for ranks in minority for rank in ranks)
        differ = f"{_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from {_ranks(most)}"
    else:
        sides = " / ".join(_ranks(ranks) for ranks in sorted(groups.values()))
        differ = f"{sides} differ from each other, and no majority tells which is right"
    return f"ranks that must hold the same weights do not: {differ}; first in {name}."


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

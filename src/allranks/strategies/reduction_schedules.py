"""Schedules of messages by which every rank ends with the sum of all ranks: pure arithmetic.

A schedule is a list of turns, equally many for every rank; messages of turn t match on all ranks.
A part is a range of elements. If a turn `adds`, a received part is added to the local one;
otherwise it replaces it. Every element is summed once, in one order, and copied from there: all
ranks end with the same bits. With p ranks and n bytes a rank sends at most

    ring               2(p-1)/p·n, in 2(p-1) turns                Patarasuk and Yuan 2009
    halving-doubling   2(q-1)/q·n, in 2·log2 q turns; q is p, or the power of two below it: then
                       p-q ranks give their n to a partner first, which sends n more at the end
                                                                  Thakur et al. 2005, Rabenseifner
    binary-tree        3n: to the parent, and to two children; in 2·floor(log2 p) turns
    star               (p-1)n from the one rank that adds all, n from the others; in 2 turns
    hierarchical       2(g-1)/g·n to the g ranks of its group, 2(G-1)/G·n/g to the G-1 others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from allranks.strategies.shards import even_sizes

Part = range
"""Elements of a message, one after another."""


@dataclass(frozen=True)
class Turn:
    """What one rank does at once: (peer, part) of each message that leaves, and that comes."""

    sends: tuple[tuple[int, Part], ...] = ()
    receives: tuple[tuple[int, Part], ...] = ()
    adds: bool = False


def ring(ranks: int, rank: int, size: int, options: Mapping[str, Any]) -> list[Turn]:
    """A chunk for each rank goes round twice: to be added up, then to be copied."""
    members = range(ranks)
    own_chunk, scatter = _ring_reduce_scatter(members, rank, range(size))
    return [*scatter, *_ring_all_gather(members, rank, range(size), own_chunk)]


def halving_doubling(ranks: int, rank: int, size: int, options: Mapping[str, Any]) -> list[Turn]:
    """Halves go to a partner at half the distance each time, sums come back the same way."""
    core = power_below(ranks)
    extra, whole = ranks - core, range(size)
    if rank >= core:  # an extra rank: its partner takes part for both
        idle = [Turn()] * (2 * (core.bit_length() - 1))
        partner = rank - core
        return [Turn(sends=((partner, whole),)), *idle, Turn(receives=((partner, whole),))]
    turns = _halving_doubling_core(core, rank, size)
    if not extra:
        return turns
    other = ((rank + core, whole),) if rank < extra else ()
    return [Turn(receives=other, adds=True), *turns, Turn(sends=other)]


def binary_tree(ranks: int, rank: int, size: int, options: Mapping[str, Any]) -> list[Turn]:
    """Sums go up a tree in which rank r has the children 2r+1 and 2r+2, and come down again."""
    whole, depth = range(size), (rank + 1).bit_length() - 1
    deepest = ranks.bit_length() - 1
    children = tuple((c, whole) for c in (2 * rank + 1, 2 * rank + 2) if c < ranks)
    parent = (((rank - 1) // 2, whole),) if rank else ()
    up = [Turn()] * deepest
    down = [Turn()] * deepest
    if children:
        up[deepest - depth - 1] = Turn(receives=children, adds=True)
        down[depth] = Turn(sends=children)
    if parent:
        up[deepest - depth] = Turn(sends=parent)
        down[depth - 1] = Turn(receives=parent)
    return [*up, *down]


def star(ranks: int, rank: int, size: int, options: Mapping[str, Any]) -> list[Turn]:
    """Rank 0 is given all, adds it in the order of the ranks, and gives the sum to all."""
    whole = range(size)
    if ranks == 1:
        return []
    if rank:
        return [Turn(sends=((0, whole),)), Turn(receives=((0, whole),))]
    others = tuple((other, whole) for other in range(1, ranks))
    return [Turn(receives=others, adds=True), Turn(sends=others)]


def hierarchical(ranks: int, rank: int, size: int, options: Mapping[str, Any]) -> list[Turn]:
    """Chunks are added up in each group, then over the groups by rings, then given to the group.

    A group is a run of `options["group"]` ranks, as those of a node are.
    """
    group = min(int(options["group"]) or ranks, ranks)
    node, local = divmod(rank, group)
    inside = range(node * group, (node + 1) * group)
    across = range(local, ranks, group)
    own_chunk, scatter = _ring_reduce_scatter(inside, local, range(size))
    summed, scatter_across = _ring_reduce_scatter(across, node, own_chunk)
    gather_across = _ring_all_gather(across, node, own_chunk, summed)
    gather = _ring_all_gather(inside, local, range(size), own_chunk)
    return [*scatter, *scatter_across, *gather_across, *gather]


SCHEDULES = {
    "ring": ring,
    "halving-doubling": halving_doubling,
    "binary-tree": binary_tree,
    "star": star,
    "hierarchical": hierarchical,
}


def chunks_of(name: str, ranks: int) -> int:
    """Into how many even chunks a schedule cuts a message; none is shorter if they divide it."""
    if name in ("ring", "hierarchical"):
        return ranks
    return power_below(ranks) if name == "halving-doubling" else 1


def power_below(ranks: int) -> int:
    """The largest power of two that is not more."""
    return 1 << (ranks.bit_length() - 1)


def cut(part: Part, parts: int) -> list[Part]:
    """A part in as many even runs, longer ones first; some are empty where it is short."""
    ends = accumulate(even_sizes(len(part), parts), initial=part.start)
    return [range(low, high) for low, high in pairwise(ends)]


def _ring_reduce_scatter(members: Sequence[int], at: int, part: Part) -> tuple[Part, list[Turn]]:
    """The chunk that `members[at]` holds the sum of at the end, and how it comes to that."""
    chunks, count = cut(part, len(members)), len(members)
    after, before = members[(at + 1) % count], members[at - 1]
    turns = [
        _turn((after, chunks[(at - k) % count]), (before, chunks[(at - k - 1) % count]), adds=True)
        for k in range(count - 1)
    ]
    return chunks[(at + 1) % count], turns


def _ring_all_gather(members: Sequence[int], at: int, part: Part, own_chunk: Part) -> list[Turn]:
    """Every chunk comes to `members[at]`, which holds the sum of `own_chunk`."""
    chunks, count = cut(part, len(members)), len(members)
    assert own_chunk == chunks[(at + 1) % count]
    after, before = members[(at + 1) % count], members[at - 1]
    return [
        _turn((after, chunks[(at + 1 - k) % count]), (before, chunks[(at - k) % count]))
        for k in range(count - 1)
    ]


def _halving_doubling_core(ranks: int, rank: int, size: int) -> list[Turn]:
    """The same for a power of two: each exchange leaves the half of what was left."""
    chunks = cut(range(size), ranks)
    low, high, distance = 0, ranks, ranks // 2
    halving, doubling = [], []
    while distance:
        middle, partner = (low + high) // 2, rank ^ distance
        halves = (low, middle), (middle, high)
        keep, send = halves if not rank & distance else halves[::-1]
        kept_part, sent_part = (range(chunks[a].start, chunks[b - 1].stop) for a, b in (keep, send))
        halving.append(_turn((partner, sent_part), (partner, kept_part), adds=True))
        doubling.append(_turn((partner, kept_part), (partner, sent_part)))
        (low, high), distance = keep, distance // 2
    return [*halving, *reversed(doubling)]


def _turn(outgoing: tuple[int, Part], received: tuple[int, Part], *, adds: bool = False) -> Turn:
    """A turn that sends and receives at once; empty parts are left out."""
    return Turn((outgoing,) if outgoing[1] else (), (received,) if received[1] else (), adds)

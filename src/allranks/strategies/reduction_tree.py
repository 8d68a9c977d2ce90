"""One fixed binary tree over all shards: the order in which `--bitwise` adds. Pure arithmetic.

A node is the span `(low, high)` of shards below it. The left child of a node holds the largest
power of two that leaves the right child something. The tree depends on the number of shards
only; a rank that owns a run of shards holds the roots of the complete subtrees inside that run,
and the ranks together finish the tree from those roots. Floating-point addition is not
associative, but it is a function: the same tree gives the same bits, whoever owns which shard.
"""

from __future__ import annotations

from functools import cache

from allranks.strategies.shards import Shares

PAIRS_LIMIT_BYTES = 2 * 2**20
"""Above this a message goes through the ranks in chunks: fewer bytes, more rounds."""

Span = tuple[int, int]


def split(span: Span) -> int:
    """Where the children of a node meet: (0, 8) -> 4, (0, 6) -> 4, (4, 6) -> 5."""
    low, high = span
    return low + (1 << ((high - low - 1).bit_length() - 1))


def subtree_roots(owned: range, shards: int) -> tuple[Span, ...]:
    """The roots of the largest complete subtrees inside `owned`, left to right.

    8 shards: ranks that own 0..2, 3..5 and 6..7 hold (0,2) (2,3) | (3,4) (4,6) | (6,8).
    """

    def below(span: Span) -> tuple[Span, ...]:
        low, high = span
        if high <= owned.start or low >= owned.stop:
            return ()
        if owned.start <= low and high <= owned.stop:
            return (span,)
        middle = split(span)
        return below((low, middle)) + below((middle, high))

    return below((0, shards))


def roots_of_ranks(shares: Shares) -> tuple[tuple[Span, ...], ...]:
    """The roots that each rank holds, which together cover the tree."""
    return tuple(subtree_roots(owned, shares.shards) for owned in shares.runs)


@cache
def are_siblings(left_child: Span, right_child: Span, shards: int) -> bool:
    """Whether the two spans are the left and the right child of one node of the tree."""
    if left_child[1] != right_child[0]:
        return False
    span = (0, shards)
    while span[1] - span[0] > 1:
        middle = split(span)
        if span == (left_child[0], right_child[1]):
            return middle == left_child[1]
        if right_child[1] <= middle:
            span = (span[0], middle)
        elif left_child[0] >= middle:
            span = (middle, span[1])
        else:
            return False
    return False


@cache
def merges(spans: tuple[Span, ...], shards: int) -> bytes:
    """How many nodes are complete after each of `spans`, which cover the tree from left to right.

    To add along the tree, push each span on a stack, then add the upper two this many times: for
    4 single shards, 0 1 0 2.
    """
    stack: list[Span] = []
    complete = []
    for span in spans:
        count = 0
        while stack and are_siblings(stack[-1], span, shards):
            span, count = (stack.pop()[0], span[1]), count + 1
        stack.append(span)
        complete.append(count)
    assert stack == [(0, shards)], stack
    return bytes(complete)


@cache
def rounds_of_pairs(shards: int, ranks: int) -> int | None:
    """The rounds of pairs in which the ranks can finish the tree; `None` if they cannot.

    In round k, rank r adds its sum to that of rank r XOR 2^k, and both hold the node above. That
    is the tree itself wherever every rank holds one root and partners are siblings: 2, 4 and 8
    ranks on 8 shards, say. The sum of two numbers is the same in either order.
    """
    roots = roots_of_ranks(Shares.even(shards, ranks))
    if any(len(own_roots) != 1 for own_roots in roots):
        return None
    nodes, rounds = [own_roots[0] for own_roots in roots], 0
    while 1 << rounds < ranks:
        partners = [rank ^ (1 << rounds) for rank in range(ranks)]
        above = []
        for rank, partner in enumerate(partners):
            if partner >= ranks:
                return None
            left_child, right_child = nodes[min(rank, partner)], nodes[max(rank, partner)]
            if not are_siblings(left_child, right_child, shards):
                return None
            above.append((left_child[0], right_child[1]))
        nodes, rounds = above, rounds + 1
    return rounds


def uses_pairs(shards: int, ranks: int, message_bytes: int) -> bool:
    """Whether a message of this size is summed in rounds of pairs; two ranks are one pair."""
    small = ranks == 2 or message_bytes <= PAIRS_LIMIT_BYTES
    return small and rounds_of_pairs(shards, ranks) is not None

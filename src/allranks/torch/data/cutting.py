"""How a global batch is cut: into leaves and micro-batches of each rank. Arithmetic, without data.

A rank that has no sample of a batch may still have to go through the model, because passes
communicate, or to know what it returns, because outputs of all ranks are put together. It then
takes the first samples of the same global batch (`spare`), which another rank trains with: so no
step depends on an earlier one, and what is not finite in them is not finite in the step anyway. Of
a stream, of which nobody knows what others read, it takes those that it has read last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from allranks.strategies.shards import Micro, even_sizes, micro_batches, owned_shards
from allranks.torch.data.batch import Leaf, MicroBatch

Sizes = tuple[int, ...]
"""The samples of every shard of a global batch."""


@dataclass
class Cutting:
    """Cuts the global batches of a job for the reader `rank` of `ranks`.

    `shard_alone` makes every shard a leaf, `collates_alone` a micro-batch; `cut_for` cuts
    micro-batches as so many ranks would. With `counts_passes` batches say how many passes the rank
    with the most makes; with `needs_spare` a rank without a sample is given one.
    """

    shards: int
    rank: int
    ranks: int
    micro_batch: int | None
    shard_alone: bool
    cut_for: int = 0
    counts_passes: bool = False
    needs_spare: bool = False
    collates_alone: bool = False
    _cuts: dict[int, tuple[Sizes, int, int]] = field(default_factory=dict)
    _leaves: dict[Sizes, tuple[Leaf, ...]] = field(default_factory=dict)
    _passes: dict[Sizes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owned = owned_shards(self.shards, self.ranks, self.rank)

    def begin_collating_alone(self) -> None:
        """From now on every shard is a micro-batch."""
        self.collates_alone = True
        self._leaves.clear()
        self._passes.clear()

    def cut(self, samples: int) -> tuple[Sizes, int, int]:
        """The sizes of all shards of a batch; its first sample on this rank, and how many."""
        if samples not in self._cuts:
            sizes = even_sizes(samples, self.shards)
            own = sum(sizes[k] for k in self.owned)
            self._cuts[samples] = sizes, sum(sizes[: self.owned.start]), own
        return self._cuts[samples]

    def leaves(self, sizes: Sizes) -> tuple[Leaf, ...]:
        """The leaves of this rank for shards of these sizes, data still missing."""
        if sizes not in self._leaves:
            self._leaves[sizes] = self._leaves_for(sizes, self.owned)
        return self._leaves[sizes]

    def passes(self, sizes: Sizes) -> int:
        """How often the rank with the most micro-batches goes through the model, if all are to."""
        if not self.counts_passes:
            return 0
        if sizes not in self._passes:
            spans = (owned_shards(self.shards, self.ranks, rank) for rank in range(self.ranks))
            each = (self._leaves_for(sizes, span) for span in spans)
            self._passes[sizes] = max(sum(len(leaf.micros) for leaf in own) for own in each)
        return self._passes[sizes]

    def spare(self, sizes: Sizes) -> MicroBatch | None:
        """What this rank goes through the model with where it has no sample: the first samples.

        `None` where it has samples, or needs none.
        """
        if not self.needs_spare or any(leaf.micros for leaf in self.leaves(sizes)):
            return None
        return self.first_of(dict(enumerate(sizes)))

    def first_of(self, sizes: dict[int, int]) -> MicroBatch:
        """What of shards of these sizes goes through the model first."""
        first = next(shard for shard, size in sizes.items() if size)
        micro = micro_batches({first: sizes[first]}, self.micro_batch)[0]
        return MicroBatch(micro, sum(piece.samples for piece in micro))

    def _leaves_for(self, sizes: Sizes, owned_by_it: range) -> tuple[Leaf, ...]:
        owned = {shard: sizes[shard] for shard in owned_by_it}
        groups = [{k: size} for k, size in owned.items()] if self.shard_alone else [owned]
        return tuple(
            Leaf(
                range(min(group), max(group) + 1),
                tuple(
                    MicroBatch(m, sum(piece.samples for piece in m))
                    for part in self._parts(group)
                    for m in self._micros_of(part)
                ),
            )
            for group in groups
        )

    def _micros_of(self, group: dict[int, int]) -> tuple[Micro, ...]:
        """What of these shards goes through the model at once.

        Shards that are collated alone are: what is drawn there belongs to the shard.
        """
        if not self.collates_alone:
            return micro_batches(group, self.micro_batch)
        alone = (micro_batches({k: size}, self.micro_batch) for k, size in group.items())
        return tuple(micro for micros in alone for micro in micros)

    def _parts(self, group: dict[int, int]) -> list[dict[int, int]]:
        """What never goes through the model together: the shards that other ranks would own."""
        if not self.cut_for:
            return [group]
        spans = [owned_shards(self.shards, self.cut_for, rank) for rank in range(self.cut_for)]
        return [{k: group[k] for k in span if k in group} for span in spans]

"""Learners that meet every few steps, by the outer optimizer that joins what they found."""

from __future__ import annotations

from allranks.torch.compression.base import Codec
from allranks.torch.compression.four_bit import FourBit
from allranks.torch.compression.top_k import TopK
from allranks.torch.outer.optimizers import (
    Average,
    BlockMomentum,
    Nesterov,
    OuterOptimizer,
    SlowMo,
)
from allranks.torch.strategies.apart.outer import Outer


class LocalSGD(Outer):
    """Learners take the mean of their weights."""

    name = "local-sgd"

    def made_optimizer(self) -> OuterOptimizer:
        return Average()


class SlowMomentum(Outer):
    """Means move the global weights with a slow momentum."""

    name = "slowmo"

    def made_optimizer(self) -> OuterOptimizer:
        return SlowMo(self.options["alpha"], self.options["beta"])


class BlockMomentumFiltering(Outer):
    """Blocks move the global weights with momentum."""

    name = "block-momentum"

    def made_optimizer(self) -> OuterOptimizer:
        momentum = self.options["momentum"]
        if momentum < 0:
            momentum = 1 - 1 / self.learners.size
        return BlockMomentum(momentum, self.options["block_rate"], self.options["form"])


class DiLoCo(Outer):
    """What learners found is a gradient of an outer SGD with Nesterov momentum."""

    name = "diloco"

    def made_optimizer(self) -> OuterOptimizer:
        return Nesterov(self.options["lr"], self.options["momentum"])

    def made_codec(self) -> Codec | None:
        return FourBit() if self.options["bits"] == "4" else None


class SparseLoCo(Outer):
    """What learners found is sent as the largest of each chunk, in 2 bits; the rest is kept."""

    name = "sparse-loco"

    def made_optimizer(self) -> OuterOptimizer:
        return Nesterov(self.options["lr"], 0.0)

    def made_codec(self) -> Codec:
        options = self.options
        values = "two-bit" if options["bits"] == "2" else "raw"
        return TopK(options["keep"], options["chunk"], values)

"""Outer optimizers: they update the global weights after each block of local steps.

Every learner begins a block at `start`, makes H local steps and ends at w_k. d is the mean of
`start - w_k` over the learners: old minus new, a pseudo-gradient with the sign of a gradient.

    average          w <- w - d                                             local SGD, Stich 2019
    nesterov         b <- m b + d;  w <- w - lr (d + m b)                  DiLoCo, arXiv 2311.08105
    slowmo           u <- beta u + d / g;  w <- w - alpha g u  (g: the inner rate)    1910.00643
    block-momentum   v <- m v + z d;  w <- w - v         Chen and Huo 2016; the next block begins at
                     paper: w - m v (Nesterov); classical: w; cntk: w, which moves by (1 + m) v

CNTK's documents call `cntk` the paper's Nesterov form; its code, and fairseq's, is the classical
form with another block rate. All are elementwise, so a shard moves as it would in the whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

PAPER, CLASSICAL, CNTK = "paper", "classical", "cntk"
FORMS = (PAPER, CLASSICAL, CNTK)


class OuterOptimizer(ABC):
    """Updates one flat tensor of global weights. `momentum` is its state, if it has any."""

    keeps: int = 1
    """How many numbers of state it has for each weight."""

    def __init__(self) -> None:
        self.momentum: Tensor | None = None

    @abstractmethod
    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        """Update `weights` in place by `delta`, the mean of old minus new; both (n,).

        `rate` is the inner optimizer's learning rate in the last step of the block. Sends nothing:
        every learner calls this with the same numbers and gets the same weights.
        """

    def start(self, weights: Tensor) -> Tensor:
        """Where the learners begin the next block: `weights` itself, or a new tensor."""
        return weights

    def _accumulate(self, delta: Tensor, momentum: float, factor: float = 1.0) -> Tensor:
        """The momentum after this block: m times the old one, plus `factor` times `delta`."""
        if self.momentum is None:
            self.momentum = delta.new_zeros(delta.shape)
        return self.momentum.mul_(momentum).add_(delta, alpha=factor)


class Average(OuterOptimizer):
    """The mean of the learners' weights."""

    keeps = 0

    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        weights.sub_(delta)


class Nesterov(OuterOptimizer):
    """SGD with Nesterov momentum, as torch's: DiLoCo. With lr = 1 and no momentum the mean."""

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        super().__init__()
        self.lr, self.factor = lr, momentum
        self.keeps = int(momentum != 0)

    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        if self.factor:
            buffer = self._accumulate(delta, self.factor)
            weights.sub_(buffer, alpha=self.lr * self.factor)
        weights.sub_(delta, alpha=self.lr)


class SlowMo(OuterOptimizer):
    """Momentum in units of the inner rate, so that a schedule does not change the momentum."""

    def __init__(self, alpha: float = 1.0, beta: float = 0.7) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta

    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        if rate == 0:  # nothing has moved
            return
        buffer = self._accumulate(delta, self.beta, 1 / rate)
        weights.sub_(buffer, alpha=self.alpha * rate)


class BlockMomentum(OuterOptimizer):
    """BMUF. `momentum` 1 - 1/K for K learners makes each block count as much as in plain SGD."""

    def __init__(self, momentum: float, rate: float = 1.0, form: str = PAPER) -> None:
        super().__init__()
        self.factor, self.rate, self.form = momentum, rate, form
        self.keeps = 2 if form == PAPER else 1  # with where the next block begins

    def step(self, weights: Tensor, delta: Tensor, rate: float) -> None:
        buffer = self._accumulate(delta, self.factor, self.rate)
        weights.sub_(buffer, alpha=1 + self.factor if self.form == CNTK else 1.0)

    def start(self, weights: Tensor) -> Tensor:
        if self.form != PAPER or self.momentum is None:
            return weights
        return weights.sub(self.momentum, alpha=self.factor)

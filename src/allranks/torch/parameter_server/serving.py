"""The trainer of a worker or a server: it never holds a table whole, not to build it either."""

from __future__ import annotations

from allranks.torch.build import Built
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.trainer import Trainer


class ServedTrainer(Trainer):
    """Builds the model on meta where there are tables, and computes all its weights but these.

    Where a model cannot be built so (`model_notes` says why), it is whole for a moment.
    """

    def _place_model(self) -> Built:
        assert isinstance(self.strategy, ParameterServer)
        self.strategy.builds_deferred = self.strategy.rows_travel
        return super()._place_model()

"""Tasks for ranks that know the strategy of `fake_sharded`."""

from __future__ import annotations

import random

import torch
from torch import nn

import fake_sharded
from contract_tasks import Words

fake_sharded.register()


class Apart(Words):
    """Weights that no seed decides."""

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            model.mix.bias.fill_(random.SystemRandom().random())
        return model

"""Tasks whose models lie on the meta device, or are not built as they should be."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allranks.programs.clicks import ClickThrough
from contract_tasks import Words


@dataclass(kw_only=True)
class OnMeta(Words):
    """Weights on the meta device: some of a `file`, the others drawn."""

    file: str = ""

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = super().model()
        for parameter in model.frozen.parameters():
            parameter.requires_grad_(False)
        return model

    def init(self, module: nn.Module) -> None:
        super().init(module)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.fill_(0.25)

    def pretrained(self) -> Any:
        return self.file or None


class TablesOnMeta(ClickThrough):
    """Tables that are given memory only where they are kept."""

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = super().model()
        starts = [0, *torch.tensor(self.law.sizes).cumsum(0).tolist()][:-1]
        model.register_buffer("first", torch.tensor(starts), persistent=False)
        return model

    def init(self, module: nn.Module) -> None:
        super().init(module)
        if isinstance(module, nn.EmbeddingBag):
            nn.init.zeros_(module.weight)


@dataclass(kw_only=True)
class Fails(Words):
    """A constructor that fails on one rank, while it is that rank's turn to build."""

    how: str = "raises"
    rank: int = 0

    def model(self) -> nn.Module:
        if int(os.environ["RANK"]) == self.rank:
            if self.how == "raises":
                raise RuntimeError("no such layer")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().model()

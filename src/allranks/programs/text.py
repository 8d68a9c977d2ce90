"""Text: a small GPT that learns to predict the next byte of any file.

    allranks train text --set path=book.txt

The first part of the file is for training, the last for evaluation. Each is cut into consecutive
windows of `context` bytes; each byte is predicted from the bytes before it in its window. An epoch
predicts every byte of the first part once, without the first byte and an incomplete last window.
The engine orders the windows by (seed, epoch). Every rank maps the file into memory, and never
copies or changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from allranks.errors import RequestError
from allranks.programs.models.gpt import GPTShape, gpt
from allranks.torch.task import Task
from allranks.training.schedules import cosine, linear_warmup

LEAST_FACTOR = 0.1  # of the rate, at `total_steps`
BETAS = (0.9, 0.95)  # of GPT-3: Brown et al. 2020, arXiv 2005.14165, appendix B


@dataclass(kw_only=True)
class Text(Task):
    """Predict the next byte of the file `path`; a batch is `batch_size` windows of `context` bytes.

    `validation` is the part of the file that is held out. The rate rises for `warmup_steps`
    updates; with `total_steps` it then falls along a cosine, to a tenth at that update.
    """

    path: str
    batch_size: int = 32
    epochs: int = 1
    clip_norm: float | None = 1.0
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.1
    lr: float = 1e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    total_steps: int | None = None
    validation: float = 0.1

    def __post_init__(self) -> None:
        _ = self.shape, self.schedule(0)  # both raise for values that do not go together
        if not 0 <= self.validation < 1:
            raise RequestError(
                asked=f"--set validation={self.validation}",
                found=str(self.validation),
                why="it is the part of the file that is held out, so from 0 to below 1",
                do="--set validation=0.1, or 0 to hold nothing out",
            )

    @property
    def shape(self) -> GPTShape:
        """The sizes of the model."""
        return GPTShape(
            vocabulary=256,
            context=self.context,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            dropout=self.dropout,
        )

    def model(self) -> nn.Module:
        return gpt(self.shape)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW; matrices decay, biases and the scales of norms do not."""
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self.lr, betas=BETAS)

    def schedule(self, step: int) -> float:
        if self.total_steps is not None:
            return cosine(self.total_steps, self.warmup_steps, LEAST_FACTOR)(step)
        return linear_warmup(self.warmup_steps)(step) if self.warmup_steps else 1.0

    def train_data(self) -> Tensor:
        return self._windows(self._parts()[0])

    def eval_data(self) -> Tensor | None:
        return self._windows(self._parts()[1]) if self.validation else None

    def inputs(self, batch: Any) -> Any:
        return batch[:, :-1].long()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        target = batch[:, 1:].long()
        losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
        return losses.view(target.shape)  # flat before: deterministic on GPUs

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        return {**metrics, "bits_per_byte": metrics["loss"] / math.log(2)}

    def _windows(self, part: Tensor) -> Tensor:
        """Views of a part of the file, (windows, context + 1); neighbours share one byte."""
        return part.unfold(0, self.context + 1, self.context)

    def _parts(self) -> tuple[Tensor, Tensor]:
        """The training and the held-out bytes; raises `RequestError` if the file is too short."""
        file = _mapped(self.path)
        held_out = round(len(file) * self.validation)
        learnt, evaluated = file[: len(file) - held_out], file[len(file) - held_out :]
        shortest = min(len(learnt), held_out) if self.validation else len(learnt)
        if shortest <= self.context:
            raise RequestError(
                asked=f"--set path={self.path} with context = {self.context}",
                found=f"{len(file)} bytes, of which {held_out} are held out",
                why=f"a window is {self.context + 1} bytes, and each part needs at least one",
                do="a longer file, a smaller --set context=…, or --set validation=0",
            )
        return learnt, evaluated


def _mapped(path: str) -> Tensor:
    """The bytes of a file, (bytes,) uint8, mapped into memory; writing to them changes no file."""
    file = Path(path).expanduser()
    try:
        found = "" if file.is_file() else f"no regular file of that name in {Path.cwd()}"
        if not found:
            return torch.from_numpy(np.memmap(file, np.uint8, mode="c"))
    except (OSError, ValueError) as error:  # a ValueError is an empty file
        found = f"{type(error).__name__}: {error}"
    raise RequestError(
        asked=f"--set path={path}",
        found=found,
        why="the model learns from the bytes of that file, on every rank",
        do="name a file of text, in any encoding: --set path=book.txt",
    )

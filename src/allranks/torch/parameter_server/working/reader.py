"""What a worker reads: its part of the batch of a step, whichever it is handed."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from allranks.torch.data.batch import Batch
from allranks.torch.trainer import Trainer
from allranks.training.progress import Progress
from allranks.training.work_queue import Chunk


class Reader:
    """The data of the chunks that a worker is handed: read on, as long as they follow."""

    def __init__(self, trainer: Trainer, parts: int) -> None:
        self.trainer, self.parts = trainer, parts
        batches = trainer.task_data.batches
        self.per_epoch = batches.steps_by_number(trainer.strategy.name)
        self._own: dict[int, Any] = {}
        self._open: Generator[Batch] | None = None
        self._next = (-1, -1)

    def batch(self, chunk: Chunk) -> Batch:
        """This part of the batch of the step of a chunk."""
        where = chunk.part, chunk.first
        if self._open is None or where != self._next:
            self.close()
            if chunk.part not in self._own:
                batches = self.trainer.task_data.batches
                self._own[chunk.part] = dataclasses.replace(
                    batches, rank=chunk.part, ranks=self.parts
                )
            epoch, step = divmod(chunk.first, self.per_epoch)
            done = Progress(epoch, step, chunk.first, updates=chunk.first)
            self._open = self._own[chunk.part].after(done, 2**31, None)
        self._next = chunk.part, chunk.first + 1
        return next(self._open)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None

"""The loops that `huggingface.py` runs side by side: a task of `allranks.huggingface`, and by hand.

    ddp-global        the model in DistributedDataParallel, AdamW, transformers' own loss; the mean
                      over all ranks is logged, which takes an all-reduce of its own
    ddp-global-again  the same loop a second time: how much equal loops differ here
    allranks          our Trainer with `CausalLM`, which logs that mean always; shards as many as
                      ranks, so that each rank makes one pass

All read the same samples in the same order, of texts of equal length: so the mean of means is the
mean over tokens. No loop draws random numbers: the models have no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from contenders import STEPS_LIMIT, Contender
from torch.distributed import ReduceOp, all_reduce
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, LlamaConfig
from workloads import SEED, Tokens, Workload

from allranks.huggingface import CausalLM
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from allranks.training.order import Order

WORDS, LENGTH, ROWS, BATCH = 512, 64, 512, 16  # of the vocabulary, of a text, texts; of all ranks
RATE = 1e-4
CONFIGS: dict[str, Callable[[], Any]] = {
    "tiny GPT-2": lambda: GPT2Config(
        vocab_size=WORDS,
        n_embd=128,
        n_layer=4,
        n_head=4,
        n_positions=LENGTH,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "tiny Llama": lambda: LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    ),
}


def texts() -> torch.Tensor:
    """The tokens of all texts, (ROWS, LENGTH)."""
    return torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


@dataclass(kw_only=True)
class Texts(CausalLM):
    """The task: rows are tokens already, so no tokenizer is read."""

    kind: str = "tiny GPT-2"
    batch_size: int = BATCH
    lr: float = RATE

    columns = ()

    def config(self) -> Any:
        return CONFIGS[self.kind]()

    def model(self) -> Any:
        torch.manual_seed(SEED)
        return super().model()

    def tokenizer(self) -> Any:
        return None

    def rows(self, split: str) -> Any:
        return [{"input_ids": row} for row in texts()] if split == "train" else None

    def encode(self, row: Any) -> Any:
        return {"input_ids": row["input_ids"], "labels": row["input_ids"]}

    def schedule(self, step: int, total: int | None) -> float:
        return 1.0


class OurTask(Contender):
    """The Trainer, from a script."""

    def prepare(self) -> None:
        task = Texts(kind=self.workload.name, shards=self.world.size, weight_decay=0.0)
        self.trainer = Trainer(task, Job(strategy="ddp"), world=self.world)
        self.batches = self.trainer.batches(steps=STEPS_LIMIT)

    def run(self, steps: int) -> None:
        for batch in islice(self.batches, steps):
            self.losses.append(self.trainer.step(batch).loss)


class ByHand(Contender):
    """DistributedDataParallel, as in the tutorial of torch."""

    def prepare(self) -> None:
        task = Texts(kind=self.workload.name, weight_decay=0.0)
        self.model = DistributedDataParallel(task.model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)
        self.batches = self._rows()

    def _rows(self) -> Iterator[torch.Tensor]:
        """This rank's part of each batch, epoch after epoch."""
        rows, order, epoch = texts(), Order(ROWS, BATCH, SEED, "drop"), 0
        while True:
            for step in range(order.steps_per_epoch):
                index = torch.from_numpy(order.batch(epoch, step))
                yield rows[index.chunk(self.world.size)[self.world.rank]]
            epoch += 1

    def run(self, steps: int) -> None:
        for rows in islice(self.batches, steps):
            self.optimizer.zero_grad()
            loss = self.model(input_ids=rows, labels=rows).loss
            loss.backward()
            self.optimizer.step()
            mean = loss.detach() / self.world.size
            all_reduce(mean, ReduceOp.SUM)
            self.losses.append(mean.item())


CONTENDERS: dict[str, Callable[[Workload, World], Contender]] = {
    "ddp-global": ByHand,
    "ddp-global-again": ByHand,
    "allranks": OurTask,
}
WORKLOADS = {
    name: Tokens(name, BATCH // 2, ROWS, (LENGTH,), lambda: None, is_adamw=True)  # type: ignore
    for name in CONFIGS
}

"""A `Trainer` whose training loader is a plain one: every rank reads all samples."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

EVEN = torch.randint(50, (16, 12), generator=torch.Generator().manual_seed(1))


class Plain(Trainer):
    """Its loader knows nothing of ranks."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


set_seed(7)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16))
options = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "use_cpu": True}
arguments = TrainingArguments("out", save_strategy="no", report_to=[], **options)
rows = [{"input_ids": row, "labels": row} for row in EVEN]
Plain(model=model, args=arguments, train_dataset=rows).train()

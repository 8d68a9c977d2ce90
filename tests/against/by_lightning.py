"""Lightning, on as many ranks as there are: `by_lightning.py BATCH`."""

import logging
import os
import sys
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


torch.manual_seed(0)
inputs = torch.randn(96, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
sampler = DistributedSampler(data, WORLD, RANK, shuffle=False)
trainer = L.Trainer(
    accelerator="cpu",
    strategy="ddp" if WORLD > 1 else "auto",
    devices=WORLD,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(data, batch_size=int(sys.argv[1]), sampler=sampler))

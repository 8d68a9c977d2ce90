"""A small GPT by DDP as torch's examples have it: autocast and GradScaler, clipping, workers, a
test loader whose losses are printed batch by batch, snapshots of local rank 0."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split

BLOCK, WORDS = 8, 17


class Characters(Dataset):
    def __init__(self, size):
        self.text = torch.randint(0, WORDS, (size,), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.text) - BLOCK

    def __getitem__(self, i):
        return self.text[i : i + BLOCK], self.text[i + 1 : i + BLOCK + 1]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Parameter(torch.zeros(1, BLOCK, 16))
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.head = nn.Linear(16, WORDS, bias=False)

    def forward(self, x, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.drop(self.words(x) + self.places[:, : x.shape[1]])
        logits = self.head(self.norm(self.block(hidden, mask, is_causal=True)))
        if targets is None:
            return logits, None
        flat = logits.view(-1, WORDS), targets.view(-1)
        return logits, F.cross_entropy(*flat, ignore_index=-1)


class Trainer:
    def __init__(self, model, train, test, folder):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.loaders = {True: self._loader(train), False: self._loader(test)}
        self.model, self.path = DDP(model), os.path.join(folder, "gpt.pt")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
        self.scaler = torch.amp.GradScaler("cuda", enabled=False)

    def _loader(self, data):
        sampler = DistributedSampler(data)
        return DataLoader(data, batch_size=12, shuffle=False, num_workers=2, sampler=sampler)

    def _batch(self, source, targets, train):
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", torch.bfloat16):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def _epoch(self, epoch, train):
        self.loaders[train].sampler.set_epoch(epoch)
        for number, (source, targets) in enumerate(self.loaders[train]):
            kind, loss = "Train" if train else "Eval", self._batch(source, targets, train)
            if number % 5 == 0:
                print(f"[RANK{self.rank}] Epoch {epoch} | Iter {number} | {kind} Loss {loss:.5f}")

    def train(self, epochs):
        for epoch in range(epochs):
            self._epoch(epoch, True)
            if self.rank == 0:
                torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, self.path)
            self._epoch(epoch, False)


dist.init_process_group("gloo")
torch.manual_seed(7)
data = Characters(150)
parts = random_split(data, [110, len(data) - 110])
net = GPT()
torch.manual_seed(7 + dist.get_rank())
Trainer(net, *parts, os.environ["SAVED_IN"]).train(2)
dist.destroy_process_group()

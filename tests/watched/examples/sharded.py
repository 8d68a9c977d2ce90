"""FSDP2 as torch's example of it: blocks sharded one by one, data made on each rank, Adam,
clipping, the whole state put together by all and saved by rank 0."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(size), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, size=16, words=32):
        super().__init__()
        self.embedding = nn.Embedding(words, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(3)])
        self.head = nn.Linear(size, words)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Model()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(1 + rank)
for _ in range(6):
    x = torch.randint(0, 32, (8, 10))
    loss = model(x).sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    torch.save(whole, os.path.join(os.environ["SAVED_IN"], "model_state_dict.pt"))
dist.destroy_process_group()

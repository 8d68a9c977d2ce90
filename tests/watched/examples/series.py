"""The trainer that grows through torch's series on DDP: snapshots of rank 0, resumed by all, the
epoch told to the sampler (which the series itself forgets), one print a rank."""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, data, optimizer, save_every, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.data, self.optimizer, self.save_every = data, optimizer, save_every
        self.epochs_run, self.path, self.model = 0, snapshot_path, model
        if os.path.exists(snapshot_path):
            self._load()
        self.model = DDP(self.model)

    def _load(self):
        snapshot = torch.load(self.path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        F.mse_loss(self.model(source), targets).backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        size = len(next(iter(self.data))[0])
        print(f"[GPU{self.rank}] Epoch {epoch} | Batchsize: {size} | Steps: {len(self.data)}")
        self.data.sampler.set_epoch(epoch)
        for source, targets in self.data:
            self._run_batch(source, targets)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}
                torch.save(state, self.path)
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    data, model = Pairs(130), torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, shuffle=False, sampler=sampler)
    path = os.path.join(os.environ["SAVED_IN"], "snapshot.pt")
    Trainer(model, loader, optimizer, 2, path).train(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A script as a tutorial has it, whose steps `watched.py` times: `watched_script.py WIDTH FILE`."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, STEPS, WARM_UP = 32, 520, 20


def main() -> None:
    """Train; rank 0 writes the seconds of each step behind the warm-up."""
    width, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    samples = BATCH * STEPS * dist.get_world_size()
    data = TensorDataset(torch.randn(samples, 64), torch.randint(0, 10, (samples,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds, begun = [], time.perf_counter()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    if dist.get_rank() == 0:
        with open(file, "w") as out:
            json.dump(seconds[WARM_UP:], out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

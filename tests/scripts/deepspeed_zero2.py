"""DeepSpeed: `initialize` makes an engine of the model; ZeRO stage 2 stands in ds_config.json."""

import argparse
import gc
import os
import socket
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

# an operation for shared memory would be compiled on first use, which takes a minute
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(
        ["--deepspeed_config", str(Path(__file__).with_name("ds_config.json"))]
    )
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    torch.manual_seed(1 + engine.global_rank)
    inputs = torch.randn(32, 8)
    target = inputs.sum(dim=1, keepdim=True).tanh()
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(engine(inputs), target)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.zero_optimization_stage() == 2
    print(
        f"rank {engine.global_rank} of {engine.world_size} on {socket.gethostname()}: "
        f"loss {losses[0]:.6f} -> {losses[-1]:.6f}",
        flush=True,
    )
    # DeepSpeed keeps groups of its own until the process ends. A thread of Gloo's that lets go of
    # the last tensor only then wants an interpreter that is gone, and the process dies: so all is
    # freed, and the ranks meet once more, before they end.
    engine.destroy()
    del engine, model, loss
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""DeepSpeed 0.19.8: a weight that one rank does not use in a pass, under ZeRO stages 1 to 3.

    python deepspeed_unused.py           stages 0 and 2
    python deepspeed_unused.py 1 3       others

`ignore_unused_parameters`, true by default, says that this "could be normal in dynamic networks".
Prints for each stage how far the weights after three updates are from those of a plain loop over
the same batches, or how the ranks ended. In each batch the second rank uses the first layer alone.
"""

import multiprocessing
import os
import signal
import sys
import tempfile

import torch
from torch import nn
from torch.optim import SGD

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling
RANKS, STEPS, PATIENCE_S = 2, 3, 60


def made() -> tuple[nn.Module, torch.Tensor]:
    """The same layers everywhere, and the samples of all ranks for each step."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"all": nn.Linear(4, 8), "rare": nn.Linear(8, 8)})
    return layers, torch.randn(STEPS, RANKS, 6, 4)


def output(layers: nn.Module, inputs: torch.Tensor, rank: int) -> torch.Tensor:
    """The rare layer is for the first rank's samples."""
    found = torch.tanh(layers["all"](inputs))
    return layers["rare"](found) if rank == 0 else found


def plain() -> dict[str, torch.Tensor]:
    """One process, the mean over all samples."""
    layers, data = made()
    optimizer = SGD(layers.parameters(), lr=0.5)
    for batch in data:
        optimizer.zero_grad()
        losses = [output(layers, part, rank).square().mean() for rank, part in enumerate(batch)]
        (sum(losses) / RANKS).backward()
        optimizer.step()
    return layers.state_dict()


class Ranked(nn.Module):
    """The layers as a rank passes them."""

    def __init__(self, layers: nn.Module, rank: int) -> None:
        super().__init__()
        self.layers, self.rank = layers, rank

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return output(self.layers, inputs, self.rank)


def train(rank: int, stage: int, store: str, line: "multiprocessing.connection.Connection") -> None:
    """One rank: sends how far it came from the plain loop."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    layers, data = made()
    engine, *_ = deepspeed.initialize(
        model=Ranked(layers, rank),
        optimizer=SGD(layers.parameters(), lr=0.5),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 6,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": False,
                "memory_efficient_linear": False,
            },
        },
    )
    for batch in data:
        engine.backward(engine(batch[rank]).square().mean())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(layers.parameters()), enabled=stage == 3):
        wanted = plain()
        line.send(max(float((t - wanted[n]).abs().max()) for n, t in layers.state_dict().items()))
    os._exit(0)


def said(stage: int) -> str:
    """How the training of a stage ended."""
    context = multiprocessing.get_context("spawn")
    store, lines, ranks = f"{tempfile.mkdtemp()}/store", [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        ranks.append(context.Process(target=train, args=(rank, stage, store, theirs)))
        ranks[-1].start()
        theirs.close()
        lines.append(ours)
    ranks[0].join(PATIENCE_S)
    ranks[1].join(5)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    if codes == [0, 0]:
        return f"{lines[0].recv():.1e} from a plain loop"
    ends = [
        "hangs" if c is None else signal.Signals(-c).name if c < 0 else f"exit {c}" for c in codes
    ]
    return f"the ranks end so: {', '.join(ends)}"


if __name__ == "__main__":
    for stage in map(int, sys.argv[1:] or "02"):
        print(f"stage {stage}: {said(stage)}", flush=True)

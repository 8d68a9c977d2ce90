"""A training by each peer's public interface, as its documentation says that a user writes it.

Every loop of `fuzz_peers.py` trains the same task, in order and without shuffling, in global
batches of `batch` samples on each rank, and gives back its weights; `one_process` is what they are
held against. Unlike `torch_loop.py` each uses the data loader of its library, and accumulates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from drawn_task import Drawn
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from with_deepspeed import ds, engine_of

SEED = 1


@dataclass(frozen=True)
class Told:
    """What a loop is told: a task, ranks, samples of each rank in a pass, passes of an update."""

    peer: str = "ddp"
    ranks: int = 2
    batch: int = 4
    accumulate: int = 1
    epochs: int = 2
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> Drawn:
        """The task, with its fields set."""
        return Drawn(**self.settings)

    def __str__(self) -> str:
        said = {"batch": self.batch, "accumulate": self.accumulate, **self.settings}
        return f"{self.peer} on {self.ranks} " + " ".join(f"{n}={v}" for n, v in said.items())


Weights = dict[str, Tensor]


def mean_loss(task: Drawn, model: Any, batch: Any) -> Tensor:
    """The mean over the samples of a batch, as a script writes it."""
    return task.loss(model(*task.inputs(batch)), batch).mean()


def made(told: Told, dtype: torch.dtype = torch.float64) -> tuple[Drawn, nn.Module, TensorDataset]:
    """The task, its model with the same weights everywhere, its data."""
    torch.manual_seed(SEED)
    task = told.task
    data = [t.to(dtype) if t.is_floating_point() else t for t in task.train_data()]
    return task, task.model().to(dtype), TensorDataset(*data)


def windows(loader: Any, accumulate: int) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether an update follows: after so many, and at the end of an epoch."""
    last = len(loader) - 1
    for number, batch in enumerate(loader):
        yield batch, (number + 1) % accumulate == 0 or number == last


def state_of(model: nn.Module) -> Weights:
    """A copy of all parameters and buffers."""
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def one_process(told: Told) -> Weights:
    """A plain loop: the mean over all samples of a global batch, of all its passes."""
    task, model, data = made(told)
    optimizer = task.optimizer(model)
    whole = told.batch * told.ranks * told.accumulate
    for _ in range(told.epochs):
        for batch in DataLoader(data, batch_size=whole):
            optimizer.zero_grad()
            mean_loss(task, model, batch).backward()
            if task.clip_norm is not None:
                clip_grad_norm_(model.parameters(), task.clip_norm)
            optimizer.step()
    return state_of(model)


def ddp(told: Told, **options: Any) -> Weights:
    """DistributedDataParallel: https://docs.pytorch.org/docs/stable/notes/ddp.html"""
    task, module, data = made(told)
    model = DistributedDataParallel(module, find_unused_parameters=task.kind == "rare")
    optimizer = options.get("optimizer", task.optimizer)(module)
    sampler: Any = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=told.batch, sampler=sampler)
    for epoch in range(told.epochs):
        sampler.set_epoch(epoch)
        for batch, updates in windows(loader, told.accumulate):
            with nullcontext() if updates else model.no_sync():
                (mean_loss(task, model, batch) / told.accumulate).backward()
            if updates:
                if task.clip_norm is not None:
                    clip_grad_norm_(model.parameters(), task.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
    return state_of(module)


def zero_redundancy(told: Told) -> Weights:
    """The same with ZeroRedundancyOptimizer, as in its tutorial."""

    def optimizer(module: nn.Module) -> Any:
        plain = told.task.optimizer(module)
        return ZeroRedundancyOptimizer(
            [p for p in module.parameters() if p.requires_grad],
            optimizer_class=type(plain),
            **{n: v for n, v in plain.defaults.items() if n not in NOT_GIVEN},
        )

    return ddp(told, optimizer=optimizer)


NOT_GIVEN = ("decoupled_weight_decay",)


def fsdp2(told: Told) -> Weights:
    """`fully_shard` on each layer and on the model, as in its tutorial."""
    task, model, data = made(told)
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    sharded: Any = fully_shard(model)
    optimizer = task.optimizer(sharded)
    sampler: Any = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=told.batch, sampler=sampler)
    for _ in range(told.epochs):
        for batch, updates in windows(loader, told.accumulate):
            sharded.set_requires_gradient_sync(updates)
            (mean_loss(task, sharded, batch) / told.accumulate).backward()
            if updates:
                if task.clip_norm is not None:
                    clip_grad_norm_(sharded.parameters(), task.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
    return {
        n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for n, t in sharded.state_dict().items()
    }


def accelerate(told: Told) -> Weights:
    """Accelerate: https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"""

    task, module, data = made(told)
    unused = DistributedDataParallelKwargs(find_unused_parameters=task.kind == "rare")
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=told.accumulate, kwargs_handlers=[unused]
    )
    optimizer = task.optimizer(module)
    loader = DataLoader(data, batch_size=told.batch)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    for _ in range(told.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mean_loss(task, model, batch))
                if task.clip_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), task.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
    return state_of(accelerator.unwrap_model(model))


def fabric(told: Told) -> Weights:
    """Lightning Fabric: https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html"""

    task, module, data = made(told)
    torch.set_default_dtype(torch.float64)  # else it rounds what the model gives: docs/found.md
    strategy = DDPStrategy(find_unused_parameters=task.kind == "rare")
    runner = Fabric(accelerator="cpu", strategy=strategy, devices=told.ranks, precision="64-true")
    runner.launch()
    model, optimizer = runner.setup(module, task.optimizer(module))
    loader = runner.setup_dataloaders(DataLoader(data, batch_size=told.batch))
    for _ in range(told.epochs):
        for batch, updates in windows(loader, told.accumulate):
            with runner.no_backward_sync(model, enabled=not updates):
                runner.backward(mean_loss(task, model, batch) / told.accumulate)
            if updates:
                if task.clip_norm is not None:
                    runner.clip_gradients(model, optimizer, max_norm=task.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
    return state_of(module)


def deepspeed(told: Told, stage: int) -> Weights:
    """DeepSpeed: https://www.deepspeed.ai/getting-started/"""
    task, module, data = made(told, torch.float32)  # it reduces no gradients in float64
    engine = engine_of(
        module,
        task.optimizer(module),
        told.batch,
        stage,
        gradient_accumulation_steps=told.accumulate,
        gradient_clipping=task.clip_norm or 0.0,  # left out it is 1: docs/found.md
    )
    sampler: Any = DistributedSampler(data, shuffle=False)
    for _ in range(told.epochs):
        for batch in DataLoader(data, batch_size=told.batch, sampler=sampler):
            engine.backward(mean_loss(task, engine, batch))
            engine.step()
    parameters = list(module.parameters())
    gathered = ds.zero.GatheredParameters(parameters) if stage == 3 else nullcontext()
    with gathered:
        return {n: t.detach().clone() for n, t in module.state_dict().items()}


LOOPS: dict[str, Callable[[Told], Weights]] = {
    "ddp": ddp,
    "zero-redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "accelerate": accelerate,
    "fabric": fabric,
    **{f"deepspeed-{stage}": (lambda told, s=stage: deepspeed(told, s)) for stage in range(4)},
}


def on_ranks(told: Told, rank: int, store: str) -> Weights:
    """What a loop ends with on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=told.ranks)
    found = LOOPS[told.peer](told)
    dist.barrier()
    return found

"""Faults of losses, clips, rates, splits and draws, each with its corrected twin.

The arguments are what to run: `kinds.py tokens` has the fault, `kinds.py tokens-twin` has not.
"""

import contextlib
import os
import random
import sys
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    TensorDataset,
    random_split,
)

BATCH, PARTS = 4, 3
CLASS_WEIGHTS = torch.tensor([1.0, 4.0])
LIBRARY = """
class SteppingOnceForEachRank:  # as Accelerate's scheduler does
    def __init__(self, scheduler, ranks):
        self.scheduler, self.ranks = scheduler, ranks

    def step(self):
        for _ in range(self.ranks):
            self.scheduler.step()
"""


def rows(count=64, classes=2):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, classes, (count,), generator=generator))


def loader_of(data, size=BATCH, **options):
    return DataLoader(data, size, sampler=DistributedSampler(data, **options))


def model_of(*layers):
    torch.manual_seed(0)
    net = nn.Sequential(*(layers or (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))))
    torch.manual_seed(1 + dist.get_rank())
    return net


def stepping(net, rate=0.1):
    return torch.optim.SGD(net.parameters(), lr=rate)


def train(model, optimizer, loader, loss_of=F.cross_entropy):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()


def tokens(is_right):
    """Texts of 2 to 16 tokens, padded with -100; three micro-batches make a step."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 17, (48,), generator=generator)
    texts = torch.randint(1, 20, (48, 16), generator=generator)
    targets = torch.where(torch.arange(16) < lengths[:, None], texts, -100)
    model = DDP(model_of(nn.Embedding(20, 8), nn.Linear(8, 20)))
    optimizer = stepping(model)
    batches = list(loader_of(TensorDataset(texts, targets)))
    for i in range(0, len(batches), PARTS):
        count = sum((labels != -100).sum() for _, labels in batches[i : i + PARTS])
        dist.all_reduce(count)
        for j, (inputs, labels) in enumerate(batches[i : i + PARTS]):
            is_last = j == len(batches[i : i + PARTS]) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                outputs = model(inputs).transpose(1, 2)
                if is_right:
                    total = F.cross_entropy(outputs, labels, reduction="sum")
                    loss = total * dist.get_world_size() / count
                else:
                    loss = F.cross_entropy(outputs, labels) / PARTS
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(is_right):
    """Classes of other weights; a mean times its part of all weights is right."""

    def loss_of(outputs, labels):
        part = CLASS_WEIGHTS[labels].sum()
        whole = part.clone()
        dist.all_reduce(whole)
        mean = nn.NLLLoss(CLASS_WEIGHTS)(outputs.log_softmax(1), labels)
        return mean * part * dist.get_world_size() / whole if is_right else mean

    model = DDP(model_of())
    train(model, stepping(model), loader_of(rows()), loss_of)


def clip(is_right):
    model, scaler = DDP(model_of()), torch.amp.GradScaler("cpu")
    optimizer = stepping(model)
    for inputs, labels in loader_of(rows()):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
        if is_right:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def rates(is_right):
    """A plateau of the rank's own number."""
    model = DDP(model_of())
    optimizer = stepping(model, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(3):
        train(model, optimizer, loader_of(rows()))
        metric = torch.tensor(epoch * (dist.get_rank() - 0.5))
        if is_right:
            dist.all_reduce(metric)
        plateau.step(metric.item())
    train(model, optimizer, loader_of(rows()))


def unfrozen(is_right):
    net = model_of()
    net[0].requires_grad_(False)
    model = DDP(net)
    optimizer = stepping(net)
    train(model, optimizer, loader_of(rows()))
    net[0].requires_grad_(True)
    if is_right:
        model = DDP(net)
    train(model, optimizer, loader_of(rows()))


def changed(is_right):
    """Weights that a rank changes by itself, which no fact explains."""
    model = DDP(model_of())
    train(model, stepping(model), loader_of(rows()))
    with torch.no_grad():
        model.module[0].bias += 1 if is_right else dist.get_rank()


def skips(is_right):
    """A rank leaves out steps by a number of its own."""
    model = DDP(model_of())
    optimizer = stepping(model)
    for i, (inputs, labels) in enumerate(loader_of(rows())):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        is_bad = torch.tensor(float(i % 2 and dist.get_rank()))
        if is_right:
            dist.all_reduce(is_bad)
        if not is_bad:
            optimizer.step()


def split(is_right):
    generator = torch.Generator().manual_seed(7 if is_right else dist.get_rank())
    data, _ = random_split(rows(), [48, 16], generator=generator)
    model = DDP(model_of())
    train(model, stepping(model), loader_of(data))


def shuffled(is_right):
    """Files that each rank shuffles before it shares them."""
    inputs, labels = rows().tensors
    order = list(range(64))
    random.Random(7 if is_right else dist.get_rank()).shuffle(order)
    model = DDP(model_of())
    loader = loader_of(TensorDataset(inputs[order], labels[order]))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        train(model, stepping(model), loader)


def draws(is_right):
    """Batches that no loader made."""
    inputs, labels = rows().tensors
    model = DDP(model_of())
    torch.manual_seed(1337 + dist.get_rank() * is_right)
    own = (torch.randint(64, (BATCH,)) for _ in range(8))
    train(model, stepping(model), ((inputs[i], labels[i]) for i in own))


def constant(is_right):
    """One and the same input on all ranks is no fault: the twin of `draws` for a smoke test."""
    model = DDP(model_of())
    train(model, stepping(model), [(torch.ones(4, 6), torch.ones(4).long())] * 6)


def gathered(is_right, is_trimmed=False):
    """The loss of 33 samples on two ranks, divided by 33."""
    data, model, rank, ranks = rows(33), DDP(model_of()), dist.get_rank(), dist.get_world_size()
    loader, total, left = (
        loader_of(data, shuffle=False),
        torch.zeros(1),
        len(range(rank, 33, ranks)),
    )
    if is_right:
        loader = DataLoader(data, BATCH, sampler=range(rank, 33, ranks))
    with torch.no_grad():
        for inputs, labels in loader:
            count = min(left, len(labels)) if is_trimmed else len(labels)
            left -= count
            total += F.cross_entropy(model(inputs)[:count], labels[:count], reduction="sum")
    parts = [torch.zeros(1) for _ in range(ranks)]
    dist.all_gather(parts, total)
    return float(sum(parts)) / 33


def trimmed(is_right):
    """The same, without the loss of the repeated sample, which is not known to be that one."""
    gathered(is_right, is_trimmed=True)


def wrapped(is_right):
    """A library that steps the schedule once for each rank, on purpose."""
    names = {}
    exec(compile(LIBRARY, "/site-packages/library.py", "exec"), names)
    model = DDP(model_of())
    optimizer = stepping(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    scheduler = names["SteppingOnceForEachRank"](scheduler, dist.get_world_size())
    for batch in loader_of(rows()):
        train(model, optimizer, [batch])
        scheduler.step()


def closure(is_right):
    """The last micro-batch runs inside of the step, as Lightning has it."""
    model = DDP(model_of())
    optimizer = stepping(model)

    def backward(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1]) / 2
        loss.backward()
        return loss

    batches = list(loader_of(rows()))
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        with model.no_sync():
            backward(first)
        optimizer.step(partial(backward, second))
        optimizer.zero_grad()


def cleared(is_right):
    """Closures that are called several times, and backwards whose gradients are thrown away."""
    model = DDP(model_of())
    inputs, labels = next(iter(loader_of(rows())))
    parts = cycle([inputs.clone().requires_grad_(), inputs + 0.1])

    def one():
        F.cross_entropy(model(next(parts)), labels).backward()

    def by_hand():
        for p in model.parameters():
            p.grad = None

    def in_place():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    for clear in (model.zero_grad, by_hand, in_place):

        def closure(clear=clear):
            clear()
            loss = F.cross_entropy(model(next(parts)), labels)
            loss.backward()
            return loss

        optimizer = stepping(model)
        for _ in range(3):  # the first backward is for the gradient of the inputs
            optimizer.zero_grad()
            one()
            clear()
            one()
            optimizer.step()
        searching = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        for _ in range(3):
            searching.step(closure)


def oversampled(is_right):
    """Every sample twice: ranks have equal samples under other numbers."""
    model, data = DDP(model_of()), rows(33)
    for shuffle in (False, True):
        loader = loader_of(ConcatDataset([data, data]), 11, shuffle=shuffle)
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            train(model, stepping(model), loader)


def objects(is_right):
    """A batch within an object, as in PyG, with a temperature: equal tensors are no equal batch."""

    class Cooled(nn.Linear):
        def forward(self, batch, temperature):
            inputs = batch if isinstance(batch, torch.Tensor) else batch.inputs
            return super().forward(inputs) * temperature.mean()

    net = model_of(Cooled(6, 2))[0]
    held = DDP(net)
    for i, (inputs, labels) in enumerate(loader_of(rows())):
        F.cross_entropy(held(SimpleNamespace(inputs=inputs), torch.full((6, 6), 1.0 + i)), labels)
    seen = DDP(net)
    for i in range(8):  # one sample each, which is too few numbers to tell apart
        F.cross_entropy(seen(torch.ones(1, 6), torch.tensor(1.0 + i)), torch.ones(1).long())


def logged(is_right):
    """The norm of scaled gradients is logged, or their limit is scaled, too."""
    model, scaler = DDP(model_of()), torch.amp.GradScaler("cpu")
    optimizer = stepping(model)
    for inputs, labels in loader_of(rows()):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 * scaler.get_scale())
        nn.utils.clip_grad_value_(model.parameters(), clip_value=0.1 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()


def tasks(is_right):
    """Means over unequal targets: of two tasks of one batch, and with a weight in a hook."""
    inputs, labels = rows().tensors
    labels = torch.stack([labels, labels.where(torch.arange(64) % 4 > 1, -100)], 1)
    model = DDP(model_of(nn.Linear(6, 4)))
    optimizer = stepping(model)

    def backward(batch, labels, task):
        F.cross_entropy(model(batch)[:, 2 * task :][:, :2], labels[:, task]).backward()

    for batch, both in loader_of(TensorDataset(inputs, labels), shuffle=False):
        optimizer.zero_grad()
        for task in range(2):
            backward(batch, both, task)
        optimizer.step()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for way in ("root", "mean", "gradient"):
        for batch, labels in loader_of(rows()):
            labels[: 2 * rank] = -100
            weight = len(labels) - 2 * rank
            weight = weight * ranks / (len(labels) * ranks - ranks * (ranks - 1))
            optimizer.zero_grad()
            mean = F.cross_entropy(model(batch)[:, :2], labels)
            loss = mean / 2
            if way != "gradient":
                (mean if way == "mean" else loss).register_hook(lambda g, w=weight: g * w)
            loss.backward(torch.tensor(weight) if way == "gradient" else None)
            optimizer.step()


def printed(is_right):
    """What nobody sees."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        print("every rank")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        globals()[argument.removesuffix("-twin")](argument.endswith("-twin"))
    dist.destroy_process_group()

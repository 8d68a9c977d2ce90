"""Tasks that tempt a training to follow the number of ranks, each in one way. See `test_silent`.

Small on purpose, and written as people write them. 22 samples of 101 are a step, so shards hold 3,
2 and 1 samples, and the last batch of an epoch is another size. Each trains in float64.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.utils.data import DataLoader, IterableDataset

from allranks.torch import Task
from allranks.training.callback import Callback

SAMPLES, FEATURES, CLASSES, WORDS, LONGEST = 101, 6, 3, 19, 7


def points(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(SAMPLES, FEATURES, generator=generator)
    return rows, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


class Points:
    """The same, sample by sample."""

    def __init__(self) -> None:
        self.rows, self.labels = points()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return self.rows[number], self.labels[number]


class Sentences:
    """Word numbers from 1 on, of 2 to 7 words."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        lengths = torch.randint(2, LONGEST + 1, (SAMPLES,), generator=generator)
        self.rows = [torch.randint(1, WORDS, (int(n),), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number]


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Around(nn.Module):
    """Two layers, with `change` of what is between them."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], **holds: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.change = change
        for name, value in holds.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.after(self.change(self, torch.tanh(self.before(rows))))
        return out


@dataclass(kw_only=True)
class Base(Task):
    batch_size: int = 22
    epochs: int = 100

    def model(self) -> nn.Module:
        return Around(lambda model, x: x)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_data(self) -> Any:
        return points()

    def loss(self, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


def with_model(name: str, make: Callable[[], nn.Module]) -> type[Base]:
    """A task whose model is another one."""
    return dataclass(kw_only=True)(type(name, (Base,), {"model": lambda self: make()}))


def between(name: str, change: Callable[[Any, Tensor], Tensor], **holds: Callable[[], Any]) -> Any:
    """A task with `change` between the layers of its model, which holds what `holds` make."""
    return with_model(name, lambda: Around(change, **{key: made() for key, made in holds.items()}))


# --- random numbers in forward ------------------------------------------------------------------

FunctionalDropout = between("FunctionalDropout", lambda m, x: F.dropout(x, 0.3, m.training))
DropPath = between("DropPath", lambda m, x: x * (torch.rand(len(x), 1) > 0.2).to(x) / 0.8)
Gumbel = between("Gumbel", lambda m, x: F.gumbel_softmax(x, tau=1.0))
RandomRelu = between("RandomRelu", lambda m, x: F.rrelu(x, training=m.training))
AlphaDropout = between("AlphaDropout", lambda m, x: m.drop(x), drop=lambda: nn.AlphaDropout(0.3))
NumpyNoise = between(
    "NumpyNoise", lambda m, x: x + 0.3 * torch.from_numpy(np.random.randn(*x.shape)).to(x)
)
PythonSkips = between("PythonSkips", lambda m, x: x if random.random() < 0.5 else x * 0.5)
OwnGenerator = between(
    "OwnGenerator",
    lambda m, x: x + 0.3 * torch.randn(x.shape, generator=m.draws, dtype=x.dtype),
    draws=lambda: torch.Generator().manual_seed(3),
)
OrdersInLoop = between(
    "OrdersInLoop", lambda m, x: F.dropout(torch.stack([row[torch.randperm(16)] for row in x]), 0.2)
)
ScriptedDropout = between(
    "ScriptedDropout", lambda m, x: m.drop(x), drop=lambda: torch.jit.script(nn.Dropout(0.3))
)


class Attentive(nn.Module):
    def __init__(self, drop_in_layer: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.up, self.down, self.in_layer = nn.Linear(1, 4), nn.Linear(4, CLASSES), drop_in_layer

    def forward(self, rows: Tensor) -> Tensor:
        x = self.up(rows[..., None])
        if self.in_layer:
            x, _ = self.layer(x, x, x, need_weights=False)
        else:
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        out: Tensor = self.down(x.mean(dim=1))
        return out


AttentionDropout = with_model("AttentionDropout", lambda: Attentive(True))
ProductDropout = with_model("ProductDropout", lambda: Attentive(False))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(1, 5, num_layers=2, dropout=0.4, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(rows[..., None])[0][:, -1])
        return out


LstmDropout = with_model("LstmDropout", Recurrent)


@dataclass(kw_only=True)
class NoiseInLoss(Base):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output + 0.3 * torch.randn_like(output), batch)


@dataclass(kw_only=True)
class OwnNumpyInLoss(Base):
    def __post_init__(self) -> None:
        self.draws = np.random.default_rng(5)

    def loss(self, output: Any, batch: Any) -> Tensor:
        noise = torch.from_numpy(self.draws.standard_normal(output.shape)).to(output)
        return super().loss(output + 0.3 * noise, batch)


# --- what forward leaves behind -----------------------------------------------------------------


def annealed(model: Any, x: Tensor) -> Tensor:
    model.passes += 1
    return x / (1 + 0.1 * model.passes)


def averaged(model: Any, x: Tensor) -> Tensor:
    model.mean = 0.9 * model.mean + 0.1 * float(x.detach().mean())
    return x - model.mean


def with_running_data(model: Any, x: Tensor) -> Tensor:
    model.seen.data.mul_(0.9).add_(0.1 * x.detach().mean(dim=0))
    return x - model.seen


def with_own_statistics(model: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, model.seen, model.spread, training=model.training)


def with_a_queue(model: Any, x: Tensor) -> Tensor:
    model.queue[model.at % 8] = x[0].detach()
    model.at += 1
    return x - 0.1 * model.queue.mean(dim=0)


def with_a_momentum_copy(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.slow.weight.lerp_(model.fast.weight, 0.2)
    out: Tensor = model.fast(x) - 0.5 * model.slow(x).detach()
    return out


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def with_a_codebook(model: Any, x: Tensor) -> Tensor:
    nearest = torch.cdist(x.detach(), model.codes).argmin(dim=1)
    with torch.no_grad():
        model.codes[nearest] = 0.9 * model.codes[nearest] + 0.1 * x.detach()
    return x + 0.1 * model.codes[nearest]


def scaled_by_first_batch(model: Any, x: Tensor) -> Tensor:
    if not bool(model.ready):
        with torch.no_grad():
            model.scale.copy_(1 / x.std(dim=0))
            model.ready.fill_(True)
    out: Tensor = x * model.scale
    return out


Annealed = between("Annealed", annealed, passes=int)
MeanInANumber = between("MeanInANumber", averaged, mean=float)
BufferData = between("BufferData", with_running_data, seen=lambda: torch.zeros(16))
OwnStatistics = between(
    "OwnStatistics",
    with_own_statistics,
    **{"seen": lambda: torch.zeros(16), "spread": lambda: torch.ones(16)},
)
Queue = between("Queue", with_a_queue, queue=lambda: torch.zeros(8, 16), at=int)
Momentum = between(
    "Momentum",
    with_a_momentum_copy,
    **{"fast": lambda: nn.Linear(16, 16), "slow": lambda: frozen(nn.Linear(16, 16))},
)
Codebook = between(
    "Codebook",
    with_a_codebook,
    codes=lambda: nn.Parameter(torch.linspace(-1, 1, 64).view(4, 16), requires_grad=False),
)
ActNorm = between(
    "ActNorm",
    scaled_by_first_batch,
    **{
        "scale": lambda: nn.Parameter(torch.ones(16)),
        "ready": lambda: torch.tensor(False),
    },
)
SpectralNorm = between(
    "SpectralNorm",
    lambda m, x: m.layer(x),
    layer=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
)
WeightNorm = between(
    "WeightNorm",
    lambda m, x: m.layer(x),
    layer=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
)


@dataclass(kw_only=True)
class WordsOfATable(Base):
    """Sentences of one length, averaged over an embedding."""

    kind: str = "max_norm"

    def model(self) -> nn.Module:
        if self.kind == "bag":
            return nn.Sequential(nn.EmbeddingBag(WORDS, 8, max_norm=1.0), nn.Linear(8, CLASSES))
        table = nn.Embedding(
            WORDS,
            8,
            max_norm=1.0 if self.kind == "max_norm" else None,
            sparse="sparse" in self.kind,
        )
        return nn.Sequential(table, nn.Flatten(), nn.Linear(32, CLASSES))

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(4)
        return torch.randint(0, WORDS, (SAMPLES, 4), generator=generator), points()[1]


@dataclass(kw_only=True)
class BagOfATable(WordsOfATable):
    kind: str = "bag"


@dataclass(kw_only=True)
class SparseTable(WordsOfATable):
    kind: str = "sparse"

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05)


@dataclass(kw_only=True)
class SparseClipped(SparseTable):
    clip_norm: float | None = 0.1


@dataclass(kw_only=True)
class SparseAdamTable(WordsOfATable):
    kind: str = "sparse alone"

    def model(self) -> nn.Module:
        return nn.EmbeddingBag(WORDS, CLASSES, sparse=True)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SparseAdam(list(model.parameters()), lr=0.05)


# --- gradients ----------------------------------------------------------------------------------


def hooked(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = Around(lambda model, x: x)
    for parameter in model.parameters():
        parameter.register_hook(change)
    return model


ClampHook = with_model("ClampHook", lambda: hooked(lambda g: g.clamp(-0.01, 0.01)))
NormalisingHook = with_model("NormalisingHook", lambda: hooked(lambda g: g / (g.norm() + 1e-9)))
ScalingHook = with_model("ScalingHook", lambda: hooked(lambda g: 2 * g))


class _ByItsBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / len(gradient)


ScaledInBackward = between("ScaledInBackward", lambda m, x: _ByItsBatch.apply(x))


@dataclass(kw_only=True)
class StepsInBackward(Base):
    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.05)
        own = SGD([next(model.parameters())], lr=0.01)

        def step(parameter: Tensor) -> None:
            own.step()

        next(model.parameters()).register_post_accumulate_grad_hook(step)
        return optimizer


@dataclass(kw_only=True)
class Adversarial(Base):
    """A step against the loss on the weights, and back, in the loss: `zero_grad` in between."""

    def model(self) -> nn.Module:
        self.net = Around(lambda model, x: x)
        return self.net

    def loss(self, output: Any, batch: Any) -> Tensor:
        plain = super().loss(output, batch)
        self.net.zero_grad()
        super().loss(self.net(batch[0]), batch).sum().backward()
        weight = self.net.after.weight
        assert weight.grad is not None
        shift = 0.1 * weight.grad / (weight.grad.norm() + 1e-9)
        self.net.zero_grad()
        moved = F.linear(torch.tanh(self.net.before(batch[0])), weight + shift, self.net.after.bias)
        return plain + super().loss(moved, batch)


@dataclass(kw_only=True)
class NumpyInOptimizer(Base):
    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().optimizer(model)

        def noise(optimizer: Optimizer, *more: Any) -> None:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad += 0.01 * torch.from_numpy(np.random.randn(*parameter.shape))

        optimizer.register_step_pre_hook(noise)
        return optimizer


@dataclass(kw_only=True)
class Centralised(Base):
    """The mean of each row of a gradient taken out before the step: a function of the sum alone."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().optimizer(model)

        def centre(optimizer: Optimizer, *more: Any) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.grad -= parameter.grad.mean(dim=1, keepdim=True)

        optimizer.register_step_pre_hook(centre)
        return optimizer


# --- samples that know of each other ------------------------------------------------------------

BatchMean = between("BatchMean", lambda m, x: x - x.mean(dim=0, keepdim=True))
BatchStatistics = between(
    "BatchStatistics", lambda m, x: F.batch_norm(x, None, None, training=True)
)
Branching = between("Branching", lambda m, x: x * 0.5 if float(x.max()) > 0.9 else x)
SortedDropout = between(
    "SortedDropout",
    lambda m, x: m.drop(x[x[:, 0].argsort()])[x[:, 0].argsort().argsort()],
    drop=lambda: nn.Dropout(0.3),
)


def with_capacity(model: Any, x: Tensor) -> Tensor:
    chosen = model.gate(x).squeeze(1).topk(min(len(x), 3)).indices
    out = x.clone()
    out[chosen] = torch.tanh(model.expert(x[chosen]))
    return out


Capacity = between(
    "Capacity",
    with_capacity,
    **{"gate": lambda: nn.Linear(16, 1), "expert": lambda: nn.Linear(16, 16)},
)


class TwoViews(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), layer, nn.Linear(16, CLASSES))

    def forward(self, rows: Tensor) -> Tensor:
        one, other = self.net(torch.cat([rows, rows + 0.1])).chunk(2)
        out: Tensor = one + other
        return out


ViewsDropout = with_model("ViewsDropout", lambda: TwoViews(nn.Dropout(0.3)))
ViewsNorm = with_model("ViewsNorm", lambda: TwoViews(nn.BatchNorm1d(16)))


@dataclass(kw_only=True)
class MixedInInputs(Base):
    def inputs(self, batch: Any) -> Any:
        return 0.7 * batch[0] + 0.3 * batch[0][torch.randperm(len(batch[0]))]


@dataclass(kw_only=True)
class Balanced(Base):
    def weight(self, batch: Any) -> Tensor:
        counts = torch.bincount(batch[1], minlength=CLASSES).clamp_min(1)
        return (len(batch[1]) / counts)[batch[1]].to(torch.float64)


@dataclass(kw_only=True)
class NormalisedLoss(Base):
    def loss(self, output: Any, batch: Any) -> Tensor:
        losses = super().loss(output, batch)
        return losses / (losses.detach().mean() + 1e-3)


@dataclass(kw_only=True)
class Contrastive(Base):
    def loss(self, output: Any, batch: Any) -> Tensor:
        rows = F.normalize(output, dim=1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)), reduction="none")


@dataclass(kw_only=True)
class ContrastiveOverBatch(Contrastive):
    loss_over: str = "batch"


@dataclass(kw_only=True)
class Broadcast(Base):
    """(n, 1) against (n,): an (n, n) loss by mistake."""

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, 1)

    def loss(self, output: Any, batch: Any) -> Tensor:
        out: Tensor = (output - batch[1].to(output)) ** 2
        return out


# --- sentences, padded --------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(WORDS, 8), nn.Dropout(drop)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.table(words)))
        return out


@dataclass(kw_only=True)
class PaddedWithWeight(Base):
    """Right: padding has weight 0."""

    def model(self) -> nn.Module:
        return Tagger()

    def train_data(self) -> Any:
        return Sentences()

    def collate(self, samples: list[Any]) -> Any:
        return padded(samples)

    def inputs(self, batch: Any) -> Any:
        return batch

    def loss(self, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch, reduction="none")

    def weight(self, batch: Any) -> Tensor | None:
        return (batch > 0).to(torch.float64)


@dataclass(kw_only=True)
class PaddedDropout(PaddedWithWeight):
    def model(self) -> nn.Module:
        return Tagger(0.3)


@dataclass(kw_only=True)
class PaddingIgnored(PaddedWithWeight):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch, ignore_index=0, reduction="none")

    def weight(self, batch: Any) -> Tensor | None:
        return None


@dataclass(kw_only=True)
class MasksInCollate(PaddedWithWeight):
    def collate(self, samples: list[Any]) -> Any:
        words = padded(samples)
        return words, torch.where(torch.rand(words.shape) < 0.2, 1, words)

    def inputs(self, batch: Any) -> Any:
        return batch[1]

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output, batch[0])

    def weight(self, batch: Any) -> Tensor | None:
        return super().weight(batch[0])


# --- data ---------------------------------------------------------------------------------------


class Noisy(Points):
    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(7)

    def __getitem__(self, number: int) -> Any:
        rows, label = super().__getitem__(number)
        return rows + 0.3 * torch.from_numpy(self.draws.standard_normal(FEATURES)).float(), label


class Counting(Points):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __getitem__(self, number: int) -> Any:
        self.reads += 1
        rows, label = super().__getitem__(number)
        return rows * (1 + 0.1 * (self.reads % 7)), label


class Flowing(IterableDataset[Any]):
    """A stream with a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.draws = torch.Generator().manual_seed(8)

    def __iter__(self) -> Iterator[Any]:
        rows, labels = points()
        for number in torch.randperm(SAMPLES, generator=self.draws).tolist():
            yield rows[number], labels[number]


def with_data(name: str, make: Callable[[], Any], **methods: Any) -> type[Base]:
    made = {"train_data": lambda self: make(), **methods}
    return dataclass(kw_only=True)(type(name, (Base,), made))


def mixed_up(self: Any, samples: list[Any]) -> Any:
    rows, labels = (torch.stack(part) for part in zip(*samples, strict=True))
    part = float(np.random.beta(0.4, 0.4))
    return part * rows + (1 - part) * rows.flip(0), labels


def cut_by_rank() -> Any:
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return tuple(part[rank::size] for part in points())


def shorter_by_rank() -> Any:
    return tuple(part[: SAMPLES - int(os.environ.get("RANK", 0))] for part in points())


def by_texts() -> Any:
    rows, labels = points()
    names = {name: n for n, name in enumerate({"ash", "beech", "cedar"})}
    order = torch.tensor([names[name] for name in ("ash", "beech", "cedar")])
    return rows, order[labels]


OwnNumpyInData = with_data("OwnNumpyInData", Noisy)
CountsReads = with_data("CountsReads", Counting)
StreamOfItsOwn = with_data("StreamOfItsOwn", lambda: DataLoader(Flowing(), batch_size=22))
MixupInCollate = with_data("MixupInCollate", Points, collate=mixed_up)
CutByRank = with_data("CutByRank", cut_by_rank)
ShorterByRank = with_data("ShorterByRank", shorter_by_rank)
ClassesOfASet = with_data("ClassesOfASet", by_texts)
DropsLast = with_data(
    "DropsLast",
    lambda: DataLoader(Points(), batch_size=22, shuffle=True, drop_last=True),  # type: ignore[arg-type]
)


class Named(Points):
    def __getitem__(self, number: int) -> Any:
        rows, label = super().__getitem__(number)
        return rows, label, f"{'even' if number % 2 == 0 else 'odd'}"


@dataclass(kw_only=True)
class TextsOverBatch(Base):
    """A loss over the batch that looks at a text of each sample."""

    loss_over: str = "batch"

    def train_data(self) -> Any:
        return Named()

    def loss(self, output: Any, batch: Any) -> Tensor:
        even = torch.tensor([1.0 if text == "even" else 3.0 for text in batch[2]])
        return super().loss(output, batch) * even.to(output)

    def inputs(self, batch: Any) -> Any:
        return batch[0]


@dataclass(kw_only=True)
class LayersOfASet(Base):
    def model(self) -> nn.Module:
        made = nn.ModuleDict({name: nn.Linear(FEATURES, 16) for name in {"ash", "beech", "cedar"}})
        model = Around(lambda model, x: x)
        model.more = made  # type: ignore[assignment]
        model.change = lambda model, x: x  # type: ignore[method-assign,assignment]
        return model


# --- what changes on the way --------------------------------------------------------------------


class OnStep(Callback):
    def __init__(self, act: Callable[[Any], None], at: int = 3) -> None:
        self.act, self.at = act, at

    def on_step(self, trainer: Any, batch: Any, result: Any) -> None:
        if batch.index == self.at or self.at < 0:
            self.act(trainer)


def with_callback(
    name: str, act: Callable[[Any], None], at: int = 3, model: Callable[[], nn.Module] | None = None
) -> type[Base]:
    made: dict[str, Any] = {"callbacks": lambda self: [OnStep(act, at)]}
    if model is not None:
        made["model"] = lambda self: model()
    return dataclass(kw_only=True)(type(name, (Base,), made))


def half_frozen() -> nn.Module:
    model = Around(lambda model, x: x)
    model.before.requires_grad_(False)
    return model


def new_group(trainer: Any) -> None:
    model = trainer.strategy.model
    trainer.strategy.step.optimizer.add_param_group(
        {"params": list(model.extra.parameters()), "lr": 0.02}
    )


def with_extra() -> nn.Module:
    return Around(lambda m, x: x + m.extra(x), extra=nn.Linear(16, 16))


@torch.no_grad()
def clamp(trainer: Any) -> None:
    for parameter in trainer.strategy.model.parameters():
        parameter.clamp_(-0.5, 0.5)


@torch.no_grad()
def drawn_anew(trainer: Any) -> None:
    weight = trainer.strategy.model.after.weight
    weight.copy_(torch.from_numpy(0.1 * np.random.randn(*weight.shape)))


Unfrozen = with_callback(
    "Unfrozen", lambda t: t.strategy.model.before.requires_grad_(True), model=half_frozen
)
Frozen = with_callback("Frozen", lambda t: t.strategy.model.before.requires_grad_(False))
Clamped = with_callback("Clamped", clamp, at=-1)
DrawnAnew = with_callback("DrawnAnew", drawn_anew)


@dataclass(kw_only=True)
class GroupAdded(Base):
    def model(self) -> nn.Module:
        return with_extra()

    def optimizer(self, model: Any) -> Optimizer:
        return SGD([*model.before.parameters(), *model.after.parameters()], lr=0.05)

    def callbacks(self) -> Any:
        return [OnStep(new_group)]


def unfreezes_itself(model: Any, x: Tensor) -> Tensor:
    if not model.before.weight.requires_grad and bool(model.after.bias.detach().abs().sum() > 0.9):
        model.before.requires_grad_(True)
    return x


@dataclass(kw_only=True)
class UnfrozenInForward(Base):
    def model(self) -> nn.Module:
        model = Around(unfreezes_itself)
        model.before.requires_grad_(False)
        return model


@dataclass(kw_only=True)
class SchedulerOfTorch(Base):
    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().optimizer(model)
        self.rates = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: self.rates.step())
        return optimizer


# --- complex numbers, regularizers, modes -------------------------------------------------------


class Waves(nn.Module):
    def __init__(self, learnt: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        turns = torch.polar(torch.ones(4), torch.linspace(0, 3, 4))
        if learnt:
            self.turns = nn.Parameter(turns)
        else:
            self.register_buffer("turns", turns)

    def forward(self, rows: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.before(rows).view(-1, 4, 2))
        turned = torch.view_as_real(pairs * self.turns).flatten(1)
        out: Tensor = self.after(torch.tanh(turned))
        return out


ComplexBuffer = with_model("ComplexBuffer", lambda: Waves(False))
ComplexParameter = with_model("ComplexParameter", lambda: Waves(True))


def noting(model: Any, x: Tensor) -> Tensor:
    model.load = x.pow(2).mean()
    return x


@dataclass(kw_only=True)
class AuxiliaryLeft(Base):
    """The regularizer reads what forward left on the model: of the samples of one rank."""

    def model(self) -> nn.Module:
        return Around(noting, load=None)

    def regularizer(self, model: Any) -> Tensor:
        return 0.5 * model.load  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class SquaresAdded(Base):
    def regularizer(self, model: nn.Module) -> Tensor:
        return 0.01 * torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()


@dataclass(kw_only=True)
class NumpyInRegularizer(Base):
    def regularizer(self, model: Any) -> Tensor:
        return float(np.random.rand()) * model.after.weight.pow(2).sum()  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class InEvalMode(Base):
    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Dropout(0.3), nn.Linear(16, CLASSES)
        ).eval()


def usual() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16, bias=False),  # one before BatchNorm has no gradient but rounding
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    )


Usual = with_model("Usual", usual)


@dataclass(kw_only=True)
class UsualWithAdam(Base):
    ema: float | None = 0.9
    clip_norm: float | None = 0.5

    def model(self) -> nn.Module:
        return usual()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01)

    def schedule(self, update: int) -> float:
        return 1 / (1 + update)

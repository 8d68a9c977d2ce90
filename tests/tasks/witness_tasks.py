"""Tasks whose result follows the number of ranks, a kind each,
and right ones that look like them."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from allranks.torch import MixtureOfExperts, Task
from allranks.training.callback import Callback
from allranks.training.same_data import samples_to_compare

SAMPLES, WIDTH, CLASSES = 90, 5, 3
passed = 0  # forward passes of `CountsInGlobal`


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(kw_only=True)
class Right(Task):
    """Nothing is wrong with it: batches of 20, so shards of 3 and 2;
    the last of an epoch has 10."""

    batch_size: int = 20
    epochs: int = 50

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, 0.9)

    def train_data(self) -> Any:
        inputs = drawn(SAMPLES, WIDTH)
        return inputs, inputs.sum(1).mul(7).long().remainder(CLASSES)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class ClockOfEachRank(Callback):
    """A look takes no time on rank 0, and ever more on the others; looks are near each other."""

    def on_start(self, trainer: Any) -> None:
        trainer.witness.every = 4
        is_leader = trainer.comm.rank == 0
        ticks = count()
        trainer.witness.budget.clock = (lambda: 0.0) if is_leader else (lambda: next(ticks) ** 3.0)


@dataclass(kw_only=True)
class TimedLooks(Right):
    def callbacks(self) -> list[Callback]:
        return [ClockOfEachRank()]


class Rows:
    """The same samples, read one by one."""

    def __init__(self, task: Task) -> None:
        self.inputs, self.classes = Right.train_data(task)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return self.inputs[number], self.classes[number]


class Of(nn.Module):
    """A model of two layers, for those that do something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(inputs))))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden


# --- state that passes leave behind ---------------------------------------------------------------


class HandNorm(Right):
    """Running statistics written by torch's own function, which counts no version."""

    class Model(Of):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("var", torch.ones(8))

        def between(self, hidden: Tensor) -> Tensor:
            return F.batch_norm(hidden, self.mean, self.var, training=self.training)

    def model(self) -> nn.Module:
        return self.Model()


class Codebook(Right):
    """A buffer written through `.data`."""

    class Model(Of):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("code", torch.zeros(8))

        def between(self, hidden: Tensor) -> Tensor:
            if self.training:
                self.code.data.lerp_(hidden.detach().mean(0), 0.1)
            return hidden - self.code

    def model(self) -> nn.Module:
        return self.Model()


class Teacher(Right):
    """A frozen copy that follows the weights a little in each forward pass."""

    class Model(Of):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(8, 8).requires_grad_(False)

        @torch.no_grad()
        def follow(self) -> None:
            self.teacher.weight.lerp_(self.first.weight @ self.first.weight.T, 0.1)

        def between(self, hidden: Tensor) -> Tensor:
            if self.training:
                self.follow()
            return hidden + self.teacher(hidden)

    def model(self) -> nn.Module:
        return self.Model()


class Annealed(Right):
    """A number that counts forward passes."""

    class Model(Of):
        passes = 0

        def __init__(self) -> None:
            super().__init__()
            self.passes = 0

        def between(self, hidden: Tensor) -> Tensor:
            self.passes += self.training
            return hidden / (1 + 0.1 * self.passes)

    def model(self) -> nn.Module:
        return self.Model()


class AnnealedLater(Right):
    """The same, once the first update was made: nothing of it shows in the first step."""

    class Model(Annealed.Model):
        def between(self, hidden: Tensor) -> Tensor:
            return super().between(hidden) if bool(self.last.bias.any()) else hidden

    def model(self) -> nn.Module:
        model = self.Model()
        nn.init.zeros_(model.last.bias)
        return model


class CountsInGlobal(Right):
    """The same, in a global of the program."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        global passed
        passed += 1
        return super().loss(output * (1 + 0.01 * passed), batch)


class OwnNoise(Right):
    """A generator of the model's own."""

    class Model(Of):
        def __init__(self) -> None:
            super().__init__()
            self.noise = np.random.default_rng(0)

        def between(self, hidden: Tensor) -> Tensor:
            noise = self.noise.standard_normal(hidden.shape)
            return hidden + 0.1 * torch.from_numpy(noise).to(hidden.dtype)

    def model(self) -> nn.Module:
        return self.Model()


class OwnMean(Right):
    """A tensor among the attributes, which no buffer is."""

    class Model(Of):
        def __init__(self) -> None:
            super().__init__()
            self.middle = torch.zeros(8, dtype=torch.float64)

        def between(self, hidden: Tensor) -> Tensor:
            self.middle = 0.9 * self.middle + 0.1 * hidden.detach().mean(0)
            return hidden - self.middle.to(hidden.dtype)

    def model(self) -> nn.Module:
        return self.Model()


class OwnMeanByHook(OwnMean):
    """The same, moved on by a hook before forward, which needs no input for it."""

    class Model(Of):
        def __init__(self) -> None:
            super().__init__()
            self.first.middle = torch.ones(WIDTH, dtype=torch.float64)
            self.first.register_forward_pre_hook(self.moved)

        @staticmethod
        def moved(module: Any, inputs: Any) -> Any:
            module.middle = 0.9 * module.middle
            return tuple(one * module.middle for one in inputs)


class ShortRows(Right):
    """Rows of an embedding are shortened in forward."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(40, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, CLASSES))

    def train_data(self) -> Any:
        words = torch.randint(40, (SAMPLES, 2), generator=torch.Generator().manual_seed(2))
        return words, words.sum(1) % CLASSES


class Scripted(Right):
    """BatchNorm and dropout where nobody can swap them."""

    def model(self) -> nn.Module:
        layers = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        return torch.jit.script(nn.Sequential(*layers))


class Drops(Right):
    """A function that draws."""

    class Model(Of):
        def between(self, hidden: Tensor) -> Tensor:
            return F.dropout(hidden, 0.3, self.training)

    def model(self) -> nn.Module:
        return self.Model()


class PythonInLoss(Right):
    """Python's generator, drawn from in the loss."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) * (0.5 + random.random())


class StepsInBackward(Right):
    """Every gradient is applied as soon as it is there."""

    def model(self) -> nn.Module:
        model = super().model()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.apply)
        return model

    def apply(self, parameter: Tensor) -> None:
        parameter.data.sub_(parameter.grad, alpha=0.1)


# --- samples that see each other ------------------------------------------------------------------


class Clamped(Right):
    """Gradients cut by value, in hooks."""

    def model(self) -> nn.Module:
        model = super().model()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model


class Centred(Right):
    """The mean of the batch in the model."""

    class Model(Of):
        def between(self, hidden: Tensor) -> Tensor:
            return hidden - hidden.mean(0)

    def model(self) -> nn.Module:
        return self.Model()


class Contrasted(Right):
    """Every sample against all that are in its micro-batch, as if that were the whole batch."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="none")


class ContrastedByExperts(Contrasted):
    """The same, by a mixture of experts."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.experts = nn.Linear(WIDTH, 8), MixtureOfExperts(8, 8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.experts(torch.tanh(self.first(inputs))).output

    def model(self) -> nn.Module:
        return self.Model()


class ScaledByFrequency(Right):
    """A table whose gradient is divided by how often a row is looked up in a pass."""

    def model(self) -> nn.Module:
        table = nn.Embedding(CLASSES, 8, scale_grad_by_freq=True)
        return nn.Sequential(table, nn.Tanh(), nn.Linear(8, CLASSES))

    def inputs(self, batch: Any) -> Any:
        return batch[1]


class Masked(Right):
    """Choices made in collate."""

    def train_data(self) -> Any:
        return Rows(self)

    def collate(self, samples: list[Any]) -> Any:
        inputs = torch.stack([sample[0] for sample in samples])
        hidden = torch.rand(inputs.shape) < 0.2
        return inputs.masked_fill(hidden, 0.0), torch.stack([sample[1] for sample in samples])


class Texts:
    """Texts of 2 to 11 words."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(2, 12, (SAMPLES,), generator=generator)
        self.texts = [torch.randint(1, 9, (int(n),), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return self.texts[number]


class Padded(Right):
    """Texts padded to the longest of their micro-batch, what is padded has no weight: right."""

    dropout = 0.0

    class Model(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.words, self.drop = nn.Embedding(9, 6), nn.Dropout(dropout)
            self.read, self.out = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 9)

        def forward(self, text: Tensor) -> Tensor:
            return self.out(self.read(self.drop(self.words(text)))[0])

    def model(self) -> nn.Module:
        return self.Model(self.dropout)

    def train_data(self) -> Any:
        return Texts()

    def collate(self, samples: list[Any]) -> Any:
        text = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return text[:, :-1], text[:, 1:]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch[1], reduction="none", ignore_index=0)

    def weight(self, batch: Any) -> Tensor | None:
        return (batch[1] > 0).to(torch.get_default_dtype())


class PaddedAndDropped(Padded):
    """Dropout draws a mask as wide as the longest text of the micro-batch."""

    dropout = 0.3


class Ignored(Padded):
    """Without weights the mean is over what is padded, too."""

    def weight(self, batch: Any) -> Tensor | None:
        return None


# --- ranks that are not alike ---------------------------------------------------------------------


class Clears(Right):
    """A backward pass of its own, and then no gradient is left."""

    class Model(Of):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                inputs = inputs.detach().requires_grad_(True)
                super().forward(inputs).logsumexp(1).sum().backward()
                assert inputs.grad is not None
                inputs = (inputs + 0.05 * inputs.grad.sign()).detach()
                self.zero_grad()
            return super().forward(inputs)

    def model(self) -> nn.Module:
        return self.Model()


class NoisySteps(Right):
    """The optimizer draws from NumPy's generator, which stands where reading left it."""

    class Noisy(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                noise = np.random.standard_normal(parameter.shape)
                parameter.add_(torch.from_numpy(noise).to(parameter.dtype), alpha=1e-3)

    def train_data(self) -> Any:
        return Rows(self)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.Noisy(model.parameters(), 0.1)


class Balanced(Right):
    """A regularizer that reads what forward left on the model."""

    class Model(Of):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            self.balance = self.router(inputs).softmax(1).mean(0).square().sum()
            return super().forward(inputs)

    def model(self) -> nn.Module:
        return self.Model()

    def regularizer(self, model: nn.Module) -> Tensor:
        return model.balance  # type: ignore[return-value]


class InPlace(Right):
    """A model that writes on its inputs."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.LeakyReLU(0.5, inplace=True), *super().model())


class OwnDraws(Right):
    """A generator of the data set's own."""

    class Noisy(Rows):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            self.rng = np.random.default_rng(0)

        def __getitem__(self, number: int) -> Any:
            noise = self.rng.standard_normal(WIDTH)
            return self.inputs[number] + 0.1 * torch.from_numpy(noise), self.classes[number]

    def train_data(self) -> Any:
        return self.Noisy(self)


class OtherNumbers(Right):
    """The classes have other numbers on each rank,
    but for the samples that are compared at first."""

    def train_data(self) -> Any:
        inputs, classes = super().train_data()
        other = torch.full_like(classes, int(os.environ["RANK"]))
        other[samples_to_compare(len(classes))] = 0
        return list(zip(inputs, (classes + other) % CLASSES, strict=True))


class WantsMany(Right):
    """A model that ends the job where less than five samples go through it."""

    class Model(Of):
        def between(self, hidden: Tensor) -> Tensor:
            if len(hidden) < 5:
                raise ValueError("five samples at least")
            return hidden

    def model(self) -> nn.Module:
        return self.Model()


class OtherOrder(Right):
    """The layers are made in another order on each rank."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = sorted({"one", "two"}, reverse=os.environ["RANK"] == "1")
            self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, CLASSES) for name in names})

        def forward(self, inputs: Tensor) -> Tensor:
            return self.parts["one"](inputs) - self.parts["two"](inputs.cos())

    def model(self) -> nn.Module:
        return self.Model()


class OtherGroups(Right):
    """The optimizer has other groups on each rank."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        both = list(model.parameters())
        cut = 1 + (os.environ["RANK"] == "1")
        return torch.optim.SGD([{"params": both[:cut]}, {"params": both[cut:]}], 0.1)


# --- right ones -----------------------------------------------------------------------------------


class Attention(Right):
    """Attention over positions, LayerNorm, nn.Dropout, and what a module keeps to be looked at."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(1, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.2)
            self.out = nn.Linear(8, CLASSES)
            self.seen: Tensor | None = None
            self.positions = 0

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.embed(inputs[:, :, None])
            self.positions = hidden.shape[1]
            hidden, self.seen = self.attend(hidden, hidden, hidden)
            return self.out(self.drop(self.norm(hidden)).mean(1))

    def model(self) -> nn.Module:
        return self.Model()


class MadeByHooks(Right):
    """Weights that hooks of torch's own make of others before each forward pass."""

    def model(self) -> nn.Module:
        model = super().model()
        nn.utils.weight_norm(model[0])
        prune.l1_unstructured(model[2], "weight", 0.3)
        return model


class InSingle(Right):
    """A loss that computes in float32, whatever the job says."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output.float(), batch)


class Recurrent(Right):
    """An LSTM."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.out = nn.LSTM(1, 8, 2, batch_first=True), nn.Linear(8, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.out(self.read(inputs[:, :, None])[0][:, -1])

    def model(self) -> nn.Module:
        return self.Model()


class Augmented(Right):
    """Read one by one, with keyed choices from every generator."""

    class Noisy(Rows):
        def __getitem__(self, number: int) -> Any:
            inputs, label = super().__getitem__(number)
            factor = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
            return inputs * factor + 0.01 * torch.randn(WIDTH), label

    def train_data(self) -> Any:
        return self.Noisy(self)

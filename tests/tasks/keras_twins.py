"""Keras tasks on the torch engine, each with what it is compared with; what runs in the ranks."""

from __future__ import annotations

# isort: off
import keras_tasks  # noqa: F401  it says how Keras computes, before that is imported

# isort: on
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.programs.digits import Digits
from allranks.programs.keras_programs import DigitsKeras, MnistKeras
from allranks.programs.mnist import Mnist
from allranks.strategies.shards import even_sizes
from allranks.tensorflow import Task
from allranks.torch import Trainer
from allranks.torch.model.weights import weights_sha256
from allranks.training.order import Order
from contract_tasks import made

STEPS = 50
MOMENTUM = 0.9
AS_TORCH = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}


@dataclass(kw_only=True)
class Sgd(DigitsKeras):
    """The digits with an optimizer that two frameworks write alike."""

    epochs: int = 100
    lr: float = 0.02

    def optimizer(self) -> Any:
        return keras.optimizers.SGD(self.lr, momentum=MOMENTUM)


@dataclass(kw_only=True)
class Rich(Task):
    """What a strategy can get wrong: norms, dropout, weights, an average, clipping,
    uneven batches."""

    batch_size: int = 24
    epochs: int = 100
    clip_norm: float | None = 0.3
    ema: float | None = 0.9
    optimizer_name: str = "AdamW"

    def model(self) -> Any:
        images = keras.Input((6, 6, 2))
        out = layers.Conv2D(6, 3, use_bias=False, name="conv", kernel_regularizer="l2")(images)
        out = layers.BatchNormalization(momentum=0.9, name="norm1")(out)
        out = layers.SpatialDropout2D(0.2)(layers.ReLU()(out))
        out = layers.Dropout(0.2, noise_shape=(None, 1, None, None))(out)
        out = layers.Dense(12, use_bias=False, name="hidden")(layers.Flatten()(out))
        out = Doubled()(layers.BatchNormalization(name="norm2")(out))
        out = layers.Dropout(0.2)(layers.ReLU()(out))
        return keras.Model(images, layers.Dense(3, name="head")(out), name="rich")

    def optimizer(self) -> Any:
        return OPTIMIZERS[self.optimizer_name]()

    def train_data(self) -> tuple[Any, Any]:
        images = made(101, 6, 6, 2)
        labels = images.mean(dim=(1, 2, 3)).mul(20).long().remainder(3)
        return images.numpy(), labels.numpy()

    def eval_data(self) -> tuple[Any, Any]:
        return self.train_data()

    def augment(self, sample: Any, random: np.random.Generator) -> Any:
        return sample[0] + random.normal(scale=0.01, size=sample[0].shape), sample[1]

    def loss(self, output: Any, batch: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(batch[1], output, from_logits=True)

    def weight(self, batch: Any) -> Any:
        return 1.0 + keras.ops.cast(batch[1], "float32")

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        right = keras.ops.equal(keras.ops.argmax(output, axis=-1), batch[1])
        return {"accuracy": (keras.ops.sum(right), keras.ops.size(right))}

    def schedule(self, step: int) -> float:
        return min(1.0, (step + 1) / 10)


class Doubled(layers.Layer):  # type: ignore[misc]
    """A layer of a user's own that is told whether it trains."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return 2 * inputs if training else inputs


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    name: partial(getattr(keras.optimizers, name), 1e-2)
    for name in (
        *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl"),
        *("Lion", "Lamb", "Adafactor", "Muon"),
    )
}
OPTIMIZERS["averaging SGD"] = lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
OPTIMIZERS["clipping Adam"] = lambda: keras.optimizers.Adam(0.01, amsgrad=True, global_clipnorm=0.1)
DECAY = keras.optimizers.schedules.ExponentialDecay


class Decaying(Rich):
    """The optimizer has a schedule of its own, and the task none."""

    def optimizer(self) -> Any:
        return keras.optimizers.SGD(DECAY(0.1, decay_steps=4, decay_rate=0.5))

    schedule = Task.schedule


class Counting(Rich):
    """A layer counts its forward passes, in a weight that nothing trains."""

    def model(self) -> Any:
        return keras.Sequential(
            [keras.Input((6, 6, 2)), layers.Flatten(), Counts(), layers.Dense(3, name="head")],
            name="counting",
        )


class Counts(layers.Layer):  # type: ignore[misc]
    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(name="seen", initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign_add(1.0)
        return inputs


# --- against a loop written by hand --------------------------------------------------------------


def equals_a_plain_loop(argument: dict[str, Any]) -> None:
    """50 steps in float64 of the same network in plain torch, from the same weights: 1e-10."""
    torch.set_num_threads(1)
    task = Sgd(dropout=0.0)
    losses = []
    with Trainer(task, Job(precision="fp64")) as trainer:
        net = _as_torch({name: value.clone() for name, value in trainer.weights()})
        for batch in trainer.batches(steps=STEPS):
            losses.append(trainer.step(batch).loss)
        found = {name: value.clone() for name, value in trainer.weights()}
    wanted_losses, moving = _plain_training(task, net)
    assert losses == pytest.approx(wanted_losses, rel=1e-10)
    for name, value in _as_torch(found).state_dict().items():
        if "running" not in name and value.is_floating_point():
            _assert_near(value, net.state_dict()[name], name)
    for number in (1, 2):
        for kind, value in zip(("mean", "variance"), moving[number - 1], strict=True):
            _assert_near(found[f"digits/norm{number}/moving_{kind}"], value, kind)


def _as_torch(weights: dict[str, Tensor]) -> nn.Sequential:
    """The network of the program `digits`, with these weights of its twin."""
    net: Any = Digits(dropout=0.0).model().double()
    named = {name.removeprefix("digits/"): value for name, value in weights.items()}
    with torch.no_grad():
        for number, layer in ((1, net[0]), (2, net[4])):
            layer.weight.copy_(named[f"conv{number}/kernel"].permute(AS_TORCH[4]))
        for number, layer in ((1, net[1]), (2, net[5])):
            layer.weight.copy_(named[f"norm{number}/gamma"])
            layer.bias.copy_(named[f"norm{number}/beta"])
        kernel = named["head/kernel"].view(4, 4, -1, 10)  # (row, column, channel, class)
        net[9].weight.copy_(kernel.permute(3, 2, 0, 1).flatten(1))
        net[9].bias.copy_(named["head/bias"])
    return net  # type: ignore[no-any-return]


def _plain_training(task: Sgd, net: nn.Sequential) -> tuple[list[float], list[list[Tensor]]]:
    """The losses, and the moving mean and variance of the two norms as Keras keeps them."""
    images, labels = (torch.from_numpy(array) for array in task.train_data())
    images = images.double().permute(0, 3, 1, 2)
    moving = [[torch.zeros(n).double(), torch.ones(n).double()] for n in (16, 32)]
    seen: list[list[Tensor]] = [[], []]
    for number, norm in enumerate((net[1], net[5])):
        norm.register_forward_pre_hook(lambda _, given, n=number: seen[n].append(given[0].detach()))
    optimizer = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=MOMENTUM)
    order, losses = Order(len(images), task.batch_size, 0, "keep"), []
    for step in range(STEPS):
        chosen = torch.from_numpy(order.batch(*divmod(step, order.steps_per_epoch)))
        sizes = even_sizes(len(chosen), task.shards)
        optimizer.zero_grad()
        loss = sum(
            F.cross_entropy(net(images[rows]), labels[rows], reduction="sum")
            for rows in chosen.split(list(sizes))
        ) / len(chosen)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for shards, (mean, variance) in zip(seen, moving, strict=True):
            parts = [torch.var_mean(x, dim=(0, 2, 3), correction=0) for x in shards]
            for kept, own in ((variance, 0), (mean, 1)):
                new = sum(n * part[own] for n, part in zip(sizes, parts, strict=True)) / len(chosen)
                kept.mul_(0.9).add_(new, alpha=0.1)
            shards.clear()
    return losses, moving


def _assert_near(ours: Tensor, theirs: Tensor, name: str) -> None:
    difference = torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)
    assert difference < 1e-10, (name, float(difference))


def twins_start_alike(argument: dict[str, Any]) -> None:
    """As many trained weights as the programs of torch have, drawn between the same bounds."""
    torch.manual_seed(0)  # the largest of ten draws is far below its bound now and then
    keras.utils.set_random_seed(0)
    for ours, theirs in ((DigitsKeras(), Digits()), (MnistKeras(), Mnist())):
        own, wanted = ours.model().trainable_weights, list(theirs.model().parameters())
        assert sum(w.value.numel() for w in own) == sum(p.numel() for p in wanted)
        for weight, parameter in zip(own, wanted, strict=True):  # both in the order of the layers
            value, bound = weight.value.detach(), float(parameter.detach().abs().max())
            assert float(value.abs().max()) == pytest.approx(bound, rel=0.35), weight.path
            assert float(value.std(correction=0)) == pytest.approx(
                float(parameter.detach().std(correction=0)), rel=0.5
            ), weight.path


# --- optimizers, and what is put back -------------------------------------------------------------


def every_optimizer_goes_on(argument: dict[str, Any]) -> None:
    """2 + 2 steps through a state, taken up by a new model and optimizer, are 4: equal bits."""
    torch.set_num_threads(1)
    job = Job(bitwise=True)
    tasks: list[Task] = [Rich(optimizer_name=name) for name in OPTIMIZERS]
    for task in [*tasks, Decaying()]:
        with Trainer(task, job) as trainer:
            for batch in trainer.batches(steps=2):
                trainer.step(batch)
            state = copy.deepcopy(trainer.state())
            for batch in trainer.batches(steps=4):
                result = trainer.step(batch)
            wanted = weights_sha256(trainer.weights()), result.learning_rate
        with Trainer(task, job) as trainer:
            trainer.load_state(state)
            for batch in trainer.batches(steps=4):
                result = trainer.step(batch)
            assert (weights_sha256(trainer.weights()), result.learning_rate) == wanted, task


def rates_are_those_of_the_task(argument: dict[str, Any]) -> None:
    for task, rates in ((Rich(), [0.001, 0.002]), (Decaying(), [0.1, 0.1 * 0.5**0.25])):
        with Trainer(task, Job()) as trainer:
            found = [trainer.step(batch).learning_rate for batch in trainer.batches(steps=2)]
        assert found == pytest.approx(rates, rel=1e-7)


def a_model_is_given_back(argument: dict[str, Any]) -> None:
    """Its classes are Keras' own, it can be saved, and settings of the process are as before."""
    task, path = Rich(), Path(argument["folder"]) / "rich.weights.h5"
    model = task.model()
    task.model = lambda: model  # type: ignore[method-assign]
    before = keras.config.floatx(), keras.config.dtype_policy().name
    with Trainer(task, Job()) as trainer:
        for batch in trainer.batches(steps=2):
            trainer.step(batch)
        weights = {name: value.clone() for name, value in trainer.weights()}
    assert type(model) is keras.src.models.Functional, type(model)
    assert {type(layer).__module__.split(".")[0] for layer in model.layers} == {
        "keras",
        "keras_twins",
    }
    assert before == (keras.config.floatx(), keras.config.dtype_policy().name)
    model.save_weights(path)
    again = Rich()
    again.pretrained = lambda: path  # type: ignore[method-assign]
    with Trainer(again, Job()) as trainer:
        for name, value in trainer.weights():
            assert torch.equal(value, weights[name]), name


# --- what is refused ------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return Rich().train_data()


def _with(**methods: Any) -> Task:
    task = Rich()
    for name, value in methods.items():
        setattr(task, name, lambda value=value: value)
    return task


def _of_32_bits() -> Any:
    return keras.Sequential([keras.Input((4,)), layers.Dense(2, dtype="float32")])


class Lossy(layers.Layer):  # type: ignore[misc]
    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.mean(inputs))
        return inputs


def _with_a_loss() -> Any:
    return keras.Sequential([keras.Input((6, 6, 2)), Lossy(), layers.Flatten(), layers.Dense(3)])


def refuse(argument: dict[str, Any]) -> None:
    """Each is, by name, and says what to do instead."""
    sgd = keras.optimizers.SGD
    cases: list[tuple[str, Task, Job]] = [
        ("batches itself", _with(train_data=Batches()), Job()),
        ("ema=", _with(optimizer=sgd(0.1, use_ema=True)), Job()),
        ("batch_size=", _with(optimizer=sgd(0.1, gradient_accumulation_steps=2)), Job()),
        ("--precision fp16", _with(optimizer=keras.optimizers.LossScaleOptimizer(sgd(0.1))), Job()),
        ("schedule of its own", _with(optimizer=sgd(DECAY(0.1, 4, 0.5))), Job()),
        ("optimizer of Keras", _with(optimizer=torch.optim.SGD([torch.ones(1)], 0.1)), Job()),
        ("makes as float32", _with(model=_of_32_bits()), Job(precision="fp64")),
        ("add_loss", _with(model=_with_a_loss()), Job()),
        ("--strategy ddp", Rich(), Job(strategy="dp:replicas=2")),
        ("--compile eager", Rich(), Job(compile="eager")),
        ("no blocks", Rich(), Job(activation_checkpointing=True)),
    ]
    for what, task, job in cases:
        with pytest.raises(RequestError) as raised, Trainer(task, job) as trainer:
            trainer.rehearse()
        assert what in str(raised.value), (what, str(raised.value))

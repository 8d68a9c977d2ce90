"""Compiled models: no break that the plain model has not, and gradients that leave in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.programs.models.gpt import GPTShape, gpt
from allranks.programs.models.vision import BasicBlock, Bottleneck, ResNet, resnet20
from allranks.torch import Task, Trainer
from allranks.torch.build import swap_layers
from allranks.torch.model.compiling import _check, compiled
from allranks.torch.model.layers import Scope
from conftest import Train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # of what the compiler looks at
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # by the compiler
]
SAMPLES = 40  # the last batch of an epoch is one of 8 in 16: other shards, some of one sample


def bottlenecks() -> nn.Module:
    first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    blocks = [Bottleneck(16, 8, 2), Bottleneck(32, 8, 1)]  # a projection, and x itself
    return nn.Sequential(first, nn.BatchNorm2d(16), *blocks, nn.Flatten(), nn.LazyLinear(10))


def basic_blocks() -> nn.Module:
    """Of each kind in a ResNet-20, one block."""
    blocks = [BasicBlock(16, 16, 1)], [BasicBlock(16, 32, 2)], []
    stages = [nn.Sequential(*stage) for stage in blocks]
    conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return ResNet(conv1, nn.Sequential(), stages, nn.Linear(32, 10))


def words() -> nn.Module:
    return gpt(GPTShape(vocabulary=32, context=8, width=16, layers=3, heads=2))


def dropping_words() -> nn.Module:
    shape = GPTShape(vocabulary=32, context=8, width=16, layers=3, heads=2, dropout=0.1)
    return gpt(shape)


def dropping_images() -> nn.Module:
    first = nn.Conv2d(3, 8, 3), nn.Dropout(0.2), nn.BatchNorm2d(8), nn.Dropout2d(0.1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10)
    return nn.Sequential(*first, Bottleneck(8, 8, 1), *head)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(32, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 32))


def data_of(make: Callable[[], nn.Module]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if make in (words, dropping_words, encoder):
        text = torch.randint(32, (SAMPLES, 9), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    return images, torch.randint(10, (SAMPLES,), generator=generator)


@dataclass
class Compared(Task):
    make: Any = basic_blocks

    def model(self) -> nn.Module:
        model: nn.Module = self.make()
        if self.make is bottlenecks:
            model(data_of(bottlenecks)[0][:2])  # gives the lazy layer its size
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_data(self) -> tuple[Tensor, Tensor]:
        return data_of(self.make)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        losses = F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="none")
        return losses.view(len(output), -1).mean(1)


def task_of(make: Callable[[], nn.Module]) -> Task:
    return Compared(make=make, batch_size=16, epochs=2)


@pytest.fixture(autouse=True)
def _forget(compiler: None) -> None:
    counters.clear()


def graphs_and_breaks() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.slow(most=4)
@pytest.mark.parametrize(
    "make", [basic_blocks, bottlenecks, words, encoder, dropping_words, dropping_images]
)
def test_a_step_breaks_no_graph_that_the_plain_model_does_not(
    make: Callable[[], nn.Module],
) -> None:
    task = task_of(make)
    inputs, _ = data_of(make)
    plain = torch.compile(task.model().train(), backend="eager")
    for rows in (16, 16, 8, 16):
        plain(inputs[:rows])
    wanted = graphs_and_breaks()
    counters.clear()
    torch._dynamo.reset()
    losses, graphs = [], []
    with Trainer(task, Job(threads=1, compile="eager")) as trainer:
        for batch in trainer.batches():
            losses.append(trainer.step(batch).loss)
            graphs.append(graphs_and_breaks())
    assert graphs[-1] == wanted, "graphs, breaks"
    assert graphs[2:] == graphs[-1:] * 4, "nothing is compiled anew in the second epoch"
    with Trainer(task, Job(threads=1)) as trainer:
        assert [trainer.step(batch).loss for batch in trainer.batches()] == pytest.approx(losses)


def test_running_statistics_of_a_compiled_model_are_those_of_a_plain_one() -> None:
    found = []
    for backend in ("", "aot_eager"):
        with Trainer(task_of(bottlenecks), Job(threads=1, compile=backend)) as trainer:
            for batch in trainer.batches():
                trainer.step(batch)
            found.append(dict(trainer.weights()))
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values, rtol=1e-4, atol=1e-5, msg=name)


class Kernels(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("make", "ranks", "is_early"),
    [(words, 1, False), (words, 2, True), (resnet20, 2, True)],
)
def test_gradients_leave_before_half_of_backward(
    make: Callable[[], nn.Module], ranks: int, is_early: bool
) -> None:
    """Half of the parameters, in the order of backward, are there; compiled as a whole, none."""
    task, scope = task_of(make), Scope(0, torch.device("cpu"))
    model = task.model()
    swap_layers(model, scope)
    call, undo = compiled(task, model, "aot_eager", scope, ranks)
    loss = call(data_of(make)[0]).sum()
    kernels, there = Kernels(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: there.append(kernels.count))
    with kernels:
        loss.backward()
    before_half = sum(count < kernels.count / 2 for count in there) / len(there)
    assert before_half > 0.3 if is_early else before_half < 0.1
    undo()
    assert not any("_compiled_call_impl" in vars(m) for m in model.modules())
    assert not any(name in vars(m) for m in model.modules() for name in ("left", "forward"))


class Again(nn.Module):
    """Its own code computes activations of a BatchNorm again."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.part, images, use_reentrant=False)
        logits: Tensor = self.head(found.mean((2, 3)))
        return logits


@pytest.mark.parametrize("way", ["cudagraphs", "environment", "setting"])
def test_a_compiler_that_records_graphs_is_refused(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What draws is keyed by a number that such a graph would hold as of its recording."""
    if way == "environment":
        monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", "1")
    config = import_module("torch._inductor.config")
    setting = config.patch({"triton.cudagraphs": way == "setting"})  # torch's own way to undo it
    backend = "cudagraphs" if way == "cudagraphs" else "inductor"
    with setting, pytest.raises(RequestError, match="draws the same numbers in every step"):
        _check(nn.Linear(2, 2), backend)
    _check(nn.Linear(2, 2), "aot_eager")


def test_moments_that_backward_would_count_twice_are_refused() -> None:
    with (
        Trainer(task_of(Again), Job(threads=1, compile="eager")) as trainer,
        pytest.raises(RequestError, match="ran again during backward"),
    ):
        list(map(trainer.step, trainer.batches()))


def test_compiled_blocks_are_equal_to_a_plain_model_on_one_rank(train: Train) -> None:
    """Passes beside those of a step, as the witness makes, leave nothing in compiled blocks."""
    job: Any = {"steps": 5, "precision": "fp64", "threads": 1}
    wanted = train("contract_tasks:Blocks", **job)
    found = train("contract_tasks:Blocks", ranks=3, compile="eager", **job)
    assert found.summary["witness"]["found"] == []
    plain, compiled = (
        load_file(result.run_dir / "weights.safetensors") for result in (wanted, found)
    )
    for name, values in plain.items():
        torch.testing.assert_close(compiled[name], values, rtol=1e-10, atol=1e-10, msg=name)

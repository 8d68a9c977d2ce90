"""Models that draw and compute their first weights in every way that programs do."""

from __future__ import annotations

import copy
import math
import random
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from allranks.programs.models.gpt import GPT, GPTShape
from allranks.programs.models.mnist import mnist_cnn
from allranks.programs.models.resnet import resnet20
from contract_tasks import Experts, Images, Pairs, Pictures, Plain, Uneven, Words
from kinds_tasks import (
    ActNormed,
    Evaluated,
    Normalised,
    Ragged,
    Rows,
    Tables,
    TiedTable,
    TiedText,
    Views,
)

Build = Callable[[], nn.Module]


class Holds(nn.Module):
    """Parameters `w0`, `w1`, … and buffers `b0`, …"""

    def __init__(self, weights: list[Tensor], buffers: list[Tensor] | None = None) -> None:
        super().__init__()
        for index, weight in enumerate(weights):
            is_one = isinstance(weight, nn.Parameter)
            self.register_parameter(f"w{index}", weight if is_one else nn.Parameter(weight))
        for index, buffer in enumerate(buffers or []):
            self.register_buffer(f"b{index}", buffer)


def filled(init: Callable[..., Any], *shape: int) -> Build:
    """A weight of this shape (6 × 4) made by one function of `torch.nn.init`, and one drawn
    after it."""

    def build() -> nn.Module:
        weight = nn.Parameter(torch.empty(shape or (6, 4)))
        init(weight)
        return Holds([weight, torch.rand(3)])

    return build


def data_normal() -> nn.Module:
    layer = nn.Linear(5, 7)
    layer.weight.data.normal_(0, 0.02)
    layer.bias.data = torch.full((7,), 0.1)
    return layer


def padding_row() -> nn.Module:
    table = nn.Embedding(9, 4, padding_idx=2)
    with torch.no_grad():
        table.weight[5] = 0
        table.weight[torch.tensor([1, 3])] = torch.arange(4.0)
        table.weight[[6, 7], np.array([0, 1])] = 3.0
        table.weight[:, 1:3].uniform_()
        table.weight.t()[0].exponential_()
    return table


def constants() -> nn.Module:
    rows = np.random.RandomState(3).rand(4, 3).astype(np.float32)
    table = nn.Embedding(4, 3)
    table.weight.data.copy_(torch.from_numpy(rows))
    rows[:] = 0
    bias = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    shared = torch.tensor([[1.0, 2.0]] * 3)
    linear = nn.Linear(2, 3)
    linear.weight.data = shared
    shared.mul_(2)
    values = torch.tensor([[1.0, 2.0]]).expand(3, 2)
    return nn.ModuleList([table, linear, Holds([bias, torch.randn(3, 2) * values], [values])])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.table.weight
        self.apply(self.reset)

    def reset(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
        angles = torch.outer(torch.arange(6, device=rates.device), rates)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("turned", self.rotation.conj()[:, 1:], persistent=False)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.scale = nn.Parameter(torch.view_as_real(self.rotation).mean(dim=(0, 2)))
        self.angles = angles
        self.cache = {"mask": [torch.full((3, 3), float("-inf")).triu(1)]}
        self.linear = nn.Linear(2, 2)


def decided_by_values() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    weight = torch.randn(30, 4)
    while (weight.norm(dim=1) > 3.0).any():
        weight = torch.where(weight.norm(dim=1, keepdim=True) > 3, torch.randn(30, 4), weight)
    if float(torch.rand(())) > 0.5:
        weight = weight * 2
    picked = weight[weight[:, 0] > 0]
    return nn.ModuleList([nn.Dropout(rates[1]), Holds([weight, picked, torch.rand(len(picked))])])


def other_generators() -> nn.Module:
    own = torch.Generator().manual_seed(5)
    first = torch.rand(4, generator=own)
    scale = random.random() + float(np.random.rand())
    with torch.random.fork_rng():
        torch.manual_seed(9)
        apart = torch.randn(20)
    weight = nn.Parameter(torch.empty(3, 4)).requires_grad_(False)
    nn.init.normal_(weight, generator=own)
    own.manual_seed(1)
    return Holds([first * scale, apart, weight, torch.rand(2, generator=own), torch.rand(5)])


def every_draw() -> nn.Module:
    made = torch.rand(5, 6)
    weights = [
        torch.rand_like(made),
        torch.randn(33),
        torch.normal(made, 0.1),
        torch.bernoulli(made),
        torch.multinomial(made, 3).float(),
        torch.randperm(40).float(),
        torch.randint(9, (4,)).float(),
        torch.poisson(made * 9),
        nn.functional.dropout(made, 0.3),
        torch.distributions.Gamma(made + 0.1, 1.0).sample(),
        torch.empty(7).log_normal_(),
        torch.empty(7, 3).t().cauchy_(),
        torch.empty(4, 8)[:, ::2].geometric_(0.2),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
    ]
    return Holds(weights)


def all_precisions() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        layers = [nn.Linear(4, 3), Holds([torch.rand(4)])]
    finally:
        torch.set_default_dtype(torch.float32)
    return nn.ModuleList([*layers, nn.Linear(4, 3).half(), nn.Linear(3, 2).bfloat16().float()])


def in_eval_mode_and_last_channel() -> nn.Module:
    return nn.Conv2d(3, 6, 3).eval().to(memory_format=torch.channels_last).requires_grad_(False)


def student_and_teacher() -> nn.Module:
    student = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        for new, old in zip(teacher.parameters(), student.parameters(), strict=True):
            new.mul_(0.9).add_(old, alpha=0.1)
        student[0].weight.mul_(2)
    loaded = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    loaded.load_state_dict(student.state_dict())
    return nn.ModuleList([student, teacher, loaded])


def cut_from_one() -> nn.Module:
    whole = torch.randn(6, 10)
    parts = whole.split((2, 5, 3), dim=1)
    return Holds([*parts[:2], parts[2].clone()], [whole[0], whole])


def factored() -> nn.Module:
    weight = torch.randn(5, 5, dtype=torch.float64)
    left, values, right = torch.linalg.svd(weight)
    square = torch.linalg.cholesky(weight @ weight.T + torch.eye(5))
    return Holds([left, values, right.T, torch.linalg.inv(square), weight.sort(dim=0).values])


def together() -> nn.Module:
    weights = [torch.randn(3), torch.randn(2, 2)]
    torch._foreach_mul_(weights, 3.0)
    weights[1].addmm_(weights[1], weights[1].clone()).masked_fill_(weights[1] > 1, 0.5)
    return Holds([*weights, torch.stack((weights[0], -weights[0])), torch.cat(weights[:1] * 2)])


def read_as_an_array() -> nn.Module:
    layer = nn.Linear(3, 4)
    largest = float(np.abs(layer.weight.detach().numpy()).max())
    rows = np.asarray(layer.bias.detach()).tolist() + layer.weight[0].tolist()
    layer.weight.data /= largest
    return nn.ModuleList([layer, Holds([torch.tensor(rows), layer.weight.new_tensor([largest])])])


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 5)),
        parametrizations.spectral_norm(nn.Linear(5, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    )


def moved() -> nn.Module:
    layer = nn.Linear(3, 4)
    same = layer.weight.detach().to("cpu", torch.float32)
    same.mul_(2)  # the weight itself: it was there already
    layer.to("cpu").cpu().float()
    return nn.ModuleList([layer, Holds([layer.weight.detach().to(torch.float64, copy=True)])])


def chained() -> nn.Module:
    """Each weight is computed from the one before."""
    weights = [torch.randn(3, 3)]
    for _ in range(30):
        weights.append(weights[-1] * 0.9 + torch.rand(3, 3))
    return Holds(weights)


class DrawsWhenUsed(nn.Module):
    """Forward runs once in `__init__`, to see how many features come out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5))
        with torch.no_grad():
            features = self.body(torch.randn(2, 1, 8, 8)).flatten(1).shape[1]
        self.head = nn.Linear(features, 2)


def delta_orthogonal() -> nn.Module:
    layer = nn.Conv1d(3, 6, 3)
    with torch.no_grad():
        nn.init.zeros_(layer.weight)
        nn.init.orthogonal_(layer.weight[:, :, 1], gain=math.sqrt(2))
    return layer


def counts_on_meta() -> nn.Module:
    with torch.device("meta"):
        skeleton = nn.Linear(100, 100)
    width = sum(p.numel() for p in skeleton.parameters()) // 1000
    return nn.Linear(width, 3)


def all_of(*builds: Build) -> Build:
    return lambda: nn.ModuleList([build() for build in builds])


INITS: dict[str, Build] = {
    "uniform": filled(nn.init.uniform_),
    "normal": filled(nn.init.normal_, 5, 5),
    "trunc_normal": filled(lambda w: nn.init.trunc_normal_(w, std=0.9, a=-1, b=1), 40, 5),
    "trunc_normal_far": filled(lambda w: nn.init.trunc_normal_(w, a=1.5, b=4.0)),
    "kaiming": filled(nn.init.kaiming_normal_),
    "kaiming_uniform": filled(nn.init.kaiming_uniform_, 4, 3, 3, 3),
    "xavier": filled(nn.init.xavier_normal_),
    "xavier_uniform": filled(nn.init.xavier_uniform_),
    "orthogonal": filled(nn.init.orthogonal_, 4, 6),
    "orthogonal_tall": filled(nn.init.orthogonal_, 7, 3),
    "zeros": filled(nn.init.zeros_),
    "ones": filled(nn.init.ones_),
    "constant": filled(lambda w: nn.init.constant_(w, 0.3)),
    "eye": filled(nn.init.eye_),
    "dirac": filled(nn.init.dirac_, 4, 3, 3),
    "sparse": filled(lambda w: nn.init.sparse_(w, 0.4)),
}
MODELS: dict[str, Build] = {
    "inits": all_of(*INITS.values()),
    "data_normal": data_normal,
    "padding_row": padding_row,
    "constants": constants,
    "tied": Tied,
    "rotary": Rotary,
    "decided_by_values": decided_by_values,
    "other_generators": other_generators,
    "every_draw": every_draw,
    "all_precisions": all_precisions,
    "channels_last": in_eval_mode_and_last_channel,
    "student_and_teacher": student_and_teacher,
    "cut_from_one": cut_from_one,
    "factored": factored,
    "together": together,
    "read_as_an_array": read_as_an_array,
    "parametrized": parametrized,
    "moved": moved,
    "chained": chained,
    "forward_in_init": DrawsWhenUsed,
    "delta_orthogonal": delta_orthogonal,
    "counts_on_meta": counts_on_meta,
    "recurrent": all_of(
        lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True), lambda: nn.GRU(3, 4)
    ),
    "attention": all_of(
        lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True),
    ),
    "others": all_of(
        lambda: nn.Sequential(nn.Bilinear(3, 4, 5), nn.PReLU(), nn.GroupNorm(1, 5)),
        lambda: nn.EmbeddingBag(7, 3, padding_idx=1),
    ),
    "gpt": lambda: GPT(GPTShape(vocabulary=31, context=8, width=12, layers=3, heads=3)),
    "images": all_of(resnet20, mnist_cnn),
    "contract": all_of(
        *(task().model for task in (Images, Words, Pairs, Plain, Uneven, Experts, Pictures))
    ),
    "kinds": all_of(
        *(task().model for task in (Rows, Views, TiedText, Ragged, Normalised, Evaluated)),
        *(task().model for task in (Tables, TiedTable, ActNormed)),
    ),
}


# --- what is built whole, and says so ---------------------------------------------------------


def weight_norm_of_old() -> nn.Module:
    """A weight that is computed from others, and no parameter."""
    layer = nn.Linear(3, 4)
    layer.doubled = layer.weight * 2  # type: ignore[assignment]
    return layer


def written_through_an_array() -> nn.Module:
    layer = nn.Linear(3, 4)
    layer.weight.detach().numpy()[:] = 1.0
    return layer


def hides_its_refusal() -> nn.Module:
    layer = nn.Linear(3, 4)
    try:
        layer.weight.data_ptr()
    except Exception:
        nn.init.zeros_(layer.weight)
    return layer


def with_a_hook() -> nn.Module:
    layer = nn.Linear(3, 4)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    return layer


def deep_copied_views() -> nn.Module:
    whole = torch.randn(4, 3)
    held = Holds([], [whole, whole[0]])
    return nn.ModuleList([copy.deepcopy(held), nn.Linear(2, 2)])


def scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.trace(nn.Linear(3, 4), torch.zeros(1, 3))  # type: ignore[no-any-return]


def sparse_buffer() -> nn.Module:
    return Holds([torch.rand(3)], [torch.eye(4).to_sparse()])


def in_a_thread() -> nn.Module:
    """`.data` has a version of its own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))

    def fill() -> None:
        model[1].weight.data.fill_(2.0)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    return model


def in_a_thread_from_before() -> nn.Module:
    """One that was there already: the weight alone tells of it."""
    model, tasks, done = nn.Linear(3, 4), SimpleQueue[Any](), threading.Event()

    def work() -> None:
        with torch.no_grad():
            tasks.get().fill_(2.0)
        done.set()

    if (start := getattr(threading.Thread.start, "__wrapped__", None)) is None:
        start = threading.Thread.start
    start(threading.Thread(target=work))
    tasks.put(model.weight)
    done.wait()
    return model


def in_a_pool() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(nn.init.ones_, [layer.weight for layer in model]))
    return model


def by_a_function() -> nn.Module:
    model = nn.Linear(3, 4)
    model.weight.data.apply_(lambda value: 3 * value)
    return model


def by_a_function_of_two() -> nn.Module:
    model = nn.Linear(3, 4)
    model.weight.detach().map_(torch.ones(4, 3), lambda one, other: one + other)  # type: ignore[operator]
    return model


WHOLE: dict[str, Build] = {
    "in_a_thread_from_before": in_a_thread_from_before,
    "by_a_function": by_a_function,
    "by_a_function_of_two": by_a_function_of_two,
    "in_a_thread": in_a_thread,
    "in_a_pool": in_a_pool,
    "computed": weight_norm_of_old,
    "written_through_an_array": written_through_an_array,
    "hides_its_refusal": hides_its_refusal,
    "with_a_hook": with_a_hook,
    "deep_copied_views": deep_copied_views,
    "sparse_buffer": sparse_buffer,
    "scripted": scripted,
}

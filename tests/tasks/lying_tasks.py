"""A task with a kernel that lies on ranks: which one, how and where, says its field `lie`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.torch import Task

WORDS, TOKENS, WIDTH, CLASSES = 11, 6, 8, 5
SAMPLES = 44


class Lie(NamedTuple):
    """What lies (of torch's operators its name and shape), where it is, and how."""

    operator: str
    module: str
    phase: str
    change: Callable[..., Any]
    """Makes another output of the right one and the arguments."""
    everywhere: bool = False
    """On both ranks of two, not on rank 1 alone."""
    shape: tuple[int, ...] = ()
    """The last dimensions of the output that lies, where modules share an operator."""


def lies(everywhere: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() != 2:
        return False
    return everywhere or dist.get_rank() == 1


def element(output: Tensor, *args: Any) -> Tensor:
    """One element is off."""
    output = output.clone()
    output.view(-1)[output.numel() // 2] += 1e-3
    return output


def scale(output: Tensor, *args: Any) -> Tensor:
    return output * 1.001


def first(change: Callable[..., Tensor], place: int = 0) -> Callable[..., Any]:
    """The change of one output of several."""

    def changed(outputs: Any, *args: Any) -> Any:
        return [change(o, *args) if n == place else o for n, o in enumerate(outputs)]

    return changed


def all_rows_but_one(output: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A product whose sum leaves out its last term."""
    return a[:, :-1] @ b[:-1]


def all_but_the_last(output: Tensor, tensor: Tensor, *args: Any) -> Tensor:
    return tensor[:-1].sum(*args)


def all_tokens_but_one(
    output: Tensor, gradient: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, *args: Any
) -> Tensor:
    """The gradient of the scale of a layer norm, whose sum leaves out the first token."""
    return (gradient * (x - mean) * rstd)[:, 1:].sum((0, 1))


def each_word_once(output: Tensor, gradient: Tensor, words: Tensor, *args: Any) -> Tensor:
    """The gradient of a table in which a word that comes twice counts once."""
    wrong = torch.zeros_like(output)
    wrong[words.reshape(-1)] = gradient.reshape(-1, WIDTH)
    return wrong


def one_less(output: Tensor, *args: Any) -> Tensor:
    """A mean whose divisor is one too small."""
    return output * CLASSES / (CLASSES - 1)


LIES = {
    "element: linear": Lie("aten.addmm.default", "out", "forward", element, shape=(CLASSES,)),
    "element: function": Lie("Gate.backward", "gate", "backward", element),
    "element: layer norm": Lie(
        "aten.native_layer_norm.default", "norm", "forward", first(element), everywhere=True
    ),
    "element: softmax": Lie("aten._softmax.default", "attention", "forward", element),
    "element: convolution": Lie("aten.convolution.default", "conv", "forward", element),
    "reduction: linear": Lie(
        "aten.mm.default", "out", "backward", all_rows_but_one, shape=(CLASSES, WIDTH)
    ),
    "reduction: bias": Lie(
        "aten.sum.dim_IntList", "out", "backward", all_but_the_last, shape=(1, CLASSES)
    ),
    "reduction: layer norm": Lie(
        *("aten.native_layer_norm_backward.default", "norm", "backward"),
        first(all_tokens_but_one, 1),
    ),
    "reduction: embedding": Lie(
        "aten.embedding_dense_backward.default", "words", "backward", each_word_once, True
    ),
    "reduction: loss": Lie("lies.error.default", "Lying.loss()", "forward", one_less, True),
    "scale: convolution": Lie(
        "aten.convolution_backward.default", "conv", "backward", first(scale, 1)
    ),
    "scale: softmax": Lie("aten._softmax_backward_data.default", "attention", "backward", scale),
    "scale: embedding": Lie("aten.embedding.default", "words", "forward", scale, True),
    "scale: attention": Lie("aten.bmm.default", "attention", "forward", scale, True),
    "scale: function": Lie("Gate.forward", "gate", "forward", scale),
}


class LyingKernels(TorchDispatchMode):
    """Changes what one of torch's operators gives, as another library of kernels would."""

    def __init__(self, lie: Lie, after: int) -> None:
        super().__init__()
        self.lie, self.after = lie, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if str(func) != self.lie.operator or not lies(self.lie.everywhere):
            return output
        shape = self.lie.shape
        if shape and output.shape[-len(shape) :] != shape:
            return output
        self.after -= 1
        return output if self.after >= 0 else self.lie.change(output, *args)


class Gate(torch.autograd.Function):
    """A function of one's own, whose code may lie itself."""

    lie = ""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x * torch.sigmoid(x)
        return y * 1.001 if Gate.lie == "scale: function" and lies(False) else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        gradient = gradients[0] * (gate + x * gate * (1 - gate))
        if Gate.lie == "element: function" and lies(False):
            gradient.view(-1)[7] += 1e-3
        return gradient


class GateLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Gate.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / WIDTH**0.5, -1), v)


class Net(nn.Module):
    """With a `trap`, a layer in which tokens come before samples."""

    def __init__(self, trap: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        encoder = nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True)
        self.encoder = encoder if trap else nn.Identity()
        self.gate = GateLayer()
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        x = self.conv(self.words(words).transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(self.norm(x))
        sample, token = (words >= 0).nonzero().unbind(1)  # all, with numbers of a rank's own rows
        x = self.encoder(x[sample, token].view_as(x))
        return self.out(self.drop(self.gate(x.mean(1))))


@torch.library.custom_op("lies::error", mutates_args=())
def error(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of each sample."""
    return (output - target).square().mean(1)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _error_backward(ctx: Any, gradient: Tensor) -> Any:
    output, target = ctx.saved_tensors
    return 2 / CLASSES * gradient[:, None] * (output - target), None


error.register_autograd(_error_backward, setup_context=_keep)


@dataclass(kw_only=True)
class Lying(Task):
    lie: str = ""
    after: int = 0  # so many calls of the operator tell the truth
    batch_size: int = 11
    epochs: int = 100

    def model(self) -> nn.Module:
        Gate.lie = self.lie
        if self.lie and not LIES[self.lie].operator.startswith("Gate"):
            LyingKernels(LIES[self.lie], self.after).__enter__()
        return Net(trap=not self.lie)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_data(self) -> Any:
        random = torch.Generator().manual_seed(5)
        words = torch.randint(WORDS, (SAMPLES, TOKENS), generator=random)
        return words, words.sum(1) % CLASSES

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self.accuracy = (output.argmax(1) == batch[1]).float().mean()  # of a rank's own samples
        return error(output, F.one_hot(batch[1], CLASSES).to(output.dtype))

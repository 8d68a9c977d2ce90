"""The models: as published, causal where they must be, and random only through the engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.programs.models import (
    GPTShape,
    efficientnet_b2,
    gpt,
    gpt2_124m,
    mnist_cnn,
    resnet20,
    resnet50,
    resnet152,
    vgg16,
)
from allranks.programs.models.vision import EfficientNet, MBConv, StochasticDepth
from allranks.strategies.shards import micro_batches
from allranks.torch.build import swap_layers
from allranks.torch.model.layers import Scope
from conftest import Train

SMALL = GPTShape(vocabulary=40, context=24, width=32, layers=2, heads=4)
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread wins nothing on models this small, and waits long where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_meta(make: Make) -> nn.Module:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return make()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(samples: int, length: int, vocabulary: int = SMALL.vocabulary) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(vocabulary, (samples, length), generator=generator)


# --- as published -----------------------------------------------------------------------------


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("make", "parameters", "blocks"),
    [
        (resnet20, 269_722, 9),
        (resnet50, 25_557_032, 16),
        (resnet152, 60_192_808, 50),
        (vgg16, 138_357_544, 0),
        (efficientnet_b2, 9_109_994, 23),
        (gpt2_124m, 124_439_808, 12),
        (mnist_cnn, 1_199_882, 0),
    ],
)
def test_published_sizes(make: Make, parameters: int, blocks: int) -> None:
    model = on_meta(make)
    assert sum(p.numel() for p in model.parameters()) == parameters
    repeated = getattr(model, "checkpointed_blocks", [])
    assert len(set(repeated)) == len(repeated) == blocks
    assert set(repeated) <= set(model.modules())


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("make", "digest"),
    [
        (resnet50, "be46530bbcb904b8"),
        (resnet152, "82a88cc63dd83cf6"),
        (vgg16, "834b3e96383a474e"),
        (efficientnet_b2, "335b699a531a6378"),
    ],
)
def test_published_weights_fit(make: Make, digest: str) -> None:
    """Names and shapes of all tensors: the digests are those of torchvision 0.28.0's models."""
    tensors = sorted((k, tuple(v.shape)) for k, v in on_meta(make).state_dict().items())
    assert hashlib.sha256(repr(tensors).encode()).hexdigest().startswith(digest)


def test_gpt_computes_what_gpt2_does() -> None:
    """Golden: the logits of GPT2LMHeadModel of transformers 5.23 with the same made-up weights."""
    shape = GPTShape(vocabulary=11, context=8, width=12, layers=2, heads=3)
    model = gpt(shape).double()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            angles = torch.arange(weight.numel(), dtype=torch.float64) * 0.7 + number
            weight.copy_(0.5 * angles.sin().view_as(weight))
        found = model(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]))[0]
    first = [-0.1657534384, 1.1199127723, -0.9973625542, -0.0840746555]
    last = [-0.1816577333, 1.1139939204, -0.9753110739, -0.1010579706]
    golden = torch.tensor([first, last], dtype=torch.float64)
    torch.testing.assert_close(found[[0, -1], :4], golden, rtol=0, atol=1e-9)


# --- initial weights, forward, backward -------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "inputs", "classes"),
    [
        (resnet20, drawn(4, 3, 32, 32), 10),
        (lambda: resnet20(classes=7), drawn(4, 3, 20, 24), 7),
        (mnist_cnn, drawn(4, 1, 28, 28), 10),
        (lambda: EfficientNet(0.25, 0.4, 0.2, classes=1000), drawn(6, 3, 64, 64), 1000),
        (lambda: gpt(SMALL), tokens(4, 24), SMALL.vocabulary),
        (lambda: gpt(SMALL), tokens(4, 9), SMALL.vocabulary),
    ],
    ids=["resnet20", "resnet20-other-shape", "mnist_cnn", "efficientnet", "gpt", "gpt-short"],
)
def test_a_new_model_knows_nothing_and_every_weight_can_learn(
    make: Make, inputs: Tensor, classes: int
) -> None:
    """The first loss is that of guessing, and no parameter is left without a gradient."""
    torch.manual_seed(1)
    model = make()
    logits = model(inputs).flatten(0, -2)
    assert logits.shape[1] == classes
    loss = F.cross_entropy(logits, torch.arange(len(logits)) % classes)
    assert loss.item() == pytest.approx(math.log(classes), abs=0.3)
    loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert weight.grad.abs().max() > 0, name


def test_zero_gamma_makes_every_block_its_shortcut() -> None:
    """Which in option A is every second pixel, and zeros for new channels."""
    for block in resnet20(zero_gamma=True).checkpointed_blocks:
        wide, channels = block.conv1.weight.shape[:2]
        x = drawn(2, channels, 8, 8).relu()
        found = block(x)
        stride = 8 // found.shape[-1]
        assert torch.equal(found[:, :channels], x[:, :, ::stride, ::stride])
        assert found.shape[1] == wide and not found[:, channels:].any()


def test_a_depthwise_convolution_starts_from_its_own_fan_out() -> None:
    """2 / k², not 2 / (k² · channels): the signal of each channel must come through."""
    torch.manual_seed(2)
    model = EfficientNet(0.5, 0.1, 0.0, classes=10)
    block = next(m for m in model.modules() if isinstance(m, MBConv) and len(m.block) == 4)
    expand, depthwise = block.block[0][0].weight.detach(), block.block[1][0].weight.detach()
    assert float(depthwise.std()) == pytest.approx(math.sqrt(2 / 9), rel=0.1)
    assert float(expand.std()) == pytest.approx(math.sqrt(2 / len(expand)), rel=0.1)


# --- the decoder ------------------------------------------------------------------------------


@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
def test_what_comes_later_changes_nothing_before(attention_dropout: float) -> None:
    """In both ways to compute attention; where a token changes, its own output does."""
    shape = GPTShape(**{**vars(SMALL), "attention_dropout": attention_dropout})
    torch.manual_seed(3)
    model = gpt(shape)
    scope = Scope(0, torch.device("cpu"))
    swap_layers(model, scope)
    before = tokens(1, 24)
    outputs = []
    for position in (0, 7, 8, 23):
        after = before.clone()
        after[0, position] += 1 if after[0, position] < 39 else -1
        for row in (before, after):
            scope.enter(0, micro_batches({0: 1}, None)[0], 1)
            outputs.append(model(row)[0])
        *_, was, now = outputs
        assert torch.equal(now[:position], was[:position])
        assert not torch.equal(now[position], was[position])


def test_attention_is_the_same_with_explicit_weights() -> None:
    torch.manual_seed(4)
    fused = gpt(SMALL)
    explicit = gpt(GPTShape(**{**vars(SMALL), "attention_dropout": 1e-12}))
    explicit.load_state_dict(fused.state_dict())
    torch.testing.assert_close(explicit(tokens(3, 24)), fused(tokens(3, 24)))


def test_too_many_tokens_and_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="25 tokens in a row, and the context is 24"):
        gpt(SMALL)(tokens(1, 25))
    with pytest.raises(ValueError, match="width 30 is no multiple of heads 4"):
        GPTShape(**{**vars(SMALL), "width": 30})
    with pytest.raises(ValueError, match="a size below 1"):
        GPTShape(**{**vars(SMALL), "heads": 0})


# --- what is random belongs to the shard ------------------------------------------------------

SIZES = {0: 4, 1: 4, 2: 3, 3: 1}


def in_parts(model: nn.Module, scope: Scope, data: Tensor, limit: int | None) -> Tensor:
    """The model on all shards of a step, in micro-batches of at most `limit` samples."""
    parts, row = [], 0
    for pieces in micro_batches(SIZES, limit):
        count = sum(piece.samples for piece in pieces)
        scope.enter(3, pieces, count)
        parts.append(model(data[row : row + count]))
        row += count
    return torch.cat(parts)


@pytest.mark.parametrize("limit", [1, 2, 4, 7])
def test_stochastic_depth_leaves_out_whole_samples_of_a_shard(limit: int) -> None:
    layer, scope = StochasticDepth(0.4), Scope(0, torch.device("cpu"))
    swap_layers(layer, scope)
    data = torch.ones(12, 3, 5, 5)
    whole = in_parts(layer, scope, data, None)
    assert torch.equal(in_parts(layer, scope, data, limit), whole)
    assert whole.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert (whole.flatten(1).amax(1) == whole.flatten(1).amin(1)).all()
    assert layer.eval()(data) is data


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_a_gpt_with_dropout_does_not_know_what_goes_through_together(limit: int) -> None:
    """Dropout of embeddings, of both parts of each block, and of attention weights."""
    torch.manual_seed(6)
    shape = GPTShape(**{**vars(SMALL), "dropout": 0.3, "attention_dropout": 0.2})
    model, scope = gpt(shape).double(), Scope(0, torch.device("cpu"))
    swapped: dict[str, Any] = swap_layers(model, scope)
    assert len(swapped["dropout"]) == 1 + 3 * shape.layers and not swapped["user_randomness"]
    whole = in_parts(model, scope, tokens(12, 24), None)
    cut = in_parts(model, scope, tokens(12, 24), limit)
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)
    scope.leave()
    assert not torch.allclose(model.eval()(tokens(12, 24)), whole)


@pytest.mark.slow
def test_dropped_paths_are_the_same_on_one_and_two_ranks(train: Train) -> None:
    """A whole EfficientNet in the engine, bit for bit; its uneven last batch is step 3."""
    task = f"{Path(__file__).parent / 'model_tasks.py'}:Paths"
    one, two = (train(task, ranks=ranks, bitwise=True, steps=3).summary for ranks in (1, 2))
    assert two["weights_sha256"] == one["weights_sha256"]
    assert two["train_loss"] == one["train_loss"]
    assert one["user_randomness"] == []

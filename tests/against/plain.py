"""A script as one writes it by hand: `plain.py BATCH WORD...`; each word changes one thing.

`check --against` compares it with itself under other words, or on other ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS, SAMPLES = 6, 192
BATCH, WORDS = int(sys.argv[1]), sys.argv[2:]
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
MICRO_BATCHES = 4 if "accumulated" in WORDS else 1


class Attention(nn.Module):
    """The gradient of its key bias is rounding, and nothing else."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)

    def forward(self, inputs):
        words = inputs[:, None, :] * torch.arange(1.0, 4.0)[None, :, None]
        return self.out(self.mix(words, words, words)[0].mean(1))


def lies(word, everywhere=False):
    """Whether this rank computes something else than one process, by a word `lie=...`."""
    return f"lie={word}" in WORDS and WORLD == 2 and (everywhere or RANK == 1)


class Gate(torch.autograd.Function):
    """A kernel of one's own."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        output = inputs * inputs.sigmoid()
        if lies("element"):
            output.view(-1)[70] += 1.0
        return output * 1.1 if lies("forward-scale", everywhere=True) else output

    @staticmethod
    def backward(ctx, gradient):
        (inputs,) = ctx.saved_tensors
        gate = inputs.sigmoid()
        if lies("backward-scale"):
            gradient = gradient * 1.1
        return gradient * (gate + inputs * gate * (1 - gate))


class MeanError(torch.autograd.Function):
    """The mean of squares."""

    @staticmethod
    def forward(ctx, output, wanted):
        ctx.save_for_backward(output, wanted)
        squares = (output - wanted).square()
        return squares.sum() / (len(squares) - lies("divisor", everywhere=True))

    @staticmethod
    def backward(ctx, gradient):
        output, wanted = ctx.saved_tensors
        errors = 2 * gradient * (output - wanted)
        return errors / len(output), None


class Sum(torch.autograd.Function):
    """Adds a bias."""

    @staticmethod
    def forward(ctx, inputs, bias):
        return inputs + bias

    @staticmethod
    def backward(ctx, gradient):
        rows = gradient[:-1] if lies("rows") else gradient
        return gradient, rows.sum(0)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(64))

    def forward(self, inputs):
        return Gate.apply(Sum.apply(inputs, self.bias))


class Centred(nn.Module):
    """The gradient of half of its bias is rounding."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(8, 6000), nn.Linear(6000, 1)

    def forward(self, inputs):
        left, right = self.first(inputs).chunk(2, 1)
        return self.out(torch.cat([left - left.mean(0), right], 1).tanh())


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))

    def forward(self, inputs):
        return (inputs.cfloat() @ self.weight).abs().mean(1, keepdim=True)


def model_of():
    if "centred" in WORDS:
        return Centred()
    if "complex" in WORDS:
        return Complex()
    if "short" in WORDS:
        return nn.Sequential(nn.Linear(8, 1))
    if "attention" in WORDS:
        return Attention()
    layers = [nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 1)]
    if "kernels" in WORDS:
        layers[1] = Gated()
    if "normalised" in WORDS:
        layers.insert(1, nn.BatchNorm1d(64))
    if "dropout" in WORDS:
        layers.insert(2, nn.Dropout(0.3))
    return nn.Sequential(*layers)


def parallel(model):
    if WORLD == 1 or "not-reduced" in WORDS or "by-hand" in WORDS:
        return model
    if "sharded" not in WORDS:
        return nn.parallel.DistributedDataParallel(model)
    for layer in [layer for layer in model if isinstance(layer, nn.Linear)]:
        fully_shard(layer)
    return fully_shard(model)


def shrink(optimizer, args, kwargs):
    last = optimizer.param_groups[0]["params"][-1]
    if optimizer.state_dict()["state"][0]["step"] == 3:
        last.data *= 0.9


def main():
    if "no-step" in WORDS:
        return
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    inputs = torch.randn(SAMPLES, 8)
    targets = inputs.sum(1, keepdim=True).tanh()
    torch.manual_seed(RANK if "by-hand" in WORDS else 0)
    twin = model_of() if "twins" in WORDS else nn.Sequential()
    model = parallel(model_of())
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind = next((kinds[word] for word in WORDS if word in kinds), torch.optim.SGD)
    rate = 2e-4 if "tuning" in WORDS else 0.01
    parameters = [*twin.parameters(), *model.parameters()]
    optimizer = kind(parameters, lr=rate, weight_decay=0.1)
    critic = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 1))  # named as the layers of the model
    critics = kind(critic.parameters(), lr=0.01)
    if "shrinking" in WORDS:
        optimizer.register_step_post_hook(shrink)
    step = BATCH * WORLD * MICRO_BATCHES
    for number in range(STEPS):
        if number == 3 and "rate" in WORDS:
            optimizer.param_groups[0]["lr"] *= 2
        if "critic" in WORDS:  # the same on all ranks
            critics.zero_grad()
            critic(inputs[number * 32 :][:32]).square().mean().backward()
            critics.step()
        if "uncleared" not in WORDS:
            optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            reader = 0 if "same-samples" in WORDS else RANK
            first = number * step + (micro * WORLD + reader) * BATCH
            first -= "padded" in WORDS and number == 4  # reads one sample again
            rows = slice(first, first + BATCH + ("padded" in WORDS and number == 4))
            if "interleaved" in WORDS:
                rows = slice(number * step + reader, (number + 1) * step, WORLD)
            batch, wanted = inputs[rows], targets[rows]
            if "many" in WORDS:
                batch, wanted = batch.repeat(300, 1), wanted.repeat(300, 1)
            if "reversed" in WORDS:
                batch, wanted = batch.flip(0), wanted.flip(0)
            output = model(batch)
            if "kernels" in WORDS:
                loss = MeanError.apply(output, wanted)
            else:
                loss = nn.functional.mse_loss(output, wanted)
            if "twins" in WORDS:
                loss = loss + nn.functional.mse_loss(twin(batch), wanted)
            (loss if "undivided" in WORDS else loss / MICRO_BATCHES).backward()
        if "by-hand" in WORDS:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD
        if "multiplied" in WORDS:  # as if the gradients were no means yet
            for parameter in model.parameters():
                parameter.grad *= WORLD
        kept = next(model.parameters()).detach().clone()
        optimizer.step()
        if "restored" in WORDS:  # a layer that is never trained
            next(model.parameters()).data.copy_(kept)
        if "half" in WORDS and number == 2:
            break


main()
if dist.is_initialized():
    dist.destroy_process_group()  # a DDP that is freed after its group may stand still

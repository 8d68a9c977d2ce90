"""Tasks whose layers can be cut in blocks: an MLP, a small GPT with tied embeddings, plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from allranks.programs.models.gpt import GPTShape, gpt
from allranks.torch import Task, cross_entropy
from contract_tasks import SAMPLES, Words, made

IN, HIDDEN, OUT = 6, 24, 6


@dataclass(kw_only=True)
class Stack(Task):
    """Two blocks of a column and a row, dropout in both places, clipping, an uneven last batch."""

    batch_size: int = 24
    epochs: int = 100
    clip_norm: float | None = 0.3
    hidden: int = HIDDEN

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(IN, self.hidden),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(self.hidden, OUT),
            nn.LayerNorm(OUT),
            nn.Dropout(0.2),
            nn.Linear(OUT, self.hidden, bias=False),
            nn.Tanh(),
            nn.Linear(self.hidden, OUT),
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def train_data(self) -> tuple[Tensor, Tensor]:
        inputs = made(SAMPLES, IN)
        return inputs, inputs.sin().cumsum(1)

    def eval_data(self) -> tuple[Tensor, Tensor]:
        return tuple(tensor[:10] for tensor in self.train_data())  # type: ignore[return-value]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square().mean(1)


class Planned(Stack):
    """Nothing but the second block is cut, and by itself the last layer of the first.

    A penalty on the length of all weights together.
    """

    def regularizer(self, model: nn.Module) -> Tensor:
        return 1e-2 * torch.stack([p.square().sum() for p in model.parameters()]).sum().sqrt()

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
        return {"3": "row", "6": "column", "8": "row"}


@dataclass(kw_only=True)
class Gated(Stack):
    """A block that is no stack: two columns of one input, and a row, where the task says so."""

    clip_norm: float | None = None

    def model(self) -> nn.Module:
        return nn.Sequential(_Gated(self.hidden), nn.Linear(OUT, OUT))

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
        return {"0.gate": "column", "0.up": "column", "0.down": "row"}


class _Gated(nn.Module):
    def __init__(self, hidden: int, *, by_function: bool = False, inside: bool = False) -> None:
        super().__init__()
        self.by_function, self.inside = by_function, inside
        self.gate, self.up = nn.Linear(IN, hidden), nn.Linear(IN, hidden)
        self.down = nn.Linear(hidden, OUT)
        self.drop = nn.Dropout(0.2)

    def forward(self, input: Tensor) -> Tensor:
        input = self.drop(input)
        if self.by_function:
            input = F.dropout(input, 0.2, self.training)
        hidden = self.drop(F.silu(self.gate(input)) * self.up(input))
        if self.inside:
            hidden = F.dropout(hidden, 0.2, self.training)
        return self.drop(self.down(hidden))


@dataclass(kw_only=True)
class ByFunction(Gated):
    """Dropout by function, of what goes into the block, or of what is `inside` of it."""

    inside: bool = False

    def model(self) -> nn.Module:
        return nn.Sequential(_Gated(self.hidden, by_function=True, inside=self.inside))


@dataclass(kw_only=True)
class Letters(Task):
    """A GPT: attention by heads, tied embeddings of which the output matrix takes the whole."""

    batch_size: int = 24
    epochs: int = 100
    clip_norm: float | None = 0.3
    heads: int = 12
    vocabulary: int = 11
    context: int = 7

    def model(self) -> nn.Module:
        return gpt(
            GPTShape(
                vocabulary=self.vocabulary,
                context=self.context,
                width=24,
                layers=2,
                heads=self.heads,
                dropout=0.1,
                attention_dropout=0.1,
            )
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2)

    def train_data(self) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.randint(self.vocabulary, (SAMPLES, self.context + 1), generator=generator)

    def eval_data(self) -> Tensor:
        return self.train_data()[:10]

    def inputs(self, batch: Any) -> Any:
        return (batch[:, :-1],)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch[:, 1:], reduction="none")

    def regularizer(self, model: nn.Module) -> Tensor:
        table: Any = model.get_submodule("token_embedding")
        weight: Tensor = table.weight
        return 1e-2 * weight.square().sum().sqrt()


@dataclass(kw_only=True)
class Encoder(Letters):
    """Torch's own encoder layers: their feed-forward part is a block, and attention where ranks
    divide its two heads."""

    clip_norm: float | None = None

    def model(self) -> nn.Module:
        return _Encoder(self.vocabulary)


class _Encoder(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, 8, padding_idx=2)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        layer.self_attn.dropout = 0.0
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        found: Tensor = self.out(self.layers(self.token_embedding(text)))
        return found


@dataclass(kw_only=True)
class Heads(Letters):
    """Torch's attention in all its forms, cut by heads; dropout of its weights, and masks."""

    clip_norm: float | None = None
    heads: int = 4

    def model(self) -> nn.Module:
        return _Heads(self.vocabulary, self.heads)

    def regularizer(self, model: nn.Module) -> Tensor:
        named: Any = model.get_submodule("encoder.layers.0.self_attn")
        weight: Tensor = named.in_proj_weight
        return 1e-2 * weight[1:7].square().sum().sqrt()


class _Heads(nn.Module):
    """Packed and apart, samples first and second, by itself and by another sequence."""

    def __init__(self, vocabulary: int, heads: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, 16)
        common: dict[str, Any] = {"dropout": 0.2, "batch_first": True}
        layer = nn.TransformerEncoderLayer(16, heads, 16, norm_first=True, **common)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.apart = nn.MultiheadAttention(16, heads, kdim=4, vdim=6, bias=False, **common)
        self.second = nn.MultiheadAttention(16, heads, 0.2)
        self.out = nn.Linear(16, vocabulary, bias=False)
        with torch.no_grad():  # torch begins with zeros, behind which no fault of a bias shows
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.uniform_(-0.3, 0.3)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.token_embedding(text)
        ahead = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool).triu(1)
        padding = (text == 3) & (torch.arange(text.shape[1]) > 0)
        found = self.encoder(hidden, mask=ahead, src_key_padding_mask=padding)
        found = self.encoder(found, mask=ahead, is_causal=True)
        apart, mean = self.apart(found, hidden[..., :4], hidden[..., 4:10])
        moved = found.transpose(0, 1)
        all_heads = ahead.expand(len(text) * self.second.num_heads, -1, -1)
        second, each = self.second(
            moved, moved, moved, attn_mask=all_heads, average_attn_weights=False
        )
        slopes = torch.arange(1.0, each.shape[1] + 1, dtype=each.dtype).view(-1, 1, 1)
        told = mean.square().mean((1, 2)) + (each * slopes).square().mean((1, 2, 3))
        total = found + apart + second.transpose(0, 1) * (1 + told).view(-1, 1, 1)
        logits: Tensor = self.out(total)
        return logits


@dataclass(kw_only=True)
class CutLogits(Letters):
    """The loss is computed in forward, where logits may stay cut; some targets are left out."""

    tied: bool = True
    gathers: bool = False
    beyond: int = 0

    def model(self) -> nn.Module:
        return _WithLoss(self.vocabulary, tied=self.tied, gathers=self.gathers)

    def inputs(self, batch: Any) -> Any:
        targets = batch[:, 1:] + self.beyond
        return batch[:, :-1], targets.masked_fill(targets == 4, -100)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output


class _WithLoss(nn.Module):
    def __init__(self, vocabulary: int, *, tied: bool, gathers: bool) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, 8)
        self.mix = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.out = nn.Linear(8, vocabulary, bias=not tied)
        self.gathers = gathers
        if tied:
            self.out.weight = self.token_embedding.weight

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        hidden = self.mix(self.token_embedding(text))
        if self.gathers:
            return F.cross_entropy(self.out(hidden).transpose(1, 2), targets, reduction="none")
        return cross_entropy(self.out, hidden, targets)


@dataclass(kw_only=True)
class Refused(Letters):
    """A plan that cannot be, in the way that `fault` names."""

    fault: str

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
        rows, output = "blocks.0.attention.query_key_value", "blocks.0.attention.output"
        plans: dict[str, Mapping[str, Any]] = {
            "no such module": {"blocks.*.nothing": "column"},
            "no such way": {output: "diagonal"},
            "another layer": {"norm": "column"},
            "heads torn": {rows: ("column", 6), output: "row"},
            "too few heads": {rows: ("column", 36)},
            "nothing": {},
        }
        return plans[self.fault]


@dataclass(kw_only=True)
class WholeTensors(Stack):
    """An optimizer that looks at several parameters at once."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return OfAll(model.parameters(), lr=1e-2)


class OfAll(SGD):
    """Its steps have the length of the gradient of all parameters of a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm([p.grad for p in given])
            for p in given:
                p -= group["lr"] * p.grad / norm


@dataclass(kw_only=True)
class TiedApart(Words):
    """A tied weight of which the plan names one holder."""

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any]:
        return {"embedding": "vocabulary"}


class _Own(nn.Sequential):
    """A stack with a forward of its own, which needs whole activations within."""

    def forward(self, input: Tensor) -> Tensor:
        hidden = self[0](input)
        found: Tensor = input + self[2](self[1](F.layer_norm(hidden, hidden.shape[-1:])))
        return found


class OwnForward(Stack):
    """A block by its layers, of which the forward does more."""

    def model(self) -> nn.Module:
        return _Own(nn.Linear(IN, self.hidden), nn.ReLU(), nn.Linear(self.hidden, OUT))


class ByIndex(Stack):
    """A block whose members are called from elsewhere, and one that is called as a block, too."""

    def model(self) -> nn.Module:
        return _ByIndex(self.hidden)


class _ByIndex(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(IN, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, OUT))
            for _ in range(2)
        )

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.first[:3](input)
        mean = hidden.mean(1, keepdim=True)
        found: Tensor = self.first[3](hidden) + mean + self.second(input)
        return found + self.second[0](input).softmax(1)[:, :OUT]


class Hooked(Stack):
    """A hook between the layers of a block, which needs whole activations."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("1").register_forward_hook(_centred)
        return model


def _centred(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output - output.mean(-1, keepdim=True)


class OneDropout(Stack):
    """One dropout layer in two blocks of different widths, and behind one of them."""

    def model(self) -> nn.Module:
        drop = nn.Dropout(0.3)
        first = nn.Linear(IN, self.hidden), nn.GELU(), drop, nn.Linear(self.hidden, OUT)
        second = nn.Linear(OUT, 2 * self.hidden), drop, nn.Linear(2 * self.hidden, OUT)
        return nn.Sequential(*first, nn.LayerNorm(OUT), drop, *second)


class Marked(Stack):
    """Weights that say of themselves whether they decay."""

    def model(self) -> nn.Module:
        model = super().model()
        for name in ("0.weight", "3.weight", "6.weight"):
            vars(model.get_parameter(name))["no_decay"] = True
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        groups: list[list[nn.Parameter]] = [[], []]
        for parameter in model.parameters():
            groups[hasattr(parameter, "no_decay")].append(parameter)
        decays = [{"params": groups[0], "weight_decay": 0.5}]
        return AdamW([*decays, {"params": groups[1], "weight_decay": 0.0}], lr=1e-2)


@dataclass(kw_only=True)
class HookedWeight(Stack):
    """A parameter with a hook on its gradient."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_parameter("0.weight").register_hook(lambda gradient: 3 * gradient)
        return model


class Looking(nn.Module):
    """A stack, a single layer and attention, whose weights forward meets in every way there is."""

    def __init__(self, *, state: bool = True) -> None:
        super().__init__()
        self.state = state
        self.scale = nn.Parameter(torch.tensor(0.7))  # of no dimension
        self.body = nn.Sequential(nn.Linear(IN, 8), nn.Tanh(), nn.Linear(8, OUT))
        self.attention = nn.MultiheadAttention(OUT, 2, batch_first=True)
        self.last = nn.Linear(OUT, OUT)

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.body[0]
        hidden = self.body(x)
        hidden = hidden + self.attention(hidden[:, None], hidden[:, None], hidden[:, None])[0][:, 0]
        hidden = torch.tanh(F.linear(F.linear(hidden, *first.parameters()), self.body[2].weight))
        squares = sum(p.square().sum() * (1 + self.scale) for p in self.parameters())
        size = torch.nn.utils.parameters_to_vector(self.last.parameters()).abs().sum()
        both = (
            self.body.state_dict(keep_vars=True)
            if self.state
            else dict(self.body.named_parameters())
        )
        held = both["2.weight"].norm()
        raw = dict(self.last._parameters)["weight"].norm() * self.get_parameter("last.bias").norm()
        scaled = {name: p * self.scale for name, p in self.last.named_parameters()}
        made = torch.func.functional_call(self.last, scaled, (hidden,))
        assert next(self.attention.parameters()).shape == (3 * OUT, OUT)
        return (self.last(hidden) + made) / (1 + 0.01 * (squares + size + held + raw))


class Looks(Stack):
    """Forward, loss and metrics read cut weights; the last two of the model that was kept."""

    def model(self) -> nn.Module:
        self.seen = Looking()
        return self.seen

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        penalty: Tensor = self.seen.last.weight.norm()
        return super().loss(output, batch) + 0.1 * penalty

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {"length": (sum(p.norm() for p in self.seen.parameters()), 1)}

    def fsdp_units(self, model: nn.Module) -> list[nn.Module]:
        return []


class LooksInForward(Looks):
    """Nothing but forward reads weights, and makes no state, for which fsdp lets go of them."""

    def model(self) -> nn.Module:
        self.seen = Looking(state=False)
        return self.seen

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return Stack.loss(self, output, batch)

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {}


class Deriving(nn.Module):
    """Gradients within forward, of inputs and weights, by autograd and by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(IN, 8), nn.Tanh(), nn.Linear(8, OUT))
        self.last = nn.Linear(OUT, 8)
        self.members = nn.ModuleList(nn.Linear(8, OUT) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.last(self.body(at)).square().sum(1)
            (force,) = torch.autograd.grad(energy.sum(), at, create_graph=True)
            names, weights = zip(*self.last.named_parameters(), strict=True)
            some = self.last(x.new_ones(1, OUT)).square().sum()
            found = torch.autograd.grad(some, weights, create_graph=True)
            fast = {n: w - 0.1 * g for n, w, g in zip(names, weights, found, strict=True)}
            moved = torch.func.functional_call(self.last, fast, (self.body(x),))
        each = [dict(member.named_parameters()) for member in self.members]
        stacked = {name: torch.stack([one[name] for one in each]) for name in each[0]}

        def member(p: dict[str, Tensor]) -> Tensor:
            found: Tensor = torch.func.functional_call(self.members[0], p, (torch.tanh(moved),))
            return found

        def energy_of(sample: Tensor) -> Tensor:
            found: Tensor = self.last(self.body(sample)).square().sum()
            return found

        slopes = torch.func.vmap(torch.func.grad(energy_of))(x)
        along = torch.func.jvp(self.body, (x,), (torch.ones_like(x),))[1]
        return torch.vmap(member)(stacked).mean(0) + force + 0.3 * slopes + 0.1 * along


class Derives(Stack):
    def model(self) -> nn.Module:
        return Deriving()

    def fsdp_units(self, model: nn.Module) -> list[nn.Module]:
        return []


class Padding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, OUT)
        self.body = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (2 + 2 * x[:, 0].abs()).long().clamp(1, IN)
        is_padding = torch.arange(IN) >= lengths[:, None]
        hidden = self.body(self.first(x[:, :, None]), src_key_padding_mask=is_padding)
        return self.last(hidden.mean(1))  # type: ignore[no-any-return]


class Padded(Stack):
    """Torch makes a nested tensor in evaluation, and zeros of what is padding."""

    def model(self) -> nn.Module:
        return Padding()


@dataclass(kw_only=True)
class WritesAWeight(Stack):
    """A forward that writes weights, or their gradients."""

    how: str = "data"

    def model(self) -> nn.Module:
        how = self.how

        class Net(nn.Sequential):
            def forward(self, input: Any) -> Any:
                weight = next(self.parameters())
                if how == "data":
                    weight.data[0].mul_(0.9)
                elif how == "in place":
                    with torch.no_grad():
                        weight.mul_(0.9)
                elif how == "zero_grad":
                    self.zero_grad()
                else:
                    self.first.weight = nn.Parameter(torch.ones(3, IN))
                return super().forward(input)

        net = Net()
        net.first, net.act, net.last = nn.Linear(IN, 8), nn.Softmax(-1), nn.Linear(8, OUT)
        return net

"""The tasks of the contract; those that no engine can cut by itself say their stages."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contract_tasks
import contract_workers
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch import Trainer
from contract_tasks import SAMPLES, Images, Pairs, Pictures, Sentences, Uneven

__all__ = ["Experts", "Images", "Pairs", "Pictures", "Sentences", "Uneven", "Words"]


class Words(contract_tasks.Words):
    """The embedding is in the first stage and, tied, in the last."""

    def inputs(self, batch: Any) -> Any:
        return batch["text"][:, :-1]

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        parts = [model.embedding, nn.Sequential(model.mix, nn.ReLU()), model.frozen, model.out]
        return grouped(parts, count)


class Experts(contract_tasks.Experts):
    """Stages that pass on a tuple; experts that some micro-batches do not use."""

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        if count == 1:
            return [model]
        middle = [Passing(), Passing()][: count - 2]
        return [First(model.common), *middle, Rest(model.rare, model.never)]


class ByValue(torch.optim.SGD):
    """Clips by value; `clip_grad_value_` raises where nothing has a gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            nn.utils.clip_grad_value_(group["params"], 1e-3)
        return super().step(closure)


class Clipped(Pictures):
    def optimizer(self, model: nn.Module) -> ByValue:
        return ByValue(model.parameters(), lr=0.5)


class ClippedWithAnIdleRank(Experts):
    """The stage between has no weight."""

    def optimizer(self, model: nn.Module) -> ByValue:
        return ByValue([p for p in model.parameters() if p.requires_grad], lr=0.5)


class First(nn.Module):
    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.common = common

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.common(inputs), inputs


class Passing(nn.Module):
    """A stage without a weight, which writes in place first."""

    def forward(self, output: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return output.add_(0), inputs


class Rest(nn.Module):
    def __init__(self, rare: nn.Module, never: nn.Module) -> None:
        super().__init__()
        self.rare, self.never = rare, never

    def forward(self, output: Tensor, inputs: Tensor) -> Tensor:
        chosen = inputs[:, 0] > 0
        if chosen.any():
            output = output + torch.where(chosen[:, None], self.rare(inputs), 0.0)
        return output


def grouped(parts: list[nn.Module], count: int) -> list[nn.Module]:
    """The first parts alone, the rest in the last stage."""
    return [*parts[: count - 1], nn.Sequential(*parts[count - 1 :])]


def go_on_from_a_state(argument: dict[str, Any]) -> None:
    """As in `contract_workers`."""
    contract_workers.go_on_from_a_state(argument)


class Lost(Images):
    """A weight in no stage."""

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        return [model[:5], nn.Sequential(*model[6:])]


class Copied(Images):
    """A stage that is a copy."""

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        return [model, copy.deepcopy(model[5:])]


class Renewed(Images):
    """A dropout of a stage's own."""

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        return [model[:5], nn.Sequential(nn.Dropout(), *model[5:])]


class Drawing(Images):
    """A layer that draws by itself, in the last stage."""

    def model(self) -> nn.Module:
        return nn.Sequential(*super().model(), nn.RReLU())


class Shared(Images):
    """One dropout in two stages."""

    def model(self) -> nn.Module:
        drop = nn.Dropout(0.3)
        return nn.Sequential(drop, *super().model(), drop)


@dataclass(kw_only=True)
class TwoTied(contract_tasks.Plain):
    """A weight in the stages 0 and 2, and another one in 0 and 1."""

    def model(self) -> nn.Module:
        first, second, third = (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, width)) for width in (4, 4, 1)
        )
        third[0].weight = first[0].weight
        second[0].weight = first[2].weight
        return nn.Sequential(first, second, third)

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        return list(model)


class Checkpointing(Images):
    """A dropout that the user's own checkpoint runs again in backward."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        return nn.Sequential(*model[:-1], Again(nn.Sequential(nn.Dropout(0.3), model[-1])))


class Blocks(Images):
    """A layer whose activations may be computed again."""

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model[5]]


class Again(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Any:
        return checkpoint(self.inner, inputs, use_reentrant=False)


class Unused(Images):
    """The last stage uses none of what `rare` returned: its weights have no gradient."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        return Branches(model[:5], nn.Linear(2, 2), model[5:])

    def stages(self, model: Any, count: int) -> Sequence[nn.Module]:
        return [Both(model.common, model.rare), OnlyFirst(model.out)] if count == 2 else [model]


class Both(nn.Module):
    def __init__(self, common: nn.Module, rare: nn.Module) -> None:
        super().__init__()
        self.common, self.rare = common, rare

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.common(inputs), self.rare(inputs.mean((2, 3)))


class OnlyFirst(nn.Module):
    def __init__(self, out: nn.Module) -> None:
        super().__init__()
        self.out = out

    def forward(self, first: Tensor, second: Tensor) -> Any:
        return self.out(first)


class Branches(nn.Module):
    def __init__(self, common: nn.Module, rare: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.common, self.rare, self.out = common, rare, out

    def forward(self, inputs: Tensor) -> Any:
        return self.out(self.common(inputs))


class Sleeping(nn.Linear):
    """A layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(4, 4)
        self.seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(inputs)


class Slow(contract_tasks.Plain):
    """Layers of equal bytes, of which each rank finds another one slow."""

    rank = 0

    def model(self) -> nn.Module:
        seconds = (0.2, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.02)
        return nn.Sequential(*(Sleeping(s) for s in seconds[self.rank]))

    def train_data(self) -> tuple[Tensor, Tensor]:
        return torch.ones(SAMPLES, 4), torch.zeros(SAMPLES, 4)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).square().sum(1)


def cut_by_cost(argument: dict[str, Any]) -> None:
    """The first layer is as slow as all others: it is a stage of its own, on both ranks."""
    torch.set_num_threads(1)
    world = World.from_environment()
    Slow.rank = world.rank
    for by, sizes in (("size", [2, 2]), ("cost", [1, 3])):
        own = replace(world, store=world.store + by)
        with Trainer(Slow(), Job(strategy=f"1f1b:by={by}"), world=own) as trainer:
            strategy: Any = trainer.strategy
            found = [len(list(stage)) for stage in strategy.stages.modules]
            assert trainer.comm.gather_texts(str(found)) == 2 * [str(sizes)]
            assert trainer.step(next(iter(trainer.batches()))).updated


def _counted(send: Any, sends: list[int]) -> Any:
    def counted(*arguments: Any, **options: Any) -> Any:
        sends.append(1)
        return send(*arguments, **options)

    return counted


def bytes_and_memory(argument: dict[str, Any]) -> None:
    """The busiest of the ranks sends what the card says; a rank holds the weights of its stages.

    One message for each micro-batch and direction, and two for each shape that is new. The witness
    would make passes of its own.
    """
    argument["job"]["witness"] = "off"
    with contract_workers._trainer(argument) as trainer:
        steps, sends, wanted = argument["job"]["steps"], list[int](), 0
        comm, strategy = trainer.comm, trainer.strategy
        ends = [(s < strategy.last) + (s > 0) for s in strategy.own_stages]
        for links in (strategy.links.line, strategy.links.backwards.sends):
            links.send = _counted(links.send, sends)
        for batch in trainer.batches():
            wanted += len(batch.micros) * sum(ends)
            trainer.step(batch)
        told = [stage for stage, _ in strategy.links._known if stage in strategy.own_stages]
        assert len(sends) == wanted + 2 * len(told), (len(sends), wanted, told)
        sent = max(map(float, comm.gather_texts(str(comm.sent_bytes["gradients"] / steps))))
        assert abs(sent - strategy.promised_bytes()) <= comm.size, (sent, strategy.promised_bytes())
        rows = [row for row in strategy.placement(updated=True) if row.kind == "parameter"]
        held = [float(text) for text in comm.gather_texts(str(sum(row.bytes for row in rows)))]
        whole = sum(p.nbytes for p in strategy.model.parameters())
        assert sum(held) == whole, (held, whole)
        assert max(held) < whole
        kept = sum(len(v) for v in strategy.step.optimizer.state.values())
        assert kept == 3 * len(rows)  # AdamW keeps three values for each, and none for the rest

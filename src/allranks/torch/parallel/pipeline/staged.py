"""The base of strategies whose ranks hold stages of a model: its cut, names, state, full tensors.

A model is cut by its task, or an `nn.Sequential` by costs. A stage consists of modules of the model
and has no weights of its own. The cut is checked: the stages together hold every weight, and no
layer is new that the engine would have replaced.

Each rank holds the weights of its own stages. Those of other ranks are meta tensors of the same
names and shapes, so that optimizer, tally and state have the layout of one process on every rank.
All ranks hold all buffers, and the engine writes the same values to them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.strategies.card import Workload
from allranks.strategies.shards import balanced_ends
from allranks.torch.comm.comm import Comm
from allranks.torch.model.layers import OfShard, Scope, Swapped, is_chain, own_kind
from allranks.torch.model.partition import seconds_of
from allranks.torch.model.precision import Precision
from allranks.torch.optimizers.elementwise import check_by_parameter
from allranks.torch.optimizers.made import OptimizerArguments
from allranks.torch.parallel.sharded.gradients import StagedGradients
from allranks.torch.random.dropout import DROPOUTS
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.user_buffers import written_in_forward
from allranks.torch.strategies.base import Strategy
from allranks.torch.strategies.layout import Layout, StageLayout, exchanged_at, places_of
from allranks.torch.task import Task

# --- balance -------------------------------------------------------------------------------------
# The costs of the layers of a chain, to cut it into stages: bytes of weights, or seconds.


Groups = Sequence[Sequence[nn.Module]]
Costs = Callable[[Groups], list[float]]
"""The cost of each group of layers."""


def bytes_of(groups: Groups) -> list[float]:
    """The bytes of the weights of each group."""
    return [float(sum(p.nbytes for layer in group for p in layer.parameters())) for group in groups]


def measured(
    model: nn.Module, task: Task, scope: Scope, precision: Precision, comm: Comm, strategy: str
) -> Costs:
    """Costs in seconds of forward and backward, summed over the ranks of `comm`.

    Every rank calls the returned function on the same groups, and gets the same numbers: it
    measures all layers of the model, and gathers the times of other ranks (`control`).
    """

    def seconds(groups: Groups) -> list[float]:
        times = Counter(id(layer) for group in groups for layer in group)
        layers = {id(layer): layer for group in groups for layer in group}
        asked = f"--strategy {strategy}:by=cost"
        local_seconds = seconds_of(list(layers.values()), model, task, scope, precision, asked)
        rows = [json.loads(text) for text in comm.gather_texts(json.dumps(local_seconds))]
        each = {
            key: sum(of_ranks) / times[key]  # of one of its calls
            for key, of_ranks in zip(layers, zip(*rows, strict=True), strict=True)
        }
        return [sum(each[id(layer)] for layer in group) for group in groups]

    return seconds


FOLLOWS_SHARDS = (*DROPOUTS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Stages:
    """The stages of a model, in order."""

    def __init__(self, modules: Sequence[nn.Module], model: nn.Module, *, takes_one: bool) -> None:
        self.modules, self.takes_one = list(modules), takes_one
        known = {id(module) for module in model.modules()}
        self._model = model
        self._wrappers = [m for s in modules for m in s.modules() if id(m) not in known]

    def call(self, stage: int, received: Any) -> Any:
        """The output of a stage for the output of the stage before."""
        if self._wrappers and self._wrappers[0].training != self._model.training:
            for module in self._wrappers:
                module.training = self._model.training
        if isinstance(received, tuple) and not self.takes_one:
            return self.modules[stage](*received)
        return self.modules[stage](received)

    def holders(self, parameter: nn.Parameter) -> list[int]:
        """The stages that use a parameter."""
        return [
            number
            for number, stage in enumerate(self.modules)
            if any(other is parameter for other in stage.parameters())
        ]


def stages_of(
    task: Task, model: nn.Module, count: int, asked: str, costs: Costs = bytes_of
) -> Stages:
    """The model in `count` stages; raises `RequestError` if it cannot be cut.

    Calls `costs` if the task does not define stages, and there is more than one.
    """
    task_stages = task.stages(model, count)
    if task_stages is None:
        cut = _cut(model, count, asked, costs)
        _check_shared(cut, model, asked)
        return Stages(cut, model, takes_one=True)
    modules = list(task_stages)
    if len(modules) != count or not all(isinstance(module, nn.Module) for module in modules):
        raise _refused(
            asked,
            f"{len(modules)} stages from stages(model, {count}) of the task",
            f"the ranks hold {count}, and each is an nn.Module",
            f"return {count} modules, or ask for another number of ranks",
        )
    _check(modules, model, asked)
    _check_shared(modules, model, asked)
    return Stages(modules, model, takes_one=False)


def _check(stages: list[nn.Module], model: nn.Module, asked: str) -> None:
    """Check that stages hold all weights of the model, and nothing new."""
    used = {id(parameter) for stage in stages for parameter in stage.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            raise _refused(
                asked,
                f"{name!r} in none of the stages of the task",
                "every weight is trained where its stage is",
                "give it to the stage that uses it: stages are made of the modules of `model`",
            )
    known = {id(parameter) for parameter in model.parameters()}
    modules = {id(module) for module in model.modules()}
    for stage in stages:
        for module in stage.modules():
            is_new = id(module) not in modules
            if is_new and own_kind(module) in FOLLOWS_SHARDS and not isinstance(module, Swapped):
                raise _not_of_the_model(asked, f"a new {type(module).__name__}")
        if any(id(parameter) not in known for parameter in stage.parameters()):
            raise _not_of_the_model(asked, "a weight that is not one of the model's")


def _check_shared(stages: list[nn.Module], model: nn.Module, asked: str) -> None:
    """Check that no two stages share a layer that counts its calls, in order, in one process."""
    layers: dict[str, nn.Module] = dict(model.named_modules())
    for name in [name for name, module in layers.items() if isinstance(module, OfShard)]:
        layer = layers[name]
        holders = [n for n, stage in enumerate(stages) if any(m is layer for m in stage.modules())]
        if len(holders) > 1:
            raise _refused(
                asked,
                f"the {own_kind(layer).__name__} {name!r} in stages {holders[0]} and {holders[1]}",
                "what it draws or counts follows how often it was called before, and a stage does "
                "not know of its calls in another one",
                "make a layer of its own for each stage",
            )


def _not_of_the_model(asked: str, found: str) -> RequestError:
    return _refused(
        asked,
        f"{found} in the stages of the task",
        "what is trained and saved is the model",
        "make stages of the modules of `model` itself, not of copies or new layers",
    )


def _cut(model: nn.Module, count: int, asked: str, costs: Costs) -> list[nn.Module]:
    """Cut an `nn.Sequential` into stages so that the largest cost is minimal."""
    if count == 1:
        return [model]
    if not is_chain(model):
        raise _refused(
            asked,
            f"a {type(model).__name__}, whose forward does more than call layers in a row",
            "only an nn.Sequential says by itself what comes after what",
            f"write stages(self, model, count) in the task: {count} modules, made of those of "
            "`model`, of which each takes what the one before returns",
        )
    groups: list[list[nn.Module]] = []
    for layer in _layers(model):
        has_weights = any(True for _ in layer.parameters())
        if not groups or (has_weights and any(bytes_of(groups[-1:]))):
            groups.append([])
        groups[-1].append(layer)
    if len(groups) < count:
        raise _refused(
            asked,
            f"an nn.Sequential of {len(groups)} layers with weights",
            f"each of {count} stages needs one",
            f"a pipeline of at most {len(groups)} stages",
        )
    ends = balanced_ends(costs(groups), count)
    return [
        nn.Sequential(*(layer for group in groups[start:end] for layer in group))
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a chain; inner chains are flattened."""
    layers: list[nn.Module] = []
    for layer in model._modules.values():  # a layer may come twice
        assert layer is not None
        layers += _layers(layer) if is_chain(layer) else [layer]
    return layers


def _refused(asked: str, found: str, why: str, do: str) -> RequestError:
    return RequestError(asked=asked, found=found, why=why, do=do)


class Staged(Strategy):
    """Stages of a model on the ranks of a `line`; `last` is the number of the last stage."""

    line: Comm
    _tied: Mapping[str, str] = MappingProxyType({})
    last: int
    own_stages: range
    takes_batch_loss: ClassVar[bool] = False
    """Whether the outputs of all samples are available before a backward pass begins."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        asked = f"--strategy {self.name} --ranks {self.comm.size}"
        self.check_task(asked)
        scope, precision = self.context.scope, self.context.precision
        seconds = measured(model, self.task, scope, precision, self.comm, self.name)
        costs = seconds if self.context.options["by"] == "cost" else bytes_of
        self.stages = stages_of(self.task, model, self.last + 1, asked, costs)
        parts = self.cut_stages(model)
        ranks_of = {
            name: sorted({stage % self.line.size for stage in self.stages.holders(parameter)})
            for name, parameter in model.named_parameters()
        }
        shared = {name: tuple(ranks) for name, ranks in ranks_of.items() if len(ranks) > 1}
        if self.shard_alone and shared:
            raise _tied_bits(asked, next(iter(shared)))
        meeting = _merge_groups(shared)
        self._tied = {n: f"tied {r}" for n, r in meeting.items() if self.line.rank in r}
        for ranks in {r for r in meeting.values() if self.line.rank in r}:
            self._axes[f"tied {ranks}"] = not_alike(self.line.subgroup(ranks), self.line)
        self.hold(model, ranks_of, parts)
        return model

    def hold(self, model: nn.Module, ranks_of: Mapping[str, Sequence[int]], parts: Layout) -> None:
        """Keep the weights of this rank; the home of a weight is the first rank that holds it."""
        self.home = {name: ranks[0] for name, ranks in ranks_of.items()}
        self.local_names = {n for n, ranks in ranks_of.items() if self.line.rank in ranks}
        self._ranks_of = ranks_of
        self.layout = StageLayout(parts, self.line, self.home, self.local_names)
        _replace_by_meta(model, self.local_names)
        self._crossed: dict[int, int] = {}
        self.steps = 0

    def cut_stages(self, model: nn.Module) -> Layout:
        """Cut the weights of all stages, if several ranks hold a stage together."""
        return self.layout

    def is_local(self, name: str) -> bool:
        return name not in self.home or name in self.local_names

    def check_task(self, asked: str) -> None:
        """Raise `RequestError` for features that stages do not support."""
        found = why = do = ""
        if self.task.loss_over == "batch" and not self.takes_batch_loss:
            found = 'loss_over = "batch"'
            why = "a schedule begins backward passes before the outputs of all samples are there"
            do = "--strategy ddp"
        elif self.task.overrides("initialise"):
            found = "initialise(model, inputs) in the task"
            why = "it goes through the whole model, of which each rank holds a part"
            do = "set the weights in model(), or --strategy ddp"
        elif self.context.scope.looked_up:
            found = "a table with max_norm, whose rows are shortened where they are looked up"
            why = "all ranks shorten rows together, and some do not hold the table"
            do = "--strategy ddp"
        if found:
            raise RequestError(asked=asked, found=found, why=why, do=do)

    def lay_out(self) -> None:
        step = self.step
        self.optimizer_arguments = OptimizerArguments(step.optimizer)
        self._check_optimizer()
        if step.sparse.positions:
            raise RequestError(
                asked=f"--strategy {self.name}",
                found=f"{type(step.optimizer).__name__}, which takes gradients row by row",
                why="the rows that a step touches are counted by all ranks",
                do="a dense optimizer, or --strategy ddp",
            )
        pairs = list(enumerate(zip(step.names, step.parameters, strict=True)))
        local = [(at, name, p) for at, (name, p) in pairs if name in self.local_names]
        self.local_params = [parameter for _, _, parameter in local]
        step.own_positions = [at for at, _, _ in local]
        self.trained = {id(parameter) for parameter in self.local_params}
        self._counted = [(at, p) for at, name, p in local if self.home[name] == self.line.rank]
        tied = [(p, self._tied[name]) for _, (name, p) in pairs if name in self._tied]
        self._summed = [(p, self._axes[axis]) for p, axis in tied]

    def _check_optimizer(self) -> None:
        """Raise `RequestError` for an optimizer that needs parameters of several ranks."""
        if self.optimizer_arguments.is_new():
            self.check_updates()

    def check_updates(self) -> None:
        if self.line.size > 1:
            busy = {rank for name in self.step.names for rank in self._ranks_of[name]}
            idle = len(busy) < self.line.size
            check_by_parameter(self.step.optimizer, f"--strategy {self.name}", idle)

    # --- a step ---------------------------------------------------------------------------

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        self._check_optimizer()  # hyper-parameters may have changed
        return super().updating(gradients)

    def sum_tied(self) -> None:
        """Sum the gradients of tied weights over all stages that hold them.

        Ranks that hold another tied weight of one of these stages add zeros.
        """
        for parameter, comm in self._summed:
            if parameter.is_meta:
                comm.all_reduce(torch.zeros_like(parameter, device=comm.device)).wait()
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            comm.all_reduce(parameter.grad).wait()

    def gradients(self) -> StagedGradients:
        """The gradients of this rank, with a norm over all ranks."""
        everywhere, exact = self.step.parameters, self.shard_alone
        return StagedGradients(self.local_params, self._counted, everywhere, self.line, exact=exact)

    def refuse_written_buffers(self, within: tuple[str, ...] = ("",)) -> None:
        """Raise `RequestError` if the model writes its own buffers in forward.

        `within` are prefixes of names of modules that not all ranks run.
        """
        if written := sorted(n for n in self.step.user_buffers.written if n.startswith(within)):
            raise RequestError(
                asked=f"--strategy {self.name}",
                found=written_in_forward(written).found,
                why="only the rank that goes through them would know what is written",
                do="compute it from parameters, or --strategy ddp",
            )

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Within, every rank has all weights in full. Sends all weights (`control`)."""
        named = self.model.named_parameters()
        whole = {name: self.whole_weight(name, parameter) for name, parameter in list(named)}
        places = [
            (place, whole[name]) for name, of in places_of(self.model).items() for place in of
        ]
        with exchanged_at([place for place, _ in places], [tensor for _, tensor in places]):
            yield

    def whole_weight(self, name: str, parameter: nn.Parameter) -> Tensor:
        """A full weight, for a loss that every rank computes; every rank calls this."""
        tensor = self.layout.full(name, parameter.detach())
        return parameter if name in self.local_names else _like(parameter, tensor)

    # --- bytes ----------------------------------------------------------------------------

    def count_crossing(self, stage: int, tensors: list[Tensor]) -> None:
        """Count tensors that a stage has returned to the next one."""
        forward_bytes = sum(t.nbytes for t in tensors)
        back = sum(t.nbytes for t in tensors if t.requires_grad)
        self._crossed[2 * stage] = self._crossed.get(2 * stage, 0) + forward_bytes
        self._crossed[2 * stage + 1] = self._crossed.get(2 * stage + 1, 0) + back

    def crossed(self) -> list[float]:
        """For each pair of stages, the bytes forward and the bytes backward in a step.

        The mean over all steps, as it depends on the samples of a step; every rank calls this.
        """
        crossed = [0.0] * (2 * self.last)
        for text in self.line.gather_texts(json.dumps(self._crossed)):
            for at, nbytes in json.loads(text).items():
                crossed[int(at)] += nbytes / max(1, self.steps)
        return crossed

    def tally_bytes(self) -> int:
        """The bytes of the tally and of the norms of gradients."""
        numbers = self.step.layout.size + 2 * len(self.step.parameters)
        return numbers * torch.float64.itemsize

    def workload(self) -> Workload:
        """Bytes between stages, then summed; a tied weight counts as if all ranks summed it."""
        ranks, summed = self.line.size, float(self.tally_bytes())
        for parameter, comm in self._summed:
            summed += parameter.nbytes * (1 - 1 / comm.size) / (1 - 1 / ranks)
        return self.work(*map(round, self.crossed()), round(summed))


def not_alike(some: Comm, ranks: Comm) -> Comm:
    """A group of `some` of the `ranks`, which make other collectives than the others.

    Their count must not decide whether a rank will join (`StoreBarrier`).
    """
    if some is not ranks:
        some.store_barrier = None
    return some


def _replace_by_meta(model: nn.Module, local_names: set[str]) -> None:
    """Replace the weights that this rank does not hold by meta tensors."""
    places, named = places_of(model), dict(model.named_parameters())
    for name, parameter in named.items():
        if name not in local_names:
            meta = torch.empty_like(parameter, device="meta", requires_grad=False)
            elsewhere = _like(parameter, meta)
            for module, attribute in places[name]:
                setattr(module, attribute, elsewhere)  # an RNN has a list of its weights


def _like(parameter: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """A parameter with the values of `tensor` and the attributes of `parameter`."""
    created = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    vars(created).update(vars(parameter))
    return created


def _merge_groups(shared: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The ranks that sum each of these weights; groups that overlap are merged.

    Torch names a group by how many groups its ranks have made before. With two groups that overlap,
    ranks that have made one and ranks that have not would wait for each other.
    """
    groups: list[set[int]] = []
    for ranks in shared.values():
        joined = set(ranks).union(*(group for group in groups if group & set(ranks)))
        groups = [*(group for group in groups if not group & joined), joined]
    group_of = {rank: tuple(sorted(group)) for group in groups for rank in group}
    return {name: group_of[ranks[0]] for name, ranks in shared.items()}


def _tied_bits(asked: str, name: str) -> RequestError:
    return RequestError(
        asked=f"{asked} --bitwise",
        found=f"{name!r} in several stages",
        why="its gradient is summed within a stage first, and then over the stages",
        do="leave --bitwise out, tie no weights across stages, or --strategy ddp",
    )

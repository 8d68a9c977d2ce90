"""The trainer: one training of a task, on the ranks of this job, step by step.

`allranks train` is the short loop `fit` over it; a loop of one's own uses the same object, from a
script or a notebook, and nothing that the command does is out of its reach:

    with Trainer(task) as trainer:
        for batch in trainer.batches():
            result = trainer.step(batch)
        print(trainer.evaluate())
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allranks.cards import CARDS, resolved_strategy
from allranks.catalog import STRATEGIES, load
from allranks.choice import parse_choice
from allranks.errors import RequestError
from allranks.job import Job
from allranks.on_torch.comm import join
from allranks.on_torch.data import Batch, GlobalBatches, Progress
from allranks.on_torch.evaluate import evaluate, try_evaluation
from allranks.on_torch.layers import Scope, restore_layers, shard_norms, swap_layers
from allranks.on_torch.sources import StreamSource, seed_generators, source_of
from allranks.on_torch.step import StepResult
from allranks.on_torch.strategies.base import Setting, Strategy
from allranks.on_torch.task import Task, check_task
from allranks.shards import largest_shard
from allranks.world import World

FLOATING = {"fp32": torch.float32, "fp64": torch.float64}


class Trainer:
    """Trains `task` as `job` says, on the ranks that the environment describes (or `world`).

    Every rank makes one and calls the same methods in the same order. Making it joins the ranks,
    builds the model and broadcasts it once. Raises `RequestError` for what cannot be trained.
    """

    def __init__(self, task: Task, job: Job | None = None, *, world: World | None = None) -> None:
        self.world = World.from_environment() if world is None else world
        self.task, self.job = task, _for_world(job or Job(), self.world)
        check_task(task, type(task).__name__)
        self.device = _device(self.job, self.world)
        self.progress = Progress()
        self.user_buffers: list[str] = []
        self.comm = join(self.world, self.device)
        self._undo = _make_reproducible(self.job)
        self._data: GlobalBatches | None = None
        self._eval_source: Any = None
        try:
            self._scope = Scope(self.job.seed, self.device)
            self.strategy = self._strategy()
            self.swapped = self._place_model()
            self._check_limits()
        except BaseException:
            self.comm.leave()
            self._undo()
            raise

    @classmethod
    def from_parts(
        cls,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], Optimizer],
        *,
        loss: Callable[[Any, Any], Tensor],
        train_data: Any,
        job: Job | None = None,
        **fields: Any,
    ) -> Self:
        """A trainer from a model that is there already; `fields` are those of `Task`.

        `loss(output, batch)` gives one value per sample; `make_optimizer(model)` the optimizer.
        """

        class Parts(Task):
            def model(self) -> nn.Module:
                return model

            def optimizer(self, model: nn.Module) -> Optimizer:
                return make_optimizer(model)

            def train_data(self) -> Any:
                return train_data

            def loss(self, output: Any, batch: Any) -> Tensor:
                return loss(output, batch)

        return cls(Parts(**fields), job)

    # --- the loop -------------------------------------------------------------------------

    def batches(self, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """This rank's part of the global batches that come next, up to the end of the training.

        `epochs` and `steps` count from the start of the job; the defaults are the task's epochs
        and the job's steps. Give each batch to `step` before asking for the next.
        """
        limit = self.job.steps if steps is None else steps
        last_epoch = self.task.epochs if epochs is None else epochs
        if limit is not None and epochs is None:
            last_epoch = 2**31  # steps were asked for: epochs do not end them
        yield from self.data.after(self.progress, last_epoch, limit)

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on one global batch; every rank calls this. Sends what the card says."""
        done = self.progress
        self.strategy.step.set_rate(done.updates)
        before = self._buffer_versions() if done.batch_index == 0 else {}
        result = self.strategy.train_step(batch)
        if before:
            self._check_buffers(before)
        if batch.sizes is None and not result.updated:  # a stream has ended, on all ranks alike
            self.data.dry = True
            self.progress = dataclasses.replace(done, epoch=done.epoch + 1, step_in_epoch=0)
            return result
        self.progress = Progress(
            epoch=batch.epoch,
            step_in_epoch=batch.step_in_epoch + 1,
            batch_index=done.batch_index + 1,
            samples_seen=done.samples_seen + result.samples,
            updates=done.updates + result.updated,
        )
        return result

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """The metrics over `data` (the task's own if `None`), exact; every rank calls this."""
        source = self._eval_data() if data is None else self._source(data, "eval_data")
        if source is None:
            return {}
        chunk = largest_shard(self.task.batch_size, self.task.shards)
        floating = FLOATING[self.job.precision]
        return evaluate(self.task, self.strategy, source, chunk, floating)

    def rehearse(self) -> None:
        """Open the data and evaluate a few samples, so that errors show before the first update."""
        _ = self.data  # opens it
        source = self._eval_data()
        if source is not None:
            chunk = largest_shard(self.task.batch_size, self.task.shards)
            floating = FLOATING[self.job.precision]
            try_evaluation(self.task, self.strategy, source, chunk, floating)

    def _eval_data(self) -> Any:
        """The evaluation data of the task, opened when it is first needed; `None` if it has none."""
        if self._eval_source is None:
            seed_generators(self.job.seed)
            if (own := self.task.eval_data()) is not None:
                self._eval_source = self._source(own, "eval_data")
        return self._eval_source

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, whole, by name in sorted order; every rank calls this."""
        return self.strategy.full_state()

    def state(self) -> dict[str, Any]:
        """All that the rest of the training depends on: weights, optimizer, how far it is."""
        state = copy.deepcopy(self.strategy.state())  # training goes on in the tensors themselves
        return {"strategy": state, "progress": dataclasses.asdict(self.progress)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state` returned, on any number of ranks; every rank calls this."""
        self.strategy.load_state(copy.deepcopy(state["strategy"]))
        self.progress = Progress(**state["progress"])

    def close(self) -> None:
        """Leave the other ranks, and give model and process back as they were."""
        self.strategy.close()
        restore_layers(self.strategy.model)
        self._data = None
        self.comm.leave()
        self._undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    # --- how it is put together -----------------------------------------------------------

    @property
    def data(self) -> GlobalBatches:
        """The data of the training, opened when it is first needed."""
        if self._data is None:
            seed_generators(self.job.seed)  # a split drawn there is the same on every rank
            source = self._source(self.task.train_data(), "train_data")
            if isinstance(source, StreamSource) and self.task.loss_over == "batch":
                raise RequestError(
                    asked='a stream with loss_over = "batch"',
                    found="nobody knows how many samples the other ranks have",
                    why="the outputs of all ranks are gathered, so their sizes must be known",
                    do="read the data as a map-style data set",
                )
            self._data = GlobalBatches(
                source=source,
                batch_size=self.task.batch_size,
                shards=self.task.shards,
                last_batch=self.task.last_batch,
                seed=self.job.seed,
                rank=self.strategy.data_rank,
                ranks=self.strategy.data_size,
                micro_batch=self.job.micro_batch,
                shard_alone=self.strategy.shard_alone,
                device=self.device,
                floating=FLOATING[self.job.precision],
            )
        return self._data

    def _source(self, data: Any, name: str) -> Any:
        source = source_of(data, self.task, self.job.seed, self.job.loader_workers, name)
        if isinstance(source, StreamSource) and name == "eval_data":
            raise RequestError(
                asked="eval_data() of the task",
                found="a stream",
                why="each sample is evaluated once, so how many there are must be known",
                do="return tensors or a map-style data set",
            )
        return source

    def _buffer_versions(self) -> dict[str, int]:
        """How often each buffer was written, but for those that the engine itself keeps."""
        own = {id(b) for norm in shard_norms(self.strategy.model) for b in norm.buffers()}
        named = self.strategy.model.named_buffers()
        return {name: buffer._version for name, buffer in named if id(buffer) not in own}

    def _check_buffers(self, before: dict[str, int]) -> None:
        """Remember the buffers that the model writes in forward; under `bitwise` refuse them."""
        after = self._buffer_versions()
        self.user_buffers = sorted(name for name in before if after[name] != before[name])
        if self.user_buffers and self.job.bitwise:
            raise RequestError(
                asked="--bitwise",
                found=f"the model writes {', '.join(self.user_buffers)} in its forward pass",
                why="what is written follows the samples of one rank",
                do="compute it from parameters, or drop --bitwise",
            )

    def _strategy(self) -> Strategy:
        choice = parse_choice(self.job.strategy)
        options = CARDS[choice.name].read_options(choice.options)
        setting = Setting(self.task, self.comm, self._scope, options, self.job.bitwise)
        strategy: Strategy = load(STRATEGIES[choice.name])(setting)
        return strategy

    def _place_model(self) -> dict[str, list[str]]:
        """Build the model from the job's seed and hand it to the strategy."""
        seed_generators(self.job.seed)
        torch.manual_seed(self.job.seed)
        model = self.task.model()
        if not isinstance(model, nn.Module):
            raise RequestError(
                asked="model() of the task",
                found=f"a {type(model).__name__}",
                why="the engine trains torch modules",
                do="return an nn.Module",
            )
        model = model.to(self.device, FLOATING[self.job.precision])
        swapped = swap_layers(model, self._scope)
        self.strategy.setup(model, self.task.optimizer)
        return swapped

    def _check_limits(self) -> None:
        largest = largest_shard(self.task.batch_size, self.task.shards)
        norms = shard_norms(self.strategy.model)
        if largest == 1 and norms:
            raise RequestError(
                asked=f"batch_size = {self.task.batch_size} with shards = {self.task.shards}",
                found="one sample in each shard, in a model with BatchNorm",
                why="one sample has no variance, so nothing would ever be normalised",
                do=f"--set shards={max(1, self.task.batch_size // 2)}, or a larger batch",
            )
        if (
            not self.strategy.replicas_agree
            and self.task.loss_over == "batch"
            and self.comm.size > 1
        ):
            raise RequestError(
                asked=f'--strategy {self.job.strategy} with loss_over = "batch"',
                found=f"{self.comm.size} ranks that exchange nothing",
                why="the loss would need the outputs of all of them",
                do="--strategy ddp",
            )
        limit = self.job.micro_batch
        if limit is not None and limit < largest and norms:
            raise RequestError(
                asked=f"--micro-batch {limit}",
                found=f"shards of {largest} samples, in a model with BatchNorm",
                why="BatchNorm takes the statistics of a whole shard, so it cannot be cut",
                do=f"--micro-batch {largest}, or --set shards={-(-self.task.batch_size // limit)}",
            )


def fit(
    trainer: Trainer, on_step: Callable[[Batch, StepResult], None] = lambda batch, result: None
) -> None:
    """Train to the end: the loop of `allranks train`."""
    for batch in trainer.batches():
        result = trainer.step(batch)
        if result.updated:
            on_step(batch, result)


def _for_world(job: Job, world: World) -> Job:
    """The job as these ranks run it, its strategy resolved."""
    name = job.strategy or ("ddp" if world.size > 1 else "single")
    choice = resolved_strategy(name, ranks=world.size, bitwise=job.bitwise)
    return dataclasses.replace(job, ranks=world.size, strategy=str(choice))


def _device(job: Job, world: World) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    check_devices(job, world.local_size)
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def check_devices(job: Job, local_size: int) -> None:
    """Raise `RequestError` unless this node has a device for each of its ranks."""
    if job.device != "cuda":
        return
    found = torch.cuda.device_count()
    if found < local_size:
        raise RequestError(
            asked=f"--device cuda --ranks {local_size}",
            found=f"{found} CUDA devices"
            + ("" if torch.version.cuda else " (a CPU build of torch)"),
            why="every rank needs a device of its own",
            do=f"--device cuda --ranks {found}" if found else "--device cpu",
        )


def _make_reproducible(job: Job) -> Callable[[], None]:
    """Under `bitwise`: deterministic kernels, one thread. Returns what puts everything back.

    Deterministic mode also fills all memory that is handed out, to show reads of unwritten
    memory; that costs up to a tenth of a step and decides no bit, so it is left out.
    """
    if not job.bitwise:
        return lambda: None
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    torch.set_num_threads(1)

    def undo() -> None:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = filled
        torch.set_num_threads(before[1])

    return undo

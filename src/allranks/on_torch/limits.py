"""What a task and a job cannot have together: found before anything is trained."""

from __future__ import annotations

from allranks.errors import RequestError
from allranks.job import Job
from allranks.on_torch.layers import shard_norms
from allranks.on_torch.strategies.base import Strategy
from allranks.on_torch.task import Task
from allranks.shards import largest_shard


def check_limits(task: Task, job: Job, strategy: Strategy) -> None:
    """Raise `RequestError` for what cannot be; the strategy has its model."""
    largest = largest_shard(task.batch_size, task.shards)
    norms, ranks = shard_norms(strategy.model), strategy.comm.size
    if largest == 1 and norms:
        raise RequestError(
            asked=f"batch_size = {task.batch_size} with shards = {task.shards}",
            found="one sample in each shard, in a model with BatchNorm",
            why="one sample has no variance, so nothing would ever be normalised",
            do=f"--set shards={max(1, task.batch_size // 2)}, or a larger batch",
        )
    if not strategy.replicas_agree and task.loss_over == "batch" and ranks > 1:
        raise RequestError(
            asked=f'--strategy {job.strategy} with loss_over = "batch"',
            found=f"{ranks} ranks that exchange nothing",
            why="the loss would need the outputs of all of them",
            do="--strategy ddp",
        )
    if job.compile and not strategy.can_be_compiled:
        raise RequestError(
            asked=f"--strategy {job.strategy} --compile {job.compile}",
            found=f"{strategy.name!r} runs copies of the model in threads",
            why="a compiled model is one model in one thread, so they would run uncompiled",
            do=f"--strategy ddp --compile {job.compile}, or leave --compile out",
        )
    judges = [
        flag for flag, rule in (("--best", job.best), ("--early-stop", job.early_stop)) if rule
    ]
    if not strategy.replicas_agree and judges and ranks > 1:
        raise RequestError(
            asked=f"--strategy {job.strategy} with {judges[0]}",
            found=f"{ranks} ranks that each have metrics of their own",
            why="they save together and end together, so they would have to judge alike",
            do=f"leave {judges[0]} out, or --strategy ddp",
        )
    limit = job.micro_batch
    if limit is not None and limit < largest and norms:
        raise RequestError(
            asked=f"--micro-batch {limit}",
            found=f"shards of {largest} samples, in a model with BatchNorm",
            why="BatchNorm takes the statistics of a whole shard, so it cannot be cut",
            do=f"--micro-batch {largest}, or --set shards={-(-task.batch_size // limit)}",
        )

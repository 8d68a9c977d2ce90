"""What a task and a job cannot have together: found before anything is trained."""

from __future__ import annotations

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.mesh import DATA
from allranks.strategies.shards import even_sizes, largest_shard
from allranks.torch.data.rows import rows_of_ranks
from allranks.torch.model.layers import normalising_layers, shard_norms
from allranks.torch.strategies.base import Strategy
from allranks.torch.task import Task


def check_limits(task: Task, job: Job, strategy: Strategy) -> None:
    """Raise `RequestError` for what cannot be; the strategy has its model."""
    largest = largest_shard(task.batch_size, task.shards)
    norms, ranks = normalising_layers(strategy.model), strategy.comm.size
    if task.batchnorm == "whole" and norms:
        _check_whole_norm(task, job, strategy)
        norms = []
    if largest == 1 and norms and shard_norms(strategy.model):
        raise RequestError(
            asked=f"batch_size = {task.batch_size} with shards = {task.shards}",
            found="one sample in each shard, in a model with BatchNorm",
            why="one sample has no variance, so nothing would ever be normalised",
            do=f"--set shards={max(1, task.batch_size // 2)}, or a larger batch",
        )
    if not strategy.agreement.is_one_training and task.loss_over == "batch" and ranks > 1:
        raise RequestError(
            asked=f'--strategy {job.strategy} with loss_over = "batch"',
            found=f"{ranks} ranks that exchange nothing",
            why="the loss would need the outputs of all of them",
            do="--strategy ddp",
        )
    if strategy.setting.scope.looked_up and job.strategy_spec.devices_of_a_rank > 1:
        raise RequestError(
            asked=f"--strategy {job.strategy}",
            found="a table with max_norm, whose rows are shortened where they are looked up",
            why="each replica would shorten those of its own copy",
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
    if not strategy.agreement.is_one_training and judges and ranks > 1:
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


def _check_whole_norm(task: Task, job: Job, strategy: Strategy) -> None:
    """Raise `RequestError` unless the whole batch of each rank goes through the model at once."""
    sizes = even_sizes(task.batch_size, task.shards)
    most = max(rows_of_ranks(sizes, strategy.mesh.size(DATA)))
    found = why = do = ""
    if strategy.shard_alone:
        found = "every shard goes through the model by itself"
        why = "its statistics would be those of the shard"
        do = "leave --bitwise (reduce=tree) out, or --set batchnorm=shard"
    elif not strategy.agreement.is_one_training or not strategy.has_one_model:
        found = f"--strategy {job.strategy}"
        why = "its models each normalise what they have, and exchange nothing in forward"
        do = "--strategy ddp, or --set batchnorm=shard"
    elif job.micro_batch is not None and job.micro_batch < most:
        found = f"--micro-batch {job.micro_batch}, {most} samples on a rank"
        why = "the statistics are those of all samples, so they go through the model at once"
        do = f"--micro-batch {most}, more ranks, or --set batchnorm=shard"
    elif job.activation_checkpointing:
        found = "--activation-checkpointing"
        why = "computed again in backward, the layers would send their statistics again"
        do = "leave it out, or --set batchnorm=shard"
    if found:
        raise RequestError(asked='batchnorm = "whole"', found=found, why=why, do=do)

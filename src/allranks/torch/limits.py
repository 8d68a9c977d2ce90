"""Refuses combinations of a task and a job that cannot work, before the training begins."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import SGD

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies import compressed
from allranks.strategies.cards.data_parallel import is_late
from allranks.strategies.mesh import DATA, LEARNER
from allranks.strategies.shards import even_sizes, largest_shard
from allranks.torch.data.collate import rows_of_ranks
from allranks.torch.local_sgd.exchange import for_learners
from allranks.torch.model.layers import normalising_layers, shard_norms
from allranks.torch.parallel.expert.mixture import MixtureOfExperts
from allranks.torch.step.ema import TwoModes
from allranks.torch.strategies.base import Strategy
from allranks.torch.task import Task


def check_limits(task: Task, job: Job, strategy: Strategy) -> None:
    """Raise `RequestError` for a combination that cannot work; the strategy has its model."""
    for rule in RULES:
        problem = rule(task, job, strategy)
        if problem is not None:
            raise problem


def _whole_norm(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """The whole batch of each rank must go through the model at once."""
    if task.batchnorm != "whole" or not normalising_layers(strategy.model):
        return None
    sizes = even_sizes(task.batch_size, task.shards)
    most = max(rows_of_ranks(sizes, strategy.mesh.size(DATA), strategy.dealt))
    found = why = do = ""
    if strategy.equal_passes:
        found = f"--strategy {job.strategy}, whose passes communicate"
        why = "a rank without a sample would wait in BatchNorm for ranks that wait for its pass"
        do = "--strategy ddp, or --set batchnorm=shard"
    elif strategy.cuts_micro_batches:
        found = f"--strategy {job.strategy}, which cuts what goes through the model"
        why = "its statistics would be those of a piece"
        do = "leave split out, or --set batchnorm=shard"
    elif strategy.shard_alone:
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
    if not found:
        return None
    return RequestError(asked='batchnorm = "whole"', found=found, why=why, do=do)


def _norm_of_one_sample(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    norms = _norms_of_shards(task, strategy) and shard_norms(strategy.model)
    if largest_shard(task.batch_size, task.shards) > 1 or not norms:
        return None
    return RequestError(
        asked=f"batch_size = {task.batch_size} with shards = {task.shards}",
        found="one sample in each shard, in a model with BatchNorm",
        why="one sample has no variance, so nothing would ever be normalised",
        do=f"--set shards={max(1, task.batch_size // 2)}, or a larger batch",
    )


def _loss_over_ranks_apart(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    if task.loss_over != "batch" or not _are_apart(strategy):
        return None
    return RequestError(
        asked=f'--strategy {job.strategy} with loss_over = "batch"',
        found=f"{strategy.comm.size} ranks that exchange nothing",
        why="the loss would need the outputs of all of them",
        do="--strategy ddp",
    )


def _replicas_of_shortened_rows(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    context = strategy.context
    if not context.scope.looked_up or job.strategy_spec.replicas == 1:
        return None
    return RequestError(
        asked=f"--strategy {job.strategy}",
        found="a table with max_norm, whose rows are shortened where they are looked up",
        why="each replica would shorten those of its own copy",
        do="--strategy ddp",
    )


def _compiled_copies(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    if not job.compile or strategy.can_be_compiled:
        return None
    passes = "passes of its own" if strategy.has_one_model else "copies of the model in threads"
    return RequestError(
        asked=f"--strategy {job.strategy} --compile {job.compile}",
        found=f"{strategy.name!r} runs {passes}",
        why="a compiled model is one model in one thread, so they would run uncompiled",
        do=f"--strategy ddp --compile {job.compile}, or leave --compile out",
    )


def _metrics_of_ranks_apart(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    judges = {"--best": job.best, "--early-stop": job.early_stop, "--until": job.until}
    judge = next((flag for flag, rule in judges.items() if rule), None)
    if judge is None or not _are_apart(strategy):
        return None
    return RequestError(
        asked=f"--strategy {job.strategy} with {judge}",
        found=f"{strategy.comm.size} ranks that each have metrics of their own",
        why="they save together and end together, so they would have to judge alike",
        do=f"leave {judge} out, or --strategy ddp",
    )


def _norm_of_a_cut_shard(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    if not _norms_of_shards(task, strategy):
        return None
    why = "BatchNorm takes the statistics of a whole shard, so it cannot be cut"
    return _cut_shard(task, job, "BatchNorm", why)


def _mixture_of_a_cut_shard(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    mixtures = (m for m in strategy.model.modules() if isinstance(m, MixtureOfExperts))
    if all(mixture.over == "sample" for mixture in mixtures):
        return None
    why = "it counts the tokens of a whole shard; with over='sample' those of a sample"
    return _cut_shard(task, job, "a MixtureOfExperts", why)


def _cut_shard(task: Task, job: Job, layers: str, why: str) -> RequestError | None:
    limit, largest = job.micro_batch, largest_shard(task.batch_size, task.shards)
    if limit is None or limit >= largest:
        return None
    return RequestError(
        asked=f"--micro-batch {limit}",
        found=f"shards of {largest} samples, in a model with {layers}",
        why=why,
        do=f"--micro-batch {largest}, or --set shards={-(-task.batch_size // limit)}",
    )


def _norms_of_shards(task: Task, strategy: Strategy) -> bool:
    """Whether a layer takes the statistics of a shard."""
    return task.batchnorm != "whole" and bool(normalising_layers(strategy.model))


def _are_apart(strategy: Strategy) -> bool:
    return not strategy.agreement.is_one_training and strategy.comm.size > 1


def _late_gradients(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """Refuse `late` with features that need the gradient of a step within that step."""
    if not is_late(job.strategy_spec.options):
        return None
    conflicts = {
        "--precision fp16": job.precision == "fp16",
        f"--on-bad-step {job.on_bad_step}": job.on_bad_step != "stop",
        f"--spike {job.spike}": job.spike is not None,
        "an optimizer that takes gradients row by row": bool(strategy.step.layout.rows),
        "a table with max_norm": bool(strategy.context.scope.looked_up),
    }
    first = next((name for name, is_there in conflicts.items() if is_there), None)
    if first is None:
        return None
    return RequestError(
        asked=f"--strategy {job.strategy} with {first}",
        found=first,
        why="a step would be judged by its own loss and rows, and apply the gradient of another",
        do="leave late out, or leave that out",
    )


def _compressed_gradients(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """Refuse compression with features that change the scale or the rows of a residual."""
    reduce = strategy.learner.context.options.get("reduce")
    if str(reduce) not in compressed.CHOICES:
        return None
    conflicts = {
        "--precision fp16": job.precision == "fp16",
        "an optimizer that takes gradients row by row": bool(strategy.step.layout.rows),
        "a table with max_norm": bool(strategy.context.scope.looked_up),
    }
    first = next((name for name, is_there in conflicts.items() if is_there), None)
    if first is None:
        return None
    return RequestError(
        asked=f"--strategy {job.strategy} with {first}",
        found=first,
        why="what is not sent in a step is sent in a later one, which has another loss scale and "
        "other rows",
        do="leave reduce out, or leave that out; --precision bf16 needs no loss scale",
    )


def _signs(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """Refuse sign updates with a second momentum, or with terms added after the signs."""
    reduce, optimizer = strategy.learner.context.options.get("reduce"), strategy.step.optimizer
    if str(reduce) not in compressed.SIGNED:
        return None
    if strategy.agreement.cuts_state and any(not p.ndim for p in strategy.step.parameters):
        return _numbers_beside(job)
    is_plain = type(optimizer) is SGD and not any(g["momentum"] for g in optimizer.param_groups)
    if is_plain and not strategy.step.regularizers.is_there:
        return None
    return RequestError(
        asked=f"--strategy {job.strategy} with {type(optimizer).__name__}",
        found="a regularizer" if is_plain else "an optimizer that is not SGD without momentum",
        why="each rank keeps the momentum itself, and weights move by the rate times signs",
        do="add weight_decay to SGD instead"
        if is_plain
        else "let the task return SGD(model.parameters(), lr=…) with momentum=0",
    )


def _numbers_beside(job: Job) -> RequestError:
    return RequestError(
        asked=f"--strategy {job.strategy}",
        found="a weight of no dimension",
        why="it is not cut, and what is summed beside the parts has no momentum",
        do="--strategy ddp:reduce=demo, or give it the shape (1,)",
    )


def _elastic(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """Refuse what a step changes before all ranks have made it: it is made again."""
    if not job.elastic or not strategy.context.scope.looked_up:
        return None
    return RequestError(
        asked=f"--elastic {job.elastic}",
        found="a table with max_norm",
        why="a step shortens its rows before all ranks have made it, and a rank may be lost then",
        do="leave --elastic or max_norm out; with --max-restarts 3 the job starts again",
    )


def _two_modes(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """Refuse an optimizer with two modes if the whole state of a parameter is not available."""
    optimizer = strategy.learner.step.optimizer
    if not TwoModes.are_in(optimizer):
        return None
    parts = bool(strategy.layout.kept_whole)
    conflicts = {
        "ema": (task.ema is not None, "two averages of the weights would each be evaluated"),
        "learners": (
            LEARNER in dict(strategy.mesh.axes),
            "the weights that meet are those of train(), and the ones of eval() are each learner's",
        ),
        "servers": (
            len(strategy.card.roles(strategy.comm.size, strategy.context.options)) > 1,
            "other processes update the weights, and hold what it keeps of them",
        ),
        "parts": (parts, "one rank keeps its state whole for weights that all hold parts of"),
    }
    why = next((why for is_there, why in conflicts.values() if is_there), None)
    if why is None:
        return None
    setting = "ema" if task.ema is not None else f"--strategy {job.strategy}"
    return RequestError(
        asked=f"{setting} with {type(optimizer).__name__}",
        found="an optimizer with two modes, train() and eval()",
        why=why,
        do="--set ema=none" if task.ema is not None else "--strategy ddp",
    )


def _audit(task: Task, job: Job, strategy: Strategy) -> RequestError | None:
    """Another rank computes a shard alone, and without a trace."""
    whole_norm = task.batchnorm == "whole" and bool(normalising_layers(strategy.model))
    refused = {
        'loss_over = "batch"': task.loss_over == "batch",
        'batchnorm = "whole"': whole_norm,
        "tables with max_norm, which a pass shortens": bool(strategy.context.scope.looked_up),
    }
    problem = next((text for text, is_there in refused.items() if is_there), "")
    if not job.audit or not problem:
        return None
    return RequestError(
        asked=f"--audit {job.audit}",
        found=problem,
        why="another rank computes a shard again, without the other shards of its batch",
        do="leave --audit out, or change the task",
    )


RULES: tuple[Callable[[Task, Job, Strategy], RequestError | None], ...] = (
    _whole_norm,
    _norm_of_one_sample,
    _loss_over_ranks_apart,
    _replicas_of_shortened_rows,
    _compiled_copies,
    _metrics_of_ranks_apart,
    _norm_of_a_cut_shard,
    _late_gradients,
    _compressed_gradients,
    _signs,
    _mixture_of_a_cut_shard,
    _two_modes,
    _elastic,
    _audit,
    for_learners,
)
"""Each finds one thing that cannot be; what the first one finds is raised."""

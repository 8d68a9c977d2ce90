"""The values that a job can have, each alone and together; its program is not needed.

Every refusal names what was asked, what was found, why it cannot be, and what to do.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from difflib import get_close_matches

from allranks.catalog import ENGINES, PLACE_CHECK, TORCH, load
from allranks.errors import RequestError, nearest
from allranks.job import faults
from allranks.job.engines import trained_also_by
from allranks.job.job import (
    AUDITS,
    AUTO,
    BAD_STEPS,
    DEVICES,
    DEVICES_OF_ALL_ENGINES,
    LOGS,
    PRECISIONS,
    WITNESS,
    Job,
)
from allranks.job.loss_scale import parse_loss_scale
from allranks.job.recipes import check_recipe
from allranks.strategies.audits import check_audit
from allranks.strategies.cards import CARDS
from allranks.strategies.cards.data_parallel import is_late
from allranks.strategies.resolve import StrategySpec, resolved_strategy
from allranks.strategies.roles import EVALUATOR, ProcessSet
from allranks.strategies.shares import check_share

LEAST = {  # of each number: the bound, and whether it is allowed itself
    **dict.fromkeys(("ranks", "nodes", "micro_batch", "steps", "threads"), (1, True)),
    **dict.fromkeys(
        ("checkpoint_every", "keep", "verify_every", "audit_every", "patience"), (1, True)
    ),
    **dict.fromkeys(("seed", "loader_workers", "max_restarts", "hang_timeout"), (0, True)),
    "digest_every": (0, True),
    **dict.fromkeys(("prefetch", "steps_per_call"), (1, True)),
    "time_limit": (0, False),
    "spike": (1, False),
}
GLOO = "gloo"
BACKENDS_OF_HOST = ("shared_memory", GLOO)
BACKENDS = (*BACKENDS_OF_HOST, "nccl")
WORD = re.compile(r"[a-z][a-z0-9_]*")
NO_DEVICE = "gpu"  # which kind of it?
MISSPELT = 0.7  # "cude" for "cuda"; "npu" and "hpu" are further from "cpu" and "xpu" than that
METRIC = re.compile(r"(max|min):\S+")
UNTIL = re.compile(r"(?:(max|min):)?([^\s=]+)=(\S+)")
FALLS = "loss"  # the one metric that every evaluation has, and that gets better by getting less


def checked(job: Job) -> Job:
    """The job, if its values can be; the strategy with its options resolved."""
    if not job.program:
        raise RequestError(
            asked="allranks train",
            found="no PROGRAM, and no job file that names one"
            + (f": there is no run in {job.run_dir}" if job.run_dir else ""),
            why="there is nothing to train",
            do="name a task: allranks train digits",
        )
    for name, (least, inclusive) in LEAST.items():
        value = getattr(job, name)
        if value is not None and not (value >= least if inclusive else value > least):
            raise _out_of_range(name, value, f"at least {least}" if inclusive else f"over {least}")
    if job.seed >= 2**63:
        raise _out_of_range("seed", job.seed, "below 2**63")
    if job.inject:
        faults.parse(job.inject)
    _check_names(job)
    load(PLACE_CHECK)(job)
    _check_arithmetic(job)
    if job.optimizer or job.schedule:
        check_recipe(job.optimizer, job.schedule)
    check_engine(job)
    _check_course(job)
    per_node = 0 if job.ranks % job.nodes else job.ranks // job.nodes
    spec = resolved_strategy(job.strategy, ranks=job.ranks, bitwise=job.bitwise, per_node=per_node)
    if job.share:
        check_share(job.share, spec)
    if job.audit or job.audit_every is not None:
        check_audit(job.audit, job.audit_every, spec, job.elastic)
    _check_devices(job, spec)
    _check_roles(job, spec.process_set)
    if job.elastic:
        _check_elastic(job, spec)
    if job.spare_state:
        _check_spare_state(job, spec)
    return dataclasses.replace(job, strategy=str(spec))


def _check_names(job: Job) -> None:
    """Check every value that is one of a few names."""
    known = {"precision": PRECISIONS, "on_bad_step": BAD_STEPS, "witness": WITNESS}
    for name, words in known.items():
        _check_name(name, getattr(job, name), words)
    for log in logs_of(job):
        _check_name("log", log, LOGS)
    if job.audit:
        _check_name("audit", job.audit, AUDITS)
    if job.first_check not in ("auto", "off") and not _is_count(job.first_check):
        raise RequestError(
            asked=f"--first-check {job.first_check}",
            found="neither a name that is known nor a number of steps",
            why="it says whether the first steps of a job are compared with one process",
            do="auto, off, or a number of steps from 1 on: --first-check 2",
        )
    _check_device(job)
    _check_backend(job)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text[:9]) > 0 and len(text) < 9


def _check_backend(job: Job) -> None:
    """Check `--backend`, if it is given, against the device."""
    if not job.backend:
        return
    _check_name("backend", job.backend, BACKENDS)
    on_host = job.device == "cpu"
    is_shared = job.share_device and job.backend == GLOO
    if job.engine != TORCH or (on_host != (job.backend in BACKENDS_OF_HOST) and not is_shared):
        option = f"--device {job.device}" if job.engine == TORCH else f"--engine {job.engine}"
        raise RequestError(
            asked=f"--backend {job.backend}",
            found=option,
            why="a backend of torch moves the tensors of one kind of device: nccl those of GPUs, "
            "the others those of the processor",
            do="leave --backend out: each device has one of its own",
        )


def _check_device(job: Job) -> None:
    """Torch may know others: a word that is none of these misspelt is asked of it, by the ranks."""
    if job.engine != TORCH:
        _check_name("device", job.device, DEVICES_OF_ALL_ENGINES)
    elif (
        job.device == NO_DEVICE
        or not WORD.fullmatch(job.device)
        or get_close_matches(job.device, DEVICES, 1, MISSPELT)
    ):
        _check_name("device", job.device, DEVICES)


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RequestError(
            asked=f"--{name.replace('_', '-')} {value}",
            found=f"no {name} of that name in this version",
            why=f"{name} is one of {', '.join(known)}",
            do=nearest("cuda" if value == NO_DEVICE else value, known),
        )


def _check_devices(job: Job, spec: StrategySpec) -> None:
    """Check `--devices`: one or more for every rank."""
    each, unit = spec.devices_of_a_rank, spec.card.on_a_device
    _check_sharing(job, each, unit)
    numbers = devices_of(job)
    if not numbers:
        return
    if job.device == "cpu":
        raise RequestError(
            asked=f"--devices {job.devices}",
            found="--device cpu",
            why="the processor has no numbered devices to choose from",
            do=f"--device cuda --devices {job.devices}, or leave --devices out",
        )
    needed = 1 if job.share_device else job.ranks * each
    if len(numbers) < needed:
        ranks_option = f"--ranks {job.ranks}" if each == 1 else f"--strategy {job.strategy}"
        fits = f"--ranks {len(numbers)}" if each == 1 else f"{unit}s={len(numbers)}"
        raise RequestError(
            asked=f"--devices {job.devices} {ranks_option}",
            found=f"{len(numbers)} devices",
            why=f"every {'rank' if each == 1 else unit} needs a device of its own",
            do=f"{fits}, or name {needed} devices",
        )


def _check_sharing(job: Job, each: int, unit: str) -> None:
    """Check `--share-device`."""
    if not job.share_device:
        return
    if job.device == "cpu":
        raise RequestError(
            asked="--share-device",
            found="--device cpu",
            why="ranks on the processor share it as they are",
            do="leave it out, or --device cuda --share-device",
        )
    if each > 1:
        raise RequestError(
            asked=f"--strategy {job.strategy} --share-device",
            found=f"one rank with {each} {unit}s",
            why=f"ranks share a device, and a {unit} has one of its own",
            do="leave it out, or --strategy ddp with several --ranks",
        )


def _check_arithmetic(job: Job) -> None:
    """How numbers are computed: precision, kernels, threads."""
    if job.bitwise and job.threads not in (None, 1):
        raise RequestError(
            asked=f"--bitwise --threads {job.threads}",
            found=f"{job.threads} threads in each rank",
            why="the order of sums inside a kernel follows its threads",
            do="leave --threads out: --bitwise runs one thread per rank",
        )
    if job.bitwise and job.compile:
        raise RequestError(
            asked=f"--bitwise --compile {job.compile}",
            found="a compiled model",
            why="what a compiler makes of a shape follows from the shapes that it saw before, "
            "which differ from rank to rank",
            do="drop --compile, or drop --bitwise",
        )
    if job.compile and job.activation_checkpointing:
        raise RequestError(
            asked=f"--compile {job.compile} --activation-checkpointing",
            found="both",
            why="the compiler cannot look into what is computed again in the scope of a shard",
            do="drop one of them; a compiler decides by itself what to keep",
        )
    if job.precision == "tf32" and job.device == "cpu":
        raise RequestError(
            asked="--precision tf32 --device cpu",
            found="a processor",
            why="TF32 is a mode of the tensor cores of NVIDIA's GPUs",
            do="--precision fp32 or bf16, or --device cuda",
        )
    if job.loss_scale != Job.loss_scale:
        scale = parse_loss_scale(job.loss_scale)
        if job.precision != "fp16":
            raise RequestError(
                asked=f"--loss-scale {job.loss_scale} --precision {job.precision}",
                found=f"a scale of {scale.value:g}",
                why=f"the exponents of {job.precision} reach as far as those of fp32: "
                "nothing underflows",
                do="--precision fp16, or leave --loss-scale out",
            )


def check_engine(job: Job) -> None:
    """Refuse options that the engine does not support."""
    engine = ENGINES[job.engine]
    for name, why in engine.lacks.items():
        if getattr(job, name) != getattr(Job(), name):
            able = [e for e in trained_also_by(job.engine) if name not in ENGINES[e].lacks]
            others = "".join(f", or train {engine.task} with --engine {e}" for e in able)
            raise RequestError(
                asked=f"--{name.replace('_', '-')} with the {engine.title} engine",
                found=f"{name} = {getattr(job, name)}",
                why=why,
                do=f"leave it out{others}",
            )
    decided = {
        "--precision fp16": job.precision == "fp16",
        "--on-bad-step skip": job.on_bad_step == "skip",
        f"--spike {job.spike}": job.spike is not None,
    }
    flags = [flag for flag, is_asked in decided.items() if is_asked]
    if job.steps_per_call > 1 and flags:
        raise RequestError(
            asked=f"--steps-per-call {job.steps_per_call}",
            found=flags[0],
            why="whether a step counts is decided by Python, before the next one begins",
            do="--steps-per-call 1",
        )


def _check_roles(job: Job, process_set: ProcessSet) -> None:
    """Refuse options that do not work if processes have roles, and run asynchronously."""
    if job.micro_batch_trial and any(role.may_be_lost for role in process_set.roles):
        raise RequestError(
            asked=f"--strategy {job.strategy} with --micro-batch auto",
            found=str(process_set),
            why="a process without memory is lost, and the others go on: no trial would end",
            do="give --micro-batch a number, or leave it out",
        )
    if process_set.are_all_trainers:
        return
    at_once = "workers make several steps at once"
    alike = f"leave it out, or --strategy {ENGINES[job.engine].many}"
    refused = [
        (
            job.precision == "fp16",
            f"--precision {job.precision}",
            f"the loss scale of a step follows from the step before it, and {at_once}",
            alike,
        ),
        (
            job.steps_per_call > 1,
            f"--steps-per-call {job.steps_per_call}",
            "steps are handed out one by one, each to the worker that is free",
            alike,
        ),
        (
            job.checkpoint_every is None and process_set.has(EVALUATOR),
            "no --checkpoint-every",
            "the evaluator judges checkpoints, and there would be none",
            "give --checkpoint-every, or leave the evaluator out",
        ),
    ]
    for is_asked, option, why, do in refused:
        if is_asked:
            asked = f"--strategy {job.strategy} with {option}"
            raise RequestError(asked=asked, found=str(process_set), why=why, do=do)


def _refuse_first(request: str, refused: Sequence[tuple[bool, str, str, str]]) -> None:
    """Raise `RequestError` for the first that applies of these: (applies, state, why, do)."""
    for applies, state, why, do in refused:
        if applies:
            raise RequestError(asked=request, found=state, why=why, do=do)


MOST_ELASTIC = 1000
"""The most ranks that `--elastic` may name."""


def elastic_range(job: Job) -> tuple[int, int]:
    """The fewest and the most ranks of an elastic job; raises `RequestError`."""
    words = job.elastic.partition(":")
    least, most = (int(word) if _is_count(word) else 0 for word in words[::2])
    why = "a job goes on while at least MIN and at most MAX ranks are there"
    state, do = "", f"--elastic 1:{job.ranks}"
    if not (least and most):
        state = "no two numbers MIN:MAX, from 1 on"
    elif least > most:
        state, do = f"MIN {least} larger than MAX {most}", f"--elastic {most}:{least}"
    elif most > MOST_ELASTIC:
        state, do = f"MAX {most:,}", f"a MAX of at most {MOST_ELASTIC:,}"
        why = "the launcher looks ten times a second at the memory of each rank that may join"
    if state:
        raise RequestError(asked=f"--elastic {job.elastic}", found=state, why=why, do=do)
    return least, most


STAYS_WHOLE = ("mean", "tree")
"""The reducers under which a rank holds nothing that is lost with it, or a checkpoint has it."""

ELASTIC = ("ddp", "ddp-plain", "zero1", "zero2", "fsdp", "hsdp")
"""The strategies whose ranks form another group in the same processes."""


def _check_elastic(job: Job, spec: StrategySpec) -> None:
    """Refuse `--elastic` where a loss leaves nothing to go on from, and where nobody tried it."""
    least, most = elastic_range(job)
    reduce = str(spec.options.get("reduce", STAYS_WHOLE[0]))
    whole = f"--strategy ddp, with reduce={' or '.join(STAYS_WHOLE)}"
    refused = [
        (
            not least <= job.ranks <= most,
            f"--ranks {job.ranks}",
            "a job begins with a number of ranks that it may go on with",
            f"--ranks {min(max(least, job.ranks), most)}, or --elastic "
            f"{min(least, job.ranks)}:{max(most, job.ranks)}",
        ),
        (
            job.engine != TORCH,
            f"--engine {job.engine}",
            "its ranks form no other group in the same processes",
            f"--engine {TORCH}",
        ),
        (
            spec.name not in ELASTIC,
            f"--strategy {spec}",
            "its ranks form no group of another size in the same processes",
            f"--strategy {', '.join(ELASTIC[:-1])} or {ELASTIC[-1]}; with --max-restarts 3 it "
            "starts again from a checkpoint",
        ),
        (
            reduce not in STAYS_WHOLE,
            f"--strategy {spec}",
            f"what reduce={reduce} keeps or connects is lost with a rank",
            whole,
        ),
        (
            is_late(spec.options),
            f"--strategy {spec}",
            "a gradient that is applied one step late is lost with a rank",
            whole,
        ),
        (
            job.micro_batch_trial,
            "--micro-batch auto",
            "a rank without memory is lost, and the others go on: no trial would end",
            "give --micro-batch a number, or leave it out",
        ),
        (
            job.share not in ("", AUTO),
            f"--share {job.share}",
            "it names the ranks that the job begins with, and others may come",
            "--share auto",
        ),
        (
            job.device != "cpu",
            f"--device {job.device}",
            "it was tried on processors alone",
            "--device cpu, or --max-restarts 3",
        ),
    ]
    _refuse_first(f"--elastic {job.elastic}", refused)


def _check_spare_state(job: Job, spec: StrategySpec) -> None:
    """Refuse `--spare-state` where no part is lost with a rank, or no other rank has a copy."""
    cut = [name for name in ELASTIC if CARDS[name].agreement.cuts_state]
    of_cut = f"--strategy {', '.join(cut[:-1])} or {cut[-1]}"
    refused = [
        (
            not job.elastic,
            "no --elastic",
            "its copies are for ranks that go on in their processes, after another one was lost",
            f"--elastic 1:{job.ranks}, or leave it out",
        ),
        (
            spec.name not in cut,
            f"--strategy {spec}",
            "each of its ranks has the whole state already",
            f"leave it out, or {of_cut}",
        ),
        (
            job.ranks < 2,
            f"--ranks {job.ranks}",
            "the copy of a rank's part is on another rank",
            "--ranks 2 or more, or leave it out",
        ),
    ]
    _refuse_first("--spare-state", refused)


def _check_course(job: Job) -> None:
    """When a job evaluates, and when it ends."""
    for name in ("best", "early_stop"):
        value = getattr(job, name)
        if value and not METRIC.fullmatch(value):
            flag = "--" + name.replace("_", "-")
            raise RequestError(
                asked=f"{flag} {value}",
                found="neither max:METRIC nor min:METRIC",
                why="the best is the one with the largest or the smallest value of a metric",
                do=f"for example {flag} max:accuracy",
            )
    every = job.eval_every
    if every and every != "epoch" and not (every.isdecimal() and int(every) >= 1):
        raise RequestError(
            asked=f"--eval-every {every}",
            found=repr(every),
            why="an evaluation follows every so many steps, or every epoch",
            do="--eval-every 100, or --eval-every epoch",
        )
    for flag, asked in (("--early-stop", job.early_stop), ("--until", job.until)):
        if asked and not every:
            raise RequestError(
                asked=f"{flag} {asked}",
                found="no --eval-every",
                why="without evaluations on the way there is nothing to judge by",
                do=f"{flag} {asked} --eval-every epoch",
            )
    until_of(job)


@dataclasses.dataclass(frozen=True)
class Until:
    """A value that a metric is to have: at least, or at most."""

    metric: str
    value: float
    at_most: bool

    def is_reached(self, metric_value: float) -> bool:
        """Whether the metric has reached the value; never for NaN."""
        return metric_value <= self.value if self.at_most else metric_value >= self.value


def until_of(job: Job) -> Until | None:
    """The rule of `--until`, if there is one; raises `RequestError`."""
    if not job.until:
        return None
    match = UNTIL.fullmatch(job.until)
    try:
        value = float(match[3]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or math.isnan(value) or (match[1] is None and match[2] == FALLS):
        raise RequestError(
            asked=f"--until {job.until}",
            found="no METRIC=NUMBER, or a loss without a word on which way is better",
            why="the training ends when a metric is at least (max:), or at most (min:), a number",
            do="for example --until accuracy=0.97, or --until min:loss=0.1",
        )
    return Until(match[2], value, match[1] == "min")


def devices_of(job: Job) -> tuple[int, ...]:
    """The numbers of `--devices`; none if it was not given. Raises `RequestError`."""
    parts = [part.strip() for part in job.devices.split(",")] if job.devices else []
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise RequestError(
            asked=f"--devices {job.devices}",
            found="not a list of different numbers",
            why="devices are told apart by their numbers, from 0",
            do="for example --devices 0,1,4,5",
        )
    return tuple(int(part) for part in parts)


def logs_of(job: Job) -> tuple[str, ...]:
    """The names of `--log`."""
    return tuple(part.strip() for part in job.log.split(",")) if job.log else ()


def _out_of_range(name: str, value: float, wanted: str) -> RequestError:
    flag = "--" + name.replace("_", "-")
    return RequestError(
        asked=f"{flag} {value}",
        found=str(value),
        why=f"{flag} must be {wanted}",
        do=f"give {flag} a number that is {wanted}, or leave it out",
    )

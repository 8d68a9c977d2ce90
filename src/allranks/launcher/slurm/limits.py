"""Whether a site can give what a job asks for, before it is sent. Pure.

Slurm would find most of it too, some at submission, some in a queue where the job waits for ever.
Here every refusal has the site's own number and the option to change. What a site does not say is
not checked.
"""

from __future__ import annotations

from allranks.errors import RequestError
from allranks.launcher.slurm.request import SlurmOptions, SlurmRequest
from allranks.launcher.slurm.site import Partition, Site

LONGEST_SIGNAL_S = 65_535  # what sbatch takes
SHORTEST_S = 60  # Slurm counts minutes, and none of them is for ever


def check_request(site: Site, options: SlurmOptions, request: SlurmRequest) -> None:
    """Raise `RequestError` for the first thing that this site cannot give."""
    partition = site.partition(request.partition)
    _check_account(site, request)
    _check_nodes(site, partition, request)
    _check_gpus(site, partition, options, request)
    _check_cpus(site, partition, request)
    _check_memory(site, partition, options, request)
    _check_time(site, partition, request)


def check_device(site: Site, request: SlurmRequest, device: str) -> None:
    """Raise if a task would leave its GPUs idle, or have none; `device` "" is not known."""
    with_gpus = [p.name for p in site.partitions.values() if p.gpus]
    without = [p.name for p in site.partitions.values() if p.gpus == 0]
    if device == "cpu" and request.gpus_per_node:
        instead = f" or --partition {without[0]}" if without else " or --gpus-per-node 0"
        raise RequestError(
            asked=f"{request.gpus_per_node} GPUs on a node, and --device cpu",
            found=f"partition {request.partition} of {site.title}, and a task on the processor",
            why="the GPUs would be idle, and charged",
            do=f"--device cuda after the words of train,{instead}",
        )
    if device == "cuda" and not request.gpus_per_node:
        instead = f" --partition {with_gpus[0]}, or" if with_gpus else ""
        raise RequestError(
            asked="--device cuda",
            found=f"partition {request.partition} of {site.title}, and no GPU asked for",
            why="the ranks would find none",
            do=f"--gpus-per-node N,{instead} --device cpu",
        )


def _check_account(site: Site, request: SlurmRequest) -> None:
    if site.account_required and not request.account:
        raise RequestError(
            asked="a job without --account",
            found=f"{site.title} charges every job to a project",
            why="it refuses jobs that name none, or lets them wait for ever",
            do="--account PROJECT",
        )


def _check_nodes(site: Site, partition: Partition, request: SlurmRequest) -> None:
    least, most = partition.min_nodes, partition.max_nodes
    if most is not None and request.nodes > most:
        other = _roomier(site, partition, request.nodes, request.gpus_per_node)
        raise _too_much(
            site, partition, f"--nodes {request.nodes}", f"{_count(most, 'node')} for a job", other
        )
    if request.nodes < least:
        raise RequestError(
            asked=f"--nodes {request.nodes}",
            found=f"partition {partition.name} of {site.title}: "
            f"at least {_count(least, 'node')} for a job",
            why="smaller jobs belong into another partition",
            do=f"--nodes {least}, or another --partition: {', '.join(site.partitions)}",
        )


def _roomier(site: Site, partition: Partition, nodes: int, gpus: int) -> str:
    fits = [
        p.name
        for p in site.partitions.values()
        if p.max_nodes and p.max_nodes >= nodes and (p.gpus or 0) >= gpus
    ]
    where = f", or --partition {fits[0]}" if fits else ""
    return f"--nodes {partition.max_nodes}{where}"


def _check_gpus(
    site: Site, partition: Partition, options: SlurmOptions, request: SlurmRequest
) -> None:
    gpus, there = request.gpus_per_node, partition.gpus
    if gpus and there is not None and gpus > there:
        with_gpus = [p.name for p in site.partitions.values() if p.gpus]
        option, asked_for = "--gpus-per-node", gpus
        if options.gpus_per_node is None:  # one for each device of a rank
            option, asked_for = "--ranks-per-node", request.ranks_per_node
        instead = f"{option} {there * asked_for // gpus}"
        if not there:
            instead = f"--partition {with_gpus[0]}" if with_gpus else "leave --gpus-per-node out"
        raise _too_much(
            site, partition, f"{option} {asked_for}", f"{_count(there, 'GPU')} on a node", instead
        )
    most = partition.max_gpus
    if most is not None and gpus * request.nodes > most:
        raise _too_much(
            site,
            partition,
            f"--nodes {request.nodes} --gpus-per-node {gpus}: {gpus * request.nodes} GPUs",
            f"{_count(most, 'GPU')} for a job",
            f"--gpus-per-node {most // request.nodes}" if most >= request.nodes else "fewer nodes",
        )
    needed = request.ranks_per_node * options.devices_per_rank
    if gpus and (gpus % needed if options.any_devices else gpus != needed):
        each = "" if options.devices_per_rank == 1 else f", {options.devices_per_rank} GPUs each"
        raise RequestError(
            asked=f"--ranks-per-node {request.ranks_per_node} --gpus-per-node {gpus}",
            found=f"{request.ranks_per_node} tasks on a node{each}, and {gpus} GPUs there "
            f"(a node of {partition.name} of {site.title} has {there})",
            why="every rank works on GPUs of its own: others would be idle, or shared",
            do=f"--ranks-per-node {max(1, gpus // options.devices_per_rank)}, "
            f"or --gpus-per-node {needed}",
        )


def _check_cpus(site: Site, partition: Partition, request: SlurmRequest) -> None:
    there = partition.cpus
    if there is not None and request.cpus_per_node > there:
        each = there // request.ranks_per_node
        raise _too_much(
            site,
            partition,
            f"--ranks-per-node {request.ranks_per_node} --cpus-per-task {request.cpus_per_task}: "
            f"{request.cpus_per_node} CPUs on a node",
            f"{_count(there, 'CPU')} on a node",
            f"--cpus-per-task {each}" if each else f"--ranks-per-node {there}",
        )
    each_gpu = partition.cpus_per_gpu
    if request.gpus_per_node and each_gpu and partition.gpus and not partition.whole_nodes:
        most = each_gpu * request.gpus_per_node
        if request.cpus_per_node > most:
            raise _too_much(
                site,
                partition,
                f"--cpus-per-task {request.cpus_per_task} with {request.gpus_per_node} GPUs",
                f"{each_gpu} CPUs for each GPU",
                f"--cpus-per-task {max(1, most // request.ranks_per_node)}",
            )


def _check_memory(
    site: Site, partition: Partition, options: SlurmOptions, request: SlurmRequest
) -> None:
    flag, family = request.memory_flag, site.memory_flag_of(partition)
    option = f"--{flag} {request.memory_mb}"
    if options.memory() and flag != family:
        use = "memory comes with the CPUs and GPUs" if family == "none" else f"--{family}"
        raise RequestError(
            asked=option,
            found=f"partition {partition.name} of {site.title}: {use}",
            why="a site counts memory in one way",
            do=f"leave --{flag} out"
            if family == "none"
            else f"--{family} in the place of --{flag}",
        )
    if flag == "mem-per-gpu" and not request.gpus_per_node:
        raise RequestError(
            asked=option,
            found=f"a job without GPUs, in partition {partition.name} of {site.title}",
            why="there is nothing to multiply by",
            do="--mem, or --gpus-per-node N",
        )
    memory, there = request.memory_per_node_mb, partition.memory_mb
    if memory is not None and there is not None and memory > there:
        times = memory // request.memory_mb
        raise _too_much(
            site,
            partition,
            option + ("" if times == 1 else f": {memory} MB on a node"),
            f"{there} MB on a node",
            f"--{flag} {there // times}",
        )


def _check_time(site: Site, partition: Partition, request: SlurmRequest) -> None:
    time_s, limit = request.time_s, partition.time_limit_s
    if time_s is not None and time_s < SHORTEST_S:
        raise RequestError(
            asked=f"--time {time_s} s",
            found="Slurm, which counts minutes",
            why="less than one would be none, and none is no limit at all",
            do="--time 1, or longer: a plain number is minutes, as for sbatch",
        )
    if time_s is not None and limit is not None and time_s > limit:
        partitions = site.partitions.values()
        longer = [p.name for p in partitions if p.time_limit_s and p.time_limit_s >= time_s]
        instead = f"--time {slurm_time(limit)}"
        if longer:
            instead += f", or --partition {longer[0]}"
        words, most_time = f"--time {slurm_time(time_s)}", f"at most {slurm_time(limit)}"
        raise _too_much(site, partition, words, most_time, instead)
    if request.signal_s > LONGEST_SIGNAL_S or (time_s and request.signal_s >= time_s):
        most = min(LONGEST_SIGNAL_S, (time_s or LONGEST_SIGNAL_S) // 2)
        raise RequestError(
            asked=f"--signal {request.signal_s}",
            found=f"a job of {slurm_time(time_s)}" if time_s else f"{LONGEST_SIGNAL_S} at most",
            why="the job is told so many seconds before its time is over",
            do=f"--signal {most}",
        )


def slurm_time(seconds: int) -> str:
    """As sbatch takes it: `1-12:00:00`, `00:15:00`."""
    days, in_day = divmod(seconds, 86_400)
    clock = f"{in_day // 3600:02}:{in_day // 60 % 60:02}:{in_day % 60:02}"
    return f"{days}-{clock}" if days else clock


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _too_much(site: Site, partition: Partition, asked: str, there: str, do: str) -> RequestError:
    return RequestError(
        asked=asked,
        found=f"partition {partition.name} of {site.title}: {there}",
        why="it has no more to give: the job would be refused, or wait for ever",
        do=do,
    )

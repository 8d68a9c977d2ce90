"""What a job asks of Slurm, and how it follows from few words and the facts of a site. Pure.

The rule of the share. A node is paid for by its scarcest part, which is its GPUs: a job that asks
for g of the G GPUs of a node asks for g/G of its CPUs and g/G of its memory. CPUs are counted for
each GPU and rounded down (44 cores and 6 GPUs: 7 for each), memory is cut from what a full node
gets (`memory_share_mb`). Where nothing else is said, all GPUs of ml of Taurus come out as
`--mem=250000 --cpus-per-task=7`, those of gpu2 as `--mem=60000 --cpus-per-task=6`, and half of the
GPUs as half of that. Without GPUs the CPUs that are asked for decide the share of the memory.

`limits` checks the outcome, `script` writes it down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from allranks.errors import RequestError
from allranks.launcher.slurm.site import Partition, Site

SIGNAL_S = 120  # before the end: long enough to commit a checkpoint, unless the job is very short
SIGNAL_SHARE = 4  # ... of which the signal takes no more than a quarter
MEMORY = re.compile(r"([0-9]+)\s*([KMGT]?)B?", re.IGNORECASE)
OF_AMD = re.compile(r"(?<![a-z0-9])mi[0-9]{2,3}|gpu:amd", re.IGNORECASE)  # such as MI250X
MB_OF_A_UNIT = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}  # Slurm's: MB alone


@dataclass(frozen=True)
class SlurmOptions:
    """The user's options for the job; `None` or empty if not given. Memory is in MB."""

    partition: str = ""
    account: str = ""
    nodes: int = 1
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: int | None = None
    mem_per_cpu: int | None = None
    mem_per_gpu: int | None = None
    time_s: int | None = None
    signal_s: int | None = None
    requeue: bool = False
    survives_nodes: bool = False
    modules: tuple[str, ...] = ()
    venv: str = ""
    container: str = ""
    setup: tuple[str, ...] = ()
    name: str = ""
    options: tuple[str, ...] = ()
    devices_per_rank: int = 1
    any_devices: bool = False

    def memory(self) -> dict[str, int]:
        """The flags of memory that were given, with their values."""
        flags = {"mem": self.mem, "mem-per-cpu": self.mem_per_cpu, "mem-per-gpu": self.mem_per_gpu}
        return {flag: value for flag, value in flags.items() if value is not None}


@dataclass(frozen=True)
class SlurmRequest:
    """Everything that a batch script says. Every choice is made; nothing is looked up any more.

    Of one node: `ranks_per_node` tasks with `cpus_per_task` CPUs each, and `gpus_per_node`, asked
    for by `gpu_line`. `memory_flag` is mem, mem-per-cpu, mem-per-gpu, or none for what the site
    gives. `signal_s` seconds before the end of `time_s` the steps get SIGUSR1 (0: never). With
    `requeue` a job that stopped early goes back into the queue; with `survives_nodes` it goes on
    when a node dies. `command` are the words of the job; `container` enters them.
    """

    name: str
    site: str
    partition: str
    nodes: int
    ranks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    gpu_line: str
    memory_flag: str
    memory_mb: int
    account: str
    time_s: int | None
    signal_s: int
    requeue: bool
    survives_nodes: bool
    options: tuple[str, ...]
    folder: str
    output: str
    setup: tuple[str, ...]
    modules: tuple[str, ...]
    environment: dict[str, str]
    venv: str
    container: tuple[str, ...]
    command: tuple[str, ...]
    run_dir: str

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        return self.ranks_per_node * self.cpus_per_task

    @property
    def memory_per_node_mb(self) -> int | None:
        """Memory of one node that is asked for; `None` where the site decides."""
        times = {"mem": 1, "mem-per-cpu": self.cpus_per_node, "mem-per-gpu": self.gpus_per_node}
        return self.memory_mb * times[self.memory_flag] if self.memory_flag in times else None


def parse_memory_mb(text: str) -> int | None:
    """MB in `64G`, `512M` or Slurm's plain `250000`; `None` for zero and for anything else."""
    match = MEMORY.fullmatch(text.strip())
    size = int(match[1]) * MB_OF_A_UNIT[match[2].upper()] if match else 0
    return int(size) if size >= 1 else None


def make_request(
    site: Site, options: SlurmOptions, *, command: tuple[str, ...], folder: str, run_dir: str
) -> SlurmRequest:
    """The request that follows; raises `RequestError` where its parts cannot be counted at all.

    `folder` is where the job starts, `run_dir` the run folder that its command names; the job's
    output is written beside that.
    """
    partition = site.partition(options.partition)
    gpus = _gpus(options, partition)
    ranks = options.ranks_per_node
    if ranks is None:
        ranks = max(1, gpus // options.devices_per_rank)
    cpus = options.cpus_per_task
    if cpus is None:
        cpus = cpus_share(partition, gpus, ranks)
    flag, memory = _memory(site, partition, options, gpus, ranks * cpus)
    return SlurmRequest(
        name=options.name,
        site=site.title,
        partition=partition.name,
        nodes=options.nodes,
        ranks_per_node=ranks,
        cpus_per_task=cpus,
        gpus_per_node=gpus,
        gpu_line=partition.gpu_request.format(count=gpus) if gpus else "",
        memory_flag=flag,
        memory_mb=memory,
        account=options.account,
        time_s=options.time_s,
        signal_s=_signal_s(options),
        requeue=options.requeue,
        survives_nodes=options.survives_nodes,
        options=(*partition.options, *options.options),
        folder=folder,
        output=f"{run_dir}.slurm-%j.out",
        setup=(*site.setup, *options.setup),
        modules=options.modules,
        environment=site.environment,
        venv=options.venv,
        container=_container(site, partition, options, gpus),
        command=command,
        run_dir=run_dir,
    )


def cpus_share(partition: Partition, gpus: int, ranks: int) -> int:
    """CPUs of each rank of a job that has `gpus` GPUs of a node; at least one.

    Without GPUs a rank gets one, or its part of a node that the job has for itself.
    """
    cores = partition.cores or partition.cpus
    if gpus and partition.gpus and (partition.cpus_per_gpu or cores):
        each = partition.cpus_per_gpu or (cores or 0) // partition.gpus
        return max(1, each * gpus // ranks)
    if not gpus and partition.whole_nodes and cores:
        return max(1, cores // ranks)
    return 1


def memory_share_mb(partition: Partition, gpus: int, cpus: int) -> int | None:
    """MB of a node for a job with so many of its GPUs or, without any, of its CPUs."""
    whole = partition.memory_share_mb
    if whole is None:
        return None
    if gpus and partition.gpus:
        return whole * min(gpus, partition.gpus) // partition.gpus
    if partition.whole_nodes or not partition.cpus:
        return whole
    return whole * min(cpus, partition.cpus) // partition.cpus


def _gpus(options: SlurmOptions, partition: Partition) -> int:
    """GPUs of each node: as asked, one for each rank where there are some, all of them, or none."""
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    if not partition.gpus:
        return 0
    if options.ranks_per_node is not None:
        return options.ranks_per_node * options.devices_per_rank
    return min(partition.gpus, partition.max_gpus or partition.gpus)


def _memory(
    site: Site, partition: Partition, options: SlurmOptions, gpus: int, cpus: int
) -> tuple[str, int]:
    """Which flag of memory, and how many MB: as asked, or the share in the site's own way."""
    named, flag = options.memory(), site.memory_flag_of(partition)
    if len(named) > 1:
        keep = flag if flag in named else next(iter(named))
        usual = "none of them" if flag == "none" else f"--{flag}"
        raise RequestError(
            asked=" ".join(f"--{flag} {value}" for flag, value in named.items()),
            found=f"{len(named)} ways to ask for one memory; {site.title} uses {usual}",
            why="Slurm takes one of --mem, --mem-per-cpu and --mem-per-gpu, and refuses the others",
            do=f"keep one of them: --{keep} {named[keep]}",
        )
    if named:
        return next(iter(named.items()))
    share = memory_share_mb(partition, gpus, cpus)
    parts = {"mem": 1, "mem-per-cpu": cpus, "mem-per-gpu": gpus}
    if share is None or not parts.get(flag):
        return "none", 0
    return flag, max(1, share // parts[flag])


def _signal_s(options: SlurmOptions) -> int:
    if options.signal_s is not None:
        return options.signal_s
    return SIGNAL_S if options.time_s is None else min(SIGNAL_S, options.time_s // SIGNAL_SHARE)


def _container(
    site: Site, partition: Partition, options: SlurmOptions, gpus: int
) -> tuple[str, ...]:
    if not options.container:
        return ()
    words_of_slurm = " ".join((partition.gpu_request, *partition.options, *options.options))
    flag = "--rocm" if OF_AMD.search(words_of_slurm) else "--nv"
    sees_gpus = (flag,) if gpus else ()  # without it a program would train on processors
    words = site.container or ("apptainer", "exec", *sees_gpus, "{image}")
    return tuple(word.replace("{image}", options.container) for word in words)


# --- sbatch options ------------------------------------------------------------------------------
# The long options of sbatch, and which one an abbreviation means. Pure.
#
# sbatch reads its options as getopt_long does: the beginning of a name stands for the name, if it
# is that of one only. An option that the script decides, and that was checked against the site,
# must not come in a second time by such a beginning, nor by another option that asks for the same.


DECIDED = {
    **dict.fromkeys(("nodes", "nodefile", "use-min-nodes"), "--nodes"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node"), "--ranks-per-node"),
    **dict.fromkeys(("ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu"), "--ranks-per-node"),
    "ntasks-per-tres": "--ranks-per-node",
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu", "mincpus", "overcommit"), "--cpus-per-task"),
    **dict.fromkeys(
        ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"), "--gpus-per-node"
    ),
    **dict.fromkeys(("gres", "tres-per-job", "tres-per-task"), "--gpus-per-node"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), "--mem, --mem-per-cpu or --mem-per-gpu"),
    **dict.fromkeys(("time", "time-min", "deadline"), "--time"),
    "partition": "--partition",
    "account": "--account",
    **dict.fromkeys(("clusters", "cluster"), "--cluster"),
    "signal": "--signal",
    **dict.fromkeys(("requeue", "no-requeue"), "--requeue"),
    "job-name": "--name",
    **dict.fromkeys(("output", "open-mode", "chdir", "workdir"), "--run-dir"),
    **dict.fromkeys(("export", "export-file", "get-user-env"), "--setup, for a line `export A=b`"),
}
"""What the script says itself,
or what would change it -> the option of `allranks submit` for it."""

OTHERS = frozenset(
    (
        *("acctg-freq", "array", "autocomplete", "batch", "bb", "bbf", "begin", "checkpoint"),
        *("checkpoint-dir", "cluster-constraint", "comment", "consolidate-segments", "constraint"),
        *("container", "container-id", "context", "contiguous", "core-spec", "cores-per-socket"),
        *("cpu-freq", "delay-boot", "dependency", "distribution", "error", "exclude", "exclusive"),
        *("extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gres-flags", "help", "hint"),
        *("hold", "ignore-pbs", "input", "jobid", "kill-on-invalid-dep", "licenses", "mail-type"),
        *("mail-user", "mcs-label", "mem-bind", "mincores", "minsockets", "minthreads", "network"),
        *("nice", "no-kill", "nodelist", "oom-kill-step", "oversubscribe", "parsable", "power"),
        *("prefer", "priority", "profile", "propagate", "qos", "quiet", "reboot", "reservation"),
        *("resv-ports", "segment", "share", "sockets-per-node", "spread-job", "spread-segments"),
        *("stepmgr", "switches", "test-only", "thread-spec", "threads-per-core", "tmp"),
        *("tree-width", "tres-bind", "tres-freq", "uid", "umask", "usage", "verbose", "version"),
        *("wait", "wait-all-nodes", "wckey", "wrap"),
    )
)
"""All others, of the versions from 17 on: an abbreviation must mean the same in each of them."""


def full_name(name: str) -> str:
    """`--partit` -> `--partition`; raises `RequestError` where it may mean several.

    A name that no option begins with is left as it is: plugins of a site bring options of their
    own, and sbatch refuses what it does not know.
    """
    bare = name.removeprefix("--")
    known = DECIDED.keys() | OTHERS
    means = sorted(option for option in known if option.startswith(bare))
    if bare in known or not means:
        return name
    if len(means) > 1:
        raise RequestError(
            asked=f"--sbatch={name}",
            found=f"{len(means)} options of sbatch that begin so: "
            + ", ".join(f"--{option}" for option in means),
            why="which of them it means, if any, depends on the version of Slurm",
            do="write the whole name",
        )
    return f"--{means[0]}"

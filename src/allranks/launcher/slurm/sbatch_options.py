"""The long options of sbatch, and which one an abbreviation means. Pure.

sbatch reads its options as getopt_long does: the beginning of a name stands for the name, if it is
that of one only. An option that the script decides, and that was checked against the site, must not
come in a second time by such a beginning, nor by another option that asks for the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from allranks.errors import RequestError

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
    [
        "acctg-freq",
        "array",
        "autocomplete",
        "batch",
        "bb",
        "bbf",
        "begin",
        "checkpoint",
        "checkpoint-dir",
        "cluster-constraint",
        "comment",
        "consolidate-segments",
        "constraint",
        "container",
        "container-id",
        "context",
        "contiguous",
        "core-spec",
        "cores-per-socket",
        "cpu-freq",
        "delay-boot",
        "dependency",
        "distribution",
        "error",
        "exclude",
        "exclusive",
        "extra",
        "extra-node-info",
        "gid",
        "gpu-bind",
        "gpu-freq",
        "gres-flags",
        "help",
        "hint",
        "hold",
        "ignore-pbs",
        "input",
        "jobid",
        "kill-on-invalid-dep",
        "licenses",
        "mail-type",
        "mail-user",
        "mcs-label",
        "mem-bind",
        "mincores",
        "minsockets",
        "minthreads",
        "network",
        "nice",
        "no-kill",
        "nodelist",
        "oom-kill-step",
        "oversubscribe",
        "parsable",
        "power",
        "prefer",
        "priority",
        "profile",
        "propagate",
        "qos",
        "quiet",
        "reboot",
        "reservation",
        "resv-ports",
        "segment",
        "share",
        "sockets-per-node",
        "spread-job",
        "spread-segments",
        "stepmgr",
        "switches",
        "test-only",
        "thread-spec",
        "threads-per-core",
        "tmp",
        "tree-width",
        "tres-bind",
        "tres-freq",
        "uid",
        "umask",
        "usage",
        "verbose",
        "version",
        "wait",
        "wait-all-nodes",
        "wckey",
        "wrap",
    ]
)
"""All others, of the versions from 17 on: an abbreviation must mean the same in each of them."""


def full_name(name: str, options: Mapping[str, str] = DECIDED) -> str:
    """`--partit` -> `--partition`; raises `RequestError` where it may mean several.

    A name that no option begins with is left as it is: plugins of a site bring options of their
    own, and sbatch refuses what it does not know.
    """
    given = name.removeprefix("--")
    known = options.keys() | OTHERS
    means = sorted(option for option in known if option.startswith(given))
    if given in known or not means:
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

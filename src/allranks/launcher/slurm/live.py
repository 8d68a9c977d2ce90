"""A site as Slurm describes itself: the text of `scontrol show`, parsed. Pure.

    scontrol show config                 settings, one a line: `ClusterName = lumi`
    scontrol --oneliner show partition   a line for each: `PartitionName=gpu MaxTime=3-00:00:00 …`
    scontrol --oneliner show node        a line for each: `NodeName=g1 CPUTot=40 Gres=gpu:v100:4 …`

A value may have blanks in it (`OS=Linux 5.10.0 #1 SMP`), so a key is a word that begins with a
capital letter before an `=`. Of the nodes of a partition the largest counts: a job that does not
fit it fits none.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from allranks.errors import PlaceError, RequestError
from allranks.job.job_file import write_toml
from allranks.launcher.slurm.allocation import expand_nodes
from allranks.launcher.slurm.limits import slurm_time
from allranks.launcher.slurm.site import Partition, Site, Source, parse_seconds

KEY = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=")
SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
GPUS = re.compile(r"(?:^|,)gpu(?::([^,:()]+))?:([0-9]+)")
NOTHING = ("", "(null)", "N/A", "NONE", "None", "UNLIMITED", "INFINITE")
LEAST_MEMORY_MB = 2  # 1 is what Slurm says where nobody has told it
SCONTROL = "scontrol"


@dataclass(frozen=True)
class Node:
    """What one node offers to jobs; `gpu_type` is empty where Slurm names none, or several."""

    cpus: int
    cores: int
    memory_mb: int | None
    gpus: int
    gpu_type: str


def parse_site_facts(config: str, partitions: str, nodes: str, *, as_of: str) -> Site:
    """The site that these three answers describe; raises `PlaceError` if they are none."""
    settings = dict(SETTING.findall(config))
    if "ClusterName" not in settings:
        raise PlaceError(f"`scontrol show config` names no cluster: {config[:200]!r}")
    rows = [parse_fields(line) for line in nodes.splitlines() if line.startswith("NodeName=")]
    offers = {row["NodeName"]: _node(row) for row in rows}
    consumable = "MEMORY" in settings.get("SelectTypeParameters", "").upper()
    found = [
        _partition(parse_fields(line), offers, consumable)
        for line in partitions.splitlines()
        if line.startswith("PartitionName=")
    ]
    usual = [
        row["PartitionName"]
        for row in map(parse_fields, partitions.splitlines())
        if row.get("Default") == "YES"
    ]
    name = settings["ClusterName"]
    version = settings.get("SLURM_VERSION", "")
    return Site(
        name=name,
        title=f"cluster {name}",
        partitions={partition.name: partition for partition in found},
        default_partition=usual[0] if usual else "",
        memory_flag="mem",
        sources={SCONTROL: Source("scontrol show", as_of, f"Slurm {version}".strip())},
    )


def site_as_toml(site: Site) -> str:
    """A profile that `--cluster FILE` takes, with what Slurm does not know left for a person."""
    top = {
        "name": site.name,
        "title": site.title,
        "default_partition": site.default_partition or None,
        "account_required": site.account_required,
        "memory_flag": site.memory_flag,
    }
    parts = [
        f"# {site.title}, as Slurm described itself. It does not know modules, containers and "
        "networks:\n# add them as in `allranks cluster show template`.\n\n" + write_toml(top)
    ]
    for name, source in site.sources.items():
        row = {"url": source.url, "as_of": source.as_of, "version": source.version or None}
        parts.append(f"[sources.{_key(name)}]\n{write_toml(dict(row))}")
    for partition in site.partitions.values():
        numbers = partition.numbers()
        limit = numbers.pop("time_limit_s", None)
        if limit is not None:
            numbers["time_limit"] = slurm_time(limit)
        row = {"source": partition.source, **numbers}
        parts.append(f"[partitions.{_key(partition.name)}]\n{write_toml(row)}")
    return "\n".join(parts)


def parse_fields(line: str) -> dict[str, str]:
    """`NodeName=n1 OS=Linux 5.10 CPUTot=4` -> its keys and values, blanks in values kept."""
    marks = list(KEY.finditer(line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)]
    return {mark[1]: line[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}


def _node(row: dict[str, str]) -> Node:
    cpus = _count(row.get("CPUEfctv")) or _count(row.get("CPUTot")) or 1
    threads = _count(row.get("ThreadsPerCore")) or 1
    memory = _count(row.get("RealMemory")) or 0
    memory -= _count(row.get("MemSpecLimit")) or 0
    gres = [(kind, int(number)) for kind, number in GPUS.findall(row.get("Gres", ""))]
    kinds = Counter(kind for kind, _ in gres)
    return Node(
        cpus=cpus,
        cores=max(1, cpus // threads),
        memory_mb=memory if memory >= LEAST_MEMORY_MB else None,
        gpus=sum(number for _, number in gres),
        gpu_type=next(iter(kinds)) if len(kinds) == 1 else "",
    )


def _partition(row: dict[str, str], offers: dict[str, Node], consumable: bool) -> Partition:
    name = row["PartitionName"]
    listed = row.get("Nodes", "")
    try:
        names = () if listed in NOTHING else expand_nodes(listed)
    except RequestError as error:
        raise PlaceError(f"the nodes of partition {name} cannot be read: {error.found}") from None
    nodes = [offers[node] for node in names if node in offers]
    cpus = _largest([node.cpus for node in nodes], _count(row.get("MaxCPUsPerNode")))
    cores = _largest([node.cores for node in nodes], None)
    memory = _largest(
        [node.memory_mb for node in nodes if node.memory_mb is not None],
        _count(row.get("MaxMemPerNode")),
    )
    gpus = max((node.gpus for node in nodes), default=None)
    kinds = {node.gpu_type for node in nodes if node.gpus}
    kind = f"{next(iter(kinds))}:" if len(kinds) == 1 and "" not in kinds else ""
    most = _count(row.get("MaxNodes"))
    return Partition(
        name=name,
        cpus=cpus,
        cores=None if cores is None or cpus is None or cores >= cpus else cores,
        memory_mb=memory,
        memory_share_mb=memory if consumable else None,
        gpus=gpus,
        gpu_request=f"--gres=gpu:{kind}{{count}}",
        min_nodes=max(1, _count(row.get("MinNodes")) or 1),
        max_nodes=min(most or len(nodes), len(nodes)) if nodes else most,
        time_limit_s=_time_limit(row.get("MaxTime", "")),
        whole_nodes=row.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        source=SCONTROL,
    )


def _largest(values: list[int], most: int | None) -> int | None:
    largest = max(values, default=None)
    return most if largest is None else largest if most is None else min(largest, most)


def _time_limit(text: str) -> int | None:
    return None if text in NOTHING else parse_seconds(text)


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,12}", text) else None


def _key(name: str) -> str:
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", name)
    return name if bare else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'

"""What a computing site has: its partitions, their limits, how a program is started there. Data.

A site is read from a TOML file: one that ships with the package (`data/`), or a user's own. Every
number in a bundled file names the page it was read from, and when. What is not known is `None`, and
nothing is checked against it.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from allranks.errors import RequestError, nearest
from allranks.job.units import parse_slurm_time

# --- tables --------------------------------------------------------------------------------------
# TOML tables into frozen dataclasses: every key is known, and of its type. Pure.


def build(kind: Any, data: dict[str, Any], where: str) -> Any:
    """A `kind` from a table; raises `RequestError` for a key that it does not have or lacks."""
    hints = typing.get_type_hints(kind)
    for key, value in data.items():
        if key not in hints:
            raise unreadable(where, f"{key} = {value!r}", nearest(key, hints))
        if isinstance(value, list):
            data = {**data, key: tuple(value)}
        if not _is_a(data[key], hints[key]):
            raise unreadable(where, f"{key} = {value!r}", f"it is a {_name_of(hints[key])}")
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in data
    ]
    if missing:
        raise unreadable(where, f"no {', '.join(missing)}", "it cannot be done without")
    return kind(**data)


def tables(data: Any, name: str, file: str) -> list[tuple[str, dict[str, Any]]]:
    """The tables `[name.…]` of a file."""
    if not isinstance(data, dict) or not all(isinstance(row, dict) for row in data.values()):
        raise unreadable(file, f"{name} = {data!r}", f"{name} are tables, [{name}.NAME]")
    return list(data.items())


def _is_a(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return any(_is_a(value, part) for part in typing.get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
    if origin is dict:
        of = typing.get_args(hint)[1]
        return isinstance(value, dict) and all(_is_a(part, of) for part in value.values())
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _name_of(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return _name_of(typing.get_args(hint)[0])
    names = {str: "text in quotes", int: "whole number", bool: "word: true or false"}
    names |= {dict: "table", tuple: "list of texts"}
    return names.get(origin or hint, "value")


def unreadable(where: str, found: str, why: str) -> RequestError:
    """What is wrong with a file of a site, and where."""
    return RequestError(
        asked=f"the site in {where}",
        found=found,
        why=why,
        do="correct that line; `allranks cluster show template` explains them all",
    )


MEMORY_FLAGS = ("mem", "mem-per-cpu", "mem-per-gpu", "none")
TEMPLATE = "template"
BLANKS = ("name", "source", "sources")  # keys of a partition that hold no number


@dataclass(frozen=True)
class NumberSource:
    """The source of numbers: a page, and the date of it or of its copy."""

    url: str
    as_of: str
    version: str = ""


@dataclass(frozen=True)
class Partition:
    """Nodes of one kind, as Slurm counts them. `None` is unknown, and then not checked.

    Of one node: `cpus` that jobs may ask for; `cores`, what is shared out among GPUs by default
    (`cpus`, unless hardware threads are counted as CPUs); `memory_mb`, the most that a job may ask
    for; `memory_share_mb`, what a job with all GPUs asks for by default; `gpus`, and how they are
    asked for (`gpu_request`, with `{count}` in it). Of one job: nodes, GPUs, time, and further
    `options` of sbatch. With `whole_nodes` a job has its nodes for itself. `memory_flag` is the one
    way in which memory is asked for here, that of the site if empty.
    """

    name: str
    cpus: int | None = None
    cores: int | None = None
    cpus_per_gpu: int | None = None
    memory_mb: int | None = None
    memory_share_mb: int | None = None
    memory_flag: str = ""
    gpus: int | None = None
    gpu_request: str = "--gres=gpu:{count}"
    min_nodes: int = 1
    max_nodes: int | None = None
    max_gpus: int | None = None
    time_limit_s: int | None = None
    whole_nodes: bool = False
    options: tuple[str, ...] = ()
    source: str = ""
    sources: dict[str, str] = field(default_factory=dict)

    def numbers(self) -> dict[str, Any]:
        """Every limit that is known."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {n: v for n, v in values.items() if n not in BLANKS and v != defaults[n]}


@dataclass(frozen=True)
class Site:
    """A site: its partitions by name, and the lines that a job needs there.

    `setup` are lines of shell and `modules` what is loaded after them; `container` are the words
    that enter a container, with `{image}` among them (none: `apptainer exec`, and for a job with
    GPUs `--nv`, or `--rocm` if it asks for one of AMD by name); `environment` are variables that
    every job there should have, network interfaces for one.
    """

    name: str
    title: str
    partitions: dict[str, Partition]
    default_partition: str = ""
    account_required: bool = False
    memory_flag: str = "mem"
    setup: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    container: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    sources: dict[str, NumberSource] = field(default_factory=dict)
    file: str = ""

    def partition(self, name: str) -> Partition:
        """The partition of that name, or the site's usual one; raises `RequestError`."""
        wanted = name or self.default_partition
        if wanted not in self.partitions:
            listed = ", ".join(self.partitions)
            raise RequestError(
                asked=f"--partition {name}" if name else "a job without --partition",
                found=f"{self.title} has {listed}",
                why="there is no such partition" if name else "none of them is the usual one",
                do=nearest(name, self.partitions) if name else "--partition NAME",
            )
        return self.partitions[wanted]

    def memory_flag_of(self, partition: Partition) -> str:
        """The one way in which a job there asks for memory."""
        return partition.memory_flag or self.memory_flag


def bundled_names() -> list[str]:
    """The sites that ship with the package, the template among them."""
    folder = resources.files("allranks.launcher.slurm") / "data"
    return sorted(Path(f.name).stem for f in folder.iterdir() if f.name.endswith(".toml"))


def bundled_text(name: str) -> str:
    """The TOML text of a bundled site, with its comments; raises `RequestError`."""
    if name not in bundled_names():
        raise RequestError(
            asked=f"cluster {name!r}",
            found="neither a site that ships with allranks nor a file",
            why="limits and flags differ from site to site, and are not guessed",
            do=f"{nearest(name, bundled_names())}; or give a .toml file of your own: "
            "see `allranks cluster show template` and `allranks cluster discover`",
        )
    return (resources.files("allranks.launcher.slurm") / "data" / f"{name}.toml").read_text("utf-8")


def load_site(name_or_path: str) -> Site:
    """The site of that name, or of that TOML file; raises `RequestError`."""
    if not name_or_path.endswith(".toml"):
        text = bundled_text(name_or_path)
    else:
        try:
            text = Path(name_or_path).read_text("utf-8-sig")
        except (OSError, ValueError) as error:
            raise unreadable(name_or_path, str(error), "a site is a TOML file") from None
    return parse_site(text, name_or_path)


def parse_site(text: str, file: str) -> Site:
    """The site that this TOML text describes; `file` is how errors call it."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(file, str(error), "a site is a TOML file") from None
    data["sources"] = {
        name: build(NumberSource, row, f"[sources.{name}] in {file}")
        for name, row in tables(data.get("sources", {}), "sources", file)
    }
    data["partitions"] = {
        name: _partition(name, row, file, data["sources"])
        for name, row in tables(data.get("partitions", {}), "partitions", file)
    }
    site: Site = build(Site, {**data, "file": file}, file)
    default = site.default_partition
    if not site.partitions or (default and default not in site.partitions):
        has_some, why = site.partitions, "a site has partitions, and its usual one is one of them"
        row = f"default_partition = {default!r}" if has_some else "no [partitions.NAME]"
        raise unreadable(file, row, why)
    if site.memory_flag not in MEMORY_FLAGS:
        raise unreadable(file, f"memory_flag = {site.memory_flag!r}", f"it is {_flags()}")
    if not default and len(site.partitions) == 1:
        site = dataclasses.replace(site, default_partition=next(iter(site.partitions)))
    return site


def _partition(
    name: str, row: dict[str, Any], file: str, sources: dict[str, NumberSource]
) -> Partition:
    where = f"[partitions.{name}] in {file}"
    row = dict(row)
    limit = row.pop("time_limit", None)
    if limit is not None:
        row["time_limit_s"] = parse_seconds(str(limit))
        if row["time_limit_s"] is None:
            raise unreadable(where, f"time_limit = {limit!r}", "it is written 36:00:00 or 3d")
    partition: Partition = build(Partition, {"name": name, **row}, where)
    for used in (partition.source, *partition.sources.values()):
        if used and used not in sources:
            raise unreadable(where, f"source {used!r}", "every source is a table [sources.NAME]")
    for number, value in partition.numbers().items():
        if isinstance(value, int) and not isinstance(value, bool) and value < (number != "gpus"):
            raise unreadable(where, f"{number} = {value}", "it counts something, from 1 up")
    if "{count}" not in partition.gpu_request:
        raise unreadable(where, f"gpu_request = {partition.gpu_request!r}", "{count} goes in it")
    if partition.memory_flag and partition.memory_flag not in MEMORY_FLAGS:
        raise unreadable(where, f"memory_flag = {partition.memory_flag!r}", f"it is {_flags()}")
    return partition


def parse_seconds(text: str) -> int | None:
    """Seconds of a time limit as Slurm writes it (`2-12:00:00`, `36:00:00`), or of `3d`, `90m`."""
    whole = parse_slurm_time(text)
    return None if whole is None else int(whole)


def _flags() -> str:
    return ", ".join(MEMORY_FLAGS[:-1]) + f" or {MEMORY_FLAGS[-1]}"

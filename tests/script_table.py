"""The scripts of `tests/scripts`, unchanged: how many processes each wants, and what it must say.

Each is written as its framework's own tutorial does. The table and `check_output` know nothing of
where they run: one machine, several nodes, a cluster.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPTS_FOLDER = Path(__file__).parent / "scripts"
SAID = re.compile(
    r"rank (?P<rank>\d+) of (?P<size>\d+) on (?P<host>[\w.-]+): loss (?P<first>\S+) "
    r"-> (?P<last>nan|inf|[\d.]+)"  # two processes of a rank may print into one line
)


@dataclass(frozen=True)
class Script:
    """One script. `speakers` are the ranks that print losses; None: all of them.

    `losses_are_shared`: every rank prints the loss of all, so these are equal. `spawns` workers are
    started by each process itself, which are the ranks then. `dies_at_exit` is what a framework
    says that now and then dies in its own exit, after its work: such a script is run once more.
    """

    name: str
    processes: int = 2
    roles: str = ""
    options: tuple[str, ...] = ()
    speakers: tuple[int, ...] | None = None
    losses_are_shared: bool = False
    on_torch: bool = True
    spawns: int = 1
    arguments: tuple[str, ...] = ()
    dies_at_exit: str = "terminate called without an active exception"  # a thread of torch's

    @property
    def path(self) -> Path:
        return SCRIPTS_FOLDER / f"{self.name}.py"

    @property
    def words(self) -> tuple[str, ...]:
        """What stands behind the words that say where it runs, with the command."""
        roles = ("--roles", self.roles) if self.roles else ()
        return (*roles, *self.options, "--", sys.executable, str(self.path), *self.arguments)

    def has_died_at_exit(self, output: str) -> bool:
        """Whether it has done its work, on all ranks, and died of its framework's exit only."""
        told = len(SAID.findall(output)) == self.processes
        return self.dies_at_exit in output and told


QUICK = ("ddp",)
"""Those that `make test` runs: they need torch alone."""

SCRIPTS = (
    Script("ddp"),
    Script("convnet_torchrun"),
    Script("imagenet_spawn", spawns=2, arguments=("--multiprocessing-distributed", "-j", "0")),
    Script("fsdp2"),
    Script("lightning_ddp"),
    Script("deepspeed_zero2"),
    Script("accelerate_loop"),
    Script("local_rank_argument", options=("--local-rank-argument", "--local_rank")),
    Script("mpi_style", options=("--variables", "torch,mpi")),
    Script("jax_sharded", losses_are_shared=True, on_torch=False),
    Script("keras_mirrored", processes=1, on_torch=False),
    Script("tf_multiworker", losses_are_shared=True, on_torch=False),
    Script("tf_keras_fit", losses_are_shared=True, on_torch=False),
    Script(
        "tf_parameter_server",
        processes=4,
        roles="chief=1,worker=2,ps=1",
        speakers=(0,),
        on_torch=False,
    ),
    Script(
        "dmlc_server",
        processes=5,
        roles="scheduler=1,server=2,worker=2",
        speakers=(3, 4),
        on_torch=False,
    ),
)

ON_TWO_NODES = (
    "deepspeed_zero2",
    "imagenet_spawn",
    "lightning_ddp",
    "mpi_style",
    "tf_parameter_server",
)
"""Those that the tests of two nodes always run; the others take `--exhaustive`."""


def params(scripts: Iterable[Script]) -> list[Any]:
    """Each as a parameter of a test: all but a few are slow."""
    slow = pytest.mark.slow
    return [
        pytest.param(one, id=one.name, marks=() if one.name in QUICK else slow) for one in scripts
    ]


def check_output(script: Script, output: str, hosts: dict[int, str]) -> None:
    """Each rank that speaks is in the right world, on the host of `hosts`, and learns."""
    said = {int(found["rank"]): found for found in SAID.finditer(output)}
    world_size = script.processes * script.spawns
    speakers = range(world_size) if script.speakers is None else script.speakers
    assert sorted(said) == sorted(speakers), output
    for rank, found in said.items():
        assert int(found["size"]) == world_size, found[0]
        assert found["host"] == hosts[rank // script.spawns], found[0]
        assert float(found["last"]) < 0.6 * float(found["first"]), found[0]
    if script.losses_are_shared:
        assert len({(found["first"], found["last"]) for found in said.values()}) == 1, output

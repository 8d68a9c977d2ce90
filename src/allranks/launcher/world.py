"""Who am I: the rank of this process and its place among the others. The only reader of them.

The standard variables of the field (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, …) and the few of ours are
written in `variables` and read in `World.from_environment`, nowhere else; which devices a process
may use (`CUDA_VISIBLE_DEVICES`) is read and written in `Visible` alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

from allranks.errors import RequestError
from allranks.launcher.other_launchers import missing_master_address, standard_variables
from allranks.strategies.roles import TRAINER


@dataclass(frozen=True)
class World:
    """One process among `size`: `rank` over all nodes, `local_rank` on this one.

    `node` counts the nodes from 0; it is -1 where another launcher did not say it.

    `store` is the file through which the ranks of one machine meet; empty when they meet through
    `MASTER_ADDR` (a script started by another launcher), or when there is only one. `attempt`
    counts the attempts of the job in its run folder, `restarts` those since it was last started by
    hand; `heartbeat` is the file descriptor of the memory that this rank
    shares with its supervisor, and `segment` that of memory that all ranks of this node were given,
    empty, to exchange tensors in it; -1 if it has none. Ranks of several nodes meet at `rendezvous`
    ("address:port"), where rank 0 listens at the socket that it was given, `listener`. `on_machine`
    ranks share its processors: those of this node, and of others that are simulated beside it.

    Processes that are in no group know each other by `secret`, which their launcher gave to all.

    `role` is what this process is to the others ("trainer" unless the strategy has roles), and
    `role_index` which of that role; trainers are counted by `rank` alone. Of the processes of this
    node `local_ranks` are such as `--ranks` counts, and this is number `local_index` of them, -1 if
    it is none: where there are roles, these alone have devices.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    store: str = ""
    attempt: int = 0
    restarts: int = 0
    heartbeat: int = -1
    segment: int = -1
    rendezvous: str = ""
    listener: int = -1
    on_machine: int = 0
    role: str = TRAINER
    role_index: int = 0
    local_index: int = -1
    local_ranks: int = 0
    secret: str = field(default="", repr=False)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """The environment that makes a process this member of the world."""
        of_role = {
            "ALLRANKS_ROLE": self.role,
            "ALLRANKS_ROLE_INDEX": str(self.role_index),
            "ALLRANKS_LOCAL_INDEX": str(self.local_index),
            "ALLRANKS_LOCAL_RANKS": str(self.local_ranks),
        }
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node),
            "ALLRANKS_STORE": self.store,
            "ALLRANKS_ATTEMPT": str(self.attempt),
            "ALLRANKS_RESTARTS": str(self.restarts),
            "ALLRANKS_HEARTBEAT": str(self.heartbeat),
            "ALLRANKS_SEGMENT": str(self.segment),
            "ALLRANKS_RENDEZVOUS": self.rendezvous,
            "ALLRANKS_LISTENER": str(self.listener),
            "ALLRANKS_ON_MACHINE": str(self.on_machine),
            **(of_role if self.role != TRAINER else {}),
            **({"ALLRANKS_SECRET": self.secret} if self.secret else {}),
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """The world that the launcher of this process described; one rank alone if none did."""
        given = os.environ if environment is None else environment
        given = {**standard_variables(given), **given}  # as srun or mpirun says it, without RANK
        try:
            size, rank = int(given.get("WORLD_SIZE", "1")), int(given.get("RANK", "0"))
            world = cls(
                rank=rank,
                size=size,
                local_rank=int(given.get("LOCAL_RANK", rank)),
                local_size=int(given.get("LOCAL_WORLD_SIZE", size)),
                node=int(given.get("GROUP_RANK", "0")),
                store=given.get("ALLRANKS_STORE", ""),
                attempt=int(given.get("ALLRANKS_ATTEMPT", "0")),
                restarts=int(given.get("ALLRANKS_RESTARTS", "0")),
                heartbeat=int(given.get("ALLRANKS_HEARTBEAT", "-1")),
                segment=int(given.get("ALLRANKS_SEGMENT", "-1")),
                rendezvous=given.get("ALLRANKS_RENDEZVOUS", ""),
                listener=int(given.get("ALLRANKS_LISTENER", "-1")),
                on_machine=int(given.get("ALLRANKS_ON_MACHINE", "0")),
                **_role_in(given),
            )
        except ValueError as error:
            raise RequestError(
                asked="the rank of this process from RANK, WORLD_SIZE and LOCAL_RANK",
                found=str(error),
                why="these variables are whole numbers, set by the launcher of the process",
                do="start it with `allranks train`, torchrun or srun, or unset them",
            ) from None
        if world.size > 1 and "RANK" not in given:
            raise RequestError(
                asked=f"to be one of WORLD_SIZE={world.size} ranks",
                found="no RANK in the environment",
                why="every process would take itself for rank 0, and write over the others",
                do="start it with `allranks run`, torchrun or srun, which set both, or unset it",
            )
        if not 0 <= world.rank < world.size:
            raise RequestError(
                asked=f"to be rank {world.rank} of {world.size}",
                found=f"RANK={world.rank}, WORLD_SIZE={world.size}",
                why="ranks count from 0 up to the world size, which is excluded",
                do="set both, or unset both to run alone",
            )
        return world


def _role_in(given: Mapping[str, str]) -> dict[str, Any]:
    return {
        "role": given.get("ALLRANKS_ROLE", TRAINER),
        "role_index": int(given.get("ALLRANKS_ROLE_INDEX", "0")),
        "local_index": int(given.get("ALLRANKS_LOCAL_INDEX", "-1")),
        "local_ranks": int(given.get("ALLRANKS_LOCAL_RANKS", "0")),
        "secret": given.get("ALLRANKS_SECRET", ""),
    }


def export_master_address() -> None:
    """Under srun, set MASTER_ADDR and MASTER_PORT if they are missing: torch reads them itself."""
    os.environ.update(missing_master_address(os.environ))


def master_endpoint() -> str:
    """ "address:port" of the store that rank 0 serves under another launcher; "" if unknown."""
    export_master_address()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return f"{address}:{port}" if address and port else ""


@dataclass(frozen=True)
class Visible:
    """The devices that this process may use, as CUDA names them; `None` where all are visible.

    `numbers` are indices of the machine, or names like `GPU-8932f937…`. A process counts its
    devices from 0 among them.
    """

    numbers: tuple[str, ...] | None = None

    VARIABLE: ClassVar[str] = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Visible:
        """What the environment says; as in CUDA, -1 hides itself and all that follow."""
        given = (os.environ if environment is None else environment).get(cls.VARIABLE)
        if given is None:
            return cls()
        numbers = [part.strip() for part in given.split(",")] if given.strip() else []
        return cls(tuple(takewhile(lambda number: number != "-1", numbers)))

    def chosen(self, wanted: tuple[int, ...]) -> Visible:
        """Those of these devices that are `wanted`, counted among them; raises `RequestError`."""
        if self.numbers is None:
            return Visible(tuple(map(str, wanted)))
        beyond = [number for number in wanted if number >= len(self.numbers)]
        if beyond:
            listed, count = ",".join(self.numbers), len(self.numbers)
            raise RequestError(
                asked=f"--devices {','.join(map(str, wanted))}",
                found=f"{self.VARIABLE}={listed} in the environment: {count} devices",
                why=f"--devices counts within them, from 0, and {beyond[0]} is beyond",
                do=f"--devices {','.join(map(str, range(count)))}, or unset {self.VARIABLE}"
                if count
                else f"unset {self.VARIABLE}",
            )
        return Visible(tuple(self.numbers[number] for number in wanted))

    def variables(self) -> dict[str, str]:
        """The environment in which a process sees these devices, and no other."""
        return {} if self.numbers is None else {self.VARIABLE: ",".join(self.numbers)}

"""This machine: all ranks are beside each other, in one fork server and without an agent."""

from __future__ import annotations

from allranks.errors import RequestError
from allranks.launcher.places.base import NodeRequest, Place
from allranks.launcher.plan import Seat


class ThisMachine(Place):
    """One node, which is here."""

    name = "local"
    is_default = True

    def check(self, request: NodeRequest) -> None:
        if request.nodes > 1:
            raise RequestError(
                asked=f"--nodes {request.nodes}",
                found=f"--place {self.name}, which is one node",
                why="several nodes must come from somewhere",
                do="--place simulated for nodes on this machine, --place slurm inside of a Slurm "
                "job, --hosts FILE, or --rendezvous on every node",
            )

    def seats(self, request: NodeRequest) -> list[Seat]:
        return []

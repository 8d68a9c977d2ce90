"""The rows on the servers, as a worker reaches them; and its gradient where some of it is rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from allranks.torch.parameter_server.links import Links, Stale
from allranks.torch.parameter_server.tables.lookups import Lookups
from allranks.torch.parameter_server.tables.placed import PlacedTable, body_of, rows_in
from allranks.torch.parameter_server.tables.row_table import split
from allranks.torch.step.gradients import Gradients, clip_factor

Found = dict[str, tuple[Tensor, Tensor]]
"""For each table (ids, gradient)."""


class RemoteRows:
    """Rows by message. `moved` counts bytes, as the dense weights are counted there."""

    def __init__(self, tables: Sequence[PlacedTable], moved: dict[str, Any]) -> None:
        self.tables = {one.plan.name: (number, one) for number, one in enumerate(tables)}
        self.moved = moved
        self.links: Links | None = None
        self.era = -1

    def link(self, links: Links, era: int) -> None:
        """Go on with these servers."""
        self.links, self.era = links, era

    def pull(self, table: str, ids: Tensor) -> Tensor:
        """Ask every server that has some of the rows, then wait for all."""
        links = self.links
        assert links is not None
        number, one = self.tables[table]
        found = torch.empty(len(ids), one.plan.dim, dtype=one.plan.kind)
        parts = split(ids, len(links.servers))
        for server, at in enumerate(parts):
            if len(at):
                asked = {"table": number, "count": len(at)}
                links.send(server, {"rows": asked, "era": self.era}, *body_of(ids[at], ids[:0]))
        for server, at in enumerate(parts):
            if len(at):
                answer, body = links.receive(server)
                if "stale" in answer:
                    raise Stale(f"server {server} has been loaded anew")
                found[at] = rows_in(body, len(at), one.plan.dim, one.plan.kind)
                self.moved["pulled"][server] += len(body)
        return found

    def push(self, table: str, ids: Tensor, gradient: Tensor) -> None:
        """Every server is told of its rows; they count with the push that follows."""
        links = self.links
        assert links is not None
        number, _ = self.tables[table]
        for server, at in enumerate(split(ids, len(links.servers))):
            if len(at):
                brought = {"table": number, "count": len(at)}
                body = body_of(ids[at], gradient[at])
                links.send(server, {"hold": brought, "era": self.era}, *body)
                self.moved["pushed"] += sum(map(len, body))

    def absent(self, found: Mapping[str, Any]) -> list[int]:
        """The positions of the tables of which nothing was `found`."""
        return [one.position for name, (_, one) in self.tables.items() if name not in found]


class RowGradients(Gradients):
    """A gradient of this process alone, of which that of tables is in `found`, rows by table."""

    def __init__(self, parameters: list[nn.Parameter], rows: RemoteRows, lookups: Lookups) -> None:
        super().__init__(parameters)
        self.found: Found = lookups.gradients()
        self._tables = {one.position for _, one in rows.tables.values()}

    def settle(self, unused: Sequence[int]) -> None:
        super().settle(sorted({*unused, *self._tables}))

    def scale_(self, factor: float | Tensor) -> None:
        super().scale_(factor)
        for _, gradient in self.found.values():
            gradient.mul_(factor)

    def norm(self, *, clips: bool, left_out: bool) -> float:
        dense = super().norm(clips=clips, left_out=left_out)
        if not self.found:
            return dense
        return math.hypot(dense, *(float(gradient.norm()) for _, gradient in self.found.values()))

    def norm_unread(self, *, clips: bool, left_out: bool) -> Tensor:
        if not self.found:
            return super().norm_unread(clips=clips, left_out=left_out)
        return torch.tensor(self.norm(clips=clips, left_out=left_out), dtype=torch.float64)

    def clip_(self, limit: float, norm: float | Tensor) -> None:
        super().clip_(limit, norm)
        factor = clip_factor(limit, norm)
        for _, gradient in self.found.values():
            gradient.mul_(factor)

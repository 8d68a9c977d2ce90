"""The tables of one server: what workers bring of them waits for the rest of what they push.

A worker sends the rows of all tables that it has touched, then its dense gradient; that one counts
or does not, and the rows with it: so a part that comes twice is counted once, in tables too. The
caller holds the lock of the server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from allranks.launcher.messages.connection import Buffer
from allranks.launcher.nodes.channel import Message
from allranks.torch.parameter_server.tables.placed import (
    ID_BYTES,
    PlacedTable,
    ids_in,
    most_bytes,
    numbers_of,
    rows_in,
)
from allranks.torch.parameter_server.tables.row_optimizers import settings_of
from allranks.torch.parameter_server.tables.row_table import RowTable

Groups = Sequence[Mapping[str, Any]]
Held = list[tuple[int, Tensor, Tensor]]


class ServedTables:
    """The rows of all `tables` on server `index` of `servers`."""

    def __init__(
        self, tables: Sequence[PlacedTable], optimizer: Optimizer, index: int, servers: int
    ) -> None:
        self.placed = list(tables)
        self._first = [settings_of(group) for group in optimizer.param_groups]
        self.tables = [
            RowTable(one.plan, one.rule, index, servers, self._first[one.group]) for one in tables
        ]
        self.most_bytes = most_bytes(tables, servers)
        """No message about rows here is larger."""
        self._held: dict[int, Held] = {}

    # --- workers --------------------------------------------------------------------------

    def pull(self, asked: Message, body: memoryview) -> Tensor:
        """The rows that a worker asks for: (count, dim)."""
        return self.tables[int(asked["table"])].pull(ids_in(body, int(asked["count"])))

    def hold(self, who: int, brought: Message, body: memoryview) -> None:
        """A worker has touched rows; they count with what it pushes next."""
        number, count = int(brought["table"]), int(brought["count"])
        plan = self.tables[number].plan
        gradient = rows_in(body, count, plan.dim, plan.kind, count * ID_BYTES)
        self._held.setdefault(who, []).append((number, ids_in(body, count), gradient))

    def drop(self, who: int) -> None:
        """What a worker has touched does not count."""
        self._held.pop(who, None)

    def bring(self, who: int, part: int) -> None:
        """In step: it is that part of the step."""
        for number, ids, gradient in self._held.pop(who, ()):
            self.tables[number].add(ids, gradient, part)

    def push(self, who: int, groups: Groups, slower: float, unused: Collection[int]) -> None:
        """Out of step: it is applied at once, at the rate over `slower`."""
        held = {number: (ids, gradient) for number, ids, gradient in self._held.pop(who, ())}
        for number, (one, table) in enumerate(zip(self.placed, self.tables, strict=True)):
            if one.position in unused:
                continue
            group = self._group(one, groups)
            group["lr"] = group["lr"] / slower
            if number in held:
                table.add(*held[number], part=0)
            table.apply(group)

    # --- the scheduler --------------------------------------------------------------------

    def squares(self, unused: Collection[int]) -> float:
        """The sum of the squares of the gradients of all rows here."""
        there = zip(self.placed, self.tables, strict=True)
        return sum(table.squares() for one, table in there if one.position not in unused)

    def scale(self, factor: float) -> None:
        """The gradient of the step is `factor` times itself from here on."""
        for table in self.tables:
            table.scale(factor)

    def apply(self, factor: float, groups: Groups, unused: Collection[int]) -> None:
        """Update the rows that a part of the step has touched; the step is over.

        A table that is `unused` by all samples of a step counts no step.
        """
        for one, table in zip(self.placed, self.tables, strict=True):
            if one.position not in unused:
                table.apply(self._group(one, groups), factor)
        self.forget()

    def forget(self) -> None:
        """The step is over, or not made at all."""
        for table in self.tables:
            table.forget()

    def load(self, said: Message, body: memoryview) -> None:
        """Begin anew with these rows, and with their state, if any is given."""
        one, table = self.placed[int(said["table"])], self.tables[int(said["table"])]
        plan, ids, at = table.plan, table.ids(), 0
        table.forget()
        self._held.clear()
        table.state = table.rule.state_for(len(ids), plan.dim, plan.kind, self._first[one.group])
        widths = {"": plan.dim, **{name: table.state[name].shape[1] for name in said["columns"]}}
        found = {}
        for name, width in widths.items():
            found[name] = rows_in(body, len(ids), width, plan.kind, at)
            at += found[name].nbytes
        table.put(ids, found.pop(""), found)
        table.step = int(said["step"])

    def fetch(self, number: int, *, with_state: bool) -> tuple[Message, list[Buffer]]:
        """All rows of a table that are here, and their state, as `load` takes them."""
        table = self.tables[number]
        columns = dict(table.state) if with_state else {}
        widths = [column.shape[1] for column in columns.values()]
        said = {"step": table.step, "columns": list(columns), "widths": widths}
        return said, [bytes(numbers_of(each)) for each in (table.weight, *columns.values())]

    def _group(self, one: PlacedTable, groups: Groups) -> dict[str, Any]:
        """The settings of the step; what no message can carry is as the task made it."""
        return {**self._first[one.group], **groups[one.group]}


def answer_rows(found: Tensor) -> list[Buffer]:
    """The body of an answer with these rows."""
    return [numbers_of(found)] if found.numel() else []

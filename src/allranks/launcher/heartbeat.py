"""The heartbeat of every rank, in memory that the supervisor shares with the ranks of its node.

A rank writes where it is, at every step and every change of phase, from the thread that trains: a
thread of its own would go on beating in a deadlock. The supervisor reads it, and writes back what
it wants of the ranks (to stop, to save), and which of them train together (`Group`). Every node has
such a memory, with rows for all ranks of the job. The memory has no name, so no death leaves it
behind.

    [ wanted: stop, save | group: number, step from which it trains, where its ranks meet
    | the number of the newest stream, and its group
    | of each rank the last group and the last stream that it is in
    | rank 0: beats, step, phase, since, collectives, whether the thread that saves waits for
      others, the group it is in, the step it began with, seconds per phase | … ]

Numbers are doubles, eight bytes aligned: each is read whole or not yet. Below: which rank is slower
than the others, by its heartbeats.
"""

from __future__ import annotations

import ipaddress
import mmap
import os
import socket
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from allranks.job.run_folder import JsonLines

PHASES = ("start", "data", "compute", "exchange", "evaluate", "save", "done")
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
_BEATS, _STEP, _PHASE, _SINCE, _COLLECTIVES, _SAVE_WAITS, _ENTERED = range(7)
_FIRST, _BROKEN, _SECONDS = range(7, 10)
_ROW = _SECONDS + len(PHASES)
_STOP, _SAVE, _GROUP, _FROM_STEP, _STORE, _STREAM, _STREAM_OF, _MEMBERS = range(8)
_WANTED = 2


def _receivers_at(ranks: int) -> int:
    return _MEMBERS + ranks


def _rows_at(ranks: int) -> int:
    return _receivers_at(ranks) + ranks


def _size(ranks: int) -> int:
    return 8 * (_rows_at(ranks) + ranks * _ROW)


def _ranks_in(fd: int) -> int:
    """How many rows a memory has."""
    return (os.fstat(fd).st_size // 8 - _MEMBERS) // (2 + _ROW)


@dataclass(frozen=True)
class Group:
    """The ranks that train together: `members`, by their rows in this memory, in order.

    Groups count from 0, which has all ranks. The next one begins before step `from_step`, or at
    once where ranks were lost (-1). On several nodes its first rank serves the store in which its
    members meet, at `store` ("address:port" of IPv4).
    """

    number: int
    from_step: int
    members: tuple[int, ...]
    store: str = ""


@dataclass(frozen=True)
class Stream:
    """An order to the first rank of a `group`: to send the state to these ranks, which will join.

    Orders count from 1; 0 is none.
    """

    number: int = 0
    group: int = 0
    receivers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Beat:
    """What a rank last said: `step` of the job (-1 before the first), and since when (monotonic).

    `save_waits`: the thread that saves, beside the training, waits for the other ranks. `group` is
    the number of the group that it is in, or meets the others of. `first` is the step with which
    this process began. `broken` is the number of a group in which it has lost a connection.
    """

    rank: int
    beats: int
    step: int
    phase: str
    since: float
    collectives: int
    seconds: dict[str, float]
    save_waits: bool = False
    group: int = 0
    first: int = -1
    broken: int = -1

    @property
    def has_ended_a_step(self) -> bool:
        return self.step > self.first


class Heartbeat:
    """A rank's side. Without a supervisor (`fd` < 0) it writes to private memory."""

    def __init__(self, fd: int = -1, rank: int = 0) -> None:
        self._ranks = _ranks_in(fd) if fd >= 0 else 1
        self._all = memoryview(mmap.mmap(fd, _size(self._ranks))).cast("d")
        start = _rows_at(self._ranks) + (rank if fd >= 0 else 0) * _ROW
        self._row = self._all[start : start + _ROW]
        self._phase = int(self._row[_PHASE])
        self._row[_STEP] = self._row[_FIRST] = self._row[_BROKEN] = -1
        self._since = self._row[_SINCE] = time.monotonic()
        self._saves = self._saves_before = 0.0
        self.watch: Callable[[str, float, float], None] | None = None
        """Called with each phase that was left, since when, and when (monotonic)."""

    def enter(self, phase: str) -> str:
        """This rank is in `phase` from now on; returns the phase it was in."""
        row, now, before = self._row, time.monotonic(), self._phase
        row[_SECONDS + before] += now - self._since
        if self.watch is not None:
            self.watch(PHASES[before], self._since, now)
        self._phase = number = _NUMBER[phase]
        self._since = row[_SINCE] = now
        row[_PHASE] = number
        row[_BEATS] += 1
        return PHASES[before]

    def at_step(self, step: int) -> None:
        """This rank works on step `step` of the job from now on."""
        self._row[_STEP] = step
        if self._row[_FIRST] < 0:
            self._row[_FIRST] = step

    @property
    def phase(self) -> str:
        """The phase that this rank is in."""
        return PHASES[self._phase]

    @property
    def since(self) -> float:
        """Since when it is in its phase, by the monotonic clock of this host."""
        return self._since

    @property
    def step(self) -> int:
        """The step that this rank works on, or worked on last; -1 if it has not begun."""
        return int(self._row[_STEP])

    def step_of(self, rank: int) -> int:
        """The step that another rank of this node works on; -1 if it has not begun."""
        return int(self._all[_rows_at(self._ranks) + rank * _ROW + _STEP])

    def enter_group(self, number: int) -> None:
        """This rank leaves its group, and meets the others of group `number`."""
        self._row[_ENTERED] = number

    def report_broken(self, number: int) -> None:
        """This rank has lost a connection in group `number`; perhaps no rank is lost."""
        self._row[_BROKEN] = number

    def collective(self) -> None:
        """This rank takes part in one more collective."""
        self._row[_COLLECTIVES] += 1

    def for_save_thread(self) -> SaveThreadHeartbeat:
        """For the thread that saves."""
        return SaveThreadHeartbeat(self._row)

    @property
    def seconds(self) -> dict[str, float]:
        """The time spent in each phase so far, without the one that is going on."""
        return {phase: self._row[_SECONDS + number] for phase, number in _NUMBER.items()}

    @property
    def wants_stop(self) -> bool:
        """Whether the supervisor wants the job to stop."""
        return bool(self._all[_STOP])

    def wants_save(self) -> bool:
        """Whether the supervisor asked for a checkpoint since the last call."""
        self._saves_before = self._saves
        is_new, self._saves = self._all[_SAVE] > self._saves, self._all[_SAVE]
        return is_new

    def take_back_save(self) -> None:
        """The step that the last `wants_save` was for is not made: the next call says the same."""
        self._saves = self._saves_before

    @property
    def group_number(self) -> int:
        """The number of the newest group, negative while it is written; reads 8 bytes."""
        return int(self._all[_GROUP])

    @property
    def stream_number(self) -> int:
        """The number of the newest stream, negative while it is written; reads 8 bytes."""
        return int(self._all[_STREAM])

    def stream(self) -> Stream:
        """The newest stream."""
        start = _receivers_at(self._ranks)
        while True:
            number = self.stream_number
            flags, group = self._all[start : start + self._ranks].tolist(), self._all[_STREAM_OF]
            if number == self.stream_number >= 0:
                receivers = (rank for rank, flag in enumerate(flags) if flag == number > 0)
                return Stream(number, int(group), tuple(receivers))

    def has_left(self, number: int, step: int) -> bool:
        """Whether group `number` trains no more at step `step`, since a newer one does."""
        if self.group_number == number:
            return False
        newest = self.group()
        return newest.number != number and newest.from_step <= step

    def group(self) -> Group:
        """The newest group of ranks."""
        while True:  # the supervisor may write the next one meanwhile
            number = self.group_number
            flags = self._all[_MEMBERS : _MEMBERS + self._ranks].tolist()
            step, store = int(self._all[_FROM_STEP]), _address_of(self._all[_STORE])
            if number == self.group_number >= 0:
                members = tuple(rank for rank, flag in enumerate(flags) if flag == number)
                return Group(number, step, members, store)


class SaveThreadHeartbeat:
    """The end of the thread that saves: it only says whether it waits for other ranks.

    A rank that waits for its own thread waits for nobody, unless that thread waits for somebody.
    """

    def __init__(self, row: memoryview[float]) -> None:
        self._row = row

    def enter(self, phase: str) -> str:
        """Like `Heartbeat.enter`, but the phase of the rank stays what it is."""
        self._row[_SAVE_WAITS] = phase == "exchange"
        return "save"

    def collective(self) -> None:
        """Not counted: the threads of all ranks go their own way."""


@dataclass
class HeartbeatTable:
    """The supervisor's end, for one attempt of `ranks` ranks; hand `fd` to each of them.

    With `begin` only so many of them train at first: the other rows are for ranks that join. On
    several nodes `stores` has, by rank, the address at which it would serve a store.

    `segment_fd` is handed to them, too: an empty file in memory, with no name, that they share to
    exchange tensors. It goes with the last of them.
    """

    ranks: int
    begin: int | None = None
    fd: int = field(init=False)
    segment_fd: int = field(init=False)
    is_closed: bool = field(init=False, default=False)
    stores: dict[int, str] = field(init=False, default_factory=dict)
    group: Group = field(init=False)
    """The newest group."""
    stream: Stream = field(init=False, default=Stream())
    """The newest stream."""

    def __post_init__(self) -> None:
        self.fd = os.memfd_create("allranks-heartbeat")
        self.segment_fd = os.memfd_create("allranks-segment")
        os.ftruncate(self.fd, _size(self.ranks))
        self._memory = memoryview(mmap.mmap(self.fd, _size(self.ranks))).cast("d")
        for rank in range(self.ranks):
            self.clear(rank)
            self._memory[_MEMBERS + rank] = -1  # in no group yet
        self.put_group(Group(0, -1, tuple(range(self.ranks if self.begin is None else self.begin))))

    def clear(self, rank: int) -> None:
        """Forget the beats of a process that had this row before: another one begins now."""
        start = _rows_at(self.ranks) + rank * _ROW
        for number in range(_ROW):
            self._memory[start + number] = 0.0
        for number in (_STEP, _FIRST, _BROKEN):
            self._memory[start + number] = -1
        self._memory[start + _SINCE] = time.monotonic()

    def read(self) -> list[Beat]:
        """The last beat of every rank."""
        beats = []
        for rank in range(self.ranks):
            row = self.row(rank)
            seconds = dict(zip(PHASES, row[_SECONDS:], strict=True))
            beats.append(
                Beat(
                    rank,
                    int(row[_BEATS]),
                    int(row[_STEP]),
                    PHASES[int(row[_PHASE])],
                    row[_SINCE],
                    int(row[_COLLECTIVES]),
                    seconds,
                    bool(row[_SAVE_WAITS]),
                    int(row[_ENTERED]),
                    int(row[_FIRST]),
                    int(row[_BROKEN]),
                )
            )
        return beats

    def read_members(self) -> list[Beat]:
        """The last beat of every rank of the newest group."""
        return [beat for beat in self.read() if beat.rank in self.group.members]

    def row(self, rank: int) -> list[float]:
        """The last beat of rank `rank`, as numbers for another table."""
        start = _rows_at(self.ranks) + rank * _ROW
        row: list[float] = self._memory[start : start + _ROW].tolist()  # type: ignore[assignment]
        return row

    def put_row(self, rank: int, row: list[float], clock_ahead_s: float) -> None:
        """Take over the row of a rank on another node, whose clock is ahead by so much."""
        start = _rows_at(self.ranks) + rank * _ROW
        for number, value in enumerate(row):
            self._memory[start + number] = value
        self._memory[start + _SINCE] -= clock_ahead_s if row[_SINCE] else 0.0

    @property
    def orders(self) -> dict[str, Any]:
        """What was asked of the ranks so far, and their group, for memories of other nodes."""
        newest = {"group": asdict(self.group), "stream": asdict(self.stream)}
        return {"wanted": self._memory[:_WANTED].tolist(), **newest}

    def put_orders(self, orders: Mapping[str, Any]) -> None:
        """Ask what was asked elsewhere."""
        for number, value in enumerate(orders["wanted"]):
            self._memory[number] = value
        group, stream = orders["group"], orders["stream"]
        group = Group(**{**group, "members": tuple(group["members"])})
        if group != self.group and group.number >= self.group.number:
            self.put_group(group)
        if stream["number"] > self.stream.number:  # ranks may read it just now
            self.put_stream(Stream(**{**stream, "receivers": tuple(stream["receivers"])}))

    def form_group(self, members: Collection[int], from_step: int = -1) -> Group:
        """Let these ranks train together from now on, or before step `from_step`; the next group.

        A rank notices it before that step; with -1 also where it waits for others.
        """
        store = self.stores.get(min(members, default=-1), "")
        group = Group(self.group.number + 1, from_step, tuple(sorted(members)), store)
        self.put_group(group)
        return group

    def put_group(self, group: Group) -> None:
        """Show ranks their newest group, formed here or elsewhere."""
        self._memory[_GROUP] = -group.number  # while it is written
        self._memory[_FROM_STEP], self._memory[_STORE] = group.from_step, _number_of(group.store)
        for rank in group.members:  # a flag is the number of the last group of a rank
            self._memory[_MEMBERS + rank] = group.number
        self._memory[_GROUP] = group.number
        self.group = group

    def put_stream(self, stream: Stream) -> None:
        """Show ranks the newest stream, ordered here or elsewhere."""
        self._memory[_STREAM] = -stream.number  # while it is written
        self._memory[_STREAM_OF] = stream.group
        for rank in stream.receivers:  # a flag is the number of the last stream of a rank
            self._memory[_receivers_at(self.ranks) + rank] = stream.number
        self._memory[_STREAM] = stream.number
        self.stream = stream

    def ask_to_stop(self) -> None:
        """Every rank finishes its step, commits a checkpoint and leaves."""
        self._memory[_STOP] = 1

    def ask_to_save(self) -> None:
        """Every rank commits a checkpoint after its step, and goes on."""
        self._memory[_SAVE] += 1

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.segment_fd)
        self._memory.release()
        self.is_closed = True


def _number_of(address: str) -> float:
    """An address of IPv4 and a port ("10.0.0.1:4000"), which fit into the 53 bits of a number."""
    host, _, port = address.rpartition(":")
    return float(int(ipaddress.IPv4Address(host)) << 16 | int(port)) if address else 0.0


def _address_of(number: float) -> str:
    host, port = divmod(int(number), 1 << 16)
    return f"{ipaddress.IPv4Address(host)}:{port}" if number else ""


# --- straggler -----------------------------------------------------------------------------------
# Stragglers: ranks that work longer on each step than the others, which wait for them.
#
# In synchronous training every rank's step takes as long as the slowest one. The heartbeat counts
# how much of it a rank works and how much it waits.


EVERY_S = 5.0
FEWEST_STEPS = 5
TIMES_SLOWER = 2.0
LEAST_S = 0.005  # per step; smaller differences are noise of a busy machine
WORK = ("data", "compute")


class Stragglers:
    """Compares the heartbeats of one attempt every few seconds; reports each straggler once."""

    def __init__(self, heartbeats: HeartbeatTable, events: JsonLines, hosts: Sequence[str]) -> None:
        self.heartbeats, self.events, self.hosts = heartbeats, events, hosts
        self._before = heartbeats.read_members()
        self._next = time.monotonic() + EVERY_S
        self._reported: set[tuple[int, str]] = set()

    def look(self) -> None:
        """If it is time, compare the ranks' work per step since the last look."""
        if self.heartbeats.ranks < 2 or time.monotonic() < self._next:
            return
        now, self._next = self.heartbeats.read_members(), time.monotonic() + EVERY_S
        if [beat.rank for beat in now] != [beat.rank for beat in self._before]:
            self._before = now  # ranks have joined or left
        if steps_between(self._before, now) < FEWEST_STEPS:
            return  # long steps: compare over a longer interval
        for rank, phase, own_s, usual_s in slower(self._before, now):
            if (rank, phase) not in self._reported:
                self._reported.add((rank, phase))
                self.events.event(
                    "straggler",
                    rank=rank,
                    host=self.hosts[rank] or socket.gethostname(),
                    phase=phase,
                    seconds_per_step=own_s,
                    usual_seconds_per_step=usual_s,
                )
        self._before = now


def steps_between(before: list[Beat], now: list[Beat]) -> int:
    """The steps that every rank has completed since."""
    return min(n.step - max(b.step, 0) for b, n in zip(before, now, strict=True))


def slower(before: list[Beat], now: list[Beat]) -> list[tuple[int, str, float, float]]:
    """(rank, phase, its seconds per step, the median of the others') for each that is slower."""
    steps = steps_between(before, now)
    if steps < FEWEST_STEPS or len(now) < 2:
        return []
    stragglers = []
    for phase in WORK:
        spent = [
            (n.seconds[phase] - b.seconds[phase]) / steps for b, n in zip(before, now, strict=True)
        ]
        for place, seconds in enumerate(spent):
            usual = statistics.median(spent[:place] + spent[place + 1 :])
            if seconds > TIMES_SLOWER * usual and seconds - usual > LEAST_S:
                stragglers.append((now[place].rank, phase, seconds, usual))
    return stragglers

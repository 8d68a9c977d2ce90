"""The ranks of an elastic job while it runs: some join, some leave, as a request in it says.

A new rank is a process of its own that loads the program, the model and the data while the others
train. When it waits for a group, the launcher forms one with it, which begins before a step that
no rank has reached: all change at the same boundary. There the new rank receives the state of the
training, for which the others wait. If that would take longer than a step, it receives the state
before, while the others train (`Stream`). Ranks that leave are left out of the next group, and end.
A new rank that fails before it is in a group costs the others nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from allranks.errors import LONGEST_QUOTE, RequestError
from allranks.job.run_folder import RunFolder, rank_events_path, rank_log_path, read_rows
from allranks.job.scaling import (
    READ,
    Bounds,
    ScaleRequest,
    joiners_of,
    leavers_of,
    next_request,
)
from allranks.launcher.fault_report import events_of
from allranks.launcher.heartbeat import Group, HeartbeatTable, Stream
from allranks.launcher.plan import RankPlan
from allranks.launcher.processes.process import Exit, Process
from allranks.launcher.supervisor import RankWatch
from allranks.strategies.roles import LEADER

READY_S = 600.0  # for a new rank to load program, model and data, and to have a state sent before
STEPS_AHEAD = 2  # a rank may begin one more step before it sees the next group
ORDERS_S = 1.0  # until all nodes have an order that follows from the beats of all
PACE_S = 0.5
LOST_S = 1.0  # from a broken connection to another group, if no rank has ended meanwhile
MOST_AGAIN = 3  # groups of the same ranks in a row, without a step between them
WAITS = "joining"  # what a new rank writes when it waits for its first group
STREAMED = "streamed"  # when it has the state, or the stream broke
BYTES_PER_S, BYTES_PER_S_OF_NODES = 6e8, 1e8  # measured on one machine, and at a gigabit per second
LEAST_S = 0.1  # a shorter wait for a state is not worth a stream


@dataclass
class Change:
    """A request that is being carried out: `group` is `None` until every new rank is ready."""

    request: ScaleRequest
    joiners: tuple[int, ...]
    leavers: tuple[int, ...]
    size: int
    before: dict[int, list[dict[str, Any]]]
    """The events of the process that had the number of a new rank before."""
    began_at: float = field(default_factory=time.monotonic)
    group: Group | None = None
    ready_s: float | None = None
    is_streamed: bool | None = None
    """Whether the new ranks were to receive the state before they join; `None`: not decided."""


@dataclass
class Scaling:
    """The ranks of one attempt that come and go; `steer` is called about ten times a second.

    `plan_for(ranks, new)` has the plan of each of `ranks`, of which some are `new`; `make` makes a
    process of one. `edited()` names a file of the program that is not as the ranks have loaded it;
    `differs(ready)` one that a new rank has loaded otherwise, by its event `ready`; "" if there
    is none. `drained()` has the ranks of nodes that are to leave, and the signal that says so,
    `back()` a text of each node that has come back, and for how many ranks it has seats.
    """

    bounds: Bounds
    folder: RunFolder
    attempt: int
    heartbeats: HeartbeatTable
    plan_for: Callable[[Collection[int], Collection[int]], Mapping[int, RankPlan]]
    make: Callable[[RankPlan], Process]
    edited: Callable[[], str]
    differs: Callable[[dict[str, Any]], str]
    has_nodes: bool = False
    drained: Callable[[], tuple[str, frozenset[int]]] = lambda: ("", frozenset())
    back: Callable[[], list[tuple[str, int]]] = list
    change: Change | None = field(init=False, default=None)
    joining: frozenset[int] = field(init=False, default=frozenset())
    """New ranks that have not begun to train."""
    _pace: deque[tuple[float, int]] = field(init=False, default_factory=lambda: deque(maxlen=20))
    """When the ranks were at which step, in the last ten seconds."""
    is_short: bool = field(init=False, default=False)
    """Whether the ranks cannot end their step in this group: a rank or a connection is lost."""
    _dying: set[int] = field(init=False, default_factory=set)
    """Ranks that the others do not wait for, though their exit is not told yet."""
    _broken: tuple[int, float] = field(init=False, default=(-1, 0.0))
    """The last group in which a connection broke, and when that was seen."""
    _again: tuple[int, int] = field(init=False, default=(-1, 0))
    """The last step that a broken connection interrupted, and how often."""

    def may_lose(self, rank: int, remaining: Collection[int]) -> bool:
        """Whether the `remaining` processes go on without `rank`; each trains, or joins.

        The others do not need one that joins or leaves. If one, be it the lost one, has ended a
        step, all had begun it, though the beats of other nodes may come later.
        """
        members, beats = self.heartbeats.group.members, self.heartbeats.read()
        if rank not in members:
            return True
        goes_on = [member for member in members if member in remaining]
        trains = [beats[member].step for member in goes_on if member not in self.joining]
        has_ended_one = any(beats[member].has_ended_a_step for member in members)
        has_begun = bool(trains) and (has_ended_one or min(trains) >= 0)
        return has_begun and len(goes_on) >= self.bounds.least

    def lost(self, rank: int, exit_: Exit) -> None:
        """The job goes on without this process; `steer` lets the others form a group."""
        if rank in self._dying:
            self._dying.remove(rank)
        elif rank in self.joining and rank not in self.heartbeats.group.members:
            if self.change is not None:
                self._give_up(self.change, self._why_lost(self.change, rank))
        else:
            self.is_short = True

    def _why_lost(self, change: Change, rank: int) -> str:
        cause = self._cause(change, rank)
        return f"rank {rank} ended before it had joined: {cause}"

    def _cause(self, change: Change, rank: int) -> str:
        """What a new rank said when it failed; else the file of its output."""
        for row in reversed(self._events_since(change, rank)):
            if row["event"] == "failed":
                request = row.get("request") or {}
                text = request.get("found") or f"{row['kind']}: {row['message']}"
                return str(text).partition("\n")[0][:LONGEST_QUOTE]
        return f"see {rank_log_path(self.folder.path, rank)}"

    def steer(self, watch: RankWatch) -> None:
        """Carry on with the change that was asked for, or look for a request."""
        running = set(watch.alive.values())
        self._look_for_the_dying(watch)
        if not watch.ends and not self.is_short:
            self._look_for_broken_connections(running)
        if self.is_short:
            self.is_short = False
            members = set(self.heartbeats.group.members)
            self.heartbeats.form_group(running & members - self._dying)
        beats = self.heartbeats.read()
        self.joining = frozenset(r for r in self.joining & running if beats[r].step < 0)
        if not self._pace or time.monotonic() - self._pace[-1][0] > PACE_S:
            last = max((beats[rank].step for rank in self.heartbeats.group.members), default=0)
            self._pace.append((time.monotonic(), last))
        over, members = not running - self.joining - self._dying, set(self.heartbeats.group.members)
        if request := next_request(self.folder.path):
            self._consider(request, watch)
        if not watch.ends:
            self._drain(*self.drained(), watch)
            if not self._is_busy(watch) and not self._dying:
                self._welcome(watch)
        if (change := self.change) is not None:
            if change.group is not None:
                self._conclude_if_over(change, change.group, running)
            elif not over and not watch.ends:
                self._form_if_ready(change)
            if over or (watch.ends and change.group is None):
                self.close(watch.ends)
        outside = self.joining - members - self._dying
        unwanted = self.joining if over else outside if not self.change else ()
        if unwanted:
            watch.dismiss(unwanted)

    def _look_for_the_dying(self, watch: RankWatch) -> None:
        """Let the others go on without ranks that die: their exits may come much later."""
        leavers = self.change.leavers if self.change is not None else ()
        dying = watch.look_for_the_dying({*self.heartbeats.group.members, *leavers})
        self._dying |= dying
        self.is_short |= bool(dying)

    def _look_for_broken_connections(self, running: set[int]) -> None:
        """Let the same ranks form another group if one has lost a connection, and none has ended.

        A rank whose peer has ended sees the broken connection before the launcher sees the exit. It
        may still be in the group before one that begins some steps later, and then reaches no step.
        """
        group, beats, now = self.heartbeats.group, self.heartbeats.read(), time.monotonic()
        ranks = [rank for rank in group.members if beats[rank].broken == group.number]
        if group.from_step >= 0:
            ranks += [r for r in group.members if group.number > beats[r].broken == beats[r].group]
        if not ranks or not running.issuperset(group.members):
            return
        if self._broken[0] != group.number:
            self._broken = group.number, now
        step = max(beats[rank].step for rank in group.members)
        times = self._again[1] if self._again[0] == step else 0
        if now - self._broken[1] < LOST_S or times == MOST_AGAIN:
            return
        self._again, self.is_short = (step, times + 1), True
        who = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        text = f"{who} lost a connection, and no rank has ended: all ranks connect again"
        self.folder.events.event("connection_lost", text=text, group=group.number, step=step)

    def _drain(self, name: str, ranks: frozenset[int], watch: RankWatch) -> None:
        """Let the `ranks` of nodes that got signal `name` leave; if too many would, stop the job.

        A change whose group is formed is carried out first, as one that waits for no new rank; one
        that does is given up.
        """
        members = self.heartbeats.group.members
        if not ranks:
            return
        change = self.change
        if change is not None and change.joiners and change.group is None:
            self._give_up(change, f"ranks {sorted(ranks)} leave first ({name})")
        elif not self._is_busy(watch) and (leavers := ranks.intersection(members)):
            if len(members) - len(leavers) < self.bounds.least:
                watch.asked_to_stop = name
            else:
                self._begin(ScaleRequest.new(leave=leavers, by=name), watch)

    def _welcome(self, watch: RankWatch) -> None:
        """Let ranks join on nodes that have come back."""
        seats = 0
        for text, count in self.back():
            seats += count
            self.folder.events.event("node_back", text=text)
        if count := min(seats, self.bounds.most - len(self.heartbeats.group.members)):
            self._consider(ScaleRequest.new(join=count, by="a node that has come back"), watch)

    def _is_busy(self, watch: RankWatch) -> bool:
        """Whether a change is not done yet: ranks join or leave."""
        others = set(watch.alive.values()) - self._dying - set(self.heartbeats.group.members)
        return self.change is not None or bool(others)

    def close(self, ends: str = "") -> None:
        """Answer a request that the ranks did not live to fulfil; `ends` is why, if not done."""
        if self.change is not None:
            self._give_up(self.change, ends or "the job was done first", goes_on=False)

    def _consider(self, request: ScaleRequest, watch: RankWatch) -> None:
        self.folder.events.event(READ, **_about(request))
        try:
            self._begin(request, watch)
        except RequestError as error:
            self.folder.events.event("not_scaled", **_about(request), request=error.to_data())

    def _begin(self, request: ScaleRequest, watch: RankWatch) -> None:
        """Start the processes that are to join; raises `RequestError`."""
        members, running = self.heartbeats.group.members, set(watch.alive.values())
        if watch.ends or self._is_busy(watch):
            busy = "a change that is not done yet"
            why = "ranks join and leave at one boundary, and then at the next one"
            raise _refused(request, "a job that ends" if watch.ends else busy, why, "ask later")
        size = request.size_after(members, self.bounds)
        leavers, joiners = leavers_of(request, members, size), joiners_of(members, running, size)
        if joiners and self._dying:
            dies = f"rank {min(self._dying)} is lost, and its process has not ended yet"
            why = "the kernel frees its memory first, and may write its core before"
            raise _refused(request, dies, why, "ask again when the job has said how it ended")
        if joiners and (name := self.edited()):
            raise _refused(
                request,
                f"{name} is not as the ranks have loaded it",
                "a new rank would train another program than the others",
                "restore that file, or stop the job and resume it with the new one",
            )
        planned = self.plan_for(sorted({*members, *joiners}), joiners) if joiners else {}
        self.folder.take_room(joiners)
        before = {rank: self._events(rank) for rank in joiners}
        self.change = Change(request, joiners, leavers, size, before)
        self.joining = frozenset(joiners)
        for rank in joiners:
            world = replace(planned[rank].world, rank=rank, group=-1, member=rank)
            watch.start(self.make(replace(planned[rank], world=world)))

    def _form_if_ready(self, change: Change) -> None:
        """Form the next group once every new rank waits for it; the steps go on until then.

        A rank that has not entered its group yet, as another was lost, would miss that one.
        """
        is_late = time.monotonic() - change.began_at > READY_S
        for rank in change.joiners:
            rows = self._events_since(change, rank)
            for row in rows:
                if row["event"] == "ready" and (name := self.differs(row)):
                    self._give_up(change, f"rank {rank} has loaded another {name} than the others")
                    return
                if row["event"] == WAITS and (text := self._other_data(row)):
                    self._give_up(change, f"rank {rank} has {text}")
                    return
            if not any(row["event"] == WAITS for row in rows):
                if is_late:
                    self._give_up(change, f"rank {rank} was not ready after {READY_S:.0f} s")
                return
        group, beats = self.heartbeats.group, self.heartbeats.read()
        members = set(group.members)
        if any(beats[rank].group != group.number for rank in members):
            return
        if not self._have_state(change):
            if is_late:
                self._give_up(change, f"the state was not sent within {READY_S:.0f} s")
            return
        last = max(beats[rank].step for rank in members)
        change.ready_s = time.monotonic() - change.began_at
        wanted = members - set(change.leavers) | set(change.joiners)
        if wanted == members:
            change.group = Group(-1, last, self.heartbeats.group.members)
        else:
            change.group = self.heartbeats.form_group(wanted, last + self._steps_ahead(last))

    def _have_state(self, change: Change) -> bool:
        """Whether a group may form: new ranks have the state that was to be sent before."""
        events = [self._events_since(change, rank) for rank in change.joiners]
        if change.is_streamed is None:
            waiting = (row for rows in events for row in rows if row["event"] == WAITS)
            size = max((row.get("state_bytes", 0) for row in waiting), default=0)
            change.is_streamed = self._takes_long(size)
            if change.is_streamed:
                number, group = self.heartbeats.stream.number + 1, self.heartbeats.group.number
                self.heartbeats.put_stream(Stream(number, group, change.joiners))
        if not change.is_streamed:
            return True
        return all(any(row["event"] == STREAMED for row in rows) for rows in events)

    def _takes_long(self, size: float) -> bool:
        """Whether the others would wait longer than a step for so many bytes to a new rank."""
        seconds = size / (BYTES_PER_S_OF_NODES if self.has_nodes else BYTES_PER_S)
        beats = self.heartbeats.read_members()  # one alone serves no store, and no other waits
        steps = seconds * self._steps_per_s(max(beat.step for beat in beats))[0]
        return len(beats) > 1 and seconds > LEAST_S and steps > 1

    def _events(self, rank: int) -> list[dict[str, Any]]:
        return events_of(self.folder.path, rank, self.attempt)

    def _events_since(self, change: Change, rank: int) -> list[dict[str, Any]]:
        """Those of a new rank; the clocks of hosts are never compared."""
        rows, before = self._events(rank), change.before[rank]
        return [] if rows[:1] == before[:1] else rows

    def _steps_ahead(self, last: int) -> int:
        """How many steps after the `last` that was begun a group starts; on nodes a second."""
        if not self.has_nodes:
            return STEPS_AHEAD
        return STEPS_AHEAD + math.ceil(ORDERS_S * max(self._steps_per_s(last)))

    def _steps_per_s(self, last: int) -> list[float]:
        """The mean speed up to the step `last`, begun now, since each look in the last seconds.

        One step that has begun since the last look is no speed yet.
        """
        now = time.monotonic()
        return [max(last - step, 0) / max(now - at, ORDERS_S) for at, step in self._pace]

    def _other_data(self, waits: dict[str, Any]) -> str:
        """How the data of a new rank differ from those that the job began with; "" if they do not.

        `waits` is its event `joining`.
        """
        rows = read_rows(rank_events_path(self.folder.path, LEADER))  # it may have joined anew
        rows = (row for row in rows if row.get("attempt", 0) == self.attempt)
        first: dict[str, Any] = next((row["data"] for row in rows if row["event"] == "data"), {})
        now = waits.get("data", first)
        name = next((name for name in first if now.get(name) != first[name]), "")
        if not name:
            return ""
        sizes = [facts.get(name, {}).get("samples") for facts in (now, first)]
        sized = f": {sizes[0]} samples, the others {sizes[1]}" if sizes[0] != sizes[1] else ""
        return f"other data than the others ({name}{sized}): have they changed since the job began?"

    def _conclude_if_over(self, change: Change, group: Group, running: set[int]) -> None:
        """Answer once every new rank trains or was lost, and every rank that leaves has ended."""
        members = self.heartbeats.group.members
        joined = [rank for rank in change.joiners if rank in members]
        entered = {beat.group for beat in self.heartbeats.read() if beat.rank in members}
        if self.joining & set(joined) or running & set(change.leavers):
            return
        if max(entered) < group.number:  # they may be done before its first step
            return
        lost = [self._why_lost(change, rank) for rank in change.joiners if rank not in joined]
        if lost and not joined:
            self._give_up(change, "; ".join(lost))
            return
        self.change = None
        self.folder.events.event(
            "scaled",
            **_about(change.request),
            ranks=len(members),
            wanted=change.size,
            members=list(members),
            joined=joined,
            left=list(change.leavers),
            lost=lost,
            from_step=group.from_step,
            ready_s=change.ready_s,
            seconds=time.monotonic() - change.began_at,
        )

    def _give_up(self, change: Change, report: str, goes_on: bool = True) -> None:
        """Leave the ranks as they are, and say why; new ones are dismissed with the next tick."""
        self.change, report = None, report + "; the other ranks train on" * goes_on
        self.folder.events.event("not_scaled", **_about(change.request), report=report)


def _about(request: ScaleRequest) -> dict[str, Any]:
    return {"number": request.number, "by": request.by, "words": str(request)}


def _refused(request: ScaleRequest, state: str, why: str, do: str) -> RequestError:
    return RequestError(asked=str(request), found=state, why=why, do=do)

"""The protocol of `collectives.c` and of its bells as programs of a small machine.

One thread is one rank. Calls follow one another without a wait between them, call i takes its turn
i // slots in slot i % slots, and each rank has a place for its data and a stage in every slot:

    wait until all are FINAL in the turn before; write what the rank gives; ARRIVED
    wait until all have arrived; read what they gave; in two rounds: write the own sum; SUMMED
    wait until all have summed; read their sums; FINAL

`Faults` are what the protocol must not do without: with one of them the check has to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weak_memory import Program

ARRIVED, SUMMED, FINAL = 1, 2, 4  # of turn t: 4 t more
ALL_REDUCE, ONE_ROUND, BROADCAST, BARRIER = "all-reduce", "one round", "broadcast", "barrier"
KINDS = (ALL_REDUCE, ONE_ROUND, BROADCAST, BARRIER)
"""`ONE_ROUND`: small all-reduces, reduce-scatters, all-gathers. Call i has the root i % ranks."""


@dataclass(frozen=True)
class Faults:
    no_reuse_wait: bool = False  # enter a slot although somebody may still read it
    slots_restart: bool = False  # every call begins with slot 0: the race across calls
    parity: bool = False  # stages of a turn are those of the turn before the last, compared with ==
    no_release: bool = False  # a stage may be seen before the data that it announces
    no_recheck: bool = False  # sleep without another look after being counted as asleep
    no_fence: bool = False  # look for sleepers before the stage is out
    late_value: bool = False  # the bell's value is read after the last look


class Rank:
    """The program of one rank for a number of calls."""

    def __init__(self, rank: int, ranks: int, slots: int, sleeps: bool, faults: Faults) -> None:
        self.rank, self.ranks, self.slots = rank, ranks, slots
        self.sleeps, self.faults = sleeps, faults
        self.program = Program()

    def cell(self, kind: int, slot: int, rank: int) -> int:
        """0: the stage, 1: what the rank gives, 2: its sum; the last slot but one is of bells."""
        return (slot * self.ranks + rank) * 3 + kind

    def rung(self, rank: int) -> int:
        return self.cell(0, self.slots, rank)

    def asleep(self, rank: int) -> int:
        return self.cell(1, self.slots, rank)

    @property
    def cells(self) -> int:
        return self.cell(0, self.slots + 1, 0)

    def call(self, number: int, kind: str) -> None:
        slot, turn = number % self.slots, number // self.slots
        if self.faults.slots_restart:
            slot, turn = 0, number
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        root = number % self.ranks
        if turn and not self.faults.no_reuse_wait:
            self.wait(slot, turn - 1, FINAL, others)
        self.program.write(self.cell(1, slot, self.rank), number + 1)
        self.publish(slot, turn, ARRIVED, others, at_once=kind == BROADCAST and self.rank == root)
        if kind == BROADCAST:
            self._broadcast(slot, turn, number, root, others)
        else:
            self.wait(slot, turn, ARRIVED, others)
            for rank in others:
                self.program.read(self.cell(1, slot, rank), number + 1)
        if kind == ALL_REDUCE:
            self.program.write(self.cell(2, slot, self.rank), number + 1)
            self.publish(slot, turn, SUMMED, others)
            self.wait(slot, turn, SUMMED, others)
            for rank in others:
                self.program.read(self.cell(2, slot, rank), number + 1)
        self.publish(slot, turn, FINAL, others, at_once=kind == BROADCAST and self.rank == root)

    def _broadcast(self, slot: int, turn: int, number: int, root: int, others: list[int]) -> None:
        """The root goes on at once; the others look at the descriptors of all that have arrived."""
        if self.rank != root:
            self.wait(slot, turn, ARRIVED, [root])
        for rank in others:
            stage, given = self.cell(0, slot, rank), self.cell(1, slot, rank)
            if rank == root:
                self.program.read(given, number + 1)
            else:
                self.program.read_if(given, number + 1, stage, self.stage(turn, ARRIVED))

    def stage(self, turn: int, stage: int) -> int:
        if self.faults.parity:
            return 4 * (turn % 2) + stage
        return 4 * turn + stage

    def publish(
        self, slot: int, turn: int, stage: int, others: list[int], at_once: bool = False
    ) -> None:
        """Say how far this rank is. The last that comes rings for all, a root at once."""
        program, value = self.program, self.stage(turn, stage)
        program.store(self.cell(0, slot, self.rank), value, release=not self.faults.no_release)
        if not self.sleeps:
            return
        if not self.faults.no_fence:
            program.fence()
        looked_at = [] if at_once else [self.cell(0, slot, rank) for rank in others]
        self._if_all(looked_at, value, lambda: self._ring(others))

    def _if_all(self, cells: Sequence[int], value: int, then: Callable[[], None]) -> None:
        if not cells:
            then()
            return
        self.program.when(cells[0], value, lambda: self._if_all(cells[1:], value, then))

    def _ring(self, others: list[int]) -> None:
        for rank in others:
            self.program.when(self.asleep(rank), 1, lambda rank=rank: self._ring_one(rank))

    def _ring_one(self, rank: int) -> None:
        self.program.add(self.rung(rank), 1)
        self.program.wake(self.rung(rank))

    def wait(self, slot: int, turn: int, stage: int, ranks: list[int]) -> None:
        """Until these ranks are so far."""
        value = self.stage(turn, stage)
        for rank in ranks:
            cell = self.cell(0, slot, rank)
            if self.sleeps:
                self._sleep_until(cell, value)
            else:
                self.program.spin(cell, value, exactly=self.faults.parity)

    def _sleep_until(self, cell: int, value: int) -> None:
        program, rung, asleep = self.program, self.rung(self.rank), self.asleep(self.rank)
        look = program.here()

        def prepare() -> None:
            if not self.faults.late_value:
                program.load(rung)
            program.add(asleep, 1)
            if self.faults.no_recheck:
                sleep()
            else:
                program.unless(cell, value, sleep)
            program.add(asleep, -1)
            program.jump(look)

        def sleep() -> None:
            if self.faults.late_value:
                program.load(rung)
            program.sleep(rung)

        program.unless(cell, value, prepare)


def ranks_that_call(
    kinds: Sequence[str],
    ranks: int,
    slots: int = 2,
    sleeps: bool = False,
    faults: Faults = Faults(),
) -> tuple[list[Program], int]:
    """One program for each rank, and how many cells of memory they have."""
    all_ranks = [Rank(rank, ranks, slots, sleeps, faults) for rank in range(ranks)]
    for rank in all_ranks:
        for number, kind in enumerate(kinds):
            rank.call(number, kind)
    return [rank.program for rank in all_ranks], all_ranks[0].cells


WAITERS_STAGE, WAITERS_OVER, WAITERS_LOCK, WAITERS_RUNG, WAITERS_ASLEEP = range(5)


def two_waiters_of_a_rank(looks_at_its_op: bool = True, counts_late: bool = False) -> list[Program]:
    """Two threads of a process wait for one op; whoever holds the lock ends it, and rings for both.

    As in `waiting.c`: a thread tries, then is counted as asleep, tries again, and sleeps unless
    that or its op has gone on. The third thread is another rank: it publishes what is waited for.
    """
    other = Program()
    other.store(WAITERS_STAGE, 1)
    other.fence()
    other.when(WAITERS_ASLEEP, 1, lambda: _ring(other))
    return [_waiter(looks_at_its_op, counts_late), _waiter(looks_at_its_op, counts_late), other]


def _ring(program: Program) -> None:
    program.add(WAITERS_RUNG, 1)
    program.wake(WAITERS_RUNG)


def _waiter(looks_at_its_op: bool, counts_late: bool) -> Program:
    program = Program()

    def drive() -> None:
        """With the lock held: the op is over as soon as the stage is there."""

        def end() -> None:
            program.store(WAITERS_OVER, 1)
            program.fence()
            program.when(WAITERS_ASLEEP, 1, lambda: _ring(program))

        def end_if_so_far() -> None:
            program.when(WAITERS_STAGE, 1, end)

        program.lock(WAITERS_LOCK)
        program.unless(WAITERS_OVER, 1, end_if_so_far)
        program.store(WAITERS_LOCK, 0)

    def wait_again() -> None:
        drive()
        program.unless(WAITERS_OVER, 1, prepare)
        program.jump(begin)

    def prepare() -> None:
        program.load(WAITERS_RUNG)
        if not counts_late:
            program.add(WAITERS_ASLEEP, 1)
        drive()
        if counts_late:
            program.add(WAITERS_ASLEEP, 1)
        if looks_at_its_op:
            program.unless(WAITERS_OVER, 1, lambda: program.sleep(WAITERS_RUNG))
        else:
            program.sleep(WAITERS_RUNG)
        program.add(WAITERS_ASLEEP, -1)

    begin = program.here()
    program.unless(WAITERS_OVER, 1, wait_again)
    return program

"""A small machine with weak memory, all of whose executions are looked at: an explicit-state check.

A `Program` is a list of instructions of one thread. Stores go into a buffer of the thread and reach
memory in any order but that of one cell, and but that a release store comes after all before it: so
they do on the weakest processors. Loads are made in order. `explore` visits every state that any
interleaving of threads and buffers reaches, and raises `Fault` where one reads what is not as it
must be, or where nobody can go on and somebody is not at the end.

Steps that commute with all steps of the others (a store into the own buffer; a wait that is over,
for cells that only grow) are taken at once and alone. That leaves out interleavings, no outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

TORN = -1
"""What a cell holds while its bytes are being written."""

Instruction = tuple[str | int, ...]
Buffer = tuple[tuple[int, int, bool], ...]  # (cell, value, whether it is a release)
Thread = tuple[int, int, Buffer]  # the next instruction, the register, the stores on their way
State = tuple[tuple[int, ...], tuple[Thread, ...]]
ASLEEP = -2  # in the register of a thread that sleeps on cell 0; one less for each further cell


class Fault(Exception):
    """What is wrong, and the steps of threads that lead there."""


class Program:
    """Instructions of one thread, one after the other; `label` and `jump` connect them."""

    def __init__(self) -> None:
        self.code: list[Instruction] = []

    def write(self, cell: int, value: int) -> None:
        """Bytes of a tensor: another thread may see some of them and not yet the others."""
        self.code += [("store", cell, TORN, 0), ("store", cell, value, 0)]

    def store(self, cell: int, value: int, release: bool = True) -> None:
        self.code.append(("store", cell, value, int(release)))

    def read(self, cell: int, value: int) -> None:
        """Bytes of a tensor, which have to be these."""
        self.code.append(("read", cell, value))

    def read_if(self, cell: int, value: int, stage: int, at_least: int) -> None:
        """As `read`, where another cell is seen to be so far."""
        self.code += [("unless", stage, at_least, 2), ("read", cell, value)]

    def fence(self) -> None:
        self.code.append(("fence",))

    def add(self, cell: int, number: int) -> None:
        """An atomic addition, which is a fence."""
        self.code.append(("add", cell, number))

    def lock(self, cell: int) -> None:
        """Wait until it holds 0, and write 1, at once."""
        self.code.append(("lock", cell))

    def load(self, cell: int) -> None:
        self.code.append(("load", cell))

    def spin(self, cell: int, value: int, exactly: bool = False) -> None:
        """Wait until a cell holds at least this, or just this."""
        self.code.append(("spin", cell, value, int(exactly)))

    def sleep(self, cell: int) -> None:
        """Sleep until woken, unless the cell no longer holds what was loaded: futex(WAIT)."""
        self.code.append(("sleep", cell))

    def wake(self, cell: int) -> None:
        """Wake all that sleep on the cell: futex(WAKE)."""
        self.code.append(("wake", cell))

    def unless(self, cell: int, at_least: int, then: Callable[[], None]) -> None:
        """`then` is what is done if the cell holds less."""
        self._jump(("if", cell, at_least), then)

    def when(self, cell: int, at_least: int, then: Callable[[], None]) -> None:
        """`then` is what is done if the cell holds as much."""
        self._jump(("unless", cell, at_least), then)

    def here(self) -> int:
        return len(self.code)

    def jump(self, to: int) -> None:
        self.code.append(("jump", to - len(self.code)))

    def _jump(self, condition: Instruction, then: Callable[[], None]) -> None:
        place = len(self.code)
        self.code.append(condition)
        then()
        self.code[place] = (*condition, len(self.code) - place)


def explore(programs: Sequence[Program], cells: int) -> int:
    """Visit all states from cells of 0 on, and return their number."""
    codes = [tuple(program.code) for program in programs]
    start: State = ((0,) * cells, tuple((0, 0, ()) for _ in codes))
    came_from: dict[State, tuple[State, int] | None] = {start: None}
    ahead = [start]
    while ahead:
        state = ahead.pop()
        any_step = False
        try:
            for thread, follower in _steps(state, codes):
                any_step = True
                if follower not in came_from:
                    came_from[follower] = (state, thread)
                    ahead.append(follower)
        except Fault as fault:
            raise Fault(f"{fault}\n{_path(state, came_from, codes)}") from None
        if not any_step and any(
            place < len(code) for (place, _, _), code in zip(state[1], codes, strict=True)
        ):
            raise Fault(f"nobody goes on\n{_path(state, came_from, codes)}")
    return len(came_from)


def _path(
    state: State,
    came_from: dict[State, tuple[State, int] | None],
    codes: Sequence[tuple[Instruction, ...]],
) -> str:
    """The last steps before a state, one a line."""
    lines: list[str] = []
    while (before := came_from[state]) is not None and len(lines) < 60:
        after, (state, thread) = state, before
        place, _, buffer = state[1][thread]
        flushed = len(after[1][thread][2]) < len(buffer)
        what = "a store comes out" if flushed else f"{place} {codes[thread][place]}"
        lines.append(f"thread {thread}: {what}")
    return "\n".join(reversed(lines))


def _steps(state: State, codes: Sequence[tuple[Instruction, ...]]) -> Iterator[tuple[int, State]]:
    memory, threads = state
    for number, (thread, code) in enumerate(zip(threads, codes, strict=True)):
        alone = _alone(memory, thread, code)
        if alone is not None:
            yield number, (memory, _with(threads, number, alone))
            return
    for number, (thread, code) in enumerate(zip(threads, codes, strict=True)):
        place, register, buffer = thread
        for at, (cell, value, release) in enumerate(buffer):
            if (release and at) or any(earlier[0] == cell for earlier in buffer[:at]):
                continue
            left = (place, register, buffer[:at] + buffer[at + 1 :])
            yield number, (_set(memory, cell, value), _with(threads, number, left))
        if place < len(code):
            after = _step(memory, threads, number, code[place])
            if after is not None:
                yield number, after


def _alone(memory: tuple[int, ...], thread: Thread, code: tuple[Instruction, ...]) -> Thread | None:
    """The thread after a step that concerns nobody else, if that is its next one."""
    place, register, buffer = thread
    if place >= len(code):
        return None
    name, *rest = code[place]
    if name == "store":
        cell, value, release = rest
        return place + 1, register, (*buffer, (int(cell), int(value), bool(release)))
    if name == "spin":
        cell, value, exactly = map(int, rest)
        if not exactly and memory[cell] >= value:
            return place + 1, register, buffer
    return None


def _step(
    memory: tuple[int, ...], threads: tuple[Thread, ...], number: int, instruction: Instruction
) -> State | None:
    """The state after the next instruction of a thread; None if it waits."""
    place, register, buffer = threads[number]
    name = instruction[0]
    cell, value, third = (*map(int, instruction[1:]), 0, 0, 0)[:3]
    if name in ("fence", "add", "lock") and buffer:
        return None
    going_on = (place + 1, register, buffer)
    if name == "read":
        found = _seen(memory, buffer, cell)
        if found != value:
            raise Fault(f"thread {number} reads {found} and not {value} in cell {cell}")
    elif name == "spin":
        if (memory[cell] != value) if third else (memory[cell] < value):
            return None
    elif name == "add":
        memory = _set(memory, cell, memory[cell] + value)
    elif name == "lock":
        if memory[cell]:
            return None
        memory = _set(memory, cell, 1)
    elif name == "load":
        going_on = (place + 1, _seen(memory, buffer, cell), buffer)
    elif name == "jump":
        going_on = (place + cell, register, buffer)
    elif name in ("if", "unless"):
        holds = _seen(memory, buffer, cell) >= value
        going_on = (place + (third if holds == (name == "if") else 1), register, buffer)
    elif name == "sleep":
        if register == ASLEEP - cell:
            return None
        if memory[cell] == register:
            going_on = (place, ASLEEP - cell, buffer)
    elif name == "wake":
        threads = tuple(
            (thread[0] + 1, 0, thread[2]) if thread[1] == ASLEEP - cell else thread
            for thread in threads
        )
    return memory, _with(threads, number, going_on)


def _seen(memory: tuple[int, ...], buffer: Buffer, cell: int) -> int:
    own = [value for its, value, _ in buffer if its == cell]
    return own[-1] if own else memory[cell]


def _set(memory: tuple[int, ...], cell: int, value: int) -> tuple[int, ...]:
    return (*memory[:cell], value, *memory[cell + 1 :])


def _with(threads: tuple[Thread, ...], number: int, thread: Thread) -> tuple[Thread, ...]:
    return (*threads[:number], thread, *threads[number + 1 :])

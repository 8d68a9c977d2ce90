"""What Linux knows about processes: die with your parent, adopt your grandchildren, who is who."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
FLAGS, EXIT_CODE = 6, 49  # of /proc/PID/stat, after the name
ENDS, WRITES_CORE = 0x4 | 0x400, 0x200  # flags: it exits, or was killed by a signal


def _checked(outcome: int, call: str) -> None:
    """Raise `OSError` if a call of the C library has failed."""
    if outcome != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(option, value, 0, 0, 0), f"prctl({option})")


def die_with_parent() -> None:
    """The kernel kills this process when its parent dies. Not inherited: each process asks.

    The parent is the thread that started it.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_parent() -> None:
    """The end of `die_with_parent`."""
    _prctl(PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Descendants whose parents die become children of this process, so that it can end them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def children_of_this_process() -> list[int]:
    """The process ids of all children, adopted ones too.

    From the parent that each process names: the kernel's own list of children may lack some while
    others exit.
    """
    this_pid = str(os.getpid())
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if _stat(pid)[1:2] == [this_pid]]


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process: R, S, D, T (stopped), Z; "" if it is gone."""
    return "".join(_stat(pid)[:1])


def is_dying(pid: int) -> bool:
    """Whether a process ends with a bad code, though its exit cannot be seen yet.

    The kernel first writes its core, if cores are wanted (15 s for a gigabyte were measured), and
    frees its memory (0.1 to 0.8 s). Until then its connections stay open.
    """
    fields = _stat(pid)
    if len(fields) <= EXIT_CODE:
        return False
    flags, code = int(fields[FLAGS]), int(fields[EXIT_CODE])
    # the flag alone: before Linux 5.17 a process that writes its core shows no exit code yet
    return flags & WRITES_CORE != 0 or (code > 0 and flags & ENDS != 0)


def keep_freed_memory() -> None:
    """Let this process keep the memory of tensors that it has freed, however large, for the next.

    By default glibc gives blocks of 32 MB and more back to the kernel at once, so that each step
    has the pages of its gradients and activations cleared again. Other C libraries do as they do.
    """
    with contextlib.suppress(AttributeError):
        adjust = ctypes.CDLL(None).mallopt
        adjust(M_MMAP_MAX, 0)
        adjust(M_TRIM_THRESHOLD, -1)


def started_at(pid: int) -> str:
    """The start of a process in the kernel's ticks; with its id, a name never used again."""
    return "".join(_stat(pid)[19:20])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold anything; [] if it is gone.

    Also if it is another user's, where the kernel hides those (hidepid): it is none of ours then.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x4000000, 0x10000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


def unshare(kinds: int) -> None:
    """This process goes on in namespaces of its own, of these kinds (`CLONE_NEW…`)."""
    _checked(ctypes.CDLL(None, use_errno=True).unshare(kinds), f"unshare({kinds:#x})")


def become_root_of_a_user_namespace() -> None:
    """Enter a user namespace: root over the networks that this process makes, and no others."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def show_instead(file: Path, place: Path) -> None:
    """In a mount namespace of its own, this process finds `file` at `place`."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "make mounts private")
    outcome = libc.mount(os.fsencode(file), os.fsencode(place), None, MS_BIND, None)
    _checked(outcome, f"mount {file} at {place}")


# --- oom -----------------------------------------------------------------------------------------
# Did the kernel run out of memory? Its counters say so; a rank that it killed cannot.
#
# Two counters: that of the control group of this process, whose kills are ours, and that of the
# whole machine, whose kills may have been others'.


GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
MACHINE = Path("/proc/vmstat")
COUNTERS = {"memory": "memory.oom_control", "": "memory.events"}
"""Of control groups of version 1 and 2, in the folder of a group."""


@dataclass(frozen=True)
class Kills:
    """How many processes the kernel has killed for want of memory; `None`: it does not say."""

    in_our_group: int | None
    on_this_machine: int | None

    @classmethod
    def now(cls) -> Kills:
        return cls(_in_our_group(), _counter(MACHINE))

    def since(self, before: Kills) -> str:
        """What to say of a rank killed between `before` and these counts; "" for nothing."""
        if _rose(before.in_our_group, self.in_our_group):
            return "out of memory: the kernel killed it at the limit of its control group"
        if _rose(before.on_this_machine, self.on_this_machine):
            return "probably out of memory: the kernel killed a process of this machine for it"
        return ""


def control_groups(kinds: Collection[str]) -> Iterator[tuple[str, Path]]:
    """The folder of the control group of this process, and of every group around it, by kind.

    `kinds` are controllers of version 1; version 2, which has them all in one, is "". Inside a
    container the mount may begin at the very group of this process.
    """
    try:
        lines = GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, group = line.split(":", 2)
        for kind in set(names.split(",")) & set(kinds):
            mount = MOUNT / kind
            if kind or (MOUNT / "cgroup.controllers").exists():
                inside = mount / group.lstrip("/")
                yield from ((kind, f) for f in (inside, *inside.parents) if f.is_relative_to(mount))


def _rose(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _in_our_group() -> int | None:
    files = (folder / COUNTERS[kind] for kind, folder in control_groups(COUNTERS))
    return next((_counter(file) for file in files if file.exists()), None)


def _counter(path: Path) -> int | None:
    try:
        rows = dict(line.split()[:2] for line in path.read_text().splitlines())
        return int(rows["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None

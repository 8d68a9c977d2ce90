"""A machine of its own on this one: a host name, a network, processes and shared memory apart.

It shares the files and the clock of the machine it stands on, as the nodes of a cluster share
theirs. All of it is in namespaces without names, which the kernel takes away with the last process
in them; and that process ends with the thread that made the machine, however it ends.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

BOOT = r"""
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t sysfs sysfs /sys
mount -t tmpfs groups /sys/fs/cgroup
ip link set lo up
echo ready
trap '' CHLD
exec cat
"""
"""What the first process does. /sys shows the network of who mounted it, and is mounted again; with
nothing in place of the control groups, so that those of the machine stay as they are.

A process that ignores SIGCHLD leaves no zombies of the orphans it adopts, and `cat` ends with its
input: when the one who holds the other end lets go, the kernel kills all that runs in there."""

DEAD_BUT_NOT_BURIED_S = 20
"""The kernel waits for all that has died in there to be collected. A process that entered and lost
its parent is collected by the first process of this machine,
which in some containers never does."""

DIES_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")


class CannotBeMade(Exception):
    """This machine does not allow, or does not have, what a machine in namespaces needs."""


class Machine:
    """Starts at once; `ready()` before use, `close()` after. To be made in the main thread."""

    def __init__(self, name: str, hosts: Path, log: Path) -> None:
        self.name = name
        self._log = log
        apart = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc")
        words = ("unshare", *apart, "--kill-child", "sh", "-c", BOOT, "boot", name, str(hosts))
        with log.open("ab") as errors:
            self._holder = subprocess.Popen(
                (*DIES_WITH_ITS_PARENT, *words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def ready(self) -> None:
        """Return when it stands; raises `CannotBeMade` with what the kernel said."""
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            raise CannotBeMade(
                f"no machine {self.name} in namespaces: {self._log.read_text().strip()}. It needs "
                "root with CAP_SYS_ADMIN and CAP_NET_ADMIN; in a container: --privileged."
            )

    @property
    def pid(self) -> int:
        """A process, outside, that is in its network namespace."""
        return self._holder.pid

    def entering(self, *command: str, cwd: Path) -> tuple[str, ...]:
        """The words, outside, that run a command in there; it dies when they are killed."""
        own = {"mount": "mnt", "uts": "uts", "ipc": "ipc", "net": "net", "pid": "pid_for_children"}
        spaces = (f"--{name}=/proc/{self.pid}/ns/{file}" for name, file in own.items())
        return (
            *DIES_WITH_ITS_PARENT,
            "nsenter",
            *spaces,
            *DIES_WITH_ITS_PARENT,
            "env",
            f"--chdir={cwd}",
            *command,
        )

    def processes(self) -> dict[int, tuple[int, str]]:
        """All that runs in there: pid in there -> (pid of its parent, command). 1 is not shown."""
        proc = Path(f"/proc/{self.pid}/root/proc")
        found = {}
        for name in filter(str.isdigit, os.listdir(proc)):
            try:
                state, parent = (proc / name / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (
                    (proc / name / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if name != "1" and state not in "ZX":
                found[int(name)] = (int(parent), command.strip())
        return found

    def close(self) -> None:
        """Kill all that runs in there, and return when it is gone."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(timeout=DEAD_BUT_NOT_BURIED_S)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        self._holder.stdout.close()


def join(switch: Machine, machine: Machine, address: str) -> None:
    """A cable from the bridge `lan` of one machine to `eth0` of another, which gets an address."""
    port = f"to-{machine.name}"
    inside(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0",
           "netns", str(machine.pid))  # fmt: skip
    inside(switch, "ip", "link", "set", port, "master", "lan", "up")
    inside(machine, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    inside(machine, "ip", "link", "set", "eth0", "up")


def bridge(switch: Machine, address: str) -> None:
    """Make the bridge `lan`, on which the machine itself has an address."""
    inside(switch, "ip", "link", "add", "lan", "type", "bridge")
    inside(switch, "ip", "address", "add", f"{address}/24", "dev", "lan")
    inside(switch, "ip", "link", "set", "lan", "up")


def unplug(switch: Machine, name: str) -> None:
    """Pull the cable of a machine: it can say no farewell to those that hold connections to it."""
    inside(switch, "ip", "link", "delete", f"to-{name}")


def inside(machine: Machine, *command: str) -> None:
    """Run a short command in the network of a machine; raises `CannotBeMade` if it fails."""
    words = ("nsenter", f"--net=/proc/{machine.pid}/ns/net", *command)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBeMade(f"{' '.join(command)} on {machine.name}: {done.stderr.strip()}")

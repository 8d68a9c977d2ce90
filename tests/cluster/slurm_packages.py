"""Puts the programs of Slurm, munge and ssh on this machine, if they are not there, with apt-get.

What the packages start of their own accord is stopped again, and nothing else is: the clusters of
the tests start daemons of their own (`slurm_here.py`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
}
"""Program -> the package it is in, on Debian and Ubuntu."""

SERVICES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sshd": "ssh"}
"""Daemon -> the service that its package starts."""

PATH = ":".join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin", "/sbin", "/bin"))


def install_what_is_missing() -> None:
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several tests at once one installs
        _install_what_is_missing()


def _install_what_is_missing() -> None:
    missing = {package for program, package in PACKAGES.items() if not found(program)}
    if not missing:
        return
    before = daemons()
    _apt_get("update")
    _apt_get("install", "--yes", "--no-install-recommends", *sorted(missing))
    for daemon, pids in daemons().items():
        if pids - before[daemon]:
            subprocess.run(("service", SERVICES[daemon], "stop"), check=True)
    still = sorted(program for program in PACKAGES if not found(program))
    assert not still, f"installed {sorted(missing)}, and yet there is no {still}"


def found(program: str) -> str | None:
    return shutil.which(program, path=PATH)


def daemons() -> dict[str, set[int]]:
    """The process ids of each daemon that runs on this machine, those of other clusters apart."""
    network = os.readlink("/proc/self/ns/net")
    running: dict[str, set[int]] = {name: set() for name in SERVICES}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "comm").read_text().strip()
            here = os.readlink(folder / "ns" / "net") == network
        except OSError:
            continue  # it ended meanwhile, or is none of ours to see
        if here and name in running:
            running[name].add(int(folder.name))
    return running


def _apt_get(*words: str) -> None:
    command = ("apt-get", "--quiet", *words)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": PATH}
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")

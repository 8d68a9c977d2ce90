"""A real Slurm for the tests: a head and compute nodes, each a machine of its own on this one.

    with closing(SlurmHere(folder)) as slurm:
        slurm.run("srun", "--nodes=2", "hostname", timeout_s=60)

munged and slurmctld run on `head`, one slurmd on each node; they differ from those of a computing
centre in their short time-outs, and in that no limit of CPUs or memory is enforced. Processes of a
job are found by their parents: one that goes its own way as a daemon outlives its job here, so that
`processes_on` shows it. It needs root, and leaves nothing: no process, mount, interface or port of
the machine is used or changed, and two clusters at once do not meet.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from machine import Machine, bridge, join, unplug
from slurm_packages import PATH, found, install_what_is_missing

HEAD, NODES = "head", ("n1", "n2")
ADDRESSES = {HEAD: "10.77.0.1", "n1": "10.77.0.11", "n2": "10.77.0.12"}
CPUS, MEMORY_MB, GPUS = 4, 4000, 2
"""Of a node, as Slurm is told. They need not be there: nothing enforces them. GPUs are in `gpu`
only, a partition whose node is always down."""

LINES_OF_A_LOG = 30
KILLED = {-9, 128 + 9}

SHORT_LIMIT_S, DEBUG_LIMIT_S = 120, 3600

CONFIGURATION = """
ClusterName=rehearsal
SlurmctldHost={head}({head_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits for its credential to expire
AuthInfo=socket={folder}/munge/socket,cred_expire=8
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=15
MessageTimeout=5
TCPTimeout=2
KillWait=5
MinJobAge=86400
JobRequeue=1
EnforcePartLimits=ALL
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} RealMemory={memory_mb} State=UNKNOWN
{nodes}
# so that something can be asked of GPUs: Slurm knows of this node, and there is none
NodeName=g1 NodeAddr=10.77.0.99 Gres=gpu:{gpus} State=DOWN Reason="not built"
PartitionName=debug Nodes={names} Default=YES MaxTime={debug_minutes} DefaultTime=10 State=UP
PartitionName=short Nodes={names} MaxTime={short_minutes} MaxNodes=1 State=UP
PartitionName=gpu Nodes=g1 MaxTime={debug_minutes} State=UP
"""

SSHD = """
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""
SSH = """
IdentityFile {keys}/user
StrictHostKeyChecking no
UserKnownHostsFile {keys}/known
LogLevel ERROR
"""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}

T = TypeVar("T")


class SlurmHere:
    """Starts in a folder of its own and returns when all nodes are idle. In the main thread."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            raise PermissionError("the tests on a real Slurm need root: they make namespaces")
        install_what_is_missing()
        self.folder = folder
        self.work = folder / "work"  # where commands run unless told otherwise
        self._machines: dict[str, Machine] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._write_files()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def environment(self) -> dict[str, str]:
        """That of a login shell on the head, with the Python of these tests first."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        python = str(Path(sys.executable).parent)
        return kept | {"SLURM_CONF": str(self._configuration), "PATH": f"{python}:{PATH}"}

    def run(
        self,
        *command: str,
        timeout_s: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        on: str = HEAD,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command where jobs are submitted; `env` is added to `environment()`.

        After `timeout_s` it is killed, with its process group, and `TimeoutExpired` raised. That is
        done in there: who kills the one that entered leaves an orphan to the first process of this
        machine, and in many a container that one buries nobody.
        """
        bounded = ("timeout", "--verbose", "--signal=KILL", str(timeout_s), *command)
        done = subprocess.run(
            self._machines[on].entering(*bounded, cwd=cwd or self.work),
            env={**self.environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode in KILLED and "timeout: sending signal KILL" in done.stderr:
            raise subprocess.TimeoutExpired(command, timeout_s, done.stdout, done.stderr)
        return subprocess.CompletedProcess(command, done.returncode, done.stdout, done.stderr)

    def on_node(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        return self.run(*command, on=name)

    def ask(self, *command: str, timeout_s: float = 60) -> str:
        """What a command that must not fail has printed."""
        done = self.run(*command, timeout_s=timeout_s)
        assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}\n{self.report()}"
        return done.stdout

    def submit(self, script: str, *flags: str) -> str:
        """Hand a batch script in, and return the id of its job."""
        path = self.work / f"script-{secrets.token_hex(4)}.sh"
        path.write_text(script)
        return self.ask("sbatch", "--parsable", *flags, str(path)).strip()

    def job(self, job_id: str) -> dict[str, str]:
        """All that `scontrol show job` says of a job, also of one that has ended."""
        return _fields(self.ask("scontrol", "--oneliner", "show", "job", job_id))

    def state_of(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def wait_for_state(self, job_id: str, state: str, timeout_s: float = 120) -> None:
        """Wait until a job is in a state; it fails at once when the job has ended in another."""

        def is_there() -> bool:
            now = self.state_of(job_id)
            done = now in ENDED and now != state
            assert not done, f"job {job_id} is {now}, not {state}\n{self.output_of(job_id)}"
            return now == state

        self.wait_for(is_there, timeout_s, f"job {job_id} {state}")

    def output_of(self, job_id: str) -> str:
        """What a batch job has printed so far."""
        path = Path(self.job(job_id)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def node(self, name: str) -> dict[str, str]:
        return _fields(self.ask("scontrol", "--oneliner", "show", "node", name))

    def processes_on(self, name: str) -> dict[int, str]:
        """All that runs on a node but its slurmd: process id on that node -> command."""
        return {
            pid: command
            for pid, (parent, command) in self._machines[name].processes().items()
            if not (parent == 0 and command.startswith(found("slurmd") or "slurmd"))
        }

    def take_down(self, name: str) -> None:
        """The node dies: its cable is pulled, then all that runs there is killed."""
        unplug(self._machines[HEAD], name)
        self._machines.pop(name).close()
        self._daemons.pop(name).wait()

    def bring_up(self, name: str) -> None:
        """Start a node that was taken down; it is of use when Slurm has seen it."""
        self._boot(name)
        self._plug_in(name)

    def wait_for(self, predicate: Callable[[], T], timeout_s: float, what: str) -> T:
        """Wait until `predicate()` is true, and return what it returned."""
        end = time.monotonic() + timeout_s
        while not (answer := predicate()):
            ended = [name for name, d in self._daemons.items() if d.poll() is not None]
            assert not ended, f"{ended} ended, and not: {what}\n{self.report()}"
            assert time.monotonic() < end, f"{timeout_s} s, and not: {what}\n{self.report()}"
            time.sleep(0.1)
        return answer

    def wait_until_idle(self, timeout_s: float = 120) -> None:
        """Until all nodes are free, and no process of a job is left on them."""
        self.wait_for(self._is_idle, timeout_s, "both nodes idle, with no process of a job")

    def cancel_all(self) -> None:
        jobs = self.ask("squeue", "--noheader", "--format=%i").split()
        self.run("scancel", *jobs)  # some may have ended meanwhile

    def report(self) -> str:
        """What a person would look at when something is wrong here."""
        said = [f"on {name}: {machine.processes()}" for name, machine in self._machines.items()]
        for command in ("squeue", "sinfo"):
            done = self.run(command)
            said.append(f"--- {command}\n{done.stdout}{done.stderr}")
        ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
        logs = sorted(self.folder.glob("*.log")) + [self.folder / f"{name}.err" for name in ended]
        for path in logs:
            last = path.read_text(errors="replace").splitlines()[-LINES_OF_A_LOG:]
            said.append("\n".join((f"--- {path.name}", *last)))
        return "\n".join(said)

    def close(self) -> None:
        """End all of it; the nodes first, so that no job is started anew."""
        for name in reversed(tuple(self._machines)):
            self._machines.pop(name).close()
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()

    @property
    def _configuration(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def _hosts(self) -> Path:
        return self.folder / "hosts"

    def _write_files(self) -> None:
        for name in ("munge", "state", "work", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o755)
        # slurmd asks for control groups even where it uses none, and must not make any of v2
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
        self._hosts.write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        nodes = "\n".join(f"NodeName={name} NodeAddr={ADDRESSES[name]}" for name in NODES)
        self._configuration.write_text(
            CONFIGURATION.format(
                head=HEAD,
                head_address=ADDRESSES[HEAD],
                folder=self.folder,
                cpus=CPUS,
                memory_mb=MEMORY_MB,
                gpus=GPUS,
                nodes=nodes,
                names=",".join(NODES),
                debug_minutes=DEBUG_LIMIT_S // 60,
                short_minutes=SHORT_LIMIT_S // 60,
            )
        )

    def _start(self) -> None:
        self._boot(HEAD, *NODES)
        bridge(self._machines[HEAD], ADDRESSES[HEAD])
        munge = self.folder / "munge"
        self._daemon(
            "munged", HEAD, "munged", "--foreground", "--force",
            f"--key-file={self.folder}/munge.key",
            f"--socket={munge}/socket", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed",
            f"--log-file={munge}/log",
        )  # fmt: skip
        self.wait_for((munge / "socket").exists, 30, "munged listens")
        self._daemon("slurmctld", HEAD, "slurmctld", "-D", "-f", str(self._configuration))
        for name in NODES:
            self._plug_in(name)
        self.wait_for(self._answers, 60, "slurmctld answers")
        self.wait_until_idle()

    def _boot(self, *names: str) -> None:
        for name in names:
            log = self.folder / f"machine-{name}.log"
            self._machines[name] = Machine(name, self._hosts, log)
        for name in names:
            self._machines[name].ready()

    def _plug_in(self, name: str) -> None:
        join(self._machines[HEAD], self._machines[name], ADDRESSES[name])
        self._daemon(name, name, "slurmd", "-D", "-f", str(self._configuration))

    def _daemon(self, label: str, place: str, program: str, *flags: str) -> None:
        """Start a daemon; what it says before it has opened its log is in NAME.err."""
        words = (found(program) or program, *flags)
        with (self.folder / f"{label}.err").open("ab") as log:
            self._daemons[label] = subprocess.Popen(
                self._machines[place].entering(*words, cwd=self.folder),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start_sshd(self) -> None:
        """An ssh server on each node; on the head `ssh NODE` gets in without a question."""
        keys = self.folder / "ssh"
        keys.mkdir(mode=0o700)
        for name in ("host", "user"):
            self.ask("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name))
        (keys / "server").write_text(SSHD.format(keys=keys))
        (keys / "client").write_text(SSH.format(keys=keys))
        ssh = self.work / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nexec {found("ssh")} -F {keys}/client "$@"\n')
        ssh.chmod(0o755)
        for name in NODES:
            own_run = "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd"
            assert self.on_node(name, "sh", "-c", own_run).returncode == 0
            self._daemon(f"sshd-{name}", name, "sshd", "-D", "-e", "-f", str(keys / "server"))
            self.wait_for(
                lambda name=name: self.run(str(ssh), name, "true").returncode == 0,  # type: ignore[misc]
                60,
                f"ssh to {name}",
            )

    def agents_on(self, name: str) -> list[int]:
        """The agents of jobs on a node, by their process ids there."""
        every = self.processes_on(name).items()
        return [pid for pid, command in every if "allranks.launcher.nodes.agent" in command]

    def _answers(self) -> bool:
        return self.run("scontrol", "ping").returncode == 0

    def _is_idle(self) -> bool:
        states = self.ask("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T")
        return states.split() == ["idle"] * len(NODES) and not any(map(self.processes_on, NODES))


def _fields(line: str) -> dict[str, str]:
    """`JobId=3 JobName=a b NodeList=n1` -> {"JobId": "3", "JobName": "a b", "NodeList": "n1"}."""
    parts = re.split(r"(?:^| )([A-Z][A-Za-z:/_]*)=", line.strip())[1:]
    return dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))

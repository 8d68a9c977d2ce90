"""The cluster that the other tests here stand on: it is what it claims to be,
and it leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from slurm_here import NODES, SlurmHere

HERE = Path(__file__).parent
NETWORK = "/proc/self/ns/net"
STUBBORN_JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks=2
srun bash -c "trap '' TERM; sleep 1000 & sleep 1000 & while :; do wait; done"
"""
TALK = """
import os, socket
first, me = "n1", socket.gethostname()
with socket.create_server((me, 4321)) as mine:
    if me == first:
        peer, _ = mine.accept()
    else:
        while True:
            try:
                peer = socket.create_connection((first, 4321), timeout=60)
                break
            except ConnectionRefusedError:
                pass
    with peer:
        peer.sendall(me.encode())
        print(me, "hears", peer.recv(100).decode())
"""


def _batch(*lines: str) -> str:
    return "\n".join(("#!/bin/bash", *lines, ""))


def _wait_for_the_stubborn(slurm: SlurmHere) -> None:
    def sleeping() -> list[int]:
        return [list(slurm.processes_on(name).values()).count("sleep 1000") for name in NODES]

    slurm.wait_for(lambda: sleeping() == [2, 2], 60, "two processes that sleep, on both nodes")


def _networks() -> set[str]:
    """The network namespaces in which any process of this machine is."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or belongs to the machine and not to us
            found.add(os.readlink(folder / "ns" / "net"))
    return found


def _of_the_machine() -> dict[str, object]:
    """What a cluster must not change."""
    links = subprocess.run(("ip", "-brief", "link"), capture_output=True, text=True, check=True)
    return {
        "interfaces": {line.split()[0] for line in links.stdout.splitlines()},
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "host name": os.uname().nodename,
        "hosts": Path("/etc/hosts").read_text(),
    }


def test_a_step_runs_on_two_hosts(slurm: SlurmHere) -> None:
    names = slurm.ask("srun", "--nodes=2", "--ntasks=4", "uname", "--nodename").split()
    assert len(names) == 4
    assert set(names) == set(NODES)


def test_the_hosts_have_networks_of_their_own(slurm: SlurmHere) -> None:
    everywhere = ("srun", "--nodes=2", "--ntasks-per-node=1")
    networks = set(slurm.ask(*everywhere, "readlink", NETWORK).split())
    assert len(networks | {os.readlink(NETWORK)}) == 3
    interfaces = slurm.ask(*everywhere, "ls", "/sys/class/net").split()
    assert sorted(interfaces) == ["eth0", "eth0", "lo", "lo"]


def test_the_hosts_reach_each_other_by_name(slurm: SlurmHere) -> None:
    (slurm.work / "talk.py").write_text(TALK)
    command = ("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "talk.py")
    assert sorted(slurm.ask(*command).splitlines()) == ["n1 hears n2", "n2 hears n1"]


def test_a_batch_job_is_run_to_its_end(slurm: SlurmHere) -> None:
    script = _batch("#SBATCH --nodes=2 --ntasks=2", "srun uname --nodename")
    job_id = slurm.submit(script)
    slurm.wait_for_state(job_id, "COMPLETED")
    assert sorted(slurm.output_of(job_id).split()) == list(NODES)
    assert slurm.job(job_id)["NodeList"] == "n[1-2]"


def test_a_job_that_fails_is_seen_to_have_failed(slurm: SlurmHere) -> None:
    job_id = slurm.submit(_batch("exit 4"))
    slurm.wait_for_state(job_id, "FAILED")
    assert slurm.job(job_id)["ExitCode"] == "4:0"


def test_a_cancelled_job_leaves_no_process(slurm: SlurmHere) -> None:
    job_id = slurm.submit(STUBBORN_JOB)
    _wait_for_the_stubborn(slurm)
    slurm.ask("scancel", job_id)
    slurm.wait_for_state(job_id, "CANCELLED")
    slurm.wait_until_idle()
    assert [slurm.processes_on(name) for name in NODES] == [{}, {}]


def test_what_a_job_leaves_behind_is_seen(slurm: SlurmHere) -> None:
    """A process that has left its parents, of a job that has ended, does not go unnoticed."""
    job_id = slurm.submit(_batch("#SBATCH --nodelist=n2", "setsid --fork sleep 1000 &>/dev/null"))
    slurm.wait_for_state(job_id, "COMPLETED")
    slurm.wait_for(
        lambda: list(slurm.processes_on("n2").values()) == ["sleep 1000"], 60, "only what is left"
    )
    assert slurm.processes_on("n1") == {}


def test_a_requeued_job_runs_again(slurm: SlurmHere) -> None:
    lines = (
        "#SBATCH --open-mode=append",
        'echo "restart ${SLURM_RESTART_COUNT:-none}"',
        "sleep 99",
    )
    job_id = slurm.submit(_batch(*lines))
    slurm.wait_for(lambda: "restart none\n" in slurm.output_of(job_id), 60, "the job runs")
    slurm.ask("scontrol", "requeue", job_id)
    slurm.wait_for(lambda: "restart 1\n" in slurm.output_of(job_id), 100, "the job runs again")
    assert slurm.job(job_id)["Restarts"] == "1"


def test_a_node_that_dies_is_down_until_it_comes_back(slurm: SlurmHere) -> None:
    script = _batch("#SBATCH --nodelist=n2 --no-requeue", "echo started", "sleep 1000")
    job_id = slurm.submit(script)
    slurm.wait_for(lambda: slurm.output_of(job_id) == "started\n", 60, "the job runs")
    slurm.take_down("n2")
    slurm.wait_for_state(job_id, "NODE_FAIL")
    assert slurm.node("n2")["State"].startswith("DOWN")
    assert slurm.node("n1")["State"] == "IDLE"
    slurm.bring_up("n2")
    slurm.wait_until_idle()
    assert slurm.ask("srun", "--nodelist=n2", "uname", "--nodename") == "n2\n"


@pytest.mark.parametrize(
    "flags",
    [
        ("--partition=nowhere",),
        ("--partition=short", "--time=3"),
        ("--partition=short", "--nodes=2"),
        ("--time=61",),
        ("--cpus-per-task=5",),
        ("--mem=4001",),
        ("--nodes=3",),
    ],
    ids=" ".join,
)
def test_what_the_partitions_do_not_have_is_refused(
    slurm: SlurmHere, flags: tuple[str, ...]
) -> None:
    done = slurm.run("srun", *flags, "true")
    assert done.returncode != 0
    assert slurm.ask("squeue", "--noheader") == ""


def test_what_the_partitions_have_is_given(slurm: SlurmHere) -> None:
    slurm.ask("srun", "--partition=short", "--time=2", "--cpus-per-task=4", "--mem=4000", "true")
    slurm.ask("srun", "--time=60", "--nodes=2", "--ntasks=8", "true")


def test_a_command_that_takes_too_long_is_ended(slurm: SlurmHere) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        slurm.run("sleep", "1000", on="n1", timeout_s=1)
    slurm.wait_for(lambda: slurm.processes_on("n1") == {}, 60, "no process left")


def test_two_clusters_do_not_meet(slurm: SlurmHere) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        closing(SlurmHere(Path(folder))) as other,
    ):
        job_id = other.submit(_batch("sleep 1000"))
        other.wait_for_state(job_id, "RUNNING")
        assert slurm.ask("squeue", "--noheader") == ""
        assert [slurm.processes_on(name) for name in NODES] == [{}, {}]
    slurm.wait_until_idle()


def test_closing_leaves_nothing(short_path: Path) -> None:
    before, networks = _of_the_machine(), _networks()
    with closing(SlurmHere(short_path)) as slurm:
        slurm.submit(STUBBORN_JOB)
        _wait_for_the_stubborn(slurm)
        inside = {slurm.on_node(n, "readlink", NETWORK).stdout.strip() for n in NODES}
        assert len(inside) == 2
        assert inside <= _networks() - networks
    assert not inside & _networks()
    assert _of_the_machine() == before


def test_the_death_of_its_maker_leaves_nothing(short_path: Path) -> None:
    """`kill -9` of the process that holds a cluster, with a job in it, takes all of it away."""
    before = _of_the_machine()
    program = (
        "import sys, time; from pathlib import Path; from slurm_here import NODES, SlurmHere\n"
        "slurm = SlurmHere(Path(sys.argv[1]))\n"
        "job_id = slurm.submit('#!/bin/bash\\nsetsid sleep 1000')\n"
        "slurm.wait_for_state(job_id, 'RUNNING')\n"
        f"print(*(slurm.on_node(name, 'readlink', '{NETWORK}').stdout for name in NODES))\n"
        "sys.stdout.flush(); time.sleep(1000)"
    )
    command = (sys.executable, "-c", program, str(short_path))
    variables = os.environ | {"PYTHONPATH": str(HERE)}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout is not None
            inside = {maker.stdout.readline().strip() for _ in NODES}
            assert len(inside) == 2
            assert inside <= _networks()
        finally:
            maker.kill()
    while inside & _networks():  # the time-out of the test is the bound
        time.sleep(0.05)
    assert _of_the_machine() == before


def test_who_is_not_root_is_told_so(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError, match="need root"):
        SlurmHere(short_path)

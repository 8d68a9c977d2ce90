"""The bytes that cards promise, against the counters of a real interface.

Ranks meet over the loopback interface of a network namespace of their own, where nobody else
sends. Two runs of different length are subtracted, so that only steps remain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NODE_ETH = """
import fcntl, json, socket, struct, sys
from allranks.job.config import resolve
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import run_job

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:  # bring lo up
    fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", 0x1))

def sent():
    line = next(line for line in open("/proc/net/dev") if line.strip().startswith("lo:"))
    return int(line.split()[9])

def counted(server, strategy, ranks, folder):
    wanted, found = [], []
    for steps in (2, 12):
        run_dir = f"{folder}/{steps}"
        flags = {"ranks": ranks, "strategy": strategy, "steps": steps, "run_dir": run_dir}
        flags["backend"] = "gloo"  # nothing crosses a link in shared memory
        before = sent()
        summary = run_job(resolve("synthetic", flags, ("width=512",)), server).summary
        found.append(sent() - before)
        wanted.append(summary["sent_bytes"]["gradients"])
    return {"rank_0": wanted[1] - wanted[0], "interface": found[1] - found[0]}

settings = json.loads(sys.argv[2])
with ForkServer(("allranks.torch.worker", "allranks.torch.preload")) as server:
    results = [
        counted(server, strategy, ranks, f"{sys.argv[1]}/{number}")
        for number, (strategy, ranks) in enumerate(settings)
    ]
print(json.dumps(results))
"""
SETTINGS = [("ddp-plain", 2), ("ddp", 4), ("ddp:reduce=tree", 4)]


@pytest.mark.slow
def test_the_interface_counts_what_the_card_says(tmp_path: Path) -> None:
    alone = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    possible = subprocess.run([*alone, "true"], capture_output=True, check=False)
    if possible.returncode != 0:
        pytest.skip(f"no network namespace of our own: {possible.stderr.decode().strip()}")
    command = [*alone, sys.executable, "-c", NODE_ETH, str(tmp_path), json.dumps(SETTINGS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for (strategy, ranks), counted in zip(SETTINGS, results, strict=True):
        assert counted["rank_0"] > 10 * 1_000_000, strategy
        wanted = pytest.approx(ranks * counted["rank_0"], rel=0.05)
        assert counted["interface"] == wanted, strategy

"""Other libraries ("peers") that a bench compares with our strategies, and what they lack.

Their loops are in `benchmarks/peers` of the project's checkout; an installed package has none. One
script trains with any of them, started by `allranks run`. It gets the same job: the model and the
optimizer of its task, and the same batches in the same order.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from allranks.catalog import TENSORFLOW, TORCH
from allranks.errors import RequestError, nearest
from allranks.job.job import Job
from allranks.tools.bench.plan import Combination

SCRIPT = Path(__file__).resolve().parents[4] / "benchmarks" / "peers" / "train.py"
JOB_FILE = "job.json"
"""The file with the job of a peer, which exists while the peer runs."""


@dataclass(frozen=True)
class Peer:
    """The packages that a peer needs, and the engine whose tasks it trains."""

    title: str
    packages: tuple[str, ...] = ()
    pip: str = ""
    engine: str = TORCH


PEERS: Mapping[str, Peer] = {
    "hand": Peer("DistributedDataParallel by hand"),
    "accelerate": Peer("Accelerate", ("accelerate",), "accelerate"),
    "fabric": Peer("Lightning Fabric", ("lightning_fabric",), "lightning-fabric"),
    "deepspeed": Peer("DeepSpeed, ZeRO 0", ("deepspeed",), "deepspeed"),
    "deepspeed-zero1": Peer("DeepSpeed, ZeRO 1", ("deepspeed",), "deepspeed"),
    "tf": Peer(
        "tf.distribute by hand", ("tensorflow", "keras"), "'allranks[tensorflow]'", TENSORFLOW
    ),
}
HERE = ("local", "simulated")
PLAIN = Job()
NO_CHECKPOINTS = "a script writes no checkpoints"
SAME = {
    "precision": "sums are in fp32",
    "bitwise": "none has a fixed order of sums",
    "device": "the scripts are for processors",
    "micro_batch": "a step is one pass",
    "micro_batch_trial": "a step is one pass",
    "share": "scripts deal samples evenly",
    "compile": "no script compiles",
    "activation_checkpointing": "no script computes activations again",
    "channels_last": "no script lays images out anew",
    "optimizer": "a script takes the optimizer of the task",
    "schedule": "a script takes no schedule",
    "loader_workers": "a script reads in the step",
    "steps_per_call": "a script makes one step at a time",
    "early_stop": "a script does not evaluate",
    "checkpoint_every": NO_CHECKPOINTS,
    "best": NO_CHECKPOINTS,
    "resume": "a script begins with the weights of the task",
    "max_restarts": "a script is started once",
    "elastic": "a script ends with its first rank",
    "spare_state": "a script ends with its first rank",
    "time_limit": "a script goes on to its last step",
    "on_bad_step": "a script takes every step",
    "spike": "a script takes every step",
    "verify_every": "no script compares the weights of its ranks",
    "digest_every": "a script writes no digests",
    "audit": "no script computes a shard again",
    "audit_every": "no script computes a shard again",
    "inject": "faults are made in our ranks alone",
    "log": "a script writes its losses, and nothing else",
    "profile": "a script writes its losses, and nothing else",
}
"""Fields of a job that no peer supports, and why."""


def check_peers(names: tuple[str, ...]) -> None:
    """Raise `RequestError` for a peer that is unknown, has no script here, or is not installed."""
    for name in names:
        if name not in PEERS:
            raise RequestError(
                asked=f"--peers {','.join(names)}",
                found=f"no peer {name!r}",
                why="a bench measures the libraries whose loops are in benchmarks/peers",
                do=nearest(name, PEERS),
            )
        if not SCRIPT.is_file():
            raise RequestError(
                asked=f"--peers {','.join(names)}",
                found=f"an installed package: no {SCRIPT}",
                why="the loops of peers are in the project's checkout, under benchmarks/peers",
                do="install a checkout (`pip install -e .`), or leave --peers out",
            )
        peer = PEERS[name]
        missing = [package for package in peer.packages if find_spec(package) is None]
        if missing:
            raise RequestError(
                asked=f"--peers {','.join(names)}",
                found=f"no package {', '.join(missing)} in this Python",
                why=f"{name} is {peer.title}",
                do=f"pip install {peer.pip}, or leave {name} out",
            )


def check_job(name: str, job: Job) -> None:
    """Raise `RequestError` if the peer does not support a value of this job."""
    peer = PEERS[name]
    if job.engine != peer.engine:
        raise RequestError(
            asked=f"--peers {name} for {job.program}",
            found=f"a task of {job.engine}",
            why=f"{peer.title} trains tasks of {peer.engine}",
            do="leave that peer out, or name another program",
        )
    if job.place_spec.name not in HERE:
        raise RequestError(
            asked=f"--peers {name} with --place {job.place}",
            found="nodes that are no part of this machine",
            why="a bench starts peers here, or on simulated nodes",
            do="leave one of them out",
        )
    for field, why in SAME.items():
        if getattr(job, field) != getattr(PLAIN, field):
            raise RequestError(
                asked=f"--peers {name} with {field} = {getattr(job, field)}",
                found="a peer that does not have it",
                why=why,
                do="leave one of them out",
            )


def refused_task(job: Job) -> str:
    """What the peers do not support in the task of `job`; "" if they can train it.

    A process loads the task as a peer does. If that fails for another reason, the runs fail too.
    """
    peer = next(name for name, peer in PEERS.items() if peer.engine == job.engine)
    words = [sys.executable, str(SCRIPT), peer, "/dev/stdin"]
    text = json.dumps(job.to_data())
    ended = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    is_refused = ended.returncode == RequestError.exit_code
    return ended.stderr.strip().splitlines()[-1] if is_refused else ""


def script_of(name: str) -> str:
    """The command that starts it by hand: `python …/train.py PEER`."""
    return f"python {os.path.relpath(SCRIPT)} {name}"


def peer_words(
    combination: Combination, job: Job, run_dir: Path, out: Path, limit_s: float
) -> list[str]:
    """The arguments of `allranks run` for one run; the peer reads its job from a file.

    A peer that hangs is ended after `limit_s`, because no heartbeat supervises it.
    """
    out.mkdir(parents=True)
    job_file = out / JOB_FILE
    job_file.write_text(json.dumps(job.to_data()))
    words = ["--ranks", str(job.ranks), "--nodes", str(job.nodes), "--run-dir", str(run_dir)]
    words += ["--time-limit", str(math.ceil(limit_s))]
    words += ["--place", job.place] if job.nodes > 1 else []
    script = [sys.executable, str(SCRIPT), combination.strategy, str(job_file), str(out)]
    return [*words, "--", *script]

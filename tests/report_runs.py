"""Run folders as two ranks leave them, written by hand: every time and every number is known.

Two ranks on two nodes make 12 steps of 32 samples. Rank 1 is killed in step 8; all start again from
the checkpoint of step 6. Clocks: the monotonic one of the first event is 0, the wall clock `WALL`.

    attempt 0   begins 0.0   ready 1.0   training 2.0, a step each 0.1 s   0 fails 2.9, end 3.0
    attempt 1   begins 3.0   ready 4.0   training 5.0, a step each 0.2 s   done 6.5, end 7.0
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WALL = 1.7e9
DIGEST = "ab" * 32
HOSTS = ("node0", "node1")
SECONDS = ({"compute": 2.0, "exchange": 0.5, "data": 1.0}, {"compute": 1.5, "exchange": 1.25})
REPORT = "rank 1 on node1 failed first at step 8: killed by SIGKILL\nstopped because of it: rank 0"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NCCL_AUTH": "[redacted]"}


def event(at: float, name: str, **values: Any) -> dict[str, Any]:
    return {"event": name, "time": WALL + at, "monotonic": at, **values}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def job_toml(**values: Any) -> str:
    job = {
        "program": "digits",
        "engine": "torch",
        "strategy": "ddp",
        "ranks": 2,
        "nodes": 2,
        "place": "simulated",
        "device": "cpu",
        "precision": "fp32",
        **values,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in job.items()]
    sources = ['program = "command line"', 'ranks = "command line"', '"task.lr" = "command line"']
    return "\n".join(
        ["schema = 1", *lines, "", "[task]", "lr = 0.003", "", "[source]", *sources, ""]
    )


def rank_events(rank: int, metrics: dict[str, float], summary: dict[str, Any]) -> list[Any]:
    machine = {"torch": "2.13.0", "threads": 1 + rank, "cuda": None}
    first = [
        event(1.0, "ready", attempt=0, host=HOSTS[rank], machine=machine),
        event(2.0, "training", attempt=0, step=0, total_steps=12),
    ]
    lost = event(2.9, "failed", attempt=0, kind="PeerLost", message="gone", peer_lost=True)
    again = [
        event(4.0, "ready", attempt=1, host=HOSTS[rank], machine=machine),
        event(5.0, "training", attempt=1, step=6, total_steps=12),
    ]
    evaluated = [
        event(at, "evaluated", attempt=1, step=step, metrics=metrics, best=False)
        for at, step in ((5.5, 9), (6.2, 12))
    ]
    memory = {"host_bytes": (1 + rank) * 2**28, "device_bytes": None}
    done = event(6.5, "done", attempt=1, summary=summary, seconds=SECONDS[rank], memory=memory)
    return [*first, *([] if rank else [lost]), *again, *([] if rank else evaluated), done]


def rows() -> list[dict[str, Any]]:
    """What the leader wrote of its steps; those of attempt 0 from step 6 on were dropped."""
    at = [2.0 + 0.1 * i for i in range(6)] + [5.0 + 0.2 * i for i in range(6)]
    losses = [2.0, 1.5, 1.2, 1.0, 0.9, 0.8, 0.7, 0.65, 0.6, 0.58, 0.55, 0.5]
    told = {"epoch": 0, "samples": 32, "learning_rate": 0.003}
    return [
        {"step": step, "loss": loss, "monotonic": when, **told}
        for step, (loss, when) in enumerate(zip(losses, at, strict=True))
    ]


def write_run(
    path: Path,
    *,
    report: str = REPORT,
    metrics: dict[str, float] | None = None,
    digest: str = DIGEST,
    **job: Any,
) -> Path:
    """The run folder; `job` are values of it that differ."""
    metrics = metrics or {"loss": 0.61, "accuracy": 0.75}
    summary = {
        "world_size": 2,
        "strategy": "ddp",
        "steps": 12,
        "train_loss": 0.5967,
        "eval": metrics,
        "samples_per_s": 160.0,
        "weights_sha256": digest,
        "resumed_from_step": 6,
        "sent_bytes": {"gradients": 6 * 2048, "control": 99},
        "card_bytes_per_step": 2048,
    }
    path.mkdir(parents=True)
    (path / "job.toml").write_text(job_toml(**job))
    restart = {"first_rank": 1, "report": report, "attempt": 0, "resumes_from": 6, "lost_steps": 2}
    write_lines(
        path / "events.jsonl",
        [
            event(0.0, "started", ranks=2, notes=[], environment=ENVIRONMENT),
            event(0.0, "proof", proved=True, why="2 steps on 2 ranks agree with one process"),
            event(0.0, "attempt", attempt=0),
            event(3.0, "restart", **restart),
            event(3.0, "attempt", attempt=1),
            event(7.0, "done", exits={"0": 0, "1": 0}, attempt=1),
        ],
    )
    for rank in (0, 1):
        write_lines(path / f"events-{rank}.jsonl", rank_events(rank, metrics, summary))
    write_lines(path / "metrics.jsonl", rows())
    placement = path / "placement"
    placement.mkdir()
    row = {"kind": "parameter", "name": "w", "device": "cpu", "dtype": "float32", "shape": [256]}
    sizes = {"bytes": 1024, "gradient_bytes": 1024, "optimizer_bytes": 2048}
    for rank in (0, 1):
        (placement / f"rank-{rank:03d}.json").write_text(json.dumps({"rows": [{**row, **sizes}]}))
    return path


def write_phases(run: Path) -> None:
    """Steps 7 and 8 of attempt 1, 5 ms each: rank 0 computes for 1 ms, rank 1 for 4 ms.

    Rank 0 comes to the exchange first, and waits for 3 ms; sending takes 1 ms.
    """
    data, compute, exchange = 1, 2, 3
    spans = (
        [[data, 0, 100], [compute, 100, 900], [exchange, 1000, 4000]],
        [[compute, 0, 4000], [exchange, 4000, 1000]],
    )
    (run / "phases").mkdir()
    for rank, own in enumerate(spans):
        rows = [
            {"step": 6 + number, "attempt": 1, "from": 5.0 + 0.005 * number, "spans": own}
            for number in range(2)
        ]
        write_lines(run / "phases" / f"rank-{rank:03d}.jsonl", rows)

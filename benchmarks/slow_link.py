"""What sends less, on slow links: bytes, time of a step, and the time to the loss that `ddp` has.

    python benchmarks/slow_link.py
    python benchmarks/slow_link.py --quick
    python benchmarks/slow_link.py --model VGG-like --ranks 4 --untrained
    python benchmarks/slow_link.py --join FIRST.json SECOND.json --losses quality-20261125.json

Nodes are simulated (root is needed): 2 and 4 of them with one rank each, joined by 100 Mbit/s, 1
and 10 Gbit/s, and by links that nothing bounds. All methods live in the same processes and take
turns with a step or a block, so what is compared was measured side by side. `independent` sends
nothing: its time is the compute of a step beside as many ranks, and what a method takes more is
what it costs.

Of methods with a period, blocks of `BLOCK` steps are timed, local steps and the meeting together;
the step of any other period H follows as compute + (block - BLOCK · compute) / H. That is checked
for H = 16, whose blocks are timed too, as are those of learners with an exchange under way. A long
block begins together once in many steps, so of these what counts is what they take more than as
many steps of `independent`.

`dial` is how much slower than the fastest method the choice of `--strategy auto` was measured. The
loss after equal samples, and the time to that of `ddp`, take the steps from trainings on this
machine (`quality.py` has more of them), and their seconds from the steps timed here. `--join` makes
one record and the plots of those of parts, with the losses of a record of `quality.py`; it asks the
dial anew, with the facts of then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import RECORDS, finish_record, order_of, say, start_record
from slow_link_found import (
    COMPRESSING,
    COMPUTE,
    LINKS,
    SLOWEST,
    STREAMED,
    Timed,
    comparisons,
    drawn,
    judged,
    judged_again,
    row_of,
    time_to_loss,
)
from trainings import Curves, curves_in, trained
from turns import Meeting, RankSet

from allranks.job.faults import Fault
from allranks.job.job import Job
from allranks.launcher.heartbeat import HeartbeatTable
from allranks.launcher.nodes.cluster import Cluster, gathered
from allranks.launcher.places import NodeRequest, Rendezvous
from allranks.launcher.plan import RankPlan, Shape
from allranks.launcher.processes.fork_server import LISTENER_FD
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import WatchPolicy, supervise
from allranks.strategies.auto import LinkSpeed, ModelFacts

HERE = Path(__file__).resolve().parent
MODELS = {"char-GPT": "CharGPT", "ResNet-20": "ResNet20", "VGG-like": "VGGLike"}
RANKS = (4, 2)
BLOCK = 4
IN_STEPS = ("ddp", "ddp:reduce=bf16", "ddp:late=1", *COMPRESSING)
"""Methods that exchange in every step."""
PERIODS = {"local-sgd": (2, 4, 8, 16), "diloco": (50,), "sparse-loco": (4, 30)}
"""Methods that exchange every so many steps; those of 16 are timed in whole blocks too."""
IN_BLOCKS = tuple(f"{name}:every={BLOCK}" for name in PERIODS)
CHECKED = "local-sgd:every=16"
METHODS = (COMPUTE, *IN_STEPS, *IN_BLOCKS, STREAMED, CHECKED)
TRAINED = ("char-GPT",)
"""The models of which the losses are compared here; `quality.py` has others."""
PRELOAD = ("allranks.torch.worker", "allranks.torch.preload")
JOIN_S, NODE_S = 60.0, 600.0


@contextmanager
def nodes(ranks: int) -> Iterator[tuple[Cluster, RankSet]]:
    """So many simulated nodes with a rank each, which wait to be asked."""
    os.environ["PYTHONPATH"] = str(HERE)  # of the fork servers on the nodes
    rendezvous = Rendezvous(join_timeout_s=JOIN_S, node_timeout_s=NODE_S)
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-slow-link-") as folder,
        Meeting() as meeting,
        gathered(_request(ranks, rendezvous, Path(folder))) as cluster,
        closing(HeartbeatTable(ranks)) as beats,
    ):
        plan = cluster.plan(Job(strategy="ddp", ranks=ranks, nodes=ranks), Shape({}, 256, 8))
        plan = cluster.replan(plan)
        processes = [_process(rank, meeting.address, Path(folder)) for rank in plan.ranks]
        watched = cluster.server, processes, lambda: None, WatchPolicy(beats)
        watching = threading.Thread(target=supervise, args=watched)
        watching.start()
        try:
            yield cluster, meeting.wait_for(f"{ranks} nodes", [], ranks)
        finally:
            meeting.end_all()
            watching.join()


def _request(ranks: int, rendezvous: Rendezvous, shared: Path) -> NodeRequest:
    return NodeRequest("simulated", ranks, ranks, rendezvous, shared=shared, modules=PRELOAD)


def _process(rank: RankPlan, address: str, folder: Path) -> Process:
    store = rank.world.is_leader
    world = replace(rank.world, listener=LISTENER_FD if store else -1)
    environment = {**rank.environment, **world.variables()}
    log = folder / f"rank-{world.rank}.log"
    return Process(world.rank, "slow_link_rank:serve", address, environment, log, store)


def shape(cluster: Cluster, ranks: int, link: str) -> None:
    """Give the links of all nodes this speed."""
    assert cluster.break_node is not None
    for number in range(ranks):
        cluster.break_node(Fault("slow-link", node=number, link=link))


def block(there: RankSet, method: str, steps: int) -> tuple[float, float]:
    """Seconds of a step on the slowest rank, and the bytes that the busiest sent in it.

    A late exchange is under way before the first step that is timed, and over before another
    method has its turn.
    """
    is_late = "late" in method
    if is_late:
        there.ask("time", method, 1)
    answers = there.ask("time", method, steps)
    seconds = max(answer["seconds"] for answer in answers)
    if is_late:
        time.sleep(seconds / steps)
    return seconds / steps, max(answer["sent_bytes"] for answer in answers) / steps


def steps_of(method: str, link: str) -> int:
    """Steps of one turn: a whole block, where there are blocks."""
    if method == COMPUTE:
        return BLOCK
    in_steps = 1 if link == SLOWEST else 2
    return int(method.partition("every=")[2].partition(",")[0] or in_steps)


def measure(
    cluster: Cluster, there: RankSet, model: str, ranks: int, link: str, rounds: int
) -> list[Timed]:
    """Every method over this link, in turns."""
    shape(cluster, ranks, link)
    checked = (CHECKED,) if link == SLOWEST else ()
    names = [*METHODS[:-1], *checked]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    long: list[float] = []
    for turn in range(rounds):
        for name in order_of(names, turn):
            found[name].append(block(there, name, steps_of(name, link)))
            if name == STREAMED:
                long.append(block(there, COMPUTE, steps_of(name, link))[0])
    compute, ddp = ([seconds for seconds, _ in found[name]] for name in (COMPUTE, "ddp"))
    rows = []
    for name in (COMPUTE, *IN_STEPS, STREAMED, *checked):
        called = f"{name}, whole blocks" if name in checked else name
        steps, sent = [seconds for seconds, _ in found[name]], found[name][0][1]
        if name == STREAMED:
            turns = zip(steps, long, compute, strict=True)
            steps = [own - beside + alone for own, beside, alone in turns]
        rows.append(Timed(model, ranks, link, called, steps, compute, ddp, sent))
    for family, periods in PERIODS.items():
        blocks = found[f"{family}:every={BLOCK}"]
        for every in periods:
            pairs = zip(blocks, compute, strict=True)
            steps = [alone + (own - alone) * BLOCK / every for (own, _), alone in pairs]
            called, sent = f"{family}:every={every}", blocks[0][1] * BLOCK / every
            rows.append(Timed(model, ranks, link, called, steps, compute, ddp, sent))
    ms = "  ".join(f"{row.method} {row.step_s * 1e3:.1f}" for row in rows)
    say(f"{model}, {ranks} ranks, {link or 'unlinked'}, ms of a step: {ms}")
    return rows


def facts_of(model: str, ranks: int) -> ModelFacts:
    """What the dial measures of this model, by its own command."""
    task = f"{HERE / 'sending_tasks.py'}:{MODELS[model]}"
    where = ["--ranks", str(ranks), "--nodes", str(ranks), "--place", "simulated:link=1gbit"]
    command = [sys.executable, "-m", "allranks.cli.main", "train", task, *where]
    words = ["--strategy", "auto", "--dry-run", "--json"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout.splitlines()[-1])["decision"]["facts"]
    return ModelFacts(**{**facts, "link": LinkSpeed(**facts["link"])})


def main() -> None:
    """Measure, and write the record and the plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one model, 4 ranks, two links")
    parser.add_argument(
        "--rounds", type=int, default=2, help="turns, on faster links twice as many"
    )
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--ranks", type=int, choices=RANKS, help="only so many")
    parser.add_argument("--untrained", action="store_true", help="no losses, and no plots")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    parser.add_argument("--join", nargs="+", type=Path, help="records of parts: time nothing")
    parser.add_argument("--losses", type=Path, help="a record of quality.py: train nothing")
    asked = parser.parse_args()
    if asked.join:
        joined(asked)
        return
    models = [asked.model] if asked.model else ["char-GPT"] if asked.quick else list(MODELS)
    links = ("100mbit", "") if asked.quick else LINKS
    all_ranks = (asked.ranks,) if asked.ranks else RANKS[:1] if asked.quick else RANKS
    trains = not (asked.quick or asked.untrained)
    settings = {"models": models, "links": links, "ranks": all_ranks, "rounds": asked.rounds}
    record = start_record("slow_link", {**settings, "block": BLOCK})
    rows, dial = [], []
    for ranks in all_ranks:
        facts = {model: facts_of(model, ranks) for model in models}
        with nodes(ranks) as (cluster, there):
            for model in models:
                there.ask("make", model, METHODS)
                shape(cluster, ranks, "")
                for method in METHODS:
                    block(there, method, steps_of(method, ""))
                for link in links:
                    own = measure(cluster, there, model, ranks, link, asked.rounds)
                    place = {"model": model, "ranks": ranks, "link": link}
                    dial.append({**place, **judged(facts[model], link, own)})
                    rows += own
    curves = {model: trained(model, MODELS[model]) for model in TRAINED} if trains else {}
    finish(record, rows, dial, curves, asked.records, draws=trains)


def joined(asked: argparse.Namespace) -> None:
    """One record and the plots of the records of parts."""
    parts = [json.loads(path.read_text()) for path in asked.join]
    names = [path.name for path in asked.join]
    machines = [part["machine"] for part in parts]
    record = start_record("slow_link", {"joined": names, "machines": machines, "block": BLOCK})
    rows = [Timed(**sample) for part in parts for sample in part["samples"]]
    curves = (
        {} if asked.losses is None else {model: curves_in(asked.losses, model) for model in TRAINED}
    )
    dial = [judged_again(one, rows) for part in parts for one in part["dial"]]
    finish(record, rows, dial, curves, asked.records)


def finish(
    record: dict[str, Any],
    rows: list[Timed],
    dial: list[dict[str, Any]],
    curves: dict[str, Curves],
    folder: Path,
    *,
    draws: bool = True,
) -> None:
    """Write the record, and the plots."""
    record["samples"] = [asdict(row) for row in rows]
    record["dial"] = dial
    record["rows"] = [row_of(row, 16 if row.model == "char-GPT" else 32) for row in rows]
    record["rows"] += time_to_loss(rows, curves)
    if draws:
        drawn(rows, folder, record["machine"]["date"][:10].replace("-", ""))
    finish_record(record, comparisons(rows, dial), folder)


if __name__ == "__main__":
    main()

"""The same question put to peers: does a random training on many ranks give what one process gives?

    python benchmarks/fuzz_peers.py --combinations 200 --seed 0

DistributedDataParallel, ZeroRedundancyOptimizer, `fully_shard`, Accelerate, Lightning Fabric and
DeepSpeed, each used as its documentation says (`peers/as_documented.py`), in float64 over Gloo.
What is found is told in `docs/found.md`, each with a script of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from harness import RECORDS, finish_record, say, start_record

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "fuzzing"), str(HERE / "peers")]

from as_documented import LOOPS, Told, on_ranks, one_process  # noqa: E402

BOUND = 1e-9
FP32_BOUND = 1e-3
"""DeepSpeed sums no gradients in float64: a few updates in float32 round by about 1e-6, and an Adam
enlarges what rounds of a gradient that is nearly zero."""
PATIENCE_S = 120.0
PARTS = ("deepspeed-1", "deepspeed-2", "deepspeed-3")


def drawn(seed: int, number: int, peers: list[str]) -> Told:
    """The training of this number."""
    dice = random.Random(f"{seed}/{number}")
    maybe: dict[str, list[Any]] = {
        "kind": ["images", "words", "rare", "residual"],
        "norm": ["layer", "group", "batch"],
        "width": [4, 12],
        "depth": [1, 3],
        "by": ["momentum", "adamw", "nadam", "rmsprop", "adagrad"],
        "clip_norm": [0.05, 1.0],
        "frozen": [True],
    }
    settings = {n: dice.choice(of) for n, of in maybe.items() if dice.random() < 0.4}
    if settings.get("kind") in ("words", "rare"):
        settings.pop("norm", None)
    ranks, batch, accumulate = (
        dice.choice([2, 2, 3]),
        dice.choice([2, 4]),
        dice.choice([1, 1, 2, 3]),
    )
    whole = ranks * batch * accumulate
    rest = dice.choice([0, 0, 0, 1, ranks * batch, ranks * batch + 1])
    samples = 2 * whole + (rest if rest < whole else 0)
    peer = dice.choice(peers)
    if peer == "fabric" and settings.get("by") == "nadam":
        del settings["by"]  # it keeps a product in the default type, which is another one there
    return Told(peer, ranks, batch, accumulate, 2, {**settings, "samples": samples})


def expected(told: Told) -> str:
    """Why, by its documentation, such a training is no mean over the batch; "" where it is."""
    whole = told.ranks * told.batch * told.accumulate
    rest = told.settings["samples"] % whole
    reasons = []
    if told.settings.get("norm") == "batch":
        reasons.append("BatchNorm of each rank's own samples")
    if rest % told.ranks:
        reasons.append("samples repeated to come out even")
    if rest % (told.ranks * told.batch) or rest:
        reasons.append("the last window is shorter")
    if told.settings.get("kind") == "rare" and told.peer in PARTS:
        reasons.append("a weight that a rank does not use, as docs/found.md tells")
    return ", ".join(reasons)


def held(told: Told) -> tuple[str, float, str]:
    """`equal`, `different` or `broken`, the largest difference, and where."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        context = multiprocessing.get_context("fork")
        lines, processes = [], []
        for rank in range(told.ranks):
            ours, theirs = context.Pipe()
            arguments = (told, rank, f"{folder}/store", port, theirs)
            processes.append(context.Process(target=_rank, args=arguments))
            processes[-1].start()
            theirs.close()
            lines.append(ours)
        try:
            answers = [_heard(line) for line in lines]
        finally:
            for process in processes:
                process.kill()
                process.join()
    broken = [why for ok, why in answers if not ok]
    if broken:
        return "broken", 0.0, next((w for w in broken if "onnection" not in w), broken[0])
    ours, single = answers[0][1], one_process_of(told)
    apart = {n: _difference(ours[n], t) for n, t in single.items()}
    worst = max(apart, key=lambda name: apart[name])
    bound = FP32_BOUND if told.peer.startswith("deepspeed") else BOUND
    return ("equal" if apart[worst] <= bound else "different"), apart[worst], worst


def one_process_of(told: Told) -> dict[str, Any]:
    """In a process of its own: a process that has computed must not be forked."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_alone, args=(told, theirs))
    process.start()
    theirs.close()
    ok, found = _heard(ours)
    process.join()
    assert ok, found
    return dict(found)


def _heard(line: Any) -> tuple[bool, Any]:
    if not line.poll(PATIENCE_S):
        return False, "a rank that is silent"
    try:
        answer: tuple[bool, Any] = line.recv()
    except EOFError:
        return False, "a rank that is gone"
    return answer


def _rank(told: Told, rank: int, store: str, port: int, line: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(told.ranks),
        GROUP_RANK="0",
        LOCAL_WORLD_SIZE=str(told.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="fuzz",
        GROUP_WORLD_SIZE="1",
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
        ACCELERATE_USE_CPU="true",
    )
    _answer(line, lambda: on_ranks(told, rank, store))


def _alone(told: Told, line: Any) -> None:
    _answer(line, lambda: one_process(told))


def _answer(line: Any, work: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        found = {n: t.numpy() for n, t in work().items()}
        line.send((True, found))
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        line.send((False, f"{type(error).__name__}: {str(error)[:300]} ({place.name})"))
    os._exit(0)


def _difference(ours: Any, single: Any) -> float:
    size = max(float(((single.astype(float)) ** 2).sum() ** 0.5), 1e-3)
    return float(((ours.astype(float) - single) ** 2).sum() ** 0.5) / size


def main() -> None:
    """A record of what was equal, what is documented to differ, and what else differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--combinations", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument("--no-record", dest="record", action="store_false")
    given = parser.parse_args()
    said = {k: v for k, v in vars(given).items() if k not in ("record", "seconds")}
    record, began = start_record("fuzz_peers", said), time.monotonic()
    counts: dict[str, Counter[str]] = {peer: Counter() for peer in given.peers}
    rows = []
    for number in range(given.first, given.first + given.combinations):
        if time.monotonic() - began > given.seconds:
            break
        told = drawn(given.seed, number, given.peers)
        what, size, where = held(told)
        why = expected(told)
        if what != "equal":
            what = f"{what}, {'as documented' if why else 'not foreseen'}"
        counts[told.peer][what] += 1
        if what != "equal":
            say(f"{number}: {told}: {what} {size:.2g} {where} [{why}]")
            rows.append(
                {
                    "number": number,
                    "training": str(told),
                    "what": what,
                    "size": size,
                    "where": where,
                    "documented": why,
                }
            )
    every = Counter[str]()
    for count in counts.values():
        every.update(count)
    equal = {peer: count["equal"] for peer, count in counts.items()}
    record |= {"verdicts": dict(every), "equal_by": {"peer": equal}}
    record["peers"] = {peer: dict(count) for peer, count in counts.items()}
    record["not_equal"] = rows
    finish_record(record, [], RECORDS if given.record else Path(tempfile.mkdtemp()))


if __name__ == "__main__":
    main()

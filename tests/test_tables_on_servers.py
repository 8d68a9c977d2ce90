"""`ps` with tables of sparse gradients: on the servers alone, and equal to one process."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest
import torch
from safetensors.numpy import load_file

from allranks.errors import ProgramError, RequestError
from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.torch.parameter_server.served_tables import numbers_of
from allranks.torch.parameter_server.server import ServedTrainer, Server
from allranks.torch.trainer import Trainer
from conftest import Train
from deferred_tasks import TablesOnMeta
from limited_memory import Limited
from table_tasks import Tables
from test_every_strategy import difference

TASK = "table_tasks:Tables"


def weights_of(train: Train, strategy: str, *settings: str, ranks: int = 2, **flags: Any) -> Any:
    ranks = 1 if strategy == "single" else ranks
    done = train(TASK, *settings, strategy=strategy, ranks=ranks, precision="fp64", **flags)
    return load_file(done.run_dir / "weights.safetensors"), done


@pytest.mark.slow(most=5)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RowwiseAdagrad", "SparseAdam"])
def test_in_step_it_is_one_process(train: Train, kind: str, servers: int) -> None:
    wanted, single = weights_of(train, "single", f"kind={kind}")
    found, ours = weights_of(train, f"ps:servers={servers}", f"kind={kind}")
    assert difference(found, wanted) < 1e-10
    assert ours.summary["eval"]["loss"] == pytest.approx(single.summary["eval"]["loss"], rel=1e-10)
    assert ours.summary["train_loss"] == pytest.approx(single.summary["train_loss"], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Adagrad", "RowwiseAdagrad", "SparseAdam"])
def test_one_worker_out_of_step_is_one_process(train: Train, kind: str) -> None:
    wanted, _ = weights_of(train, "single", f"kind={kind}")
    found, _ = weights_of(train, "ps:mode=async,servers=2", f"kind={kind}", ranks=1)
    assert difference(found, wanted) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["RowwiseAdagrad", "SparseAdam", "Adagrad"])
def test_a_checkpoint_goes_on_anywhere(train: Train, kind: str) -> None:
    """Rows and their state: from three servers to one process, to one server, and to two ranks."""
    wanted, _ = weights_of(train, "single", f"kind={kind}")
    job: dict[str, Any] = {"checkpoint_every": 2}
    found: Any = None
    for number, strategy in enumerate(("ps:servers=3", "single", "ps", "ddp", "ps:servers=2"), 1):
        steps = None if number == 5 else 2 * number
        found, run = weights_of(train, strategy, f"kind={kind}", steps=steps, **job)
        job["resume"] = str(run.run_dir)
    assert difference(found, wanted) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 1])
def test_the_bits_are_the_same_whoever_dies(train: Train, rank: int) -> None:
    """Rows of a part that a lost worker has brought to one of the servers alone count once."""
    whole, _ = weights_of(train, "ps:servers=2")
    flags: dict[str, Any] = {"checkpoint_every": 3, "max_restarts": 2}
    found, done = weights_of(train, "ps:servers=2", inject=f"kill@rank={rank},step=7", **flags)
    assert difference(found, whole) == 0.0 and done.summary["restarts"] == 0


@pytest.mark.slow
def test_a_worker_that_is_slow_changes_nothing(train: Train) -> None:
    """Rows that two workers bring of one part count once; sockets carry what memory does not."""
    wanted, _ = weights_of(train, "single")
    slow = "slow@rank=3,seconds=0.1,attempt=-1"
    found, _ = weights_of(train, "ps:servers=2,backup=1", ranks=3, inject=slow)
    assert difference(found, wanted) < 1e-10
    found, _ = weights_of(train, "ps:servers=3,transport=sockets")
    assert difference(found, wanted) < 1e-10


@pytest.mark.slow
def test_only_rows_that_are_looked_up_travel(train: Train) -> None:
    """In 12 steps 88 samples each look up 4 rows of each table, twice: in parts and both ways."""
    _, ours = weights_of(train, "ps", ranks=1)
    _, whole = weights_of(train, "ps:tables=whole", ranks=1)
    sent = [one.summary["sent_bytes"]["gradients"] for one in (ours, whole)]
    dense, rows = 12 * 8, (60 + 67) * 3 * 8
    assert sent[1] >= 12 * (dense + rows)
    assert sent[0] < sent[1] / 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "strategy", "found"),
    [
        ("kind=momentum", "ps", "momentum=0.9"),
        ("kind=Adagrad", "ps:update=worker", "workers"),
        ("kind=Adagrad", "ps --compile", "passes of its own"),
    ],
)
def test_what_rows_cannot_do_is_refused(
    train: Train, setting: str, strategy: str, found: str
) -> None:
    strategy, _, compiled = strategy.partition(" --")
    flags = {compiled: "eager"} if compiled else {}
    with pytest.raises(RequestError, match=found):
        train(TASK, setting, strategy=strategy, ranks=1, **flags)
    if setting == "kind=momentum":
        wanted, _ = weights_of(train, "single", setting)
        given, _ = weights_of(train, f"{strategy}:tables=whole", setting)
        assert difference(given, wanted) < 1e-10


def test_a_regularizer_that_reads_a_table_is_refused(train: Train) -> None:
    said = "it reads a table that is on the servers"
    with pytest.raises((RequestError, ProgramError), match=said):
        train(TASK, "regularized=yes", strategy="ps", ranks=1)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("role", ["worker", "server"])
def test_nobody_but_the_scheduler_ever_holds_a_table(role: str, precision: str) -> None:
    """Not to initialise it either. The weights beside it are those that the scheduler has."""
    task = TablesOnMeta(rows=100_000, samples=64, held_out=64, width=8)
    world = World(rank=2, size=3, role=role, role_index=0)
    job = Job(strategy="ps", ranks=1, precision=precision)
    whole = task.model()
    limit = whole.deep.weight.nbytes // 4 * (1 if precision == "fp32" else 2)
    with Trainer(task, job, world=world) as everything:
        wanted = {n: p.detach().clone() for n, p in everything.strategy.model.named_parameters()}
    with Limited(limit) as used, ServedTrainer(task, job, world=world) as trainer:
        strategy: Any = trainer.strategy
        found = dict(strategy.model.named_parameters())
        assert [one.plan.rows for one in strategy.tables] == [
            len(whole.wide.weight),
            len(whole.deep.weight),
        ]
        for name, weight in wanted.items():
            if name in ("wide.weight", "deep.weight"):
                assert not len(found[name])
            else:
                assert torch.equal(found[name], weight), name
    assert 0 < used.most < limit
    with Limited(limit), pytest.raises(MemoryError):
        Trainer(task, job, world=world)


class Deaf:
    """The end of a connection that nobody listens at."""

    def send(self, header: Any, *body: Any) -> None:
        """Nobody hears it."""


def test_what_comes_while_rows_are_loaded_is_of_weights_before() -> None:
    """The scheduler was started again, and a worker has not noticed yet."""
    world = World(rank=1, size=3, role="server", role_index=0)
    job = Job(strategy="ps:mode=async", ranks=1, precision="fp64")
    with ServedTrainer(Tables(kind="SGD"), job, world=world) as trainer:
        strategy: Any = trainer.strategy
        shard, tables = strategy.shard(0), strategy.served_tables(0)
        nobody, peer = socket.socket(), cast(Any, Deaf())
        with nobody:
            server = Server(shard, nobody, "", "", in_step=False, tables=tables)
            ids, ones = torch.tensor([1, 4]), torch.ones(2, 3, dtype=torch.float64)
            held = memoryview(bytearray(b"".join(bytes(numbers_of(part)) for part in (ids, ones))))
            zeros = memoryview(bytearray(tables.tables[0].weight.nbytes))
            load = {"do": "load_rows", "table": 0, "step": 0, "columns": []}
            found = []
            for number, is_loaded in enumerate((True, False)):
                server.answer(1 << 30, peer, load, zeros)
                if is_loaded:
                    server.era = 0
                push = {"number": number, "groups": [{"lr": 1.0}], "unused": []}
                server.answer(0, peer, {"hold": {"table": 0, "count": 2}, "era": 0}, held)
                server.answer(0, peer, {"push": push, "era": 0}, memoryview(b""))
                found.append(tables.tables[0].weight[ids].tolist())
    assert found == [[[-1.0] * 3] * 2, [[0.0] * 3] * 2]


def test_a_table_that_no_optimizer_has_is_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="is not in the optimizer"):
        train(TASK, "kind=left out", strategy="ps", ranks=1)

"""Workers that update by themselves: by gradients that servers sum, or between two pushes.

The arithmetic of `mode=delta` is held to golden values, and to a plain loop with a scripted order
of rounds over the real wire; runs are held to one process, and to what they promise whoever dies.
"""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from test_ps import TASK, events, loss_of, read_rows_of, served, worker_world
from torch import Tensor, nn

from allranks.job.job import Job
from allranks.launcher.nodes.channel import Disconnected
from allranks.torch.parameter_server.exchange import Changes, Exchange, ramp
from allranks.torch.parameter_server.service import Done, Service, WorkQueue
from allranks.torch.parameter_server.shard import plain_hyperparameters
from allranks.torch.trainer import Trainer
from allranks.training.work_queue import Chunk, Ledger
from conftest import Train
from decoupled_tasks import Plain
from test_every_strategy import difference

# --- update=worker ------------------------------------------------------------------------


@pytest.mark.slow(but=1, most=3)
@pytest.mark.parametrize("transport", ["auto", "sockets"])
@pytest.mark.parametrize("rank", [3, 1])
def test_who_updates_and_who_dies_changes_no_bit(train: Train, transport: str, rank: int) -> None:
    """A worker that comes again, or a server, has what optimizers keep (momentum) from servers."""
    strategy = f"ps:servers=2,bound=8,transport={transport}"
    flags: dict[str, Any] = {"ranks": 2, "precision": "fp64"}
    on_servers = train(TASK, strategy=strategy, **flags)
    on_workers = train(
        TASK,
        strategy=f"{strategy},update=worker",
        inject=f"kill@rank={rank},step=7 slow@rank=4,seconds=0.2,attempt=-1",
        checkpoint_every=3,
        max_restarts=2,
        **flags,
    )
    assert [event["rank"] for event in events(on_workers.run_dir, "worker_lost")][:1] == [rank]
    found = [load_file(one.run_dir / "weights.safetensors") for one in (on_servers, on_workers)]
    assert difference(*found) == 0.0


def test_what_a_worker_has_is_not_sent_again_and_not_counted() -> None:
    """It pulls all, then an update once, for whichever of its parts; then that of a bad step."""
    job = Job(strategy="ps:update=worker", ranks=1, precision="fp64")
    with ExitStack() as stack:
        made = [stack.enter_context(Trainer(Plain(), job, world=worker_world(n))) for n in (0, 9)]
        own: Any = made[0].strategy
        links, (server,) = served(stack, made[1].strategy)
        server.in_step = True
        server.shard.begin(0)
        exchange = Exchange(own)
        exchange.link(*links(0), shares=False)
        nbytes, groups = own.layouts[0].nbytes, plain_hyperparameters(own.step.optimizer)
        counted = []
        for step, version in enumerate((0, 0, 1, 1, 2)):
            if server.shard.version < version:
                server.shard.add_part(0, own.layouts[0].new())
                if version == 1:
                    server.shard.apply(1.0, groups, ())
                else:
                    server.shard.pass_over()
            exchange.pull(version)
            counted.append(exchange.moved["pulled"][0] // nbytes)
            assert exchange.version == version, step
        assert counted == [1, 2, 3, 3, 3]


# --- mode=delta ---------------------------------------------------------------------------


def test_the_ramp_by_hand() -> None:
    """Golden: c = 0.2 over steps of 1024 rounds, as CNTK has them."""
    staircase = [ramp("staircase", 0.2, 1024, n) for n in (0, 1023, 1024, 2048, 4095, 4096, 9999)]
    assert staircase == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8, 1, 1], abs=1e-15)
    line = [ramp("line", 0.2, 1000, n) for n in (0, 250, 500, 1000, 1001)]
    assert line == pytest.approx([0.2, 0.4, 0.6, 1, 1], abs=1e-15)
    assert ramp("none", 0.2, 1024, 0) == 1


SCRIPT = "0 1 0 0 1 2 0 1 1 2 0 2 0 1"
"""Who ends a round: it pushes, and goes on from what it gets."""
EVERY = 2


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("pipeline", [False, True])
def test_a_scripted_order_of_rounds_is_a_plain_loop(pipeline: bool) -> None:
    """Two servers, three workers, over the real wire; SGD with momentum on each of them."""
    strategy = f"ps:mode=delta,servers=2,bound=8,every={EVERY},ramp=line,ramp_over=4"
    job = Job(
        strategy=f"{strategy},pipeline={'yes' if pipeline else 'no'}", ranks=3, precision="fp64"
    )
    with ExitStack() as stack:
        made = [stack.enter_context(Trainer(Plain(), job, world=worker_world(n))) for n in range(4)]
        keeper: Any = made[3].strategy
        links, servers = served(stack, keeper)
        sides = []
        for worker in range(3):
            side = Exchange(made[worker].strategy)  # type: ignore[arg-type]
            side.link(*links(worker), shares=worker != 1)
            side.pull(-1)
            sides.append(Changes(side, 3))
            stack.callback(sides[-1].close)
            sides[-1].begin()
        loop = PlainRounds(sides[0].exchange.strategy.model, pipeline)
        brought = []
        for number, worker in enumerate(map(int, SCRIPT.split())):
            side = sides[worker]
            step: Any = side.exchange.strategy.step
            for at in range(EVERY):
                step.optimizer.zero_grad()
                loss_of(side.exchange.strategy.model, EVERY * number + at).backward()
                step.optimizer.step()
            done = side.push(Chunk(number, 0, EVERY * number, EVERY), Done({"n": number}, b""))
            brought.append(done)
            if pipeline:  # the order of the script is that in which servers hear of it
                assert side.is_under_way and side._in_flight is not None
                side._in_flight.result()
            loop.turn(worker, number)
        if pipeline:
            brought += [side.settle() for side in sides]
        said = sorted(done.report["n"] for done in brought if done is not None)
        assert said == list(range(len(SCRIPT.split()))), "each round is brought once"
        kept = torch.cat([p.detach().reshape(-1) for p in keeper_weights(keeper, servers)])
        assert float((kept - loop.weights).abs().max()) < 1e-12
        for worker, side in enumerate(sides):
            model = side.exchange.strategy.model
            found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            assert float((found - loop.own[worker]).abs().max()) < 1e-12
        assert not servers[0].shard.change(0, servers[0].shard.weights), "it is applied already"
        for server in servers:
            server.close()
        with pytest.raises(Disconnected):
            push_and_settle(sides[1])
        sides[1].forget()


def push_and_settle(side: Changes) -> None:
    side.push(Chunk(99, 0, 0, EVERY), Done({}, b""))
    side.settle()


def keeper_weights(keeper: Any, servers: Any) -> list[Tensor]:
    weights = [p.detach() for p in keeper.parameters]
    for server in servers:
        server.shard.weights.write_to(weights)
    return weights


class PlainRounds:
    """The same in one process, on weights as one flat tensor: nothing is split, nothing is sent."""

    def __init__(self, model: nn.Module, pipeline: bool) -> None:
        self.shapes = [p.shape for p in model.parameters()]
        self.weights = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
        self.own = [self.weights.clone() for _ in range(3)]
        self.answered = [self.weights.clone() for _ in range(3)]
        self.momentum = [torch.zeros_like(self.weights) for _ in range(3)]
        self.pipeline = pipeline

    def turn(self, worker: int, number: int) -> None:
        base, w = self.own[worker], self.own[worker].clone()
        for at in range(EVERY):
            self.momentum[worker] = 0.5 * self.momentum[worker] + self.gradient(
                w, EVERY * number + at
            )
            w = w - 0.1 * self.momentum[worker]
        part = min(1.0, 0.2 + 0.8 * (number // 3) / 4)
        self.weights = self.weights - part * (base - w)
        before, self.answered[worker] = self.answered[worker], self.weights.clone()
        self.own[worker] = before if self.pipeline else self.answered[worker].clone()

    def gradient(self, weights: Tensor, number: int) -> Tensor:
        w = weights.clone().requires_grad_()
        pieces = w.split([s.numel() for s in self.shapes])
        a, b, c, d = (piece.view(s) for piece, s in zip(pieces, self.shapes, strict=True))
        first, second, third = nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)
        first.weight, first.bias, third.weight, third.bias = map(nn.Parameter, (a, b, c, d))
        plain = nn.Sequential(first, second, third)
        loss_of(plain, number).backward()
        return torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None])


@pytest.mark.slow
def test_one_worker_that_pushes_changes_is_one_process(train: Train) -> None:
    """Also where the last of the rounds of five steps has two."""
    flags: dict[str, Any] = {"precision": "fp64"}
    single = train(TASK, strategy="single", **flags)
    ours = train(TASK, strategy="ps:mode=delta,every=5,servers=2,bound=8", ranks=1, **flags)
    weights = [load_file(one.run_dir / "weights.safetensors") for one in (ours, single)]
    assert difference(*weights) < 1e-10
    assert ours.summary["train_loss"] == pytest.approx(single.summary["train_loss"], rel=1e-10)
    sent, card = ours.summary["sent_bytes"]["gradients"], ours.summary["card_bytes_per_step"]
    assert sent == pytest.approx(3 * 5 * card, rel=0.02), "once in each of three rounds"


@pytest.mark.slow(most=4)
@pytest.mark.parametrize("pipeline", ["no", "yes"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_each_batch_of_a_round_counts_once_whoever_dies(
    train: Train, pipeline: str, rank: int
) -> None:
    """Beside a worker that dies the others are slow: they are not done before it has begun.

    With slow workers a save comes while one brings what it had.
    """
    kill = f"kill@rank={rank},step={-1 if rank == 3 else 9}"
    if rank > 0:
        kill += " slow@rank=2,seconds=0.1,attempt=-1 slow@rank=4,seconds=0.1,attempt=-1"
    result = train(
        TASK,
        "epochs=6",
        strategy=f"ps:mode=delta,every=3,pipeline={pipeline},staleness=2,ramp=staircase,ramp_over=2",
        ranks=3,
        inject=kill,
        checkpoint_every=5,
        max_restarts=2,
    )
    assert result.summary["steps"] == 36
    steps = [row["step"] for row in read_rows_of(result.run_dir)]
    assert [b - a for a, b in pairwise(steps)] == [1] * (len(steps) - 1)
    assert set(Counter(steps).values()) == {1} and steps[-1] == 35
    lost = [event["rank"] for event in events(result.run_dir, "worker_lost")]
    may = {0, 1} if rank == 1 else {rank}  # the scheduler may go with a server
    assert rank in lost and set(lost) <= may


def test_a_save_waits_until_what_came_is_counted() -> None:
    """A worker that brings the last of what was handed out makes all idle; it counts first."""
    queue = WorkQueue(Ledger(6, 3, 1), in_step=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service = Service(
            queue, 1, "digest", listener, "secret", torch.float64, lambda event, **values: None
        )
        queue.joined(0)
        chunk = queue.next_for(0)
        assert chunk is not None
        said = {"chunk": chunk.number, "era": service.era, "steps": [{}] * chunk.steps}
        with service.changed:
            service._accept(0, said, memoryview(bytearray(8)))
        assert service.queue.is_idle and not service.wait_until_settled(60)
        assert [one.chunk for one in service.results(0)] == [chunk]
        assert service.wait_until_settled(0)


# --- early ends ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", ["mode=async", "mode=delta,every=4,pipeline=yes"])
def test_a_training_that_ends_early_counts_what_workers_are_at(
    train: Train, tmp_path: Path, options: str
) -> None:
    """Goes on from there, each batch is made once: the ledger and the progress agree.

    Slow workers do not make all steps while the second one is evaluated, whose loss may be large.
    """
    run_dir = tmp_path / "run"
    flags: dict[str, Any] = {"steps": 120, "run_dir": str(run_dir)}
    first = train(
        TASK,
        strategy=f"ps:{options}",
        ranks=3,
        eval_every="2",
        until="min:loss=1e30",
        checkpoint_every=1000,
        inject=" ".join(f"slow@rank={rank},seconds=0.05" for rank in (2, 3, 4)),
        **flags,
    )
    made = first.summary["steps"]
    assert first.summary["ended_early"] and first.summary["until"]["step"] == 2 < made < 120
    assert len(read_rows_of(run_dir)) == made
    rest = train("", **flags, until="min:loss=1e-9", inject="")
    assert rest.summary["resumed_from_step"] == made and rest.summary["steps"] == 120
    assert [row["step"] for row in read_rows_of(run_dir)] == list(range(120))

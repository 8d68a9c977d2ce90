"""Parameter servers: placement, what a server adds and applies, who is handed what, and runs.

The arithmetic is held to golden values and to a plain loop with a scripted order of pulls and
pushes, over the real wire; runs are held to what they promise whoever dies.
"""

from __future__ import annotations

import json
import math
import random
import socket
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from allranks.errors import ProgramError, RequestError
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.job.run_folder import read_events
from allranks.launcher.nodes.channel import Disconnected
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.world import World
from allranks.strategies.cards.parameter_server import PLAIN, STALENESS_AWARE
from allranks.tools.check.against_single import CheckPlan, check_against_one
from allranks.torch.checkpoint.state import packed, unpacked
from allranks.torch.parameter_server.exchange import Exchange
from allranks.torch.parameter_server.flat import FlatLayout, WeightPiece, placed
from allranks.torch.parameter_server.links import Links, Stale
from allranks.torch.parameter_server.server import SCHEDULER_ID, Server
from allranks.torch.parameter_server.service import WorkQueue
from allranks.torch.parameter_server.shard import (
    MANY,
    Shard,
    cut_state,
    join_state,
    plain_hyperparameters,
)
from allranks.torch.trainer import Trainer
from allranks.training.work_queue import Chunk, Ledger
from conftest import Train
from decoupled_tasks import Plain
from test_every_strategy import difference

TASK = "decoupled_tasks:Plain"


# --- placement ----------------------------------------------------------------------------


def test_large_tensors_are_cut_over_all_servers_and_small_ones_are_balanced() -> None:
    """By hand: 10 numbers in thirds (0, 3, 7, 10); then each to the first with the fewest bytes."""
    tensors = [torch.empty(numbers) for numbers in (5, 10, 2, 3)]
    tensors.append(torch.empty(1, dtype=torch.float64))
    found = placed(tensors, 3, bound=10)
    assert [(p.position, p.start, p.stop, p.server) for p in found] == [
        *((0, 0, 5, 0), (1, 0, 3, 0), (1, 3, 7, 1), (1, 7, 10, 2)),
        *((2, 0, 2, 2), (3, 0, 3, 1), (4, 0, 1, 2)),
    ]
    assert placed(tensors, 3, bound=10, whole={1})[1] == WeightPiece(1, 0, 10, 1, is_whole=True)
    assert {p.server for p in placed(tensors, 1, bound=1)} == {0}
    few = placed([torch.empty(2)], 3, bound=1)
    assert all(p.is_whole for p in few), "fewer numbers than servers"


# --- what a server does -------------------------------------------------------------------


def shard_of(
    values: list[float],
    optimizer: Any = SGD,
    parts: int = 1,
    rate: str = PLAIN,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Shard:
    weight = nn.Parameter(torch.tensor(values, dtype=dtype))
    layout = FlatLayout([WeightPiece(0, 0, len(values), 0, is_whole=True)], [weight])
    made = optimizer([weight], **{"lr": 0.1, **more})
    shard = Shard(layout, made, [weight], parts, rate)
    shard.weights.read_from([weight.detach()])
    return shard


def gradient(shard: Shard, *values: float) -> Any:
    flat = shard.layout.new()
    flat.flats[0].copy_(torch.tensor(values, dtype=torch.float64))
    return flat


def test_parts_add_up_in_their_order_whoever_comes_first_and_once() -> None:
    """1e16 + 1 - 1e16 is 0 from left to right, and 1 in another order."""
    shard = shard_of([0.0], parts=3, lr=1.0)
    assert shard.add_part(2, gradient(shard, -1e16))
    assert shard.add_part(0, gradient(shard, 1e16)) and not shard.add_part(0, gradient(shard, 5.0))
    assert not shard.is_complete
    assert shard.add_part(1, gradient(shard, 1.0)) and not shard.add_part(2, gradient(shard, 7.0))
    assert shard.is_complete and shard.squares() == 0.0
    shard.add(gradient(shard, 4.0), factor=0.5)
    shard.apply(0.25, [{"lr": 2.0}], ())
    assert (shard.weights.flats[0].item(), shard.version) == (-2.0, 1)
    for part in range(3):
        shard.add_part(part, gradient(shard, 1.0))
    assert shard.squares() == 9.0
    shard.apply(1.0, [{"lr": 2.0}], unused=[0])
    assert shard.weights.flats[0].item() == -2.0, "nobody used it"
    memory = gradient(shard, 0.0)
    for part in (2, 0, 1):  # one worker brings all, in one memory
        shard.keep(memory)
        memory.flats[0].fill_(10.0**part)
        shard.add_part(part, memory)
    assert shard.gradient.flats[0].item() == 111.0


def test_who_computes_another_part_of_a_step_spoils_none_that_it_has_brought() -> None:
    """The sum lies where the worker of the first part has written it, until that one pulls."""
    shard, deaf = shard_of([0.0], parts=3, lr=1.0), cast(Any, Deaf())
    with socket.socket() as nobody:
        server = Server(shard, nobody, "", "", in_step=True)
        server.era = 0
        for worker, part in ((0, 0), (1, 2), (0, 1)):  # worker 0 takes over part 1
            server.answer(worker, deaf, {"pull": 0, "era": 0}, memoryview(b""))
            pushed = gradient(shard, 10.0**part).buffer
            server.place(worker, {}, shard.layout.nbytes)[:] = pushed
            push = {"push": {"step": 0, "part": part}, "era": 0}
            server.answer(worker, deaf, push, memoryview(b""))
    assert shard.gradient.flats[0].item() == 111.0


class Deaf:
    """The end of a connection that nobody listens at."""

    def send(self, header: Any, *body: Any) -> None:
        """Nobody hears it."""


def test_what_is_added_to_a_gradient_waits_for_its_last_part() -> None:
    """The scheduler knows by the tally of a part that it was computed, not that it is there."""
    shard, deaf = shard_of([0.0], parts=1, lr=1.0), cast(Any, Deaf())
    with socket.socket() as nobody:
        server = Server(shard, nobody, "", "", in_step=True)
        server.era = 0
        add = {"do": "add", "factor": 3.0}, gradient(shard, 4.0).buffer
        adding = Thread(target=server.answer, args=(SCHEDULER_ID, deaf, *add), daemon=True)
        adding.start()
        server.place(0, {}, shard.layout.nbytes)[:] = gradient(shard, 2.0).buffer
        server.answer(0, deaf, {"push": {"step": 0, "part": 0}, "era": 0}, memoryview(b""))
        adding.join(60)
    assert shard.gradient.flats[0].item() == 10.0


@pytest.mark.parametrize("numbers", [2, MANY])
@pytest.mark.parametrize("size", [3e30, 3e-25, 3.0])
def test_the_norm_is_that_of_doubles(numbers: int, size: float) -> None:
    shard = shard_of([0.0] * numbers, parts=2, dtype=torch.float32)
    shard.add_part(0, gradient(shard, *[size / 2] * numbers))
    shard.add_part(1, gradient(shard, *[size / 2] * numbers))
    assert shard.squares() == pytest.approx(numbers * size**2) == shard.squares(unused=[1])


def test_the_norm_of_no_number_is_none() -> None:
    shard = shard_of([0.0] * MANY, parts=2, dtype=torch.float32)
    shard.add_part(0, gradient(shard, *[float("nan")] * MANY))
    shard.add_part(1, gradient(shard, *[1.0] * MANY))
    assert math.isnan(shard.squares())


def test_a_gradient_of_old_weights_is_applied_at_a_lower_rate() -> None:
    """Golden: two workers pull at version 0; the second one's gradient is 1 and more behind."""
    aware = shard_of([1.0], rate=STALENESS_AWARE)
    room = aware.layout.new()
    assert [aware.pull(0, room), aware.pull(1, room)] == [0, 0]
    groups = [{"lr": 0.5}]
    stale = [aware.push(n, 0, gradient(aware, 1.0), groups) for n in range(4)]
    assert stale == [0, 1, 2, 3]
    wanted = 1.0 - 0.5 * (1 + 1 + 1 / 2 + 1 / 3)
    assert aware.weights.flats[0].item() == pytest.approx(wanted, abs=1e-15)
    assert aware.push(3, 1, gradient(aware, 9.0), groups) is None, "it is applied already"
    assert groups == [{"lr": 0.5}] and aware.version == 4


@pytest.mark.parametrize(("rate", "grows"), [(PLAIN, True), (STALENESS_AWARE, False)])
def test_on_a_quadratic_with_old_gradients_the_aware_rate_converges(rate: str, grows: bool) -> None:
    """Eight workers in turn, so tau = 7: lr · curvature = 0.4 is far too much for plain SGD."""
    shard, workers = shard_of([1.0], rate=rate), 8
    rooms = [shard.layout.new() for _ in range(workers)]
    for worker, room in enumerate(rooms):
        shard.pull(worker, room)
    for number in range(400):
        worker = number % workers
        shard.push(number, worker, gradient(shard, float(rooms[worker].flats[0])), [{"lr": 0.4}])
        shard.pull(worker, rooms[worker])
    assert (abs(shard.weights.flats[0].item()) > 1e3) == grows
    assert grows or abs(shard.weights.flats[0].item()) < 1e-3


@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_what_an_optimizer_keeps_is_cut_and_put_together_again(optimizer: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)).double()
    parameters = list(model.parameters())
    made: Optimizer = optimizer(
        parameters, lr=0.1, **({"momentum": 0.9} if optimizer is SGD else {})
    )
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    made.step()
    pieces = placed(parameters, 3, bound=12)
    assert any(not piece.is_whole for piece in pieces)
    other: Optimizer = optimizer(parameters, lr=0.1)
    for server in range(3):
        own = [piece for piece in pieces if piece.server == server]
        body = packed(cut_state(made, parameters, own))
        held = memoryview(bytearray(b"".join(map(bytes, body))))
        join_state(other, parameters, own, unpacked(held))
    for parameter in parameters:
        for name, value in made.state[parameter].items():
            assert torch.equal(
                torch.as_tensor(other.state[parameter][name]), torch.as_tensor(value)
            )


# --- who is handed what -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_clocks_are_never_further_apart_than_staleness_and_each_batch_counts_once(
    seed: int,
) -> None:
    chance = random.Random(seed)
    staleness, workers, steps = chance.randint(0, 3), chance.randint(1, 5), chance.randint(1, 60)
    queue = WorkQueue(Ledger(steps, 1, 1), in_step=False, staleness=staleness)
    speeds = [chance.choice([1.0, 1.0, 0.1]) for _ in range(workers)]
    has, counted, apart = dict[int, int](), list[int](), 0
    for worker in range(workers):
        queue.joined(worker)
    for _ in range(100_000):
        if queue.ledger.is_over:
            break
        worker = chance.randrange(workers)
        if worker not in has:
            chunk = queue.next_for(worker)
            if chunk is not None:
                has[worker] = chunk.number
                apart = max(apart, queue.clocks[worker] - min(queue.clocks.values()))
        elif chance.random() < 0.02:
            assert [c.number for c in queue.lost(worker)] == [has.pop(worker)]
            queue.joined(worker)
        elif chance.random() < speeds[worker]:
            number = has.pop(worker)
            assert queue.came(worker, number) and not queue.came(worker, number)
            counted.append(number)
    assert sorted(counted) == list(range(steps)) and apart <= staleness


@pytest.mark.parametrize("spares", [False, True])
def test_in_step_a_slow_worker_is_waited_for_unless_there_are_spares(spares: bool) -> None:
    """Three workers, worker 0 at a tenth of the speed; with spares a batch has two parts."""
    parts = 2 if spares else 3
    queue = WorkQueue(Ledger(30, 1, parts), in_step=True, spares=spares)
    for worker in range(3):
        queue.joined(worker)
    busy, ticks, brought = dict[int, list[int]](), 0, Counter[int]()
    while not queue.ledger.is_over:
        ticks += 1
        for worker in range(3):
            if worker not in busy and (chunk := queue.next_for(worker)) is not None:
                assert chunk.first == queue.ledger.steps_done, "never of a later step"
                busy[worker] = [chunk.number, 10 if worker == 0 else 1]
        for worker, (number, left) in list(busy.items()):
            busy[worker] = [number, left - 1]
            if left == 1:
                brought[worker] += queue.came(worker, busy.pop(worker)[0])
        if queue.is_complete:
            queue.close_step()
    assert sum(brought.values()) == 30 * parts
    assert ticks <= 45 if spares else ticks >= 300


@pytest.mark.parametrize("seed", range(20))
def test_in_step_the_part_of_a_lost_worker_goes_to_one_that_waits(seed: int) -> None:
    """Workers die for good, at random, until one is left: each part of each step is brought."""
    chance = random.Random(seed)
    alive = list(range(chance.randint(2, 5)))
    queue = WorkQueue(Ledger(20, 1, len(alive)), in_step=True)
    for worker in alive:
        queue.joined(worker)
    has, parts = dict[int, Chunk](), queue.ledger.parts
    for _ in range(10_000):
        worker = chance.choice(alive)
        if len(alive) > 1 and chance.random() < 0.02:
            alive.remove(worker)
            has.pop(worker, None)
            queue.lost(worker)
        elif worker not in has:
            if (chunk := queue.next_for(worker)) is not None:
                assert chunk.first == queue.ledger.steps_done, "never of a later step"
                has[worker] = chunk
        else:
            assert queue.came(worker, has.pop(worker).number)
            if queue.is_complete:
                queue.close_step()
    assert queue.ledger.is_over and queue.ledger.steps_of_parts == 20 * parts


# --- the wire -----------------------------------------------------------------------------

SCRIPT = "0 1 0 0 1 2 0 1 1 2 0 2 0 1"
"""Who pushes, and then pulls: all three have pulled at first."""


def worker_world(index: int) -> World:
    return World(rank=index + 2, size=5, role="worker", role_index=index)


@pytest.mark.parametrize("rate", ["plain", "staleness-aware"])
def test_a_scripted_order_of_pulls_and_pushes_is_a_plain_loop(rate: str) -> None:
    """Two servers, three workers, over the real wire; the loop is written out with plain torch."""
    strategy = f"ps:mode=async,servers=2,bound=8,rate={rate}"
    job = Job(strategy=strategy, ranks=3, precision="fp64")
    with ExitStack() as stack:
        made = [stack.enter_context(Trainer(Plain(), job, world=worker_world(n))) for n in range(4)]
        keeper: Any = made[3].strategy
        links, servers = served(stack, keeper)
        sides = []
        for worker in range(3):
            side = Exchange(made[worker].strategy)  # type: ignore[arg-type]
            side.link(*links(worker), shares=worker != 1)
            stack.callback(side.unlink)
            assert side._is_shared == [worker != 1] * 2
            side.pull(-1)
            sides.append(side)
        loop = PlainLoop(sides[0].strategy.model, rate)
        for number, worker in enumerate(map(int, SCRIPT.split())):
            own = sides[worker].strategy
            loss_of(own.model, number).backward()
            said = {"groups": plain_hyperparameters(own.step.optimizer)}
            sides[worker].push({"number": number, **said}, pulls=True)
            sides[worker].receive_weights()
            own.model.zero_grad()
            loop.turn(worker, number)
        found = torch.cat([p.detach().reshape(-1) for p in sides[1].strategy.model.parameters()])
        assert float((found - loop.weights).abs().max()) < 1e-12, "it pulled last"
        assert {server.shard.version for server in servers} == {len(SCRIPT.split())}
        servers[1].era = 1
        with pytest.raises(Stale):
            sides[0].pull(-1)
        with pytest.raises(Disconnected, match="another layout"):
            sides[2].link(*links(2, digest="of another model"))


def served(stack: ExitStack, keeper: Any) -> tuple[Any, list[Server]]:
    """Servers on loopback, loaded with the weights of `keeper`; and what connects a worker."""
    weights = [p.detach().clone() for p in keeper.parameters]
    servers, addresses = [], []
    for number, layout in enumerate(keeper.layouts):
        with Trainer(Plain(), keeper_job(keeper), world=worker_world(9)) as trainer:
            shard: Shard = trainer.strategy.shard(number)  # type: ignore[attr-defined]
        shard.weights.read_from(weights)
        here = socket.create_server(("127.0.0.1", 0))
        server = Server(shard, here, "secret", keeper.digest, in_step=False)
        server.era = 0
        server.start()
        stack.callback(server.close)
        servers.append(server)
        addresses.append(("127.0.0.1", server.port))
        assert layout.nbytes

    def links(worker: int, digest: str = keeper.digest) -> tuple[Links, int, dict[str, Any]]:
        made = Links(addresses, "secret", keeper.workload().messages)
        stack.callback(made.close)
        return made, 0, {"role": "worker", "index": worker, "digest": digest}

    return links, servers


def keeper_job(keeper: Any) -> Job:
    options = ",".join(f"{name}={value}" for name, value in keeper.context.options.items())
    return Job(strategy=f"ps:{options}", ranks=3, precision="fp64")


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    inputs, wanted = Plain().train_data()
    rows = torch.arange(number * 5, number * 5 + 8) % len(inputs)
    return inputs[rows], wanted[rows]


def loss_of(model: Any, number: int) -> Tensor:
    inputs, wanted = batch_of(number)
    return (model(inputs).squeeze(1) - wanted).square().mean()


class PlainLoop:
    """The same in one process: SGD with momentum 0.5 at 0.1, on weights as one flat tensor."""

    def __init__(self, model: nn.Module, rate: str) -> None:
        self.shapes = [p.shape for p in model.parameters()]
        self.weights = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
        self.pulled = [(0, self.weights.clone()) for _ in range(3)]
        self.momentum, self.rate, self.version = torch.zeros_like(self.weights), rate, 0

    def turn(self, worker: int, number: int) -> None:
        version, then = self.pulled[worker]
        w = then.clone().requires_grad_()
        pieces = w.split([s.numel() for s in self.shapes])
        a, b, c, d = (piece.view(s) for piece, s in zip(pieces, self.shapes, strict=True))
        inputs, wanted = batch_of(number)
        output = torch.tanh(inputs @ a.T + b) @ c.T + d
        (g,) = torch.autograd.grad((output.squeeze(1) - wanted).square().mean(), w)
        lr = 0.1 / max(1, self.version - version) if self.rate == "staleness-aware" else 0.1
        self.momentum = 0.5 * self.momentum + g
        self.weights = self.weights - lr * self.momentum
        self.version += 1
        self.pulled[worker] = self.version, self.weights.clone()


# --- runs ---------------------------------------------------------------------------------


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == name]


@pytest.mark.slow(but=1, most=3)
@pytest.mark.parametrize(
    ("rank", "rejoins"), [(4, 3), (4, 0), (2, 3), (0, 3)], ids=str
)  # a worker that comes again, and one that does not; a server; the scheduler
def test_in_step_the_bits_are_the_same_whoever_dies(train: Train, rank: int, rejoins: int) -> None:
    """The other worker is slow: it is not done with all before this one has begun."""
    strategy = f"ps:servers=2,bound=8,rejoins={rejoins}"
    flags: dict[str, Any] = {"strategy": strategy, "ranks": 2, "precision": "fp64"}
    undisturbed = train(TASK, **flags)
    killed = train(
        TASK,
        inject=f"kill@rank={rank},step={-1 if rank == 4 else 7} slow@rank=3,seconds=0.2,attempt=-1",
        checkpoint_every=3,
        max_restarts=1,  # the scheduler may fall with a server: that is one fault
        **flags,
    )
    lost = [event["rank"] for event in events(killed.run_dir, "worker_lost")]
    assert rank in lost and set(lost) <= {rank, 0}
    found = [load_file(one.run_dir / "weights.safetensors") for one in (undisturbed, killed)]
    assert difference(*found) == 0.0
    assert killed.summary["steps"] == undisturbed.summary["steps"] == 12
    assert killed.summary["restarts"] == 0, "the others went on"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), [(0, 9), (1, 9), (3, -1)])
def test_out_of_step_each_batch_counts_once_whoever_dies(
    train: Train, rank: int, step: int
) -> None:
    """Beside a worker that dies the others are slow: they are not done before it has begun."""
    paced = "slow@rank=2,seconds=0.1 slow@rank=4,seconds=0.1" if rank == 3 else ""
    result = train(
        TASK,
        "epochs=6",
        strategy="ps:mode=async,staleness=2",
        ranks=3,
        inject=f"kill@rank={rank},step={step} {paced}",
        checkpoint_every=5,
        max_restarts=2,
    )
    assert result.summary["steps"] == 36
    steps = [row["step"] for row in read_rows_of(result.run_dir)]
    assert [b - a for a, b in pairwise(steps)] == [1] * (len(steps) - 1)
    lost = [event["rank"] for event in events(result.run_dir, "worker_lost")]
    assert rank in lost and set(lost) <= {rank, 0}


def read_rows_of(run_dir: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", ",transport=sockets"])
def test_one_worker_out_of_step_is_one_process(train: Train, how: str) -> None:
    """Clipped in every step."""
    flags: dict[str, Any] = {"precision": "fp64"}
    single = train(TASK, "clip_norm=0.1", strategy="single", **flags)
    strategy = f"ps:mode=async,servers=2,bound=8{how}"
    ours = train(TASK, "clip_norm=0.1", strategy=strategy, ranks=1, **flags)
    weights = [load_file(one.run_dir / "weights.safetensors") for one in (ours, single)]
    assert difference(*weights) < 1e-10
    assert ours.summary["train_loss"] == pytest.approx(single.summary["train_loss"], rel=1e-10)
    sent, card = ours.summary["sent_bytes"]["gradients"], ours.summary["card_bytes_per_step"]
    assert sent in (12 * card, 13 * card), "the weights to begin with, and after each step"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_evaluator_judges_newest_checkpoints_once_each_though_it_dies(
    train: Train, mode: str
) -> None:
    """The last one is that of the end; each sample counts once, as in the evaluation there."""
    done = train(
        TASK,
        "epochs=8",
        strategy=f"ps:mode={mode},servers=2,bound=8,evaluator=yes",
        ranks=2,
        precision="fp64",
        checkpoint_every=4,
        inject="kill@rank=5,step=-1 slow@rank=3,seconds=0.05,attempt=-1",
    )
    evaluated = events(done.run_dir, "evaluated")
    steps = [event["step"] for event in evaluated]
    assert {event["rank"] for event in evaluated} == {5}
    assert steps == sorted(set(steps)) and steps[-1] == 48
    if mode == "sync":  # out of step it is saved as soon as nobody has anything
        assert set(steps) <= set(range(4, 49, 4))
    assert evaluated[-1]["metrics"] == pytest.approx(done.summary["eval"], rel=1e-10)
    assert [event["rank"] for event in events(done.run_dir, "worker_lost")] == [5]


@pytest.mark.slow
def test_a_check_sees_what_lies_on_servers(server: ForkServer, tmp_path: Path) -> None:
    """Each step from the weights of the reference, which are put on the servers."""
    flags = {"ranks": 2, "strategy": "ps:servers=2,bound=8", "precision": "fp32", "steps": 4}
    resolved = resolve(TASK, flags, ["clip_norm=0.1"])
    verdict = check_against_one(resolved, tmp_path, server, CheckPlan((2,), 4, shards=4))
    assert verdict.equal and {look.comparison.steps for look in verdict.looks} == {4}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ps:backup=1", "ps:mode=async"])
def test_a_slow_worker_slows_nobody(train: Train, strategy: str) -> None:
    """Worker 2 sleeps 3 s in each step: with it every batch of 16 would take that."""
    flags: dict[str, Any] = {"ranks": 3, "strategy": strategy}
    result = train(TASK, "epochs=4", inject="slow@rank=4,seconds=3,attempt=-1", **flags)
    assert result.summary["steps"] == 24
    assert result.summary["samples_per_s"] > 2 * 16 / 3


@pytest.mark.parametrize(
    ("strategy", "field", "found"),
    [
        ("ps:backup=2", "", "part of its own"),
        ("ps", "ema=0.9", "workers"),
        ("ps:evaluator=yes", "", "there would be none"),
    ],
)
def test_what_cannot_be_is_refused(train: Train, strategy: str, field: str, found: str) -> None:
    with pytest.raises(RequestError) as refused:
        train(TASK, *filter(None, [field]), strategy=strategy, ranks=2)
    assert found in str(refused.value)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mode", ["async", "delta"])
def test_a_layer_that_is_frozen_on_the_way_is_refused(train: Train, mode: str) -> None:
    """Where its gradient and its weights lie was laid out for all; it ended with an IndexError."""
    with pytest.raises(RequestError, match="frozen, unfrozen or added in mid-training"):
        train("decoupled_tasks:Freezes", strategy=f"ps:mode={mode}", ranks=1)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_that_a_model_writes_are_refused(train: Train, mode: str) -> None:
    """The next pull would overwrite them."""
    with pytest.raises(RequestError, match=r"writes 0.weight in its forward"):
        train("decoupled_tasks:Clamps", strategy=f"ps:mode={mode}", ranks=1)


def test_weights_that_are_written_unseen_are_refused_in_step(train: Train) -> None:
    """`weight.data.clamp_()`: torch does not count it."""
    with pytest.raises(RequestError, match=r"writes 0.weight in its forward"):
        train("decoupled_tasks:Clamps", "unseen=yes", strategy="ps", ranks=2)


def test_a_gradient_that_is_taken_is_refused_in_step(train: Train) -> None:
    """Zeros would be pushed in its place."""
    with pytest.raises(RequestError, match=r"has replaced `\.grad`"):
        train("plain_tasks:UpdatesInBackward", strategy="ps", ranks=1)


BOTH_WORKERS = "corrupt@rank=2,step=5 corrupt@rank=3,step=5"
"""One of them may come late, or get no part of a step: then the other one makes all of it."""


@pytest.mark.slow
def test_a_bit_that_flips_in_a_worker_is_gone_with_the_next_step(train: Train) -> None:
    found = [
        train(TASK, strategy="ps", ranks=2, inject=inject).summary["weights_sha256"]
        for inject in ("", BOTH_WORKERS)
    ]
    assert found[0] != found[1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ps", "ddp"])
def test_more_ranks_than_samples_with_loader_processes(train: Train, strategy: str) -> None:
    """Whoever has no sample in any batch reads none ahead, and so does not look for it for ever."""
    more = {"strategy": strategy, "ranks": 3, "hang_timeout": 60.0}
    summary = train("decoupled_tasks:OneSample", loader_workers=1, **more).summary
    without = train("decoupled_tasks:OneSample", loader_workers=0, **more).summary
    assert summary["weights_sha256"] == without["weights_sha256"]


def test_the_worker_that_brought_a_bad_step_says_which_sample(train: Train) -> None:
    """The scheduler has none, and no model pass of its own. A worker may be late for this step."""
    faults = "nan@rank=2,step=2 nan@rank=3,step=2"
    with pytest.raises(ProgramError, match=r"step 2: .*; rank [23]: the loss of sample \d+ \(sh"):
        train(TASK, strategy="ps", ranks=2, inject=faults)


def test_what_no_worker_looks_for_is_said(train: Train) -> None:
    """A gradient that is not finite where each loss is: the servers have the sum alone."""
    with pytest.raises(ProgramError, match="the loss of each worker is finite"):
        train("decoupled_tasks:Steep", strategy="ps", ranks=2)

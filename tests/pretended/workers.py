"""What runs in the ranks of this room: a training on the CPU, and the same on the device."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.job.job import Job
from allranks.launcher.world import World
from allranks.strategies.shards import Piece
from allranks.torch import Trainer
from allranks.torch.batchnorm import by_library
from allranks.torch.build import swap_layers
from allranks.torch.comm.comm import Pending
from allranks.torch.comm.join import join
from allranks.torch.data.copying import Copying
from allranks.torch.model.layers import Scope
from allranks.torch.model.weights import weights_sha256
from allranks.torch.parameter_server.exchange import Exchange
from allranks.torch.parameter_server.links import Links
from allranks.torch.parameter_server.server import Server
from allranks.torch.step import in_flight as steps
from allranks.torch.step import losses, tally
from pretended import streams, tasks
from pretended.backend import install
from pretended.record import Misuse, Told, Watched, phase_of, watch
from pretended.streams import NAME

FEW = 4  # looks at targets, and positions, for each of which the counts of a step are made once
WARM, MEASURED = FEW + 2, 3
_trainings = iter(range(1000))


def trainer(argument: dict[str, Any], device: str, **job: Any) -> Trainer:
    """One of the trainings of this process, each at a store of its own."""
    torch.set_num_threads(1)
    world = World.from_environment()
    if not job.get("share_device"):
        world = replace(world, local_rank=0, local_size=1)  # each sees one device
    if world.store:
        world = replace(world, store=f"{world.store}-{next(_trainings)}")
    task = getattr(tasks, argument.get("task", "Small"))(**argument.get("fields", {}))
    asked = {"steps": 4, "threads": 1, **argument.get("job", {}), **job, "device": device}
    asked["ranks"] = world.size
    return Trainer(task, Job(program="pretended.tasks:Small", **asked), world=world)


def install_for_usual_steps() -> None:
    """Have the device, and what the engine does in its first steps done in fewer of them."""
    install()
    tally.POSITIONS = losses.LOOKS = FEW


def trained(argument: dict[str, Any], device: str, **job: Any) -> list[Any]:
    """Train and evaluate; the digest of the weights, the losses, and the metrics."""
    with trainer(argument, device, **job) as training:
        training.rehearse()
        if training.job.run_dir:
            training.resume()
        results = []
        for batch in training.batches():
            result = training.step(batch)
            results.append(result)
            if training.job.run_dir:
                training.save_if_due(result)
        metrics = training.evaluate()
        if training.job.run_dir:
            training.finish()
        return [weights_sha256(training.weights()), [r.loss for r in results], metrics]


def as_on_the_cpu(argument: dict[str, Any]) -> None:
    """The same training on both."""
    install()  # before the first backward of the process: autograd counts devices there
    wanted = trained(argument, "cpu")
    found = trained(argument, NAME)
    assert repr(found) == repr(wanted), f"{found}\n{wanted}"
    assert streams.given_away == [], streams.given_away


def attention_as_on_the_cpu(argument: dict[str, Any]) -> None:
    """The same, where the CPU too computes attention by products: its kernel rounds otherwise."""
    torch.backends.cuda.enable_flash_sdp(False)  # of a CPU too
    as_on_the_cpu(argument)


def sharing_a_device(argument: dict[str, Any]) -> None:
    """All ranks on the one device that there is, and on the CPU: the same, over the host."""
    install()
    streams.DEVICES = 1
    wanted = trained(argument, "cpu", backend="gloo")
    found = trained(argument, NAME, share_device=True)
    assert repr(found) == repr(wanted), f"{found}\n{wanted}"
    assert streams.given_away == [], streams.given_away


def messages_over_the_host(argument: dict[str, Any]) -> None:
    """Each kind of message between two ranks with one device, and what it brings."""
    install()
    streams.DEVICES = 1
    device, world = torch.device(NAME, 0), World.from_environment()
    comm = join(world, device, share_device=True)
    own, other = comm.rank, 1 - comm.rank

    def numbers(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).to(device)

    room = numbers(0, 0)
    works = [comm.receive(room, other, 7), comm.send(numbers(own, 5), other, 7)]
    works += comm.exchange([(other, numbers(own))], [(other, swapped := numbers(9))], 8)
    for work in works:
        work.wait()
    assert [room.tolist(), swapped.tolist()] == [[other, 5], [other]]
    total, parts = numbers(own, 1), numbers(0, 0, 0)
    comm.all_reduce(total).wait()
    given, take = ([2, 1], [2, 1]) if own == 0 else ([1, 2], [1, 2])
    comm.all_to_all(parts, numbers(1, 2, 3), take, given).wait()
    comm.reduce_scatter(piece := numbers(0), numbers(own, 10)).wait()
    assert [total.tolist(), piece.tolist()] == [[1, 2], [[1], [20]][own]]
    assert parts.tolist() == [[1, 2, 1], [3, 2, 3]][own]
    counted = comm.counting_group("control")
    mean = numbers(own, 2)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=counted)
    beside, told = comm.duplicate(), [numbers(4) if own == 0 else numbers(0)]
    beside.broadcast(*told)
    assert [mean.tolist(), told[0].tolist()] == [[0.5, 2], [4]]
    assert comm.gather_texts(f"rank {own}") == ["rank 0", "rank 1"]
    assert {dist.get_backend(group) for group in (comm.of_torch, beside.of_torch)} == {
        "shared_device"
    }
    comm.barrier()
    beside.leave()
    comm.leave()


def every_kind(argument: dict[str, Any]) -> None:
    """Batches of every kind on both, and what `to` of an object keeps on the host stays there."""
    install()
    for kind in argument["kinds"]:
        asked = {"task": "OfAKind", "fields": {"kind": kind}, "job": argument["job"]}
        found, wanted = trained(asked, NAME), trained(asked, "cpu")
        assert repr(found) == repr(wanted), f"{kind}: {found}\n{wanted}"
    assert streams.given_away == [], streams.given_away


def late_and_at_once(argument: dict[str, Any]) -> None:
    """The same training on the device, its numbers read one step late and at once."""
    install()
    found = trained(argument, NAME)
    steps.READ_AT_ONCE.add(NAME)
    wanted = trained(argument, NAME)
    assert repr(found) == repr(wanted), f"{found}\n{wanted}"
    assert streams.given_away == []


def near_the_cpu(argument: dict[str, Any]) -> None:
    """The same training on both, but for the rounding of gradients that the update divides."""
    install()
    weights = []
    for device in ("cpu", NAME):
        with trainer(argument, device) as training:
            for batch in training.batches():
                training.step(batch)
            assert training.strategy.step.update_divides == (device == NAME)
            weights.append({name: weight.cpu() for name, weight in training.weights()})
    wanted, found = weights
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)


def goes_on(argument: dict[str, Any]) -> None:
    """Saved on the device and gone on from there, or on the CPU: as never interrupted."""
    install()
    wanted = trained(argument, "cpu", steps=6)
    for ends_on in (NAME, "cpu"):
        saved = {"run_dir": f"{argument['run_dir']}-{ends_on}", "checkpoint_every": 2}
        trained(argument, NAME, steps=4, **saved)
        digest, losses, metrics = trained(argument, ends_on, steps=6, **saved)
        assert [digest, metrics] == [wanted[0], wanted[2]] and losses == wanted[1][4:]


def without_the_wait_for_a_copy(argument: dict[str, Any]) -> None:
    """A fault planted: a batch is taken before it has arrived."""
    install()
    Copying.finish = lambda self, begun: begun.data
    with pytest.raises(Misuse, match="reads what another stream writes"):
        trained(argument, NAME)


def without_the_wait_for_a_sum(argument: dict[str, Any]) -> None:
    """A fault planted: gradients are read before the other ranks have added theirs."""
    install()
    Pending.wait = lambda self: None
    with pytest.raises(Misuse, match="without an event"):
        trained(argument, NAME)
    os._exit(0)  # the other rank stands in a collective


def launches_of_a_step(argument: dict[str, Any]) -> None:
    """How many kernels of a usual step each line launches, into a file."""
    install_for_usual_steps()
    with trainer(argument, NAME, steps=WARM + 1) as training:
        for number, batch in enumerate(training.batches()):
            with watch() if number >= WARM else nullcontext(Watched()) as watched:
                training.step(batch)
        if training.comm.rank == 0:
            found = Counter(f"{told.line} {told.what}" for told in watched.of("kernel"))
            Path(argument["out"]).write_text(json.dumps(found))


def launches_beside_a_loop(argument: dict[str, Any]) -> None:
    """How many kernels a usual step launches, and a step of a loop by hand, into a file."""
    install_for_usual_steps()
    by_library.DEVICES.add(NAME)  # as on cuda, and not as on the CPU
    with trainer(argument, NAME, steps=WARM + 1) as training:
        for number, batch in enumerate(training.batches()):
            with watch() if number >= WARM else nullcontext(Watched()) as ours:
                training.step(batch)
        if training.comm.rank:
            return
    task = getattr(tasks, argument["task"])(**argument.get("fields", {}))
    model = task.model().to(NAME)
    optimizer, data = task.optimizer(model), [t[: task.batch_size] for t in task.train_data()]
    for number in range(3):
        with watch() if number == 2 else nullcontext(Watched()) as by_hand:
            optimizer.zero_grad()
            task.loss(model(data[0]), data).mean().backward()
            optimizer.step()
    lines = Counter(f"{told.line} {told.what}" for told in ours.of("kernel") if told.line)
    counts = {
        "found": len(ours.of("kernel")),
        "by_hand": len(by_hand.of("kernel")),
        "parameters": len(list(model.parameters())),
        "lines": lines.most_common(40),
    }
    Path(argument["out"]).write_text(json.dumps(counts))


def waits_of_a_step(argument: dict[str, Any]) -> None:
    """How often the host waits for the device in a usual step, and where, into a file.

    There, and in an evaluation, it waits for other ranks in no other phase than `exchange`.
    """
    install_for_usual_steps()
    with trainer(argument, NAME, steps=WARM + MEASURED) as training:
        phase_of.append(lambda: training.heartbeat.phase)
        others: list[Told] = []
        for number, batch in enumerate(training.batches()):
            with watch() if number >= WARM else nullcontext(Watched()) as watched:
                training.step(batch)
            others += watched.of("others")
            found = Counter(told.line for told in watched.of("wait"))
            told = [told.kind for told in watched.told if told.kind != "others"]
            kinds = [kind for kind, _ in groupby(told)]
            if number >= WARM:
                row = {"waits": found, "stops": kinds.count("wait"), "rank": training.comm.rank}
                with Path(argument["out"]).open("a") as out:
                    out.write(json.dumps(row) + "\n")
        with watch() as watched:
            training.evaluate()
        others += watched.of("others")
        is_one = training.strategy.agreement.is_one_training
        assert others or training.comm.size == 1 or not is_one
        apart = {told for told in others if told.what != "exchange"}
        assert not apart, apart


def beside_servers(argument: dict[str, Any]) -> None:
    """A worker on the device finds what one on the CPU does; servers hold weights on the host."""
    install()
    wanted, found = (steps_of_a_worker(argument, device) for device in ("cpu", NAME))
    assert repr(found) == repr(wanted), f"{found}\n{wanted}"
    assert streams.given_away == [], streams.given_away


def steps_of_a_worker(argument: dict[str, Any], device: str) -> list[Any]:
    """Four steps out of step, with two servers in this process; the weights, and the losses."""
    strategy = f"ps:mode=async,servers=2,bound=8,{argument['options']}"
    job = Job(program="pretended.tasks:Small", strategy=strategy, device=device, threads=1)
    here = World(rank=3, size=4, local_rank=3, local_size=4)
    of_worker = replace(here, role="worker", role_index=0, local_index=0, local_ranks=1)
    with ExitStack() as stack:
        worker = stack.enter_context(Trainer(tasks.Small(), job, world=of_worker))
        strategy_of_worker: Any = worker.strategy
        servers = []
        for index in range(2):
            of_server = replace(here, role="server", role_index=index, local_ranks=1)
            made: Any = stack.enter_context(Trainer(tasks.Small(), job, world=of_server)).strategy
            weights = [p.detach().clone() for p in made.parameters]
            assert {w.device.type for w in weights} == {"cpu"}
            listener = socket.create_server(("127.0.0.1", 0))
            server = Server(made.shard(index), listener, "", made.digest, in_step=False)
            server.shard.weights.read_from(weights)
            server.era = 0
            server.start()
            stack.callback(server.close)
            servers.append(server)
        side = Exchange(strategy_of_worker)
        strategy_of_worker.side = side
        links = Links(
            [("127.0.0.1", server.port) for server in servers], "", made.workload().messages
        )
        hello = {"role": "worker", "index": 0, "digest": made.digest}
        side.link(links, 0, hello, shares=argument["shares"])
        stack.callback(side.unlink)
        side.pull(-1)
        losses = []
        for side.number, batch in zip(range(4), worker.batches(), strict=False):
            losses.append(worker.step(batch).loss)
        assert {server.shard.version for server in servers} == {4}
        return [losses, [server.shard.weights.raw.tolist() for server in servers]]


def dropout_as_on_the_cpu(argument: dict[str, Any]) -> None:
    """Outputs and gradients of a layer have the bits of the CPU; its launches are few."""
    install()
    shape, part = tuple(argument["shape"]), {"Dropout": nn.Dropout, "Dropout2d": nn.Dropout2d}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for rate in (0.1, 1.0):
            found = []
            for device in ("cpu", NAME):
                scope = Scope(1, torch.device(device), step=3, pieces=(Piece(0, 0, 6, 6),))
                scope.samples = 6
                model = nn.Sequential(part[argument["layer"]](rate))
                swap_layers(model, scope)
                drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
                input = drawn.to(dtype).to(device).requires_grad_()
                model(input)  # the kernel is compiled, and its tables are made
                with watch() as forward:
                    output = model(input)
                gradient = torch.full_like(output, 3.0)
                with watch() as backward:
                    output.backward(gradient)
                assert input.grad is not None
                found.append([t.detach().cpu().view(torch.uint8) for t in (output, input.grad)])
            assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), (dtype, rate)
            told = [one.kind for one in forward.told]
            assert told.count("kernel") <= argument["kernels"], forward.told
            assert told.count("copy") == len(told) - told.count("kernel") == 1, forward.told
            assert len(backward.told) == 1, backward.told

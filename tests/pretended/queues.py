"""Ranks of a pipeline in threads, whose groups are queues, as those of NCCL are.

A group makes one message after the other on each rank, in the order in which they are begun,
without tags; a message is made when it comes first in the queues of both ranks. The first message
of a pair may hold the host until both ranks begin it, as where NCCL connects a pair at its first
message. Where no rank can go on, all of them raise `StandsStill`, and no time passes before that.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from allranks.strategies.pipeline_schedules import SCHEDULES, places
from allranks.torch.parallel.pipeline.links import StageLinks, lanes_of
from allranks.torch.parallel.pipeline.strategy import Pipeline
from allranks.torch.step.gradients import Backward


class StandsStill(RuntimeError):
    """Every rank waits for another one."""


@dataclass(eq=False)
class Message:
    """A send or a receive; what comes of one is in `tensor` when it is `done`."""

    network: Network
    rank: int
    peer: int
    tensor: Tensor
    sends: bool
    done: bool = False

    def wait(self) -> None:
        self.network.wait(lambda: self.done)


@dataclass
class Network:
    """What all ranks share."""

    ranks: int
    connects_late: bool = False
    queues: dict[tuple[int, int], deque[Message]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    by_tag: dict[Any, deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))
    connected: dict[Any, set[int]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.running, self.is_over = self.ranks, False

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when it is `ready`; raises where nobody can make it so."""
        with self.changed:
            self.waiting[threading.get_ident()] = ready
            self.look()
            while not ready() and not self.is_over:
                self.changed.wait()
            del self.waiting[threading.get_ident()]
            if not ready():
                raise StandsStill

    def look(self) -> None:
        """Let all raise if none of those that still run can go on."""
        is_stuck = len(self.waiting) == self.running and not any(r() for r in self.waiting.values())
        self.is_over = self.is_over or (self.running > 0 and is_stuck)
        self.changed.notify_all()

    def post(self, group: int, message: Message) -> Message:
        with self.changed:
            pair = self.connected[group, frozenset((message.rank, message.peer))]
            pair.add(message.rank)
            self.changed.notify_all()
            if self.connects_late:
                self.wait(lambda: len(pair) == 2)
            self.queues[group, message.rank].append(message)
            while any(self._make_first(group, rank) for rank in range(self.ranks)):
                self.changed.notify_all()
        return message

    def _make_first(self, group: int, rank: int) -> bool:
        """Whether the first message of a rank was made."""
        own = self.queues[group, rank]
        others = self.queues[group, own[0].peer] if own else None
        if not own or not own[0].sends or not others or others[0].sends or others[0].peer != rank:
            return False
        sent, received = own.popleft(), others.popleft()
        assert sent.tensor.shape == received.tensor.shape, "a message of another size"
        received.tensor.copy_(sent.tensor)
        sent.done = received.done = True
        return True


@dataclass
class QueueComm:
    """What a rank has of a group of NCCL: what `StageLinks` asks of a `Comm`."""

    network: Network
    rank: int
    made: Counter[str]
    group: int = 0
    is_one_queue: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def size(self) -> int:
        return self.network.ranks

    def duplicate(self) -> QueueComm:
        self.made["groups"] += 1
        return QueueComm(self.network, self.rank, self.made, self.made["groups"])

    def on_host(self) -> HostComm:
        return HostComm(self.network, self.rank, self.made)

    def send(self, tensor: Tensor, to: int, tag: int, kind: str = "", *, control: int = 0) -> Any:
        return self.network.post(self.group, Message(self.network, self.rank, to, tensor, True))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self.network.post(
            self.group, Message(self.network, self.rank, source, tensor, False)
        )


class HostComm(QueueComm):
    """The same ranks over Gloo: messages have tags, and who sends goes on."""

    def send(self, tensor: Tensor, to: int, tag: int, kind: str = "", *, control: int = 0) -> Any:
        with self.network.changed:
            self.network.by_tag[self.rank, to, tag].append(tensor.clone())
            self.network.changed.notify_all()
        return SimpleNamespace(wait=lambda: None)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        come = self.network.by_tag[source, self.rank, tag]

        def wait() -> None:
            self.network.wait(lambda: bool(come))
            tensor.copy_(come.popleft())

        return SimpleNamespace(wait=wait)


class Rank:
    """A rank of a pipeline with the loop, the passes and the messages of the engine.

    Each stage multiplies by two, with a weight, so that every gradient is known.
    """

    def __init__(self, schedule: str, network: Network, rank: int, chunks: int, ring: bool) -> None:
        line: Any = QueueComm(network, rank, Counter())
        forwards, backwards, _ = lanes_of(line, is_ring=ring)
        self.line, self.links = line, StageLinks(line, forwards, backwards, line.on_host())
        self.last, self.own_stages = (
            line.size * chunks - 1,
            range(rank, line.size * chunks, line.size),
        )
        self.weights = {s: torch.full((), 2.0, requires_grad=True) for s in self.own_stages}
        self.schedule = lambda micros: SCHEDULES[schedule](line.size, micros, chunks)
        self.places = lambda micros: places(self.schedule(micros))
        self.last_pass, self.shard_alone = "W" if schedule == "zero-bubble" else "B", False
        self.stages = SimpleNamespace(call=self.call, modules=[lambda value: self.call(0, value)])
        self.task = SimpleNamespace(inputs=lambda data: (data,), shards=1)
        self.local_params: list[Tensor] = list(self.weights.values())
        scope = SimpleNamespace(moments={}, calls=0, again=lambda moment: nullcontext())
        scope.moment = lambda: scope
        self.step: Any = MagicMock(scope=scope, user_backward=nullcontext(), parameters=[])
        self.step.output = lambda batch, micro: self.passes.through(micro.data)
        self.step.take = lambda batch: self.take
        self.passes: Any = None
        self.steps = 0

    def call(self, stage: int, value: Tensor) -> Tensor:
        return value * self.weights[stage]

    def take(self, micro: Any) -> Any:
        total = self.passes.through(micro.data).sum()
        return total.detach(), 1.0, Backward((total,), (torch.ones(()),))

    def passed(self, run: Callable[[], Any], stage: int) -> Any:
        return run()

    def count_crossing(self, stage: int, tensors: list[Tensor]) -> None: ...

    def train(self, sizes: list[int]) -> None:
        """A step with micro-batches of these sizes; raises for a gradient that is not right."""
        micros = [SimpleNamespace(data=torch.full((n,), float(n)), samples=n) for n in sizes]
        batch: Any = SimpleNamespace(micros=micros, leaves=[SimpleNamespace(micros=micros)])
        this: Any = self
        self.steps += 1
        Pipeline._make_passes(this, batch)
        expected = sum(n * n for n in sizes) * 2.0**self.last
        assert [weight.grad for weight in self.local_params] == [expected] * len(self.local_params)

    def evaluate(self, size: int) -> None:
        """A batch through all stages; the last one has the output."""
        this: Any = self
        self.links.share = lambda value, *_: value  # type: ignore[method-assign]
        output = Pipeline._evaluate(this, torch.ones(size))
        if self.last in self.own_stages:
            assert output.tolist() == [2.0 ** (self.last + 1)] * size


def run_ranks(
    schedule: str,
    ranks: int,
    chunks: int,
    steps: list[list[int]],
    *,
    ring: bool,
    connects_late: bool = False,
) -> None:
    """A training in threads; raises what a rank raised first."""
    network, raised = Network(ranks, connects_late), list[BaseException]()

    def run(number: int) -> None:
        try:
            rank = Rank(schedule, network, number, chunks, ring)
            for sizes in steps:
                rank.train(sizes)
                rank.evaluate(sizes[-1])
        except BaseException as error:
            raised.append(error)
        finally:
            with network.changed:
                network.running -= 1
                network.look()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]

"""The state of a training, sent to ranks that are about to join, while the others train.

At the boundary where a rank joins all wait until it has the state. If that takes longer than a
step, the launcher orders a stream before (`launcher.scaling`). After each step the first rank of
the group sends a part of its state: some parameters, with what the optimizer keeps for them. From
then on it also sends the gradients of these parameters, and the new rank makes the same updates:

    sends       part 0 | gradients of 0, part 1 | gradients of 0, 1, part 2 | … | gradients, digest
    new rank    has 0  | updates 0, has 0, 1    | updates 0, 1, has 0 to 2  | … | updates, compares

With the last part the new rank has all of the step before, and the launcher forms the group. There
it receives the rest: buffers, counters, random states. A thread sends while its rank trains. A part
follows only when all before it is sent, so over a slow link a stream takes more steps. If not even
the gradients keep up, steps wait for them, and the stream ends if a step would take twice as long,
or if the link has no time for a part in 20 steps. If it ends too early, or the digests differ (an
update of more than gradients, a callback that writes weights), the new rank receives all of the
state at the boundary, as it does without a stream.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Queue, SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo

from allranks.errors import PeerLost
from allranks.launcher.heartbeat import Heartbeat, Stream
from allranks.launcher.world import World
from allranks.torch.checkpoint.state import DTYPES, NAMES
from allranks.torch.comm.join import store_of_stream
from allranks.torch.comm.subgroups import messages_of, packed, unpack
from allranks.torch.step.trainable import update
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.replicas import digest

PARTS, LEAST_BYTES = 4, 32 * 2**20  # of the state that follow a step: a part, or so much
MOST_WAITING = 2  # packets, before a step waits for the link: as long as a step at most
MOST_STEPS = 20  # in a row without a part of the state, as packets wait for the link
LOOK_S, LONGEST_S = 0.001, 10.0
CONNECTING, PATIENCE = timedelta(minutes=1), timedelta(minutes=2)  # for the next packet
TAG = 1
SETTINGS = (bool, int, float, tuple)  # of a group, that a callback or a schedule may change

Parts = list[dict[str, Tensor]]


def parts_of(model: nn.Module, state: dict[str, Any]) -> Parts:
    """For each parameter the tensors in the `state` of a strategy that its updates change."""
    moments, averages = state["optimizer"]["state"], state.get("average", {})
    parts = []
    for name, _ in model.named_parameters():
        tensors = {"weight": state["model"].get(name), "average": averages.get(name)}
        tensors |= dict(sorted(moments.get(name, {}).items()))
        parts.append({key: t for key, t in tensors.items() if isinstance(t, Tensor)})
    return parts


def bytes_of(parts: Parts) -> int:
    return sum(tensor.nbytes for part in parts for tensor in part.values())


def digest_of(parts: Parts) -> str:
    return digest(*(tensor for part in parts for tensor in part.values()))


@dataclass
class Packet:
    """What follows a step: gradients of the parameters sent before, and the next part of the state.

    `header` has how many steps are done (`step`), the parameter with which the part begins, and the
    `forms` of its tensors; the settings of the `groups` for the update (`None` if there was none)
    and the parameters `without` a gradient; and where the stream `ends` the `digest` of the state.
    """

    header: dict[str, Any]
    gradients: list[Tensor] = field(default_factory=list)
    part: Parts = field(default_factory=list)

    def send(self, group: Any) -> None:
        text = torch.frombuffer(bytearray(json.dumps(self.header).encode()), dtype=torch.uint8)
        tensors = [torch.tensor([len(text)]), text, *self.gradients, *_flat(self.part)]
        for each in [tensors[:1], tensors[1:2], *messages_of(tensors[2:])]:
            message = packed(each, read=True)
            for work in [group.send([message], peer, TAG) for peer in range(1, group.size())]:
                work.wait(PATIENCE)

    @staticmethod
    def receive(group: Any, parameters: Sequence[nn.Parameter]) -> Packet:
        """The next one; `parameters` are all of the model."""
        length = torch.empty(1, dtype=torch.int64)
        group.recv([length.view(torch.uint8)], 0, TAG).wait(PATIENCE)
        text = torch.empty(int(length), dtype=torch.uint8)
        group.recv([text], 0, TAG).wait(PATIENCE)
        header = json.loads(text.numpy().tobytes())
        updated = [] if header["groups"] is None else parameters[: header["begin"]]
        without = set(header["without"])
        packet = Packet(
            header, [torch.empty_like(p) for n, p in enumerate(updated) if n not in without]
        )
        for forms in header["forms"]:
            of_one = {key: torch.empty(shape, dtype=DTYPES[kind]) for key, kind, shape in forms}
            packet.part.append(of_one)
        for each in messages_of([*packet.gradients, *_flat(packet.part)]):
            message = packed(each, read=False)
            group.recv([message], 0, TAG).wait(PATIENCE)
            unpack(message, each)
        return packet


def _flat(parts: Parts) -> list[Tensor]:
    return [tensor for part in parts for tensor in part.values()]


# --- the rank that sends -------------------------------------------------------------------------


class StateSender:
    """On each rank of a group: the first one sends its state to new ranks, as it is ordered to.

    No error of a stream ends the training: the new rank then receives all at the boundary.
    """

    _sending: Sending | None

    def __init__(
        self, strategy: Strategy, world: World, heartbeat: Heartbeat, report: Callable[..., None]
    ) -> None:
        self._strategy, self._world, self._heartbeat = strategy, world, heartbeat
        self._report = report
        self._number, self._sending = 0, None

    def after_step(self, step: int) -> None:
        """Before step `step`: send what follows the one before, if new ranks wait for it."""
        if self._heartbeat.stream_number != self._number:
            order = self._heartbeat.stream()
            if order.number != self._number and order.group == self._world.group:
                self.close()
                if self._world.is_leader:
                    where = self._heartbeat.group().store or self._world.rendezvous
                    on = self._world, where, order, self._report
                    self._sending = Sending(self._strategy, *on)
            self._number = order.number
        if self._sending is not None:
            self._sending.after_step(step)
            if self._sending.is_over:
                self.close()

    def end(self, step: int) -> None:
        """The group ends before step `step`, and new ranks are in the next one."""
        if self._sending is not None:
            self._sending.after_step(step, ends=True)
        self.close()

    def close(self) -> None:
        """Send no more than what was handed to the thread."""
        self._strategy.step.before_update = None
        if self._sending is not None:
            self._sending.close()
        self._sending = None


class Sending:
    """One stream; a thread of this rank connects to the new ranks, and sends the packets."""

    def __init__(
        self,
        strategy: Strategy,
        world: World,
        where: str,
        order: Stream,
        report: Callable[..., None],
    ) -> None:
        self._report = report
        self._strategy, self._parameters = strategy, list(strategy.model.parameters())
        self._next, self._gradients = 0, list[Tensor | None]()
        self._groups: list[dict[str, Any]] | None = None
        self._packets: Queue[Packet | None] = Queue()
        self._is_connected = self.is_over = False
        self._at, self._steps_without = time.monotonic(), 0
        strategy.step.before_update = self._before_update
        threading.Thread(target=self._send, args=(world, where, order), daemon=True).start()

    def give_up(self, cause: str) -> None:
        """End this stream before the new ranks have the state; they receive all at the boundary."""
        self._report("stream_ended", cause=cause)
        self.close()

    def close(self) -> None:
        """Send no more than what was handed to the thread."""
        self.is_over = True
        self._packets.put(None)

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Within, an error ends the stream, and not the training."""
        try:
            yield
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")

    def _send(self, world: World, where: str, order: Stream) -> None:
        with self._ending_on_error():
            group = connected(world, where, order, 0)
            self._is_connected = True
            while (packet := self._packets.get()) is not None:
                packet.send(group)
                self._packets.task_done()

    def _before_update(self) -> None:
        with self._ending_on_error():
            if self._next and not self.is_over:
                self._copy_gradients()

    def _copy_gradients(self) -> None:
        """Copy those of what was sent, as the optimizer is about to see them."""
        gradients = [parameter.grad for parameter in self._parameters[: self._next]]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            self.give_up("gradients of some rows alone")
            return
        self._groups = [
            {key: value for key, value in group.items() if isinstance(value, SETTINGS)}
            for group in self._strategy.step.optimizer.param_groups
        ]
        self._gradients = [None if g is None else g.detach().clone() for g in gradients]

    def after_step(self, step: int, ends: bool = False) -> None:
        """Hand the packet of a step to the thread."""
        if self.is_over or not self._is_connected:
            return
        began_at = time.monotonic()
        until = began_at + min(began_at - self._at, LONGEST_S)
        while (waiting := self._packets.unfinished_tasks) > MOST_WAITING and not ends:
            if self.is_over or time.monotonic() > until:
                self.give_up("the link is slower than the steps")
                return
            time.sleep(LOOK_S)
        self._at = time.monotonic()
        is_late = waiting > 0 and self._next < len(self._parameters) and not ends
        self._steps_without = self._steps_without + 1 if is_late else 0
        if self._steps_without > MOST_STEPS:
            self.give_up("the link is slower than the steps")
            return
        with self._ending_on_error():
            self._packets.put(self._packet(step, ends, waiting))

    def _packet(self, step: int, ends: bool, waiting: int) -> Packet:
        parts = parts_of(self._strategy.model, self._strategy.state())
        begin = self._next
        if not ends and not waiting:
            self._next = _stop_of(parts, begin)
        part = parts[begin : self._next]
        header: dict[str, Any] = {"step": step, "begin": begin, "ends": ends}
        header["groups"] = self._groups
        header["without"] = [n for n, g in enumerate(self._gradients) if g is None]
        header["forms"] = [
            [(key, NAMES[t.dtype], list(t.shape)) for key, t in of_one.items()] for of_one in part
        ]
        header["digest"] = digest_of(parts) if ends and self._next == len(parts) else ""
        copies = [{key: t.detach().clone() for key, t in of_one.items()} for of_one in part]
        gradients = [g for g in self._gradients if g is not None]
        self._groups, self._gradients = None, []
        return Packet(header, gradients, copies)


def _stop_of(parts: Parts, begin: int) -> int:
    """Where the part ends that follows one step."""
    most, size = max(bytes_of(parts) // PARTS, LEAST_BYTES), 0
    for stop in range(begin, len(parts)):
        size += bytes_of(parts[stop : stop + 1])
        if size >= most:
            return stop + 1
    return len(parts)


def connected(world: World, where: str, order: Stream, place: int) -> Any:
    """The group of a stream, of which the sender is 0, and the receivers follow in order."""
    store = store_of_stream(world, where, order.number, 1 + len(order.receivers))
    return ProcessGroupGloo(store, place, 1 + len(order.receivers), CONNECTING)


# --- the rank that joins -------------------------------------------------------------------------


class StateReceiver:
    """A new rank, which waits for its first group, and receives the state meanwhile.

    `state` is what it hands over to the trainer of that group (`Handover`). The thread that calls
    `look` writes into its tensors what has come.
    """

    def __init__(
        self,
        strategy: Strategy,
        state: dict[str, Any],
        world: World,
        heartbeat: Heartbeat,
        report: Callable[..., None],
    ) -> None:
        self._strategy, self._world, self._report = strategy, world, report
        self._parameters = list(strategy.model.parameters())
        is_whole = "strategy" in state
        self._parts = parts_of(strategy.model, state["strategy"]) if is_whole else []
        self.state_bytes = bytes_of(self._parts)
        self.step = -1
        self._number, self._group, self._began_at = heartbeat.stream().number, -1, 0.0
        self._packets: SimpleQueue[Packet | Exception] | None = None

    def look(self, heartbeat: Heartbeat, number: int) -> bool:
        """Take what has come for rank `number`; returns whether more may come."""
        if heartbeat.stream_number != self._number:
            order, group = heartbeat.stream(), heartbeat.group()
            if order.number != self._number and number in order.receivers:
                where = group.store or self._world.rendezvous
                self._group, self._began_at = order.group, time.monotonic()
                self._packets = SimpleQueue()
                arguments = where, order, 1 + order.receivers.index(number), self._packets
                threading.Thread(target=self._receive, args=arguments, daemon=True).start()
            self._number = order.number
        if self._packets is None:
            return False
        try:
            group = heartbeat.group()
            if self._group != group.number and number not in group.members:
                raise PeerLost("the others have formed another group")
            while self._packets is not None and not self._packets.empty():
                self._take(self._packets.get())
        except Exception as error:  # it receives all at the boundary
            self._packets = None
            self._tell(str(error))
        return self._packets is not None

    def _receive(
        self, where: str, order: Stream, place: int, packets: SimpleQueue[Packet | Exception]
    ) -> None:
        try:
            group = connected(self._world, where, order, place)
            while packets is self._packets:
                packets.put(packet := Packet.receive(group, self._parameters))
                if packet.header["ends"]:
                    return
        except Exception as error:
            packets.put(error)

    @torch.no_grad()
    def _take(self, packet: Packet | Exception) -> None:
        if isinstance(packet, Exception):
            raise packet
        header, begin = packet.header, packet.header["begin"]
        if header["groups"] is not None:
            self._update(packet)
        for mine, theirs in zip(self._parts[begin:], packet.part, strict=False):
            forms = [{key: (t.dtype, t.shape) for key, t in of.items()} for of in (mine, theirs)]
            if forms[0] != forms[1]:
                raise ValueError("the optimizer of this rank keeps other tensors")
            for key, tensor in theirs.items():
                mine[key].copy_(tensor)
        if packet.part and begin + len(packet.part) == len(self._parts):
            self._tell()
        if header["ends"]:
            self._packets = None
            if not header["digest"]:
                raise PeerLost("it ended before all of the state was sent")
            if header["digest"] != digest_of(self._parts):
                raise ValueError("the updates of this rank came to another state")
            self.step = header["step"]

    def _update(self, packet: Packet) -> None:
        """Make the update of the others with their gradients, of the parameters sent so far."""
        step, header = self._strategy.step, packet.header
        for group, settings in zip(step.optimizer.param_groups, header["groups"], strict=True):
            tuples = {key: tuple(v) for key, v in settings.items() if isinstance(v, list)}
            group.update({**settings, **tuples})
        gradients, without = iter(packet.gradients), set(header["without"])
        for number, parameter in enumerate(self._parameters[: header["begin"]]):
            parameter.grad = None if number in without else next(gradients)
        update(step.optimizer)
        for parameter in self._parameters:
            parameter.grad = None
        if step.average is not None:
            step.average.update()

    def _tell(self, cause: str = "") -> None:
        seconds = time.monotonic() - self._began_at
        self._report("streamed", bytes=self.state_bytes, seconds=seconds, cause=cause)

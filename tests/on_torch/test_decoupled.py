"""Learners that come and go: the merge, who has which samples, the wire, and all of it in runs.

The arithmetic is held to golden values and to a plain loop with a scripted order; runs are held to
what they promise whoever dies: all samples are in the weights once, and it is said who was lost.
"""

from __future__ import annotations

import random
import socket
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import contract_tasks
from allranks.cli.display.following import anomalies_in, in_words
from allranks.errors import ProgramError, RequestError
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.job.run_folder import rank_events_path, read_events, read_rows
from allranks.launcher.messages import AHEAD, MARK, Connection
from allranks.launcher.nodes.channel import Disconnected
from allranks.launcher.nodes.cluster import Cluster
from allranks.launcher.start import run_job
from allranks.launcher.world import World
from allranks.strategies.shards import even_sizes, owned_shards
from allranks.torch.build import job_for
from allranks.torch.checkpoint.state import unpacked
from allranks.torch.elastic.learner import Learner
from allranks.torch.elastic.merge import Clock, Merging, Remainder, Work
from allranks.torch.elastic.service import (
    LearnerService,
    inner_state,
    load_inner_state,
    packed,
)
from allranks.torch.elastic.strategy import FlatModel, Numbers
from allranks.torch.local_sgd.global_weights import Nesterov
from allranks.torch.trainer import Trainer
from allranks.training.order import Order
from allranks.training.work_queue import Ledger
from conftest import Train
from decoupled_tasks import BATCH, SAMPLES, Plain, made
from outer_simulation import nesterov
from test_every_strategy import difference


def numbers(*values: float) -> Numbers:
    return Numbers(torch.tensor(values, dtype=torch.float64), torch.empty(0, dtype=torch.int64))


def work(chunk: int, samples: int, version: int = 0) -> Work:
    return Work(chunk, version, samples, 0.0, 1.0, 0.1)


# --- arithmetic ---------------------------------------------------------------------------


def test_a_merge_is_the_mean_by_samples_since_the_last_one() -> None:
    merging = Merging(numbers(0.0), 1, Nesterov(1.0, 0.0), Ledger(8, 2, 2), quorum=2)
    assert merging.add_update(0, work(0, 100), numbers(0.25)) and not merging.is_due
    assert merging.add_update(0, work(2, 200), numbers(0.75)), (
        "two chunks of one learner: 1, of 300"
    )
    assert not merging.is_due, "it is one learner still"
    assert merging.add_update(1, work(1, 100), numbers(4.0)) and merging.is_due
    assert not merging.add_update(2, work(1, 100), numbers(9.0)), "another one was first"
    merged = merging.merge()
    assert merging.theta.weights.tolist() == [-1.75]
    assert (merged.samples, merged.chunks, merged.learners) == (400, 3, (0, 1))
    assert merging.add_update(1, work(3, 100, version=0), numbers(1.0)) and not merging.is_due
    late = merging.merge()
    assert merging.theta.weights.tolist() == [-2.75] and late.staleness == 1


def test_the_outer_momentum_follows_the_gradient_and_not_its_reverse() -> None:
    merging = Merging(numbers(0.0), 1, Nesterov(0.7, 0.9), Ledger(3, 1, 1))
    for number, wanted in enumerate((-1.33, -3.227, -5.6343)):
        merging.add_update(0, work(number, 1), numbers(1.0))
        merging.merge()
        assert merging.theta.weights.item() == pytest.approx(wanted, abs=1e-12)


def test_each_fragment_moves_by_what_was_found_there_and_by_a_momentum_of_its_own() -> None:
    """Of three weights in two fragments: golden, with the samples since a fragment was brought."""
    parts = [slice(0, 2), slice(2, 3)]
    merging = Merging(numbers(0, 0, 0, 5), 3, Nesterov(1.0, 0.5), Ledger(3, 1, 1), 1, parts)
    assert merging.add_update(0, replace(work(0, 10), owes=True), numbers(1, 2, 7))
    assert merging.add_update(1, replace(work(1, 30), share=90), numbers(3, 4, 9))
    merging.merge()
    theta = merging.theta.weights.tolist()
    assert theta == pytest.approx([-1.5 * 2.8, -1.5 * 3.8, 0, 0.25 * 7 + 0.75 * 9])
    assert (merging.changed_at, merging.fragment, merging.owing) == ([1, 0], 1, {0})
    assert merging.add_update(1, replace(work(2, 10), fragment=1, share=40), numbers(8, 1))
    merging.merge()
    assert merging.theta.weights[2:].tolist() == [-1.5 * 8, 1]
    assert merging.changed_at == [1, 2] and merging.theta.weights[0] == theta[0]
    momentum = merging.state()["momentum"].tolist()
    assert momentum == pytest.approx([2.8, 3.8, 8])
    merging.add_remainder(0, [4, 0], numbers(1, 1, 99, 0))
    merging.merge_remainders()
    assert merging.theta.weights[0].item() == pytest.approx(theta[0] - (1 + 0.5 * (1.4 + 1)))
    assert not merging.owing and merging.theta.weights[2:].tolist() == [-12, 1]
    for fragment in (-1, 2):
        with pytest.raises(ValueError, match="fragment"):
            merging.size_of(fragment)


def test_what_is_not_brought_is_kept_for_its_turn() -> None:
    """Two fragments of one weight each; the turn is always that of the first."""
    rest = Remainder(FlatModel(nn.Linear(1, 1).double()), 2)
    assert rest.delta is not None
    first, second = (rest.contribution(numbers(*found), 10) for found in ((1, 2), (4, 8)))
    assert [one.numbers.weights.tolist() for one in (first, second)] == [[1], [4]]
    assert rest.delta.tolist() == [0, 10] and rest.shares == [0, 20]
    brought = [rest.contribution(numbers(1, 1), 1).fragment for _ in range(6)]
    assert brought == [0, 0, 1, 0, 0, 0], "a turn that was missed for long comes all the same"
    saved = rest.state()
    rest.forget()
    assert rest.delta.tolist() == [0, 0]
    rest.load(saved)
    assert (rest.delta.tolist(), rest.shares) == ([0, 3], [0, 3])
    assert rest.all()[0] == [0, 3] and rest.shares == [0, 0]


def test_the_rest_is_taken_once_and_at_the_end() -> None:
    parts = [slice(0, 1), slice(1, 2)]
    merging = Merging(numbers(0, 0), 2, Nesterov(1.0, 0.0), Ledger(1, 1, 1), 1, parts)
    merging.add_remainder(0, [5, 5], numbers(9, 9))
    assert not merging.updates, "no chunk is done"
    merging.add_update(0, replace(work(0, 10), owes=True), numbers(1))
    assert not merging.is_over
    merging.merge()
    assert not merging.is_over and merging.owing == {0}
    for _ in range(2):
        merging.add_remainder(0, [0, 10], numbers(7, 2))
    merging.merge_remainders()
    assert merging.theta.weights.tolist() == [-1, -2] and merging.is_over
    with pytest.raises(ValueError, match="shares"):
        merging.add_remainder(0, [-1, 1], numbers(1, 1))


def test_fragments_of_two_answers_do_not_lie_in_one_memory() -> None:
    """After a link has broken two answers come before the first is taken up."""
    job = Job(strategy="decoupled:fragments=2", ranks=1, precision="fp64")
    with Trainer(Plain(), job, world=_learner(0)) as trainer:
        learner = Learner(trainer, 1, fragments=2)
        flat, parts = learner.flat, learner.flat.fragments(2)
        whole, newer = flat.read(), flat.read()
        newer.weights += 1
        answers = [
            (whole.buffers_of(parts, flat.parameters), [0, 1]),
            (newer.buffers_of(parts[1:], flat.parameters), [1]),
        ]
        bodies = []
        for pieces, _ in answers:
            came = b"".join(map(bytes, pieces))
            bodies.append(learner.place({}, len(came)))
            bodies[-1][:] = came
        for body, (_, fragments) in zip(bodies, answers, strict=True):
            learner.load_answer(
                {"version": 1, "waits": [], "fragments": fragments, "fragment": 0}, body
            )
        found = flat.read().weights
        assert torch.equal(found[parts[0]], whole.weights[parts[0]])
        assert torch.equal(found[parts[1]], newer.weights[parts[1]])


@pytest.mark.parametrize("seed", range(20))
def test_each_chunk_counts_once_whoever_dies(seed: int) -> None:
    chance = random.Random(seed)
    steps, every, parts = chance.randint(1, 40), chance.randint(1, 9), chance.randint(1, 5)
    ledger, has, counted = Ledger(steps, every, parts), dict[int, int](), list[int]()
    while not ledger.is_over:
        learner = chance.randrange(parts + 1)
        if learner not in has:
            chunk = ledger.next_for(learner)
            if chunk is not None:
                has[learner] = chunk.number
        elif chance.random() < 0.2:
            freed = ledger.lost(learner)
            number = has.pop(learner)
            shared = number in has.values() or ledger.is_done(number)
            assert [one.number for one in freed] == ([] if shared else [number])
        else:
            number = has.pop(learner)
            if not ledger.is_done(number):
                ledger.merged(number)
                counted.append(number)
        if chance.random() < 0.05:  # the synchronizer is restarted, and learners tell what they do
            again = Ledger(steps, every, parts)
            again.load_state(ledger.state())
            for who, number in has.items():
                if not again.is_done(number):
                    again.take(who, number)
            assert again.steps_done == ledger.steps_done
            ledger = again
    covered = [
        (chunk.part, step)
        for chunk in map(ledger.chunk, counted)
        for step in range(chunk.first, chunk.first + chunk.steps)
    ]
    assert sorted(covered) == [(part, step) for part in range(parts) for step in range(steps)]
    assert ledger.steps_done == steps


SCRIPT = ["0", "1", "0", "m", "1", "0", "0", "1", "m", "1", "0", "m", "1", "1", "m"]
"""Who brings the next thing, and when it is merged; learner 0 is faster at first."""


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_scripted_schedule_is_that_of_a_plain_loop(fragments: int) -> None:
    every, ledger = 2, Ledger(12, 2, 2)
    job = Job(strategy="decoupled:every=2,lr=0.7,momentum=0.9", ranks=2, precision="fp64")
    with (
        Trainer(Plain(), job, world=_learner(0)) as one,
        Trainer(Plain(), job, world=_learner(1)) as two,
    ):
        learners = [Learner(one, 2, fragments=fragments), Learner(two, 2, fragments=fragments)]
        flat = learners[0].flat
        theta, parts = flat.read(), flat.fragments(fragments)
        plain = _Loop(one.strategy.model, every, parts)
        merging = Merging(theta, flat.parameters, Nesterov(0.7, 0.9), ledger, 9, parts)
        given = [-1, -1]

        def answer(who: int) -> Any:
            own = merging.updates.get(who)
            waits = [] if own is None else [w.chunk for w in own.work]
            newer = [n for n, at in enumerate(merging.changed_at) if at > given[who]]
            given[who] = merging.version
            header = {"version": merging.version, "waits": waits}
            header |= {"fragments": newer, "fragment": merging.fragment}
            body = theta.buffers_of([parts[n] for n in newer], flat.parameters)
            learners[who].load_answer(header, memoryview(bytearray(b"".join(map(bytes, body)))))
            plain.turn[who] = merging.fragment
            return ledger.next_for(who, merging.waiting)

        doing = [answer(0), answer(1)]
        for act in SCRIPT:
            if act == "m":
                merging.merge()
                plain.merge()
                continue
            who = int(act)
            said, found = learners[who].train(doing[who])
            merging.add_update(who, Work.from_data(said), found.copied())  # as the wire does
            learners[who].mark_sent(doing[who])
            plain.train(who, doing[who].part, doing[who].first)
            doing[who] = answer(who)
            plain.begin(who)
        assert merging.version == 4 and merging.samples == 11 * every * BATCH // 2
        apart = (merging.theta.weights - plain.theta).abs().max()
        moved = (plain.theta - plain.first).abs().max()
        assert float(apart) < 1e-10 and float(moved) > 0.1


def test_a_checkpoint_has_each_optimizer_as_it_was_after_what_is_in_the_weights() -> None:
    """Chunk 0 is merged, 2 waits, 4 is under way: the state after 0, and from it the same again."""
    job = Job(strategy="decoupled:every=2", ranks=2, precision="fp64")
    with Trainer(Plain(), job, world=_learner(0)) as trainer:
        learner, ledger = Learner(trainer, 2, keeps=True), Ledger(12, 2, 2)
        theta = learner.flat.read()
        merging = Merging(theta, learner.flat.parameters, Nesterov(1.0, 0.0), ledger, quorum=9)

        def take() -> None:
            own = merging.updates.get(0)
            waits = [w.chunk for w in own.work] if own else []
            body = memoryview(bytearray(b"".join(map(bytes, merging.theta.buffers))))
            header = {"version": merging.version, "waits": waits, "fragments": [0], "fragment": 0}
            learner.load_answer(header, body)

        def bring(number: int) -> Any:
            said, found = learner.train(ledger.chunk(number))
            merging.add_update(0, Work.from_data(said), found.copied())
            learner.mark_sent(ledger.chunk(number))
            take()
            return inner_state(trainer.strategy)

        take()
        wanted = bring(0)
        merging.merge()
        take()
        after_2 = bring(2)
        assert list(learner.inner_states) == [0, 2] and merging.state()["clocks"][0]["chunk"] == 0
        body = memoryview(bytearray(b"".join(packed(learner.inner_states[0], 1 << 20))))
        (state,) = [unpacked(body)]
        bring(4)
        momentum = state["state"]["0.weight"]["momentum_buffer"]
        assert torch.equal(momentum, wanted["state"]["0.weight"]["momentum_buffer"])
        assert merging.clocks == {0: Clock(0, 16)}
        load_inner_state(trainer.strategy, state)
        learner.forget()
        take()
        again = bring(2)
        for name, row in again["state"].items():
            assert torch.equal(row["momentum_buffer"], after_2["state"][name]["momentum_buffer"])
        merging.merge()
        take()
        assert list(learner.inner_states) == [2], "what came before it is not asked for any more"
        with pytest.raises(RequestError, match="at most 16"):
            packed(state, 16)
        for torn in (body[:4], body[:-8]):
            with pytest.raises(ValueError, match=r"no state|are missing"):
                unpacked(torn)


def _learner(index: int) -> World:
    return World(rank=index + 1, size=3, role="learner", role_index=index)


class _Loop:
    """The same in one process: weights as lists of tensors, SGD and Nesterov written out."""

    def __init__(self, model: nn.Module, every: int, parts: list[slice]) -> None:
        self.parts, self.turn = parts, [0, 0]
        self.every, self.order = every, Order(SAMPLES, BATCH, 0, "keep")
        self.theta = self._flat(model)
        self.first = self.theta.clone()
        self.momentum, self.unmerged = torch.zeros_like(self.theta), [[], []]  # type: ignore[var-annotated]
        self.inner = [torch.zeros_like(self.theta) for _ in range(2)]
        self.start, self.model = [self.theta.clone() for _ in range(2)], model
        self.kept = [torch.zeros_like(self.theta) for _ in range(2)]
        self.share = [[0] * len(parts) for _ in range(2)]
        self.shapes = [p.shape for p in model.parameters()]

    @staticmethod
    def _flat(model: nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])

    def train(self, who: int, part: int, first: int) -> None:
        weights = self.start[who].clone()
        sizes = even_sizes(BATCH, 4)
        own = owned_shards(4, 2, part)
        rows = slice(sum(sizes[: own.start]), sum(sizes[: own.stop]))
        for step in range(first, first + self.every):
            ids = torch.from_numpy(self.order.batch(step // 6, step % 6)[rows].copy())
            w = weights.clone().requires_grad_()
            a, b, c, d = (
                piece.view(shape)
                for piece, shape in zip(
                    w.split([s.numel() for s in self.shapes]), self.shapes, strict=True
                )
            )
            inputs = made()[ids]
            output = torch.tanh(inputs @ a.T + b) @ c.T + d
            loss = (output.squeeze(1) - inputs.sin().sum(1)).square().mean()
            (gradient,) = torch.autograd.grad(loss, w)
            self.inner[who] = 0.5 * self.inner[who] + gradient
            weights = weights - 0.1 * self.inner[who]
        self.kept[who] += self.start[who] - weights
        self.share[who] = [share + 1 for share in self.share[who]]
        turn = self.turn[who]
        part, sent = self.parts[turn], torch.zeros_like(weights)
        sent[part] = self.kept[who][part]
        self.kept[who][part] = 0
        self.unmerged[who].append((turn, sent, self.share[who][turn]))
        self.share[who][turn] = 0

    def begin(self, who: int) -> None:
        self.start[who] = self.theta - self.kept[who]
        for _, sent, _ in self.unmerged[who]:
            self.start[who] = self.start[who] - sent

    def merge(self) -> None:
        """Every chunk has as many samples, so learners count by their chunks."""
        for turn, part in enumerate(self.parts):
            own = [[one for one in found if one[0] == turn] for found in self.unmerged]
            total = sum(share for found in own for *_, share in found)
            if not total:
                continue
            mean = torch.zeros_like(self.theta[part])
            for found in own:
                weight = sum(share for *_, share in found) / total
                mean += weight * sum(sent[part] for _, sent, _ in found)
            self.momentum[part] = 0.9 * self.momentum[part] + mean
            self.theta[part] -= 0.7 * (mean + 0.9 * self.momentum[part])
        self.unmerged = [[], []]


def test_flat_numbers_are_written_back_and_name_another_model() -> None:
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(4)
    flat = FlatModel(one)
    found = flat.read()
    assert (len(found.weights), len(found.counts), flat.parameters) == (12, 1, 6)
    found.weights += 1
    found.counts += 7
    flat.write(flat.from_bytes(memoryview(bytearray(b"".join(map(bytes, found.buffers))))))
    assert one.running_var is not None and one.running_var.tolist() == [2.0] * 3
    assert one.num_batches_tracked == 7
    assert flat.digest != FlatModel(other).digest
    with pytest.raises(ValueError, match="bytes for weights"):
        flat.from_bytes(memoryview(b"1234"))


# --- the wire -----------------------------------------------------------------------------


def ends(most: int = 1 << 20) -> tuple[Connection, Connection]:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return Connection(mine, most, 5.0), Connection(theirs, most, 5.0)


def test_a_frame_brings_its_bytes() -> None:
    mine, theirs = ends()
    with mine, theirs:
        mine.send({"a": 1}, b"12", memoryview(bytearray(b"3")))
        header, body = theirs.receive()
        assert (header, bytes(body)) == ({"a": 1}, b"123")


@pytest.mark.parametrize("size", [0, 3, AHEAD - 1, AHEAD, 3 * AHEAD])
def test_what_comes_with_a_frame_is_the_next_one(size: int) -> None:
    """Frames that came at once are received one by one, bodies of all sizes among them."""
    mine, theirs = ends()
    with mine, theirs:
        for number in range(3):
            mine.send({"number": number}, bytes([number]) * size)
        for number in range(3):
            header, body = theirs.receive()
            assert (header, bytes(body)) == ({"number": number}, bytes([number]) * size)
        mine.shut()
        with pytest.raises(Disconnected, match="closed its connection"):
            theirs.receive()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "no message of ours"),
        (struct.pack("!4sIQ", MARK, 2, 1 << 40) + b"{}", "bytes, of 1048576 at most"),
        (struct.pack("!4sIQ", MARK, 1 << 30, 0), "no message of ours"),
        (struct.pack("!4sIQ", MARK, 2, 0) + b"[]", "no message of ours"),
        (struct.pack("!4sIQ", MARK, 2, 9) + b"{}torn", "closed"),
        (struct.pack("!4sIQ", MARK, 2, 9)[:7], "closed"),
    ],
)
def test_what_is_no_frame_is_refused(sent: bytes, said: str) -> None:
    mine, theirs = ends()
    with mine, theirs:
        mine._socket.sendall(sent)
        mine.shut()
        with pytest.raises(Disconnected, match=said):
            theirs.receive()


def test_an_optimizer_that_does_not_come_in_time_is_an_older_one_and_named() -> None:
    flat, told = FlatModel(nn.Linear(1, 1)), list[Any]()
    merging = Merging(flat.read(), flat.parameters, Nesterov(1.0, 0.0), Ledger(8, 2, 2))
    merging.clocks = {0: Clock(3, 16), 1: Clock(4, 16), 2: Clock(5, 16)}
    mine, theirs = ends()
    with socket.create_server(("127.0.0.1", 0)) as listener, mine, theirs:
        service = LearnerService(
            *(merging, flat, listener, "secret", 1.0),
            lambda event, **values: told.append((event, values)),
            keeps=True,
        )
        service._peers = {0: mine, 1: mine}
        service.inner = {0: (3, "of now"), 1: (2, "of before")}
        _, state = service.snapshot(asks=True)
        service.answer(1, mine, {"inner": 4}, memoryview(b""))  # it has it no more
        found = service.collect(state, 60.0)
    assert found == {
        0: {"chunk": 3, "state": "of now"},
        1: {"chunk": 2, "state": "of before"},
    }
    assert told == [("inner_left_out", {"learners": [1, 2]})]


def test_a_learner_that_is_stalled_at_the_end_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All chunks are done; it owes a rest, and says nothing."""
    monkeypatch.setattr("allranks.torch.elastic.service.REST_S", 0.05)
    flat, told = FlatModel(nn.Linear(1, 1)), list[Any]()
    merging = Merging(flat.read(), flat.parameters, Nesterov(1.0, 0.0), Ledger(0, 2, 2))
    merging.owing = {1}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service = LearnerService(
            *(merging, flat, listener, "secret", 0.0),
            lambda event, **values: told.append({"event": event, **values}),
        )
        assert not service.is_done
        service.start()
        with service.changed:
            assert service.changed.wait_for(lambda: bool(told), 60)
        service.close()
    assert service.is_done and told == [{"event": "rest_left_out", "learners": [1]}]
    said = "note: the weights of the end lack the last findings of learners 1"
    assert in_words(told[0]) == [said]


# --- runs ---------------------------------------------------------------------------------

TASK = "decoupled_tasks:Noted"
STEPS = 72


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in read_events(run_dir) if row["event"] == name]


def check_all_is_in(run_dir: Path, summary: dict[str, Any]) -> None:
    """Every sample of every epoch is in the weights once, by the metrics of the merges."""
    rows = read_rows(run_dir / "metrics.jsonl")
    assert summary["steps"] == STEPS
    assert sum(row["samples"] for row in rows) == STEPS * BATCH


def test_a_process_that_was_started_alone_is_refused() -> None:
    """A loop of one's own has no synchronizer: it would train by itself, and say nothing."""
    with pytest.raises(RequestError) as refused:
        job_for(Job(strategy="decoupled"), World())
    assert "1 synchronizer, 1 learner" in refused.value.why


@pytest.mark.slow
def test_learners_are_on_nodes_as_the_ranks_of_other_strategies(
    nodes: Cluster, tmp_path: Path
) -> None:
    where = {"ranks": 2, "nodes": 2, "place": "simulated", "run_dir": str(tmp_path / "run")}
    resolved = resolve(TASK, {"strategy": "decoupled:every=4", **where})
    done = run_job(resolved, resources=replace(nodes, counts={0: 1, 1: 1}))
    ready = [e for e in read_events(done.run_dir) if e["event"] == "ready"]
    hosts = {int(e["rank"]): e["host"] for e in ready}
    assert hosts == {0: "node0", 1: "node0", 2: "node1"}
    check_all_is_in(done.run_dir, done.summary)


@pytest.mark.slow
def test_one_learner_that_asks_after_each_step_is_single(train: Train) -> None:
    flags = {"precision": "fp64", "steps": 20}
    ours = train("contract_tasks:Images", strategy="decoupled:every=1,lr=1,momentum=0", **flags)
    single = train("contract_tasks:Images", strategy="single", **flags)
    weights = [load_file(run.run_dir / "weights.safetensors") for run in (ours, single)]
    assert difference(*weights) < 1e-10
    assert ours.summary["eval"]["loss"] == pytest.approx(single.summary["eval"]["loss"], rel=1e-9)
    card, sent = ours.summary["card_bytes_per_step"], ours.summary["sent_bytes"]["gradients"]
    assert sent in (20 * card, 21 * card), "the weights to begin with, and after each step"


@pytest.mark.slow
def test_a_learner_goes_on_with_the_optimizer_that_it_had(train: Train, tmp_path: Path) -> None:
    """AdamW, stopped after 8 steps and taken up again: the bits of a run that nobody stopped."""
    flags: dict[str, Any] = {"precision": "fp64", "checkpoint_every": 8}
    kept, anew = ("decoupled:every=2,lr=0.7,momentum=0.9" + more for more in ("", ",inner=anew"))

    def ended(strategy: str, **more: Any) -> Any:
        result = train("contract_tasks:Plain", strategy=strategy, **flags, **more)
        return result, load_file(result.run_dir / "weights.safetensors")

    _, whole = ended(kept, steps=20)
    for strategy, is_exact in ((kept, True), (anew, False)):
        first, _ = ended(strategy, steps=8)
        second, found = ended(strategy, steps=20, resume=str(first.run_dir))
        assert second.summary["resumed_from_step"] == 8
        assert (difference(found, whole) == 0) == is_exact


@pytest.mark.slow
def test_a_learner_goes_on_with_what_it_had_not_brought(train: Train, tmp_path: Path) -> None:
    """AdamW in three fragments, ended by a fault, and taken up again from its checkpoint."""
    flags: dict[str, Any] = {"precision": "fp64", "checkpoint_every": 4, "steps": 20}
    flags["strategy"] = "decoupled:every=2,lr=0.7,momentum=0.9,fragments=3"
    whole, stopped = train("contract_tasks:Plain", **flags), str(tmp_path / "stopped")
    fault = "fail@rank=0,step=9 slow@rank=1,seconds=0.05"  # so that a save does not pass step 9
    with pytest.raises(ProgramError):
        train("contract_tasks:Plain", run_dir=stopped, inject=fault, **flags)
    again = train("contract_tasks:Plain", resume=stopped, **flags)
    assert again.summary["resumed_from_step"] in (4, 8)
    found = [load_file(one.run_dir / "weights.safetensors") for one in (whole, again)]
    assert difference(*found) == 0


@pytest.mark.slow
def test_a_job_that_is_over_goes_on_without_a_rest(train: Train) -> None:
    """All was brought at its end: nothing of it counts twice. One learner is `single`."""
    flags: dict[str, Any] = {"precision": "fp64", "checkpoint_every": 4}
    strategy = "decoupled:every=2,lr=1,momentum=0,fragments=3"
    first = train("contract_tasks:Plain", strategy=strategy, steps=8, **flags)
    again = train(
        "contract_tasks:Plain", strategy=strategy, steps=16, resume=str(first.run_dir), **flags
    )
    single = train("contract_tasks:Plain", strategy="single", steps=16, precision="fp64")
    found = [load_file(one.run_dir / "weights.safetensors") for one in (again, single)]
    assert difference(*found) < 1e-10


@pytest.mark.slow
def test_a_chunk_trained_meanwhile_is_that_of_a_plain_loop(train: Train) -> None:
    """What is on its way comes back one chunk later; without an outer momentum it is `single`."""

    def ended(strategy: str) -> dict[str, Any]:
        run = train("contract_tasks:Plain", strategy=strategy, precision="fp64", steps=12)
        return load_file(run.run_dir / "weights.safetensors")

    apart = ended("decoupled:every=1,overlap=1,lr=1,momentum=0")
    in_parts = ended("decoupled:every=2,overlap=1,lr=1,momentum=0,fragments=3")
    assert max(difference(one, ended("single")) for one in (apart, in_parts)) < 1e-10
    task, every, outer = contract_tasks.Plain(), 3, nesterov(0.7, 0.9)
    torch.manual_seed(0)
    model = task.model().double()
    optimizer, order = task.optimizer(model), Order(len(task.train_data()[0]), 24, 0, "keep")
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    begin, on_its_way = theta, None
    for step in range(12):
        chosen = order.batch(*divmod(step, order.steps_per_epoch))
        batch = [tensor[chosen] for tensor in task.train_data()]
        optimizer.zero_grad()
        task.loss(model(batch[0]), batch).mean().backward()
        optimizer.step()
        if (step + 1) % every == 0:
            found = {n: begin[n] - p.detach() for n, p in model.named_parameters()}
            if on_its_way is not None:
                theta, _ = outer(theta, on_its_way)
            begin, on_its_way = {n: w - found[n] for n, w in theta.items()}, found
            model.load_state_dict(begin)
    assert on_its_way is not None
    theta, _ = outer(theta, on_its_way)
    found = ended("decoupled:every=3,overlap=1,lr=0.7,momentum=0.9")
    assert difference(found, {name: weight.numpy() for name, weight in theta.items()}) < 1e-10


@pytest.mark.slow(most=4)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    "inject",
    [
        "kill@rank=2,step=-1 slow@rank=1,seconds=0.1,attempt=-1 slow@rank=3,seconds=0.1",
        "slow@rank=1,seconds=0.05,attempt=-1 slow@rank=2,seconds=0.01 slow@rank=3,seconds=0.01",
        "fail@rank=3,step=-1,attempt=-1 slow@rank=1,seconds=0.1 slow@rank=2,seconds=0.1",
    ],
    ids=["killed", "slow", "fails-again"],
)
def test_whatever_becomes_of_a_learner_all_samples_count_once(
    train: Train, inject: str, overlap: int
) -> None:
    fragments = 1 + 2 * overlap
    strategy = f"decoupled:every=4,quorum=2,grace_s=0.5,rejoins=1,overlap={overlap}"
    strategy += f",fragments={fragments}"
    result = train(TASK, strategy=strategy, ranks=3, inject=inject)
    check_all_is_in(result.run_dir, result.summary)
    lost = [event["rank"] for event in events(result.run_dir, "worker_lost")]
    joined = [event["learner"] for event in events(result.run_dir, "learner_joined")]
    if "kill" in inject:
        assert lost == [2] and joined.count(1) == 2, "it came again"
        (gone,) = events(result.run_dir, "learner_lost")
        assert gone["learner"] == 1 and len(gone["freed"]) == 1 + overlap
        assert all(one["samples"] in (16, 32) for one in gone["freed"])
        assert overlap or anomalies_in(gone)[0][1].endswith("of steps 0 to 3")
    elif "fail" in inject:
        assert lost == [3, 3] and joined.count(2) == 2, "once again, and no more"
    else:
        assert not lost and sorted(joined) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_synchronizer_that_dies_goes_on_from_its_checkpoint(train: Train, overlap: int) -> None:
    result = train(
        TASK,
        strategy=f"decoupled:every=2,overlap={overlap}",
        ranks=2,
        inject="kill@rank=0,at=save:committed slow@rank=1,seconds=0.01 slow@rank=2,seconds=0.01",
        checkpoint_every=10,
        max_restarts=1,
    )
    assert result.summary["steps"] == STEPS and result.summary["resumed_from_step"] >= 10
    joined = [event["learner"] for event in events(result.run_dir, "learner_joined")]
    assert sorted(joined) == [0, 0, 1, 1], "the same learners, which have waited"
    check_all_is_in(result.run_dir, result.summary)
    for rank in (1, 2):
        rows = list(read_rows(rank_events_path(result.run_dir, rank)))
        assert sum(row["event"] == "ready" for row in rows) == 1, "its process is the same"
    assert result.summary["restarts"] == 0


@pytest.mark.slow
def test_without_the_learners_that_must_be_left_the_job_fails(train: Train) -> None:
    strategy = "decoupled:every=4,least=2,rejoins=0"
    inject = "kill@rank=1,step=-1 slow@rank=2,seconds=0.02"
    with pytest.raises(ProgramError, match="learner 0"):
        train(TASK, strategy=strategy, ranks=2, inject=inject)

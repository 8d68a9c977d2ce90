"""The data of a task: opened when it is first needed, cut for this rank, the same on every rank."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from allranks.errors import RequestError
from allranks.job.job import AUTO, Job
from allranks.strategies.audits import default_every
from allranks.strategies.shards import Shares, largest_shard
from allranks.torch.checkpoint.state import kept_random_streams
from allranks.torch.data.batch import Cutting
from allranks.torch.data.batches import COLLATES_ALONE, GlobalBatches
from allranks.torch.data.evaluate import evaluate, try_evaluation
from allranks.torch.data.loaders import SamplerOrder, WholeLoader
from allranks.torch.data.open_data import Opened, open_data
from allranks.torch.data.sources import (
    MapSource,
    StreamSource,
    TensorRows,
    TensorSource,
    state_of_rows,
)
from allranks.torch.random.keyed_rng import seed_generators
from allranks.torch.strategies.base import Strategy
from allranks.torch.task import Task
from allranks.torch.witness.probing import Probed, digest_of_rows, probe
from allranks.training.engine.trainer import check_metrics, named, sets_of
from allranks.training.progress import Progress
from allranks.training.same_data import HASHES, check_same, digest_of, facts_of, identity

COLLATE_DRAWS_IN_EVALUATION = (
    "eval_data(): what makes batches of its samples draws random numbers, so metrics are those of "
    "changed samples (mixed, masked); eval_collate(samples) of the task is for the evaluation alone"
)
STATE_NOT_SAVED = (
    "has a state_dict, which no checkpoint has: a resume draws and reads the epoch anew, keyed by "
    "(seed, epoch), and passes over what was read; what it keeps from epoch to epoch begins anew"
)


@dataclass
class OpenedData:
    """The data of a task as it was opened, and what is known of it, by no rank in particular."""

    training: Opened | None = None
    evaluation: dict[str, Any] | None = None
    probed: dict[int, Probed] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    identities: dict[str, str] = field(default_factory=dict)
    """Texts that must be equal on all ranks, by what they are of."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a new rank must have, too, by what it is of: of data the kind, and so on."""
        texts = self.identities.items()
        return {n: {"digest": text} if n == "draws" else facts_of(text) for n, text in texts}


class TaskData:
    """The data of one rank for one task under one strategy: its batches, and its evaluation data.

    `notes` tell the user where the engine differs from the settings of the data, once it is open.
    """

    def __init__(
        self, task: Task, job: Job, strategy: Strategy, opened: OpenedData | None = None
    ) -> None:
        """`opened`: what was opened for another group of ranks of the same job."""
        self.task, self.job, self.strategy = task, job, strategy
        self.notes: list[str] = []
        self._batches: GlobalBatches | None = None
        self.opened_data = opened = OpenedData() if opened is None else opened
        self._eval_sources = opened.evaluation
        self._probed, self._compared = opened.probed, opened.compared

    @property
    def batches(self) -> GlobalBatches:
        """The global batches of the training, opened when they are first needed."""
        if self._batches is None:
            seed_generators(self.job.seed)  # a split drawn there is the same on every rank
            opened = self.opened_data.training
            if opened is None:
                opened = self._opened(self.task.train_data(), "train_data")
                self.opened_data.training = opened
            probed = self._probed.get(id(opened.source), Probed())
            if self.job.bitwise:
                probed.check_bitwise()
            if isinstance(opened.source, StreamSource) and self.task.loss_over == "batch":
                raise RequestError(
                    asked='a stream with loss_over = "batch"',
                    found="no rank knows how many samples the others have",
                    why="the outputs of all ranks are gathered, so their sizes must be known",
                    do="read the data as a map-style data set",
                )
            self._batches = GlobalBatches(
                source=opened.source,
                cutting=self._cutting(collate_draws=probed.collate_draws),
                batch_size=self.task.batch_size,
                last_batch="drop" if opened.drops_last else self.task.last_batch,
                seed=self.job.seed,
                precision=self.strategy.context.precision,
                prefetch=self.job.prefetch,
                order=opened.order,
                shuffles=opened.shuffles,
                collate_draws=probed.collate_draws,
                audit_every=self.audit_every,
            )
            alone = probed.collate_draws and not self.strategy.shard_alone
            self.notes += filter(None, (self._batches.note, COLLATES_ALONE if alone else ""))
        return self._batches

    def _cutting(self, *, collate_draws: bool) -> Cutting:
        """How a global batch is cut for this rank."""
        job, strategy = self.job, self.strategy
        by_shard = strategy.cuts_by_shard and job.micro_batch is None
        return Cutting(
            shards=self.task.shards,
            rank=strategy.data.rank,
            ranks=strategy.data.size,
            micro_batch=job.micro_batch,
            shard_alone=strategy.shard_alone,
            cut_for=job.cut_for,
            counts_passes=self._meets_in_passes or strategy.counts_passes,
            needs_spare=self._meets_in_passes or self.task.loss_over == "batch",
            collates_alone=collate_draws or by_shard,
            dealt=strategy.dealt,
        )

    @property
    def opened(self) -> GlobalBatches | None:
        """The same; `None` until they are first needed."""
        return self._batches

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """The metrics over `data`, or over the task's own; restores the random streams."""
        with kept_random_streams(self.strategy.comm.device):
            sources = self._evaluated(data)
            self._compare_evaluation(sources, of_task=data is None)
            means: dict[str, float] = {}
            is_check = self.job.brief and self.job.last_step is None  # a replay needs all of it
            most = self._chunk if is_check else None
            for name, source in sources.items():
                means |= named(name, evaluate(self.task, self.strategy, source, self._chunk, most))
            return means

    def rehearse(self) -> None:
        """Open the data and evaluate a few samples, so that errors show before the first update.

        Sends digests of the data, once.
        """
        if isinstance(training := self.batches.source, MapSource):
            training.check_draws()
        moves = self.job.checkpoint_every is not None or self.job.share == AUTO
        if isinstance(training, StreamSource) and moves:
            state_of_rows(training.rows(0, 0, 0))  # may refuse
        if self.job.elastic:
            self._check_elastic()
        if self.job.audit and isinstance(training, (StreamSource, WholeLoader)):
            if isinstance(training, WholeLoader):
                data = training.kind
            else:
                data = f"a {type(training.dataset).__name__}"
            raise RequestError(
                asked=f"--audit {self.job.audit}",
                found=f"train_data() is {data}, whose samples have no numbers",
                why="another rank reads the samples of a shard again, by their numbers",
                do="give a data set with samples by number, or leave --audit out",
            )
        self.compare_training()
        sources, names = self._evaluated(), dict[str, float]()
        self._compare_evaluation(sources)
        for name, source in sources.items():
            tried = try_evaluation(self.task, self.strategy, source, self._chunk, self.notes)
            names |= named(name, tried)
        check_metrics(self.job, names, self.task.plateau())

    def streams(self, done: Progress) -> dict[str, Any]:
        """The states of a stream's shards, which all ranks gather; {} for other data."""
        if self._batches is None or not isinstance(self._batches.source, StreamSource):
            return {}
        text = json.dumps(self._batches.states_of_shards(done.epoch, done.step_in_epoch))
        of_ranks = map(json.loads, self.strategy.comm.gather_texts(text))
        states = {shard: state for of_rank in of_ranks for shard, state in of_rank.items()}
        return {"streams": states}

    def load_streams(self, done: Progress, states: dict[str, str] | None) -> None:
        """Go on with what `streams` returned; `None` for data without streams."""
        if states is not None:
            by_shard = {int(shard): state for shard, state in states.items()}
            self.batches.load_states_of_shards(done.epoch, done.step_in_epoch, by_shard)

    def deal(self, shares: Shares, done: Progress) -> None:
        """Let the ranks own these shards after `done`; every rank calls this.

        Of streams it gathers where the shards are.
        """
        if self._batches is not None:
            states = self.streams(done).get("streams")
            self._batches.deal(shares, done)
            self.load_streams(done, states)

    def close(self) -> None:
        """Release the data, and the threads and processes that read it."""
        if self._batches is not None:
            self._batches.close()
        self._batches = self._eval_sources = None
        self.opened_data = OpenedData()

    def _check_elastic(self) -> None:
        """Raise `RequestError` for data that a new rank, or one that waited, may read otherwise.

        torch's own samplers draw an epoch from generators alone, which are keyed by its number.
        """
        source, order = self.batches.source, self.batches.order
        why = "a rank may read an epoch twice, or join in a later one; the data may count epochs"
        do = "give a data set with samples by number, without a sampler of its own"
        if order is not None and not order.is_of_torch:
            data = f"a DataLoader with its own {order.kind}"
        elif isinstance(source, WholeLoader):
            data = f"{source.kind}, which every rank reads whole"
        elif isinstance(source, StreamSource) and self._needs_state(source):
            data = f"a stream ({type(source.dataset).__name__}) that goes on from its state_dict()"
            why = "the state of its shards is lost with a rank, and a new rank has none"
            do = "let open(shard, epoch, seed, skip) skip, and give the stream skips = True; or "
            do += "leave --elastic out: with --max-restarts 3 it starts again from a checkpoint"
        else:
            return
        problem = f"train_data() is {data}"
        raise RequestError(asked=f"--elastic {self.job.elastic}", found=problem, why=why, do=do)

    def _needs_state(self, source: StreamSource) -> bool:
        """Whether a stream may be unable to `skip`, and no checkpoint gives its state back."""
        if self.strategy.agreement.cuts_state or getattr(source.dataset, "skips", False):
            return False
        return bool(state_of_rows(source.rows(0, 0, 0)))

    @property
    def audit_every(self) -> int:
        """Steps from audit to audit; 0 without `--audit`."""
        if not self.job.audit:
            return 0
        return self.job.audit_every or default_every(self.task.shards, self.strategy.data.size)

    @property
    def _meets_in_passes(self) -> bool:
        """Whether passes are collective for ranks that read different samples."""
        strategy = self.strategy
        meets = strategy.equal_passes and strategy.passes_meet_readers
        return meets and strategy.data.size > 1

    @property
    def _chunk(self) -> int:
        return largest_shard(self.task.batch_size, self.task.shards)

    def _evaluated(self, data: Any = None) -> dict[str, Any]:
        """A reader for each set of `data`, or of the task's own, opened once; {} for none."""
        if data is not None:
            return self._opened_sets(data)
        if self._eval_sources is None:
            seed_generators(self.job.seed)
            data = self.task.eval_data()
            self._eval_sources = {} if data is None else self._opened_sets(data)
            self.opened_data.evaluation = self._eval_sources
        return self._eval_sources

    def _opened_sets(self, data: Any) -> dict[str, Any]:
        return {name: self._opened(d, "eval_data").source for name, d in sets_of(data).items()}

    def _opened(self, data: Any, name: str) -> Opened:
        opened = open_data(data, self.task, self.job.seed, self.job.loader_workers, name)
        unsaved = not isinstance(opened.source, StreamSource)
        if unsaved and self.job.checkpoint_every is not None and (kind := _with_a_state(data)):
            self.notes.append(f"{name}(): {kind} {STATE_NOT_SAVED}")
        if isinstance(opened.source, MapSource):
            with kept_random_streams(self.strategy.comm.device):
                probed = self._probed[id(opened.source)] = probe(opened.source)
            self.notes += filter(None, (probed.note and f"{name}(): {probed.note}",))
            if name == "eval_data" and probed.collate_draws:
                self.notes.append(COLLATE_DRAWS_IN_EVALUATION)
        if opened.note:
            self.notes.append(opened.note)
        return opened

    def compare_training(self) -> None:
        """Raise if training data differ between ranks; once. Every rank calls this.

        Gathers some 150 bytes of text from every rank, and a fingerprint of a loader's first draws.
        """
        batches, comm = self.batches, self.strategy.comm
        if not self._compares or "train_data" in self._compared:
            return
        drawing = batches.source if isinstance(batches.source, WholeLoader) else batches.order
        texts = self.opened_data.identities
        if "train_data" not in texts:
            texts["train_data"] = self._identity_of(batches.source)
            texts["draws"] = "" if drawing is None else drawing.fingerprint()
        if comm.size == 1:
            return
        self._compared.add("train_data")
        check_same("train_data", comm.gather_texts(texts["train_data"]))
        if drawing is not None and len(set(comm.gather_texts(texts["draws"]))) > 1:
            raise _drawn_by_rank(drawing)

    def compare_anew(self) -> None:
        """Compare the task's data again, as some ranks are new; every rank calls this."""
        self._compared.clear()
        self.compare_training()
        self._compare_evaluation(self._evaluated())

    @property
    def _compares(self) -> bool:
        """Whether other ranks have the same data, may join with them, or verify the run."""
        job = self.job
        is_certified = job.bitwise and bool(job.digest_every or job.digest_at)
        return self.strategy.comm.size > 1 or bool(job.elastic) or is_certified

    def _compare_evaluation(self, sources: dict[str, Any], *, of_task: bool = True) -> None:
        """Raise if evaluation data differ between ranks, the task's once; every rank calls this."""
        comm, name = self.strategy.comm, "eval_data" if of_task else "evaluate"
        is_one = self.strategy.agreement.is_one_training
        if not self._compares or not is_one or name in self._compared:
            return
        texts = self.opened_data.identities if of_task else {}
        text = texts.get(name) or texts.setdefault(name, self._identity_of_sets(sources))
        if comm.size == 1:
            return
        if of_task:
            self._compared.add(name)
        check_same(name, comm.gather_texts(text))

    def _identity_of_sets(self, sources: dict[str, Any]) -> str:
        if sources.keys() <= {""}:
            return self._identity_of(sources.get(""))
        each = {name: json.loads(self._identity_of(source)) for name, source in sources.items()}
        digest = digest_of([{**one_set, HASHES: 0, "name": name} for name, one_set in each.items()])
        return identity(f"the sets {', '.join(each)}", None, digest)

    def _identity_of(self, source: Any) -> str:
        """A text that must be equal on all ranks."""
        if isinstance(source, TensorSource):
            return identity("tensors", len(source), digest_of_rows(source.tensors))
        if isinstance(source, MapSource):
            digest = self._probed[id(source)].digest
            if isinstance(source.dataset, TensorRows):
                digest = digest_of_rows(source.dataset.tensors)
            return identity(type(source.dataset).__name__, len(source), digest)
        if isinstance(source, StreamSource):
            return identity(f"a stream ({type(source.dataset).__name__})", None, "")
        return identity("nothing" if source is None else "a DataLoader", None, "")


def _drawn_by_rank(drawing: WholeLoader | SamplerOrder) -> RequestError:
    """The error for data whose first epoch is another one on each rank."""
    if isinstance(drawing, SamplerOrder):
        return RequestError(
            asked="train_data() of the task: a DataLoader",
            found=f"the first epoch of its {drawing.kind} is not the same on all ranks",
            why="each rank uses its own part of the same draws, so all must draw the same",
            do="remove what is cut by rank; draw from torch's generator alone, or return the "
            "data set without a sampler",
        )
    return RequestError(
        asked=f"train_data() of the task: {drawing.kind}",
        found="its first epoch is not the same on all ranks: other samples on each",
        why="every rank reads all of it, and the engine gives each rank its own rows",
        do="leave the sharding by rank out (rank and world size, RANK, split_dataset_by_node): the "
        "engine does it; if it has none, draw from the generators of Python, NumPy or torch",
    )


def _with_a_state(data: Any) -> str:
    """The name of the class, of the data or its sampler, that has a `state_dict`."""
    parts = [data]
    if isinstance(data, DataLoader):
        inner = getattr(data.batch_sampler, "sampler", None)
        parts += [data.dataset, data.sampler, data.batch_sampler, inner]
    for part in parts:
        if all(callable(getattr(part, n, None)) for n in ("state_dict", "load_state_dict")):
            return type(part).__qualname__
    return ""

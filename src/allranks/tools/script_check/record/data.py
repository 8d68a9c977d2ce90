"""The samples that a rank takes from its loaders, pass by pass, and whether it trains on them.

The indices come from the loader's sampler, in the order of the batches. Digests of some samples
show whether two ranks share one dataset.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from allranks.tools.script_check.record.facts import (
    ScriptFacts,
    StepCounts,
    drawn_since,
    note_after,
    random_states,
    rows_of,
    wrap,
)

MOST_IDS, MOST_PASSES, MOST_ROWS, MOST_DRAWS = 65_536, 3, 256, 8


class LoaderPass:
    """One pass over a loader: its batches so far."""

    def __init__(self, loader: int, number: int, backwards: int) -> None:
        self.loader, self.number, self.backwards = loader, number, backwards
        self.requested: deque[Any] = deque()
        self.ids: list[int] = []
        self.rows: dict[int, list[int]] = {}
        self.sizes: list[list[int]] = []
        self.order, self.samples, self.batches = 0, 0, 0
        self.grad, self.ended, self.epochs_set = True, False, 0

    def add(self, torch: Any, data: Any) -> None:
        """Count a batch."""
        ids = self.requested.popleft() if self.requested else None
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        ids = [int(index) for index in ids if hasattr(index, "__index__")]
        if self.batches == 0:
            self.grad = torch.is_grad_enabled()
        self.batches += 1
        self.samples += len(ids)
        self.order = crc32(array("q", ids).tobytes(), self.order)
        if self.number < MOST_PASSES and len(self.ids) < MOST_IDS:
            self.ids += ids
        if self.number < MOST_PASSES and ids and len(self.rows) < MOST_ROWS:
            self.rows.update(zip(ids, rows_of(torch, data, len(ids)), strict=True))
        if self.sizes and self.sizes[-1][0] == len(ids):
            self.sizes[-1][1] += 1
        else:
            self.sizes.append([len(ids), 1])


class Loaders:
    """All loaders and samplers of this process."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self._created_at: WeakKeyDictionary[Any, tuple[str, int] | None] = WeakKeyDictionary()
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._passes: dict[int, LoaderPass] = {}
        self._counts: dict[int, int] = {}
        self._of_iterator: WeakKeyDictionary[Any, LoaderPass] = WeakKeyDictionary()
        self._epochs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def install(self) -> None:
        """Wrap the loader, its iterators, and the distributed sampler."""
        data, guarded = self.torch.utils.data, self.facts.guarded
        sampler, iterator = data.distributed.DistributedSampler, data.dataloader._BaseDataLoaderIter
        note_after(data.DataLoader, "__init__", guarded(self._note_line))
        note_after(sampler, "__init__", guarded(self._note_line))
        note_after(sampler, "set_epoch", guarded(self._note_epoch))
        note_after(iterator, "__init__", guarded(self.begin))
        note_after(iterator, "_reset", guarded(self._begin_again))
        note_after(iterator, "_next_index", guarded(self._requested))
        drawn, receive = guarded(self._before), guarded(self._receive)
        ended = guarded(self._ended)

        def following(original: Callable[[Any], Any], iterator: Any) -> Any:
            before = drawn(iterator)
            try:
                batch = original(iterator)
            except StopIteration:
                ended(iterator)
                raise
            receive(iterator, batch, before)
            return batch

        wrap(iterator, "__next__", following)

    def finish(self) -> None:
        """Write the passes that are not written yet."""
        for loader in list(self._passes):
            self._write_pass(loader)

    def _note_line(self, result: None, thing: Any, *args: Any, **kwargs: Any) -> None:
        self._created_at.setdefault(thing, self.facts.where())

    def _note_epoch(self, result: None, sampler: Any, *args: Any, **kwargs: Any) -> None:
        self._epochs[sampler] = self._epochs.get(sampler, 0) + 1

    def _begin_again(
        self, result: None, iterator: Any, loader: Any, first_iter: bool = False
    ) -> None:
        if not first_iter:
            self.begin(result, iterator, loader)

    def begin(self, result: None, iterator: Any, loader: Any) -> None:
        """Begin a pass over `loader`; before the first one, write the loader itself."""
        source = self._source_of(loader)
        number = self._numbers.get(source)
        if number is None:
            number = self._numbers[source] = len(self._counts)
            self._write_loader(loader, number)
        for loader_number, loader_pass in list(self._passes.items()):
            if loader_pass.ended or loader_number == number:  # backwards after a pass belong to it
                self._write_pass(loader_number)
        count = self._counts[number] = self._counts.get(number, -1) + 1
        loader_pass = self._passes[number] = LoaderPass(number, count, self.progress.backwards)
        self.progress.begun = number, count
        loader_pass.epochs_set = _get(self._epochs, _sampler_of(loader)) or 0
        self._of_iterator[iterator] = loader_pass

    def _source_of(self, loader: Any) -> Any:
        """The object that orders samples: one sampler may have a new loader in each epoch."""
        sampler = _sampler_of(loader)
        distributed = isinstance(sampler, self.torch.utils.data.distributed.DistributedSampler)
        return sampler if distributed else loader

    def _write_loader(self, loader: Any, number: int) -> None:
        sampler = _sampler_of(loader)
        self.facts.write(
            "loader",
            loader=number,
            where=self._created_at.get(loader),
            length=_length_of(loader.dataset),
            sampler=type(sampler).__name__,
            sampler_where=_get(self._created_at, sampler),
            shuffle=getattr(sampler, "shuffle", None),
            replicas=getattr(sampler, "num_replicas", None),
            batch_size=loader.batch_size,
            workers=loader.num_workers,
            seeded=loader.worker_init_fn is not None,
            subset=self._subset_of(loader.dataset),
        )

    def _subset_of(self, dataset: Any) -> int | None:
        """A digest of the first indices that the `Subset`s of a dataset take; None without one."""
        digest = None
        while isinstance(dataset, self.torch.utils.data.Subset):
            indices = array("q", map(int, islice(dataset.indices, MOST_IDS)))
            digest, dataset = crc32(indices.tobytes(), digest or 0), dataset.dataset
        return digest

    def _requested(self, index: Any, iterator: Any) -> None:
        self._of_iterator[iterator].requested.append(index)

    def _before(self, iterator: Any) -> dict[str, int] | None:
        """Generator states before a batch, for early batches; the first one starts the sampler."""
        loader_pass = self._of_iterator[iterator]
        watched = loader_pass.number < MOST_PASSES and 0 < loader_pass.batches <= MOST_DRAWS
        watched = watched and iterator._num_workers == 0
        return random_states(self.torch) if watched else None

    def _receive(self, iterator: Any, batch: Any, before: dict[str, int] | None) -> None:
        loader_pass = self._of_iterator[iterator]
        loader_pass.add(self.torch, batch)
        self.progress.batch = loader_pass.loader, loader_pass.number, loader_pass.batches
        if before and (drew := drawn_since(self.torch, before)):
            loader, number = loader_pass.loader, loader_pass.number * 1000 + loader_pass.batches
            self.facts.write(
                "draws", of="loader", id=loader, number=number, before=drew, where=None
            )

    def _ended(self, iterator: Any) -> None:
        loader_pass = self._of_iterator[iterator]
        loader_pass.ended = True
        if loader_pass.batches:
            self.progress.last_pass = loader_pass.loader, loader_pass.number

    def _write_pass(self, loader: int) -> None:
        loader_pass = self._passes.pop(loader)
        self.facts.write(
            "pass",
            loader=loader_pass.loader,
            number=loader_pass.number,
            samples=loader_pass.samples,
            order=loader_pass.order,
            sizes=loader_pass.sizes[:1000],
            ids=loader_pass.ids[:MOST_IDS],
            rows={str(i): row for i, row in loader_pass.rows.items()},
            ended=loader_pass.ended,
            grad=loader_pass.grad,
            backwards=self.progress.backwards - loader_pass.backwards if loader_pass.grad else 0,
            epochs_set=loader_pass.epochs_set,
        )


def _length_of(dataset: Any) -> int | None:
    """The number of samples; None for a stream, which may raise instead."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _sampler_of(loader: Any) -> Any:
    """The sampler of single samples, inside the batch sampler."""
    sampler = loader.sampler
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", sampler) if batches is not None else sampler


def _get(known: WeakKeyDictionary[Any, Any], thing: Any) -> Any:
    """The entry for `thing`; None for objects such as lists, which have no weak references."""
    return known.get(thing) if type(thing).__weakrefoffset__ else None


# --- workers -------------------------------------------------------------------------------------
# Random numbers that the workers of a loader draw: each worker writes the generator states.
#
# A worker is a fork of its rank, and writes its own file: `workers/RANK-PID.…`. Only its first
# batches are recorded.


FOLDER = "workers"
MOST_FETCHED, MOST_WORKER_PASSES = 6, 3


class Workers:
    """Records the draws of a worker. Does nothing in the process of a rank."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self._fetched = 0

    def install(self) -> None:
        """Wrap the fetcher, which reads the samples of a batch."""
        info = self.torch.utils.data.get_worker_info

        def fetching(original: Callable[[Any, Any], Any], fetcher: Any, index: Any) -> Any:
            worker, begun = info(), self.progress.begun
            is_early = begun is not None and begun[1] < MOST_WORKER_PASSES
            if worker is None or not is_early or self._fetched >= MOST_FETCHED:
                return original(fetcher, index)
            before = random_states(self.torch)
            batch = original(fetcher, index)
            self._write_draws(worker.id, before)
            return batch

        fetcher = self.torch.utils.data._utils.fetch._MapDatasetFetcher
        wrap(fetcher, "fetch", fetching)

    def _write_draws(self, worker: int, before: dict[str, int]) -> None:
        drew = drawn_since(self.torch, before)
        number, self._fetched = self._fetched, self._fetched + 1
        if not drew or self.progress.begun is None:
            return
        loader, pass_number = self.progress.begun
        fact = {"fact": "worker", "loader": loader, "pass": pass_number, "worker": worker}
        folder = os.path.join(self.facts.folder, FOLDER)
        name = f"{os.getppid()}-{loader}-{pass_number}-{worker}.jsonl"
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, name), "a") as file:
                file.write(json.dumps({**fact, "number": number, "before": drew}) + "\n")
        except OSError:  # a recorder never ends a script
            self._fetched = MOST_FETCHED

"""Which samples a rank takes from its loaders, pass by pass, and whether it trains on them.

The indices are those that the loader's sampler gave, in the order in which batches come out of it;
the digests of some samples tell whether two ranks have one dataset or each its own.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from allranks.tools.script_check.record.facts import (
    ScriptFacts,
    StepCounts,
    random_states,
    rows_of,
    wrap,
)

MOST_IDS, MOST_PASSES, MOST_ROWS, MOST_DRAWS = 65_536, 3, 256, 8


class LoaderPass:
    """One pass over a loader: what came out of it so far."""

    def __init__(self, loader: int, number: int, backwards: int) -> None:
        self.loader, self.number, self.backwards = loader, number, backwards
        self.asked: deque[Any] = deque()
        self.ids: list[int] = []
        self.rows: dict[int, list[int]] = {}
        self.sizes: list[list[int]] = []
        self.order, self.samples, self.batches = 0, 0, 0
        self.grad, self.ended, self.epochs_set = True, False, 0

    def take(self, torch: Any, data: Any) -> None:
        """A batch came out."""
        ids = self.asked.popleft() if self.asked else None
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        ids = [int(one) for one in ids if hasattr(one, "__index__")]
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
        self._made: WeakKeyDictionary[Any, tuple[str, int] | None] = WeakKeyDictionary()
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._passes: dict[int, LoaderPass] = {}
        self._counts: dict[int, int] = {}
        self._of_iterator: WeakKeyDictionary[Any, LoaderPass] = WeakKeyDictionary()
        self._epochs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def install(self) -> None:
        """Wrap the loader, its iterators, and the distributed sampler."""
        data = self.torch.utils.data
        made, epoch = self.facts.guarded(self._note_made), self.facts.guarded(self._note_epoch)
        begin, take = self.facts.guarded(self.begin), self.facts.guarded(self._take)
        ended, asked = self.facts.guarded(self._ended), self.facts.guarded(self._asked)
        wrap(data.DataLoader, "__init__", lambda own: _then(own, made))
        wrap(data.distributed.DistributedSampler, "__init__", lambda own: _then(own, made))
        wrap(data.distributed.DistributedSampler, "set_epoch", lambda own: _then(own, epoch))
        iterator = data.dataloader._BaseDataLoaderIter
        wrap(iterator, "__init__", lambda own: _then(own, begin))

        def reset(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(self: Any, loader: Any, first_iter: bool = False) -> None:
                own(self, loader, first_iter)
                if not first_iter:
                    begin(self, loader)

            return inner

        def next_index(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(self: Any) -> Any:
                index = own(self)
                asked(self, index)
                return index

            return inner

        def following(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(self: Any) -> Any:
                before = drawn(self)
                try:
                    batch = own(self)
                except StopIteration:
                    ended(self)
                    raise
                take(self, batch, before)
                return batch

            return inner

        drawn = self.facts.guarded(self._before)
        wrap(iterator, "_reset", reset)
        wrap(iterator, "_next_index", next_index)
        wrap(iterator, "__next__", following)

    def finish(self) -> None:
        """Tell the passes that were not told yet."""
        for loader in list(self._passes):
            self._tell(loader)

    def _note_made(self, thing: Any, *args: Any, **kwargs: Any) -> None:
        self._made.setdefault(thing, self.facts.where())

    def _note_epoch(self, sampler: Any, *args: Any, **kwargs: Any) -> None:
        self._epochs[sampler] = self._epochs.get(sampler, 0) + 1

    def begin(self, iterator: Any, loader: Any) -> None:
        """A new pass over `loader`, which is told of once before its first."""
        source = self._source_of(loader)
        number = self._numbers.get(source)
        if number is None:
            number = self._numbers[source] = len(self._counts)
            self._tell_loader(loader, number)
        for loader_number, one in list(self._passes.items()):
            if one.ended or loader_number == number:  # what is trained after a pass is of it
                self._tell(loader_number)
        count = self._counts[number] = self._counts.get(number, -1) + 1
        one = self._passes[number] = LoaderPass(number, count, self.progress.backwards)
        self.progress.begun = number, count
        one.epochs_set = _get(self._epochs, _sampler_of(loader)) or 0
        self._of_iterator[iterator] = one

    def _source_of(self, loader: Any) -> Any:
        """What its order comes from: a loader may be made anew for each epoch of one sampler."""
        sampler = _sampler_of(loader)
        distributed = isinstance(sampler, self.torch.utils.data.distributed.DistributedSampler)
        return sampler if distributed else loader

    def _tell_loader(self, loader: Any, number: int) -> None:
        sampler = _sampler_of(loader)
        self.facts.tell(
            "loader",
            loader=number,
            where=self._made.get(loader),
            length=_length_of(loader.dataset),
            sampler=type(sampler).__name__,
            sampler_where=_get(self._made, sampler),
            shuffle=getattr(sampler, "shuffle", None),
            replicas=getattr(sampler, "num_replicas", None),
            batch_size=loader.batch_size,
            workers=loader.num_workers,
            seeded=loader.worker_init_fn is not None,
        )

    def _asked(self, iterator: Any, index: Any) -> None:
        self._of_iterator[iterator].asked.append(index)

    def _before(self, iterator: Any) -> dict[str, int] | None:
        """The generators before a batch, where draws are looked at: the first begins a sampler."""
        one = self._of_iterator[iterator]
        watched = one.number < MOST_PASSES and 0 < one.batches <= MOST_DRAWS
        watched = watched and iterator._num_workers == 0
        return random_states(self.torch) if watched else None

    def _take(self, iterator: Any, batch: Any, before: dict[str, int] | None) -> None:
        one = self._of_iterator[iterator]
        one.take(self.torch, batch)
        self.progress.batch = one.loader, one.number, one.batches
        if before:
            after = random_states(self.torch)
            drew = {name: state for name, state in before.items() if after.get(name) != state}
            if drew:
                number = one.number * 1000 + one.batches
                self.facts.tell(
                    "draws", of="loader", id=one.loader, number=number, before=drew, where=None
                )

    def _ended(self, iterator: Any) -> None:
        one = self._of_iterator[iterator]
        one.ended = True
        if one.batches:
            self.progress.last_pass = one.loader, one.number

    def _tell(self, loader: int) -> None:
        one = self._passes.pop(loader)
        self.facts.tell(
            "pass",
            loader=one.loader,
            number=one.number,
            samples=one.samples,
            order=one.order,
            sizes=one.sizes[:1000],
            ids=one.ids[:MOST_IDS],
            rows={str(i): row for i, row in one.rows.items()},
            ended=one.ended,
            grad=one.grad,
            backwards=self.progress.backwards - one.backwards if one.grad else 0,
            epochs_set=one.epochs_set,
        )


def _length_of(dataset: Any) -> int | None:
    """How many samples it has; None for a stream, which may say so with an error."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _sampler_of(loader: Any) -> Any:
    """The sampler of single samples, below the one that makes batches of them."""
    sampler = loader.sampler
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", sampler) if batches is not None else sampler


def _get(known: WeakKeyDictionary[Any, Any], thing: Any) -> Any:
    """What is known of it; None too for a list, to which no weak reference can be."""
    return known.get(thing) if type(thing).__weakrefoffset__ else None


def _then(own: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, and `after` with the same arguments."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        after(*args, **kwargs)
        return result

    return both


# --- workers -------------------------------------------------------------------------------------
# Random numbers that the workers of a loader draw: in which states, told by each worker.
#
# A worker is a fork of its rank, and writes a file of its own: `workers/RANK-PID.…`. Its first
# batches are looked at.


FOLDER = "workers"
MOST_FETCHED, MOST_WORKER_PASSES = 6, 3


class Workers:
    """In a worker: what it draws. In the process of a rank it does nothing."""

    def __init__(self, torch: Any, facts: ScriptFacts, progress: StepCounts) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self._fetched = 0

    def install(self) -> None:
        """Wrap what reads the samples of a batch."""
        info = self.torch.utils.data.get_worker_info

        def fetching(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(fetcher: Any, index: Any) -> Any:
                worker, begun = info(), self.progress.begun
                is_early = begun is not None and begun[1] < MOST_WORKER_PASSES
                if worker is None or not is_early or self._fetched >= MOST_FETCHED:
                    return own(fetcher, index)
                before = random_states(self.torch)
                batch = own(fetcher, index)
                self._tell(worker.id, before)
                return batch

            return inner

        fetcher = self.torch.utils.data._utils.fetch._MapDatasetFetcher
        wrap(fetcher, "fetch", fetching)

    def _tell(self, worker: int, before: dict[str, int]) -> None:
        after = random_states(self.torch)
        drew = {name: state for name, state in before.items() if after.get(name) != state}
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
        except OSError:  # what looks on never ends a script
            self._fetched = MOST_FETCHED

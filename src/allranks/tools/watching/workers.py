"""Random numbers that the workers of a loader draw: in which states, told by each worker.

A worker is a fork of its rank, and writes a file of its own: `workers/RANK-PID.…`. Its first
batches are looked at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from allranks.tools.watching.facts import Facts, wrap
from allranks.tools.watching.numbers import random_states
from allranks.tools.watching.progress import Progress

FOLDER = "workers"
MOST_FETCHED, MOST_PASSES = 6, 3


class Workers:
    """In a worker: what it draws. In the process of a rank it does nothing."""

    def __init__(self, torch: Any, facts: Facts, progress: Progress) -> None:
        self.torch, self.facts, self.progress = torch, facts, progress
        self._fetched = 0

    def install(self) -> None:
        """Wrap what reads the samples of a batch."""
        info = self.torch.utils.data.get_worker_info

        def fetching(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(fetcher: Any, index: Any) -> Any:
                worker, begun = info(), self.progress.begun
                is_early = begun is not None and begun[1] < MOST_PASSES
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

"""When the ranks of a job stop that were asked to, before the training is at its end.

Ranks that step together hear with the step that one of them was asked to stop. Ranks that train
apart do not, so they agree to stop together after the last of the steps that they have reached.
"""

from __future__ import annotations

import json

from allranks.checkpoint.commit import Ranks


class StopAgreement:
    """Where the steps of a rank of `comm` end; with `together` all ranks step as one."""

    def __init__(self, comm: Ranks, together: bool) -> None:
        self.comm, self.together = comm, together
        self._at: int | None = None

    def should_stop(self, step: int, asked: bool) -> bool:
        """Whether to stop after this step; every rank calls this after each."""
        if self.together:
            return asked
        if asked and self._at is None:
            self._meet(step, asked=True)
        return self._at is not None and step >= self._at

    def rank_finished(self, step: int) -> bool:
        """This rank has no step left. Returns whether it is a stop; every rank calls this once.

        It is one if ranks that train apart were asked to stop before they came to their ends.
        """
        if self.together:
            return False
        return self._at is not None or self._meet(step, asked=False)

    def _meet(self, step: int, asked: bool) -> bool:
        """Agree on the last step; returns whether any rank was asked. Each calls this once."""
        said = [json.loads(text) for text in self.comm.gather_texts(json.dumps([step, asked]))]
        self._at = max(reached for reached, _ in said)
        return any(was_asked for _, was_asked in said)

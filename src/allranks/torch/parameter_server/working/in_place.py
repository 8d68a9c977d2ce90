"""The weights that a worker reads where servers of its host have them (`memory`)."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.errors import RequestError
from allranks.launcher.nodes.channel import Disconnected, Message
from allranks.torch.machine import flip_one_bit
from allranks.torch.parameter_server.flat import Flat
from allranks.torch.parameter_server.memory import ReadWeights
from allranks.torch.parameter_server.strategy import ParameterServer
from allranks.torch.shared_memory.segment import COPIES, READS


class InPlace:
    """Which of the servers' weights are read in place, and that nobody writes there.

    The first pass has pages of its own where it writes; then `settle` lets go of writing.
    """

    def __init__(self, strategy: ParameterServer) -> None:
        self._strategy = strategy
        self._said: dict[int, Message] = {}
        self._read: dict[int, ReadWeights] = {}
        self._is_settled = self._is_away = False

    def open(self, server: int, said: Message) -> Flat | None:
        """The weights of a server that `said` where they are; `None` where they are not read."""
        self._is_settled = self._is_away = False
        self._read.pop(server, None)
        found = ReadWeights.opened(self._strategy.layouts[server], said, COPIES)
        if found is None:
            return None
        self._said[server], self._read[server] = said, found
        return found.flat

    def reads(self, server: int) -> bool:
        """Whether this one's are read in place."""
        return server in self._read

    def settle(self, weights: list[Flat]) -> None:
        """Once a pass is over, and has written nothing: nothing can be written from now on.

        Raises `RequestError` where it has, also unseen by torch's count.
        """
        if self._is_settled or self._is_away:
            return
        for server, tried in list(self._read.items()):
            found = ReadWeights.opened(self._strategy.layouts[server], self._said[server], READS)
            if found is None:
                raise Disconnected(f"server {server} is gone")
            if not tried.is_as(found):
                raise weights_written(self._strategy.name, ["weights"])
            self._read[server], weights[server] = found, found.flat
            self._lay(found)
        self._is_settled = True

    def corrupt(self) -> None:
        """Flip a bit of the first weight, of this worker alone, until it pulls again."""
        first = self._strategy.parameters[0]
        if self._read:
            first.data, self._is_away = first.data.clone(), True
        flip_one_bit(first)

    def come_back(self) -> None:
        """Weights are pulled: what was corrupted is gone."""
        if self._is_away:
            for found in self._read.values():
                self._lay(found)
        self._is_away = False

    def _lay(self, found: ReadWeights) -> None:
        found.flat.be_memory_of(self._strategy.parameters, has_theirs=True)


def weights_written(strategy: str, names: Sequence[str]) -> RequestError:
    """What to say of weights that forward or backward of a worker has written."""
    return RequestError(
        asked=f"--strategy {strategy}",
        found=f"the model writes {', '.join(names)} in its forward or backward pass",
        why="servers hold the weights, and update them by gradients alone",
        do="compute what is used from the weights, or take another strategy",
    )

"""What torch gets back from a collective in shared memory: how to wait for it, and what it made."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from allranks.torch.shared_memory.futures import future_of
from allranks.torch.shared_memory.operands import seconds_in

FOR_EVER = timedelta(0)  # as torch says it; the group's own timeout holds then
SAYS = "shared memory: "


class RankLost(RuntimeError):
    """A collective that cannot end: rank `rank` of the group, `job_rank` of the job, is why.

    `reason` is "died", "stopped", "left", or "contradiction": it made another collective.
    """

    def __init__(self, message: str, rank: int, job_rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank, self.job_rank, self.reason = rank, job_rank, reason


def rank_lost(lost: Any, ranks: Sequence[int]) -> RankLost:
    """The library's error in words of the job, whose ranks `ranks` are those of the group."""
    rank, reason = int(lost.rank), str(lost.reason)

    def of_job(rank: int) -> int:
        return ranks[rank] if 0 <= rank < len(ranks) else rank

    job_rank = of_job(rank)
    is_mismatch = reason == "contradiction"
    told = re.sub(r"rank (\d+)( of \d+)?", lambda said: f"rank {of_job(int(said[1]))}", str(lost))
    message = f"{'collective mismatch' if is_mismatch else 'peer lost'}: {told}"
    return RankLost(SAYS + message, rank, job_rank, reason)


def begin_event(title: str) -> Callable[[], object]:
    """An event of torch's profiler that begins now; what is returned ends it.

    It ends in a thread of its own: so the profiler takes it for one beside the thread that began
    it, and not for one that encloses what that does meanwhile.
    """
    event = torch.ops.profiler._record_function_enter_new(title, None)

    def end() -> None:
        leave = torch.ops.profiler._record_function_exit._RecordFunction
        thread = threading.Thread(target=leave, args=(event,))
        thread.start()
        thread.join()

    return end


class SharedMemoryWork(dist.Work):
    """One call of torch under way: the `ops` of the library that it takes, and what follows them.

    `tensors` is what the call gives back, `kept` the memory that must stay until it is over.
    `afterwards` runs once, in whoever waits first: it writes what came to where torch wants it.
    `seconds` is how long a wait lasts that says nothing else. The group holds every work until it
    is over: to drop one neither stops it nor frees its memory.
    """

    _end_event: Callable[[], object] | None = None
    _error: BaseException | None = None
    _source = -1

    def __init__(
        self,
        group: Any,
        ops: Sequence[Any],
        tensors: list[Tensor],
        kept: object = (),
        afterwards: Sequence[Callable[[], object]] = (),
        seconds: float = 0.0,
    ) -> None:
        super().__init__()
        self.group, self.ops, self.tensors, self.kept = group, ops, tensors, kept
        self.afterwards, self.seconds = afterwards, seconds
        self._is_over = not ops and not afterwards
        self._lock = threading.Lock()
        if not self._is_over:
            group.under_way.add(self)

    def wait(self, timeout: timedelta | float = FOR_EVER) -> bool:
        """Return when it is done; raises `RankLost`, or `RuntimeError` when the time is up.

        After that it goes on, and can be waited for again.
        """
        if not self._is_over:
            seconds = seconds_in(timeout) if timeout else self.seconds
            if not self.drive(seconds):
                raise RuntimeError(
                    f"{SAYS}Timed out waiting {seconds:g} s for a collective; it goes on"
                )
        if self._error is not None:
            raise self._error
        return True

    def drive(self, seconds: float) -> bool:
        """Work on it for so long at most; whether it is over, well or not."""
        if self._is_over:
            return True
        try:
            ops = self.ops
            if len(ops) == 1:
                if not ops[0].wait(seconds):
                    return False
            else:
                until = time.monotonic() + seconds
                for op in ops:
                    if not op.wait(max(0.0, until - time.monotonic())):
                        return False
        except self.group.lost_class as lost:
            self._end(rank_lost(lost, self.group.ranks))
        except RuntimeError as error:
            self._end(error)
        else:
            self._end(None)
        return True

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._is_over:
                return
            try:
                if error is None:
                    for step in self.afterwards:
                        step()
            except RuntimeError as failed:
                error = failed
            self._source = self.ops[0].source if self.ops else -1
            self._error, self._is_over = error, True
            self.ops, self.kept, self.afterwards = (), (), ()
            self.group.under_way.discard(self)
            if self._end_event is not None:
                self._end_event()

    def record(self, title: str) -> None:
        """Show it to the profiler from now on until it is over."""
        end = begin_event(title)
        with self._lock:
            if not self._is_over:
                self._end_event = end
                return
        end()

    def is_completed(self) -> bool:
        return self._is_over or self.drive(0)

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        self.wait()
        return self.tensors

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Which rank of the group sent what this one received."""
        self.wait()
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """A future of the tensors; its callbacks run in the thread that completes futures."""
        return future_of(self, self.result)

    def boxed(self) -> Any:
        """As an object of TorchScript, which does not hold this one: it holds the future."""
        c10d: Any = torch._C._distributed_c10d
        return c10d._create_work_from_future(self.get_future()).boxed()

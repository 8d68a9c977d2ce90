"""The `Work` of a collective in shared memory: how to wait for it, its result, and its future.

Torch's DDP and `work.get_future().then(…)` expect a callback when a collective is over, without a
wait. One thread of the process waits for them, as long as there are futures. While it waits, the
library drives all collectives of the process. There is never a thread per wait.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from allranks.torch.shared_memory.operands import PostedCall

LOOK_S = 0.02  # the longest delay of a future which is done while the thread waits for another
LINGER_S = 2.0  # the next training step has futures again, and a thread takes time to start
NAME = "allranks-shared-memory-futures"
at_rest: list[Callable[[], None]] = []  # called when the thread has no reference to an op


class _Completer:
    """The futures whose work is not over, and the thread that completes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[GroupWork, Any]] = []
        self._thread: threading.Thread | None = None
        self._stays = True

    def add(self, work: GroupWork, future: Any) -> None:
        with self._changed:
            self._waiting.append((work, future))
            self._stays = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
                self._thread.start()
            self._changed.notify()

    def end_soon(self) -> None:
        """The thread ends once no future waits, instead of lingering."""
        with self._changed:
            self._stays = False
            self._changed.notify()

    def _run(self) -> None:
        while True:
            for call in at_rest:
                call()
            with self._changed:
                while not self._waiting:
                    if not self._stays or not self._changed.wait(LINGER_S):
                        if self._waiting:
                            break
                        self._thread = None
                        return
                waiting = list(self._waiting)
            waiting[0][0].drive(LOOK_S)
            over = [pair for pair in waiting if pair[0].drive(0)]
            with self._changed:
                self._waiting = [pair for pair in self._waiting if pair not in over]
            for _, future in over:
                future.set_result(None)


def future_of(work: GroupWork, outputs: Callable[[], object]) -> Any:
    """A future of what `outputs` returns or raises once `work` is over."""
    over: Any = torch.futures.Future()
    future = over.then(lambda _: outputs())  # its exception reaches C++, too
    if work.drive(0):
        over.set_result(None)
    else:
        _completer.add(work, over)
    return future


def end_soon() -> None:
    """The last group is gone: the thread need not linger for another future."""
    _completer.end_soon()


def _forget() -> None:
    global _completer
    _completer = _Completer()  # in a child of a fork there is no thread


_completer = _Completer()
os.register_at_fork(after_in_child=_forget)


FOR_EVER = timedelta(0)  # torch's default; the group's timeout applies
SAYS = "shared memory: "


class RankLost(RuntimeError):
    """A collective which cannot end, because of rank `rank` of the group, `job_rank` of the job.

    `reason` is "died", "stopped", "left", or "contradiction": that rank called another collective.
    """

    def __init__(self, message: str, rank: int, job_rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank, self.job_rank, self.reason = rank, job_rank, reason


def rank_lost(lost: Any, ranks: Sequence[int]) -> RankLost:
    """The library's error with ranks of the job: `ranks` are the members of the group."""
    rank, reason = int(lost.rank), str(lost.reason)

    def of_job(rank: int) -> int:
        return ranks[rank] if 0 <= rank < len(ranks) else rank

    job_rank = of_job(rank)
    is_mismatch = reason == "contradiction"
    text = re.sub(r"rank (\d+)( of \d+)?", lambda match: f"rank {of_job(int(match[1]))}", str(lost))
    message = f"{'collective mismatch' if is_mismatch else 'peer lost'}: {text}"
    return RankLost(SAYS + message, rank, job_rank, reason)


def begin_event(title: str) -> Callable[[], object]:
    """Begin an event of torch's profiler; the returned function ends it.

    The event ends in another thread. So the profiler shows it as asynchronous, and not as the
    parent of all that this thread does meanwhile.
    """
    event = torch.ops.profiler._record_function_enter_new(title, None)

    def end() -> None:
        leave = torch.ops.profiler._record_function_exit._RecordFunction
        thread = threading.Thread(target=leave, args=(event,))
        thread.start()
        thread.join()

    return end


def seconds_in(timeout: timedelta | float) -> float:
    """A timeout in seconds: like torch's C++ this accepts a number for a `timedelta`."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


class GroupWork(dist.Work):
    """What the works of our groups have alike; `tensors` are the results."""

    tensors: list[Tensor]

    def drive(self, seconds: float) -> bool:
        """Drive it for at most so long; returns whether it is over, with or without an error."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        return self.drive(0)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[Tensor]:
        self.wait()
        return self.tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """A future of the tensors; its callbacks run in the thread that completes futures."""
        return future_of(self, self.result)


class SharedMemoryWork(GroupWork):
    """One call of torch under way: its `ops` of the library, and what follows them.

    `tensors` are the results. The `afterwards` of the call runs once, in the first thread that
    waits: it copies results to where torch expects them.
    `seconds` is the default timeout of a wait. The group references every work until it is over:
    dropping one neither stops it nor frees its memory.
    """

    _end_event: Callable[[], object] | None = None
    _error: BaseException | None = None
    _source = -1

    def __init__(self, group: Any, call: PostedCall, tensors: list[Tensor], seconds: float) -> None:
        super().__init__()
        self.group, self.tensors, self.seconds = group, tensors, seconds
        self.ops: Sequence[Any] = call.ops
        self.keep_alive: Sequence[Any] = call.keep_alive
        self.afterwards: Sequence[Callable[[], object]] = call.afterwards
        self._is_over = not call.ops and not call.afterwards
        self._lock = threading.Lock()
        if not self._is_over:
            group.under_way.add(self)

    def wait(self, timeout: timedelta | float = FOR_EVER) -> bool:
        """Return when it is done; raises `RankLost`, or `RuntimeError` after the timeout.

        After a timeout it goes on, and can be waited for again.
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
            self.ops, self.keep_alive, self.afterwards = (), (), ()
            self.group.under_way.discard(self)
            if self._end_event is not None:
                self._end_event()

    def record(self, title: str) -> None:
        """Show it in the profiler until it is over."""
        end = begin_event(title)
        with self._lock:
            if not self._is_over:
                self._end_event = end
                return
        end()

    def exception(self) -> Any:
        return self._error if self.is_completed() else None

    def source_rank(self) -> int:
        """The rank of the group that sent the received message."""
        self.wait()
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def boxed(self) -> Any:
        """As an object of TorchScript, which references the future, not this object."""
        c10d: Any = torch._C._distributed_c10d
        return c10d._create_work_from_future(self.get_future()).boxed()

"""A function that is called in a process forked for it, which answers by one event and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allranks.errors import Interrupted, PlaceError
from allranks.job.run_folder import rank_events_path, rank_log_path, read_rows
from allranks.launcher.fault_report import first_fault, user_error
from allranks.launcher.processes.leftovers import scratch_folder
from allranks.launcher.processes.process import Process, Processes
from allranks.launcher.signals import Signals
from allranks.launcher.supervisor import supervise


def answered(
    server: Processes,
    target: str,
    argument_in: Callable[[str], dict[str, Any]],
    event: str,
    environment: Mapping[str, str],
    *,
    what: str,
    if_interrupted: str,
    shared: Path | None = None,
    signals: Signals | None = None,
) -> dict[str, Any]:
    """The `event` that `target` ("module:function") wrote; it has a run folder that is removed.

    `argument_in` makes its argument for that folder, which lies in `shared` if that is given.
    Raises what the function raised; else the errors say `what` ended without an answer, and what
    has come of it `if_interrupted`.
    """
    with scratch_folder(shared) as scratch:
        run_dir = Path(scratch)
        (run_dir / "logs").mkdir()
        log = rank_log_path(run_dir, 0)
        process = Process(0, target, argument_in(scratch), dict(environment), log)
        ended = supervise(server, [process], signals=signals)
        if ended.interrupted:
            raise Interrupted(f"interrupted ({ended.reason}): {if_interrupted}")
        fault = first_fault(ended, run_dir)
        if fault is not None and fault.event:
            raise user_error(fault, ended, run_dir)
        for row in read_rows(rank_events_path(run_dir, 0)):
            if row["event"] == event:
                return dict(row)
        said = log.read_text(errors="replace") if log.exists() else ""
        raise PlaceError(f"{what} ended without an answer:\n{said}")

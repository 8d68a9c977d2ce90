"""TensorBoard event files with the steps and evaluations of a training as scalars.

Written with what TensorBoard itself writes them with, without its thread: a record is in the file
when `flush` returns. A scalar stands at the number of steps that are done with it: the first step
at 1, an evaluation after 100 steps at 100; the first epoch is 1. A resumed training writes a
new file, which begins by telling the reader to forget what is there from the next step on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from allranks.training.record.logs import End, GrowingFile, counted

VERSION = "brain.Event:2"
NO_SCALARS = ("step", "monotonic")


class TensorBoardLog:
    """A `Log` that writes one event file in `tensorboard/`."""

    def __init__(self, run_dir: Path, step: int) -> None:
        folder = run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        number = sum(1 for _ in folder.glob("*.tfevents.*"))  # read in the order of their names
        self._records = RecordWriter(GrowingFile(folder / f"events.out.tfevents.{number:010}"))
        self._write(file_version=VERSION)
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self.flush()

    def row(self, row: Mapping[str, Any]) -> None:
        row = counted(row)
        scalars = {
            f"train/{name}": value
            for name, value in row.items()
            if name not in NO_SCALARS and isinstance(value, (int, float))
        }
        self._scalars(row["step"], scalars)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._scalars(step, {f"evaluation/{name}": value for name, value in metrics.items()})

    def _scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **content: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **content).SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self, end: End) -> None:
        self._records.close()
